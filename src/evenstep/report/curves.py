"""Metrics over windows, few enough to draw: of many windows the mean, the least and the most of each stretch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evenstep.report.text import significant
from evenstep.types import Float64Array, Int64Array

__all__ = ["CHARTS", "MAX_POINTS", "Chart", "Line", "curves", "evaluation_curves", "stretches"]

MAX_POINTS = 360  # of a curve
Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a chart."""

    key: str  # name in metrics.jsonl
    label: str
    band: str | None = None  # name of a metric that is drawn as ± around it


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture: curves of one unit over the windows."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    is_share: bool = False  # shown in percent
    is_from_zero: bool = True


def _one(title: str, unit: str, key: str, **more: Any) -> Chart:
    return Chart(title=title, unit=unit, lines=(Line(key=key, label=title),), **more)


# in the page's order; one without any value is not drawn
CHARTS: tuple[Chart, ...] = (
    Chart(
        title="Reward of a rollout",
        unit="reward",
        lines=(Line(key="reward_mean", label="mean of the voting rollouts", band="reward_std"),),
        is_from_zero=False,
    ),
    Chart(
        title="Rollouts and rows",
        unit="count per window",
        lines=(Line(key="num_rows", label="rows"), Line(key="num_rollouts", label="rollouts")),
    ),
    Chart(
        title="Segments of a rollout",
        unit="segments",
        lines=(
            Line(key="segments_per_rollout_max", label="most"),
            Line(key="segments_per_rollout_mean", label="mean"),
        ),
    ),
    _one("Trained tokens, N", "tokens per window", "num_trained_tokens"),
    Chart(
        title="Padding and lockstep efficiency",
        unit="%",
        lines=(
            Line(key="padding_efficiency", label="padding: real tokens / footprint"),
            Line(key="lockstep_efficiency", label="lockstep: lower bound / cost"),
        ),
        is_share=True,
        is_from_zero=False,
    ),
    Chart(
        title="Micro-batches and fillers",
        unit="count per window",
        lines=(
            Line(key="num_microbatches", label="micro-batches per rank, K"),
            Line(key="num_fillers", label="fillers"),
        ),
    ),
    _one("Speed", "tokens per second", "tokens_per_second"),
    Chart(
        title="Time of a window",
        unit="seconds",
        lines=(
            Line(key="seconds_generate", label="generate"),
            Line(key="seconds_train", label="train"),
            Line(key="seconds_score", label="score"),
        ),
    ),
    _one("Peak memory of rank 0", "bytes", "peak_memory_bytes"),
    _one("Gradient norm before clipping", "norm", "grad_norm"),
    _one("Loss", "loss of the window", "loss", is_from_zero=False),
    _one("Entropy", "nats per trained token", "entropy"),
    _one("Ratio, largest deviation from 1", "|ratio − 1| of a token", "ratio_max_deviation"),
    _one("Clip fraction", "% of trained tokens", "clip_fraction", is_share=True),
    Chart(
        title="KL",
        unit="nats per trained token",
        lines=(
            Line(key="kl", label="policy to the policy at step 0"),
            Line(key="engine_trainer_kl", label="engine to trainer"),
        ),
    ),
    _one("Staleness, largest", "optimizer steps", "staleness_max"),
    Chart(
        title="Rollouts and groups that went wrong",
        unit="count per window",
        lines=(
            Line(key="num_failed", label="failed rollouts"),
            Line(key="num_truncated", label="truncated rollouts"),
            Line(key="num_replaced", label="replaced groups"),
        ),
    ),
    _one("Groups without spread of rewards", "% of voting groups", "zero_spread_fraction", is_share=True),
    _one("Critic's error", "(value − return)², mean", "value_error"),
    _one("Learning rate", "per step", "lr"),
)


def stretches(num_windows: int, most: int = MAX_POINTS) -> Int64Array:
    """Where each stretch of windows begins; at most ``most`` of them, as even as they can be.

    >>> stretches(3).tolist(), stretches(10, 4).tolist()
    ([0, 1, 2], [0, 2, 5, 7])
    """
    num = min(num_windows, most)
    return np.arange(num, dtype=np.int64) * num_windows // max(num, 1)


def curves(windows: Sequence[Metrics], most: int = MAX_POINTS) -> dict[str, Any]:
    """``first`` and ``last`` window of each stretch; per metric ``mean`` and, where stretches are longer, ``least`` and
    ``most``; whole metrics without a number are left out, null where a window has none.

    >>> found = curves([{"window": w, "loss": float(w % 4), "kl": None} for w in range(8)], most=2)
    >>> found["first"], found["last"], found["metrics"]["loss"]
    ([0, 4], [3, 7], {'mean': [1.5, 1.5], 'least': [0.0, 0.0], 'most': [3.0, 3.0]})
    >>> list(found["metrics"])
    ['loss']
    """
    starts = stretches(len(windows), most)
    ends = [*starts[1:].tolist(), len(windows)]
    found: dict[str, Any] = {}
    for key in _numeric(windows):
        values = [_number(window.get(key)) for window in windows]
        if all(value is None for value in values):
            continue
        if len(starts) == len(windows):
            found[key] = {"mean": [significant(value) for value in values]}
        else:
            found[key] = _envelope(np.array([np.nan if v is None else v for v in values], dtype=np.float64), starts)
    return {
        "first": [windows[start]["window"] for start in starts],
        "last": [windows[end - 1]["window"] for end in ends[: len(starts)]],
        "metrics": found,
    }


def _numeric(windows: Sequence[Metrics]) -> list[str]:
    """Names of metrics in the order in which they first appear; counters of the window itself are no curve."""
    names: dict[str, None] = {}
    for window in windows:
        names.update(dict.fromkeys(window))
    return [name for name in names if name not in ("window", "stepped", "skip_reason")]


def _number(value: Any) -> float | int | None:
    # not NaN, infinite, or so large that a sum of them is
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 else None


def _envelope(values: Float64Array, starts: Int64Array) -> dict[str, list[Any]]:
    is_there = ~np.isnan(values)
    counts = np.add.reduceat(is_there.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(is_there, values, 0.0), starts)
    means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    columns = {"mean": means, "least": np.fmin.reduceat(values, starts), "most": np.fmax.reduceat(values, starts)}
    return {name: [significant(float(value)) for value in column] for name, column in columns.items()}


EVALUATION_KEYS = ("eval_reward_mean", "eval_floor", "eval_long_reward_mean")


def evaluation_curves(evaluations: Sequence[Metrics]) -> dict[str, Any]:
    """As `curves`, of the held-out rewards."""
    return curves([{"window": e["window"]} | {name: e.get(name) for name in EVALUATION_KEYS} for e in evaluations])


def charts_json() -> list[dict[str, Any]]:
    """What the page draws, as plain data."""
    return [asdict(chart) for chart in CHARTS]
