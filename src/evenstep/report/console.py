"""A run on the terminal: a live table where there is one, plain lines where the output is piped.

Rank 0 tells a reporter what happens; the reporter knows nothing of training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from evenstep.errors import StateError
from evenstep.report.columns import COLUMNS, GAP, fitting
from evenstep.report.history import History

__all__ = ["LiveReporter", "PlainReporter", "Reporter", "make_reporter"]

HEADER_EVERY = 25  # plain lines
LINES_AROUND = 6  # of a terminal's height, kept free of table rows


class Reporter(Protocol):
    """What rank 0 says while it trains; metrics have the names of ``metrics.jsonl``."""

    def start(self, info: Mapping[str, Any]) -> None:
        """``num_ranks``, ``num_parameters``, ``num_windows``, ``first_window``, ``folder``, earlier ``evaluations``."""
        ...

    def phase(self, name: str) -> None: ...
    def window(self, metrics: Mapping[str, Any]) -> None: ...
    def evaluation(self, result: Mapping[str, Any]) -> None: ...
    def notice(self, text: str) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...


@contextmanager
def make_reporter(stream: IO[str] | None = None) -> Iterator[Reporter]:
    """A reporter for a stream (default: stdout): live on a terminal, plain elsewhere. Leaves the terminal in order."""
    console = Console(file=sys.stdout if stream is None else stream, highlight=False, markup=False)
    if console.is_terminal:
        reporter = LiveReporter(console)
        try:
            yield reporter
        finally:
            reporter.close()
    else:
        yield PlainReporter(console.file)


def skip_text(metrics: Mapping[str, Any]) -> str | None:
    """Why a window took no optimizer step, or None when it did."""
    if metrics["stepped"]:
        return None
    return f"* window {metrics['window'] + 1} took no optimizer step: {metrics['skip_reason']}"


class PlainReporter:
    """One aligned line per window, flushed at once, without control codes.

    Args:
        stream: where the lines go.
        history: what was reported; its clock tells the time left.
    """

    def __init__(self, stream: IO[str], history: History | None = None) -> None:
        self._stream = stream
        self._history = History() if history is None else history

    def start(self, info: Mapping[str, Any]) -> None:
        self._history.start(info)
        self._print(self._history.opening(info))

    def phase(self, name: str) -> None:
        """A finished window says it all; phases are for those who watch."""

    def window(self, metrics: Mapping[str, Any]) -> None:
        if self._history.num_reported % HEADER_EVERY == 0:
            self._print(aligned(column.header for column in COLUMNS))
        row = self._history.add_window(metrics)
        self._print(aligned(column.text(row) for column in COLUMNS))
        if (skipped := skip_text(metrics)) is not None:
            self._print(skipped)

    def evaluation(self, result: Mapping[str, Any]) -> None:
        self._history.evaluations.append(dict(result))
        self._print(self._history.evaluation_line(result))

    def notice(self, text: str) -> None:
        self._print(f"note: {text}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._print("")
        for line in self._history.summary(summary["folder"]):
            self._print(line)

    def _print(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except BrokenPipeError:  # a filter may end without a word then, a run may not
            raise StateError(
                "a run writes a line per window to its standard output, found that its reader has ended; finished "
                "windows are on disk: go on with --resume, and send the output to a file"
            ) from None


def aligned(cells: Iterator[str]) -> str:
    """Cells of a plain line, each as wide as its column."""
    return (" " * GAP).join(cell.rjust(column.width) for column, cell in zip(COLUMNS, cells, strict=True))


class LiveReporter:
    """A table that grows while the run goes on, and the phase under it.

    Args:
        console: a terminal; as many columns are shown as fit its width.
        history: what was reported; its clock tells the time left.
    """

    def __init__(self, console: Console, history: History | None = None) -> None:
        self._console = console
        self._history = History() if history is None else history
        self._spinner: Spinner | None = Spinner("dots", text=Text("starting"))
        self._live = Live(get_renderable=self._frame, console=console, refresh_per_second=4)

    def start(self, info: Mapping[str, Any]) -> None:
        self._history.start(info)
        self._console.print(self._history.opening(info), style="bold")
        self._live.start()

    def phase(self, name: str) -> None:
        position = self._history.num_reported + self._history.first_window + 1
        window = f"window {position} of {self._history.num_windows}" if position <= self._history.num_windows else ""
        if self._spinner is not None:
            self._spinner.update(text=Text(f"{window}{': ' if window else ''}{name}"))

    def window(self, metrics: Mapping[str, Any]) -> None:
        self._history.add_window(metrics)
        if (skipped := skip_text(metrics)) is not None:
            self.notice(skipped)

    def evaluation(self, result: Mapping[str, Any]) -> None:
        self._history.evaluations.append(dict(result))
        self._console.print(self._history.evaluation_line(result))

    def notice(self, text: str) -> None:
        self._console.print(text, style="yellow")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.close()
        self._console.print()
        for line in self._history.summary(summary["folder"]):
            self._console.print(line, style=None if line.startswith(" ") else "bold", soft_wrap=True)

    def close(self) -> None:
        """Leave the table as it is and give the cursor back."""
        self._spinner = None
        self._live.stop()

    def _frame(self) -> Group:
        columns = fitting(self._console.width)
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(column.header, justify="right", width=column.width, no_wrap=True)
        room = max(1, self._console.height - LINES_AROUND)
        shown = self._history.windows[-room:]
        for row in shown:
            table.add_row(*(Text(column.text(row)) for column in columns))
        parts: list[Table | Spinner | Text] = [table]
        hidden = [column.header for column in COLUMNS if column not in columns]
        if self._spinner is not None:
            parts.append(self._spinner)
        if len(shown) < self._history.num_reported:
            parts.append(self._small(f"{self._history.num_reported - len(shown)} earlier windows: see metrics.jsonl"))
        if hidden:
            parts.append(self._small(f"a wider terminal shows {', '.join(hidden)}"))
        return Group(*parts)

    def _small(self, text: str) -> Text:
        return Text(text, style="dim", no_wrap=True, overflow="ellipsis")
