"""A dry run as text: what was read, a table of arms, and what the columns mean; plain where the output is piped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evenstep.dry_run.arms import RECORDED, ArmResult
from evenstep.dry_run.summary import DryRun

__all__ = ["print_dry_run", "table_cells"]

GIB = float(1 << 30)
MAX_SKIPPED_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    header: str
    text: Callable[[DryRun, ArmResult], str]
    is_left: bool = False
    needs_model: bool = False
    is_shown: Callable[[DryRun], bool] = lambda run: True


def _mean(total: float, count: int) -> str:
    mean = total / count
    return f"{mean:,.0f}" if mean == int(mean) else f"{mean:,.1f}"


def _num_microbatches(result: ArmResult) -> str:
    mean = _mean(result.num_microbatches_mean, 1)
    return (
        mean
        if result.num_microbatches_max == result.num_microbatches_mean
        else f"{mean} (≤{result.num_microbatches_max})"
    )


def _layout(result: ArmResult) -> str:
    arm = result.arm
    return (
        f"{arm.layout}, {arm.micro_batch_rows} row{'s' * (arm.micro_batch_rows > 1)}"
        if arm.layout == "fixed"
        else arm.layout
    )


def _budget(result: ArmResult) -> str:
    return "none" if result.arm.max_tokens_per_gpu is None else f"{result.arm.max_tokens_per_gpu:,}"


def _seconds(run: DryRun, result: ArmResult) -> str:
    seconds = run.estimates(result)["estimated_step_seconds"]
    return "" if seconds is None else f"{seconds:.3g}"


def _cost(run: DryRun, result: ArmResult) -> str:
    ratio = run.cost_to_best(result)
    return "" if ratio is None else f"{ratio:.2f}×"


def _memory(run: DryRun, result: ArmResult) -> str:
    found = run.estimates(result)
    memory = found["estimated_memory_bytes"]
    return "" if memory is None else f"{memory / GIB:.1f}{'' if found['estimated_to_fit'] else ' !'}"


def _over(run: DryRun) -> bool:
    return any(result.num_overlong or result.num_over_budget for result in run.results)


COLUMNS = (
    Column(header="", text=lambda run, result: "*" if result in _bests(run) else "", is_left=True),
    Column(header="planner", text=lambda run, result: result.arm.planner, is_left=True),
    Column(header="layout", text=lambda run, result: _layout(result), is_left=True),
    Column(header="ranks", text=lambda run, result: str(result.arm.num_ranks)),
    Column(header="budget", text=lambda run, result: _budget(result)),
    Column(header="padding", text=lambda run, result: f"{result.padding_efficiency:.1%}"),
    Column(header="fill", text=lambda run, result: "" if result.fill is None else f"{result.fill:.0%}"),
    Column(header="K", text=lambda run, result: _num_microbatches(result)),
    Column(header="fillers", text=lambda run, result: _mean(result.num_fillers, result.num_windows)),
    Column(header="lockstep", text=lambda run, result: f"{result.lockstep_efficiency:.1%}"),
    Column(header="over-long", text=lambda run, result: f"{result.num_overlong:,}", is_shown=_over),
    Column(header="over budget", text=lambda run, result: f"{result.num_over_budget:,}", is_shown=_over),
    Column(header="cost", text=lambda run, result: _cost(run, result)),
    Column(header="est. s/step", text=_seconds, needs_model=True),
    Column(header="est. GiB", text=_memory, needs_model=True),
)


WINDOW_FIGURES = ("K", "padding", "lockstep", "cost")


def window_cells(run: DryRun) -> list[list[str]]:
    """Header and one line for each planned window: as recorded where a run was read, and by the cheapest arm."""
    shown = [result for result in (run.results[0], run.best()) if result is not None and result.refused is None]
    shown = list(dict.fromkeys(shown)) if run.results[0].arm.planner == RECORDED else shown[-1:]
    header = ["window", "rows", "tokens"]
    for result in shown:
        arm = f"{'recorded' if result.arm.planner == RECORDED else '*'} {result.arm.layout} {_budget(result)}"
        header += [f"{arm}: {WINDOW_FIGURES[0]}", *WINDOW_FIGURES[1:]]
    lines = [header]
    for at, window in enumerate(run.windows):
        line = [window.name, f"{window.rows.size:,}", f"{int(run.rows.lengths_R[window.rows].sum()):,}"]
        least = min((result.windows[at].step_cost for result in shown), default=1.0)
        for result in shown:
            stats = result.windows[at]
            line += [
                str(stats.num_microbatches),
                f"{stats.padding_efficiency:.1%}",
                f"{stats.lockstep_efficiency:.1%}",
                f"{stats.step_cost / least:.2f}×",
            ]
        lines.append(line)
    return lines


def _bests(run: DryRun) -> list[ArmResult | None]:
    return [run.best(ranks) for ranks in sorted({result.arm.num_ranks for result in run.results})]


def _columns(run: DryRun) -> list[Column]:
    has_model = run.question.model is not None
    return [column for column in COLUMNS if column.is_shown(run) and (has_model or not column.needs_model)]


def table_cells(run: DryRun) -> list[list[str]]:
    """Header and one line for each arm that could be planned."""
    columns = _columns(run)
    lines = [[column.header for column in columns]]
    for result in run.results:
        if result.refused is None:
            lines.append([column.text(run, result) for column in columns])
    return lines


def _legend(run: DryRun) -> list[str]:
    per_step = " of a step" if len(run.windows) > 1 else ""
    lines = [
        "padding: real tokens / tokens taken; fill: tokens taken / budget; K: micro-batches on each rank; lockstep: "
        "lower bound",
        f"under the arm's own rules / cost{per_step}; cost: of a step, against the arm marked * (evenstep's cheapest"
        + (" that fits" if run.question.model is not None else "")
        + ")",
    ]
    if run.rows.token_ids is not None and run.rows.num_without_ids:
        lines.append(
            f"layout tree needs the token ids of all rows, and no images: {run.rows.num_without_ids:,} rows are without"
        )
    if any(result.arm.layout == "tree" and result.refused is None for result in run.results):
        found = run.rows.num_with_experts
        lines.append(
            f"layout tree merges tokens of equal ids and equal experts: {found:,} rows carry routed experts"
            if found
            else "layout tree merges tokens of equal ids: no row carries routed experts that would keep them apart"
        )
    if any(result.padding_efficiency > 1 for result in run.results):
        lines.append("padding above 100 %: in layout tree, tokens that rows begin with alike are taken once")
    if _over(run):
        lines.append(
            "over-long: rows that alone exceed the budget and stand alone; over budget: cells of several rows above it"
        )
    if run.question.model is not None:
        lines += [
            f"Estimates for {run.question.model[0]} ({run.question.model[1].num_parameters / 1e9:.3g}B parameters), "
            f"not measurements: {run.question.assumptions.text()}.",
            f"'!': more than the {run.question.assumptions.device.memory_bytes / 1e9:.0f} GB of the device. Optimizer, "
            f"communication and generation are not in the seconds.",
        ]
    else:
        lines.append(
            "Costs are those of a dense 4-billion-parameter model; --model gives another, with seconds and memory."
        )
    return lines


def _head(run: DryRun) -> list[str]:
    rows = run.rows
    lengths = rows.lengths_R
    num_rollouts = len(set(rows.rollout_ids))
    groups = "" if rows.group_ids is None else f" in {len(set(rows.group_ids)):,} groups"
    lines = [
        f"{run.source}: format {rows.format}, {rows.num_rows:,} rows of {num_rollouts:,} rollouts{groups}, "
        f"{int(lengths.sum()):,} tokens",
        f"lengths: {lengths.min():,} to {lengths.max():,}, median {np.median(lengths):,.0f}, mean {lengths.mean():,.0f}"
        f", 90 % up to {np.quantile(lengths, 0.9):,.0f}",
    ]
    if rows.num_approximate:
        lines.append(
            f"APPROXIMATE: the lengths of {rows.num_approximate:,} rows come from text or a provider's count, not from "
            f"token ids (--bytes-per-token)"
        )
    planned = len(run.windows)
    sizes = [int(window.rows.size) for window in run.windows]
    span = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    if run.num_windows > planned:
        lines.append(
            f"windows: {planned} of {run.num_windows:,} planned, evenly spaced ({span} rows each; --max-windows)"
        )
    elif planned > 1:
        lines.append(f"windows: {planned} ({span} rows each)")
    else:
        lines.append(f"windows: 1 ({run.windows[0].name}, {span} rows; --windows N cuts others)")
    lines += [f"left out: {note}" for note in rows.notes]
    if rows.skipped:
        lines.append(f"skipped: {len(rows.skipped):,} lines that could not be read")
        lines += [f"  {line.where}: {line.problem}" for line in rows.skipped[:MAX_SKIPPED_SHOWN]]
        if len(rows.skipped) > MAX_SKIPPED_SHOWN:
            lines.append(f"  … and {len(rows.skipped) - MAX_SKIPPED_SHOWN:,} more (all of them with --json)")
    return lines


def _refusals(run: DryRun) -> list[str]:
    """Why arms have no line in the table, each reason once."""
    budgets: dict[str, list[str]] = {}
    for result in run.results:
        if result.refused is not None:
            arm = result.arm
            reason = f"{arm.planner}, {arm.layout}, {arm.num_ranks} ranks, not planned: {result.refused}"
            budgets.setdefault(reason, []).append(_budget(result))
    return [f"{reason} (budget {' and '.join(found)})" for reason, found in budgets.items()]


def plain_lines(run: DryRun, *, has_windows: bool = False) -> list[str]:
    """The whole text without colours or boxes."""
    table = _aligned(table_cells(run), [column.is_left for column in _columns(run)])
    windows = ["", *_aligned(window_cells(run), [True])] if has_windows else []
    return [*_head(run), "", *table, *windows, "", *_refusals(run), *_legend(run)]


def _aligned(cells: list[list[str]], is_left: list[bool]) -> list[str]:
    """Columns below each other; those of which ``is_left`` says nothing end at the right."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    sides = [*is_left, *([False] * (len(widths) - len(is_left)))]
    return [
        "  ".join(
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in cells
    ]


def print_dry_run(run: DryRun, echo: Callable[[str], None], *, has_windows: bool = False) -> None:
    """Print it: a coloured table in a terminal that is wide enough for it, else aligned plain lines."""
    lines = plain_lines(run, has_windows=has_windows)
    if not sys.stdout.isatty():
        echo("\n".join(lines))
        return
    from rich.console import Console
    from rich.table import Table

    def table_of(cells: list[list[str]], is_left: list[bool]) -> Table:
        table = Table(show_edge=False, pad_edge=False, header_style="bold")
        for index, header in enumerate(cells[0]):
            left = index < len(is_left) and is_left[index]
            table.add_column(header, justify="left" if left else "right", no_wrap=left)
        for line in cells[1:]:
            table.add_row(*line, style="bold green" if line[0] == "*" else None)
        return table

    console = Console(highlight=False)
    tables = [table_of(table_cells(run), [column.is_left for column in _columns(run)])]
    if has_windows:
        tables.append(table_of(window_cells(run), [True]))
    boundless = console.options.update(max_width=1 << 20)
    if any(console.measure(table, options=boundless).maximum > console.width for table in tables):
        echo("\n".join(lines))  # rich would cut figures to make it fit
        return
    for text in _head(run):
        console.print(text, markup=False, style="yellow" if text.startswith(("APPROXIMATE", "skipped")) else None)
    for table in tables:
        console.print()
        console.print(table)
    console.print()
    for text in [*_refusals(run), *_legend(run)]:
        console.print(text, markup=False, style="dim")
