"""What the steps of an arm add up to: the figures of ``evenstep replay --json``, and whether an arm passed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DIFFERENCES", "LEAST_NOISE", "ArmRun", "first_deviation", "noise_floor", "summary"]

Record = Mapping[str, Any]

LEAST_NOISE = 1e-7  # relative: what float32 cannot tell apart
# figure -> (key of a step, whether the least of the steps counts instead of the largest)
DIFFERENCES = {
    "loss_max_abs_difference": ("loss_abs_difference", False),
    "gradient_cosine_min": ("gradient_cosine", True),
    "gradient_relative_difference_max": ("gradient_relative_difference", False),
    "update_cosine_min": ("update_cosine", True),
    "update_relative_difference_max": ("update_relative_difference", False),
    "weight_cosine_min": ("weight_cosine", True),
    "weight_max_abs_difference": ("weight_max_abs_difference", False),
    "weight_max_difference_lr": ("weight_max_difference_lr", False),
    "weight_max_difference_ulp": ("weight_max_difference_ulp", False),
    "logprob_max_abs_difference": ("logprob_max_abs_difference", False),
}
AT_LEAST = ("gradient_relative_difference_max", "update_relative_difference_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One launch of an arm: its finished steps, and how it ended."""

    steps: Sequence[Record]
    status: str  # ok, oom, hung, crashed
    reason: str | None = None  # in a sentence


def summary(
    runs: Sequence[ArmRun], reference: Sequence[ArmRun], *, num_steps: int, warmup: int, against: str | None
) -> dict[str, Any]:
    """The figures of an arm.

    Times are medians over all launches without their first ``warmup`` steps; everything else is of the first launch,
    which is the one that was compared.

    Args:
        runs: launches of the arm, the i-th made right after the i-th of the first arm.
        reference: launches of the first arm.
        num_steps: that each should have made.
        warmup: steps of each launch that are in no time.
        against: name of what the arm was compared with; None for the first arm, which differs from itself by nothing.
    """
    steps = runs[0].steps
    # a window whose rollouts have no tokens is passed over
    with_rows = [step for step in steps if "num_rows" in step]
    timed = [_timed(run.steps, warmup) for run in runs]
    seconds = [step["seconds"] for part in timed for step in part.values()]
    pairs = [
        theirs[at]["seconds"] / step["seconds"]
        for part, theirs in zip(timed, (_timed(run.steps, warmup) for run in reference), strict=False)
        for at, step in part.items()
        if at in theirs
    ]
    peaks = [step["peak_memory_bytes"] for run in runs for step in run.steps if "num_rows" in step]
    status, reason = _status(runs, num_steps)
    tokens = sum(step["num_tokens"] for part in timed for step in part.values())
    found: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "steps_completed": len(steps),
        "rows_consumed": sum(step["num_rows"] for step in with_rows),
        "rows_expected": sum(step["num_rows_expected"] for step in with_rows),
        "step_seconds_median": statistics.median(seconds) if seconds else None,
        "speedup_paired_median": statistics.median(pairs) if pairs else None,
        "tokens_per_second": tokens / sum(seconds) if seconds else None,
        "peak_memory_bytes": max(peaks, default=None),
        "padding_efficiency": _ratio(with_rows, "num_tokens", "footprint"),
        "num_tokens": sum(step["num_tokens"] for step in with_rows),
        "num_tokens_computed": sum(step["num_tokens_computed"] for step in with_rows),
        "num_microbatches_median": statistics.median(s["num_microbatches"] for s in with_rows) if with_rows else None,
        "num_fillers": sum(step["num_fillers"] for step in with_rows),
        "num_oom": sum(run.status == "oom" for run in runs),
        "num_hung": sum(run.status == "hung" for run in runs),
    }
    if against is None:
        found |= {name: 1.0 if is_least else 0.0 for name, (_, is_least) in DIFFERENCES.items()}
    else:
        found |= _differences(with_rows, reference[0].steps, against)
        found["worst"] = _worst(with_rows, against)
    found["steps"] = [dict(step) for step in steps]
    return found


def noise_floor(noise: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the first arm is from itself: the worst of the noise arms, relative differences at least 1e-7."""
    arms = list(noise)
    found: dict[str, Any] = {
        name: value for name, value in arms[-1].items() if name not in ("steps", "worst", "reason")
    }
    for name, (_, is_least) in DIFFERENCES.items():
        values = [arm[name] for arm in arms if arm.get(name) is not None]
        found[name] = (min if is_least else max)(values) if values else None
        if name in AT_LEAST:
            found[name] = max(found[name] or 0.0, LEAST_NOISE)
    return found


def measured_noise(noise: Iterable[Mapping[str, Any]]) -> float:
    """Largest relative gradient difference of the noise arms, as measured."""
    return max((arm.get("gradient_relative_difference_max") or 0.0 for arm in noise), default=0.0)


def first_deviation(arm: Mapping[str, Any], limit: float, against: str) -> dict[str, Any] | None:
    """Where an arm first left the limit: the step, its worst parameter, and the row and cell of its worst log-prob."""
    for step in arm["steps"]:
        found = step.get("against", {}).get(against, {})
        if found.get("gradient_relative_difference", 0.0) > limit:
            return {"step": step["step"], "window": step["window"], **found}
    return None


def problem_of(arm: Mapping[str, Any], *, num_steps: int, limit: float | None) -> str | None:
    """Why an arm fails, or None when it passed."""
    if arm["status"] != "ok":
        return f"{arm['status']}: {arm['reason']}"
    if arm["steps_completed"] != num_steps:
        return f"{arm['steps_completed']} of {num_steps} steps"
    relative = arm["gradient_relative_difference_max"]
    if limit is not None and relative is None:
        return "no step was compared"
    if limit is not None and relative > limit:
        return f"its gradient differs by {relative:.3g}, more than {limit:.3g}"
    return None


def _timed(steps: Sequence[Record], warmup: int) -> dict[int, Record]:
    return {step["step"]: step for step in steps[warmup:] if "seconds" in step}


def _ratio(steps: Sequence[Record], name: str, of: str) -> float | None:
    total = sum(step[of] for step in steps)
    return sum(step[name] for step in steps) / total if total else None


def _status(runs: Sequence[ArmRun], num_steps: int) -> tuple[str, str | None]:
    for run in runs:
        if run.status != "ok":
            return run.status, run.reason
    for run in runs:
        for step in run.steps:
            if "num_rows" in step and step["num_rows"] != step["num_rows_expected"]:
                names = ", ".join(step["wrong_rows"])
                return "lost_rows", (
                    f"step {step['step']} trained {step['num_rows']} of {step['num_rows_expected']} rows exactly once; "
                    f"not {names}"
                )
        if len(run.steps) != num_steps:
            return "crashed", f"{len(run.steps)} of {num_steps} steps"
    return "ok", None


def _differences(steps: Sequence[Record], reference: Sequence[Record], against: str) -> dict[str, Any]:
    losses = {step["step"]: step["loss"] for step in reference if "loss" in step}
    columns: dict[str, list[float]] = {key: [] for key, _ in DIFFERENCES.values()}
    for step in steps:
        found = dict(step["against"].get(against, {}))
        if step["step"] in losses:
            found["loss_abs_difference"] = abs(step["loss"] - losses[step["step"]])
        for key in columns.keys() & found.keys():
            columns[key].append(found[key])
    return {
        name: ((min if is_least else max)(columns[key]) if columns[key] else None)
        for name, (key, is_least) in DIFFERENCES.items()
    }


def _worst(steps: Sequence[Record], against: str) -> dict[str, Any] | None:
    """The step whose gradient is furthest off, with its parameter and its row."""
    compared = [step for step in steps if "gradient_relative_difference" in step["against"].get(against, {})]
    if not compared:
        return None
    step = max(compared, key=lambda step: step["against"][against]["gradient_relative_difference"])
    return {"step": step["step"], "window": step["window"], **step["against"][against]}
