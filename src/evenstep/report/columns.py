"""The columns of a run's table: one place for their names, widths, and how a metric is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COLUMNS", "GAP", "Column", "duration", "fitting", "number"]

GAP = 2  # blanks between columns
ABSENT = "-"

Metrics = Mapping[str, Any]


def number(value: float | None, digits: int = 3) -> str:
    """A number short enough for a column.

    >>> number(0.51234), number(12345.6), number(3), number(None), number(0.000123)
    ('0.512', '12.3k', '3', '-', '1.2e-04')
    """
    if value is None:
        return ABSENT
    if isinstance(value, int) and abs(value) < 10_000:
        return str(value)
    if abs(value) >= 10_000_000:
        return f"{value / 1e6:.0f}M"
    if abs(value) >= 10_000:
        return f"{value / 1e3:.1f}k"
    if value and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    """Seconds as people read them.

    >>> duration(8.24), duration(83), duration(3 * 3600 + 125), duration(None)
    ('8s', '1m23s', '3h02m', '-')
    """
    if seconds is None:
        return ABSENT
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.0f}%"


def _step(metrics: Metrics) -> str:
    # a window without an optimizer step is marked; the line below says why
    return f"{metrics['window'] + 1}{'' if metrics['stepped'] else '*'}"


def _segments(metrics: Metrics) -> str:
    mean, most = metrics["segments_per_rollout_mean"], metrics["segments_per_rollout_max"]
    return ABSENT if mean is None else f"{mean:.1f}/{number(most)}"


def _seconds(metrics: Metrics) -> str:
    parts = (metrics["seconds_generate"], metrics["seconds_score"], metrics["seconds_train"])
    return "/".join(ABSENT if part is None else f"{part:.1f}" for part in parts)


def _metric(name: str, digits: int = 3) -> Callable[[Metrics], str]:
    return lambda metrics: number(metrics[name], digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; all are right-aligned."""

    header: str
    width: int  # characters; every usual value fits
    rank: int  # columns of low rank stay when the terminal is narrow
    text: Callable[[Metrics], str]  # of a window's metrics, with `heldout` and `eta_s` added


COLUMNS: tuple[Column, ...] = (
    Column(header="step", width=5, rank=0, text=_step),
    Column(header="reward", width=6, rank=1, text=_metric("reward_mean")),
    Column(header="held-out", width=8, rank=2, text=_metric("heldout")),
    Column(header="rollouts", width=8, rank=3, text=_metric("num_rollouts")),
    Column(header="rows", width=4, rank=4, text=_metric("num_rows")),
    Column(header="segments", width=8, rank=5, text=_segments),
    Column(header="fillers", width=7, rank=9, text=_metric("num_fillers")),
    Column(header="K", width=3, rank=7, text=_metric("num_microbatches")),
    Column(header="padding", width=7, rank=8, text=lambda metrics: _percent(metrics["padding_efficiency"])),
    Column(header="lockstep", width=8, rank=11, text=lambda metrics: _percent(metrics["lockstep_efficiency"])),
    Column(header="tokens/s", width=8, rank=10, text=_metric("tokens_per_second", digits=0)),
    Column(header="grad norm", width=9, rank=12, text=_metric("grad_norm")),
    Column(header="gen/score/train s", width=17, rank=13, text=_seconds),
    Column(header="ETA", width=6, rank=6, text=lambda metrics: duration(metrics["eta_s"])),
)


def fitting(width: int) -> Sequence[Column]:
    """The most important columns that fit side by side, in their usual order; never fewer than the first.

    >>> [column.header for column in fitting(30)]
    ['step', 'reward', 'held-out']
    >>> len(fitting(140)) == len(COLUMNS)
    True
    """
    chosen: list[Column] = []
    used = -GAP
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        used += column.width + GAP
        if used > width and chosen:
            break
        chosen.append(column)
    return [column for column in COLUMNS if column in chosen]
