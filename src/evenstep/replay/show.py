"""A replay on the terminal: what is running, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from evenstep.replay.measures import ArmRun
from evenstep.replay.spec import STEPS

__all__ = ["ReplayProgress", "make_progress", "print_result"]

PLAIN_WIDTH = 220  # columns where nobody's terminal says
COLUMNS = ("arm", "steps", "rows", "s/step", "speed", "tokens/s", "peak MiB", "padding", "K", "gradient", "1-cos",
           "update", "weights/lr", "loss")  # fmt: skip
LEGEND = (
    "speed: median of paired ratios to the first arm; gradient, update: relative difference to it, and weights/lr the "
    "largest difference of a weight in learning rates, worst step of each"
)


class ReplayProgress:
    """Says which arm runs, and how far it is; on a terminal in one line that moves.

    Args:
        console: where; plain lines unless it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._running: tuple[str, int, Path] | None = None

    def launch(self, name: str, index: int, total: int, num_steps: int, folder: Path) -> None:
        self._running = (f"{index} of {total}: {name}", num_steps, folder)
        if self._console.is_terminal and self._live is None:
            self._live = Live(get_renderable=self._frame, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def finished(self, name: str, run: ArmRun) -> None:
        assert self._running is not None
        title, num_steps, _ = self._running
        said = f"{len(run.steps)} of {num_steps} steps" if run.status == "ok" else f"{run.status}: {run.reason}"
        self._console.print(f"{title}: {said}", style=None if run.status == "ok" else "red", soft_wrap=True)

    def notice(self, text: str) -> None:
        self._console.print(text, style="yellow", soft_wrap=True)

    def close(self) -> None:
        """Give the line back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _frame(self) -> Spinner | Text:
        if self._running is None:
            return Text("")
        title, num_steps, folder = self._running
        path = folder / STEPS
        num_done = path.read_bytes().count(b"\n") if path.exists() else 0
        self._spinner.update(text=Text(f"{title}, step {min(num_done + 1, num_steps)} of {num_steps}"))
        return self._spinner


@contextmanager
def make_progress(stream: IO[str]) -> Iterator[ReplayProgress]:
    """Progress on a stream; leaves a terminal in order."""
    progress = ReplayProgress(Console(file=stream, highlight=False, markup=False))
    try:
        yield progress
    finally:
        progress.close()


def print_result(result: Mapping[str, Any], stream: IO[str]) -> None:
    """The table of arms with the noise floor below, then what failed and where it began."""
    console = Console(file=stream, highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, markup=False, width=PLAIN_WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=column != "arm")
    for name, arm in result["arms"].items():
        table.add_row(*_cells(name, arm, result["num_steps"]), style=None if arm["passed"] else "red")
    table.add_row(*_cells("noise floor", result["noise_floor"], result["num_steps"]), style="dim")
    needed = console.measure(table, options=console.options.update(max_width=1 << 20)).maximum
    if needed > console.width:  # a terminal folds what is too long, rich would cut figures
        console = Console(file=stream, highlight=False, markup=False, width=needed)
    console.print(table)
    console.print(LEGEND, style="dim", soft_wrap=True)
    for name, arm in result["arms"].items():
        for line in _lines(name, arm):
            console.print(line, style=None if arm["passed"] else "red", soft_wrap=True)
    if result["limit"] is not None:
        said = "every arm is within it" if result["passed"] else "not every arm passed"
        console.print(f"limit of the relative gradient difference {result['limit']:.3g}: {said}", soft_wrap=True)


def _cells(name: str, arm: Mapping[str, Any], num_steps: int) -> list[str]:
    cosine = arm["gradient_cosine_min"]
    return [
        name,
        f"{arm['steps_completed']}/{num_steps}",
        f"{arm['rows_consumed']}/{arm['rows_expected']}",
        _number(arm["step_seconds_median"], ".3f"),
        _number(arm["speedup_paired_median"], ".2f"),
        _number(arm["tokens_per_second"], ",.0f"),
        _number(None if arm["peak_memory_bytes"] is None else arm["peak_memory_bytes"] / 2**20, ",.0f"),
        _number(arm["padding_efficiency"], ".3f"),
        _number(arm["num_microbatches_median"], "g"),
        _number(arm["gradient_relative_difference_max"], ".1e"),
        _number(None if cosine is None else max(0.0, 1.0 - cosine), ".1e"),
        _number(arm["update_relative_difference_max"], ".1e"),
        _number(arm["weight_max_difference_lr"], ".2g"),
        _number(arm["loss_max_abs_difference"], ".1e"),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _lines(name: str, arm: Mapping[str, Any]) -> Iterator[str]:
    if arm["problem"] is not None:
        yield f"{name} failed: {arm['problem']}"
    found = arm["first_deviation"]
    if found is not None:
        row = ""
        if "worst_row" in found:
            row = (
                f"; log-probs differ most in row {found['worst_row']} (micro-batch {found['worst_row_microbatch']} of "
                f"rank {found['worst_row_rank']}, {found['logprob_max_abs_difference']:.1e} nats)"
            )
        yield (
            f"{name} first left the limit in step {found['step']}: {found['gradient_relative_difference']:.3g}, most "
            f"in {found['worst_parameter']} ({found['worst_parameter_relative_difference']:.3g}){row}"
        )
    if "against_oracle" in arm:
        oracle = arm["against_oracle"]
        if oracle["gradient_relative_difference_max"] is None:
            yield f"{name} against float64, one row at a time: {oracle.get('reason', 'no step was compared')}"
        else:
            yield (
                f"{name} against float64, one row at a time: gradient "
                f"{oracle['gradient_relative_difference_max']:.1e}, loss {oracle['loss_max_abs_difference']:.1e}"
            )
