"""What is locked here, from steps written by hand:

1. Times are medians over all launches without their warm-up steps; the speed-up is the median of ratios of one step
   of one launch, not a ratio of medians.
2. The worst step counts, in whichever direction is worse; padding efficiency is a ratio of sums.
3. The noise floor is the worst of the noise arms, its relative differences at least 1e-7; the limit of an arm goes by
   the noise as measured.
4. An arm fails for its status, a step or row too few, or a gradient beyond the limit; where it began is told.
5. A difference is over the whole gradient: relative to the reference, not the mean of the parameters' own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenstep.replay.measures import (
    LEAST_NOISE,
    ArmRun,
    first_deviation,
    measured_noise,
    noise_floor,
    problem_of,
    summary,
)
from evenstep.train.stored_steps import Difference


def step(index: int, seconds: float, relative: float = 0.0, **others: Any) -> dict[str, Any]:
    figures = {
        "gradient_relative_difference": relative,
        "gradient_cosine": 1 - relative,
        "worst_parameter": f"w{index}",
        "worst_parameter_relative_difference": relative,
    }
    return {
        "step": index,
        "window": index + 10,
        "seconds": seconds,
        "loss": 0.5,
        "peak_memory_bytes": 100 + index,
        "num_rows": 4,
        "num_rows_expected": 4,
        "wrong_rows": [],
        "num_tokens": 10,
        "footprint": 10 * (index + 1),
        "num_tokens_computed": 10 * (index + 1),
        "num_microbatches": 2,
        "num_fillers": 0,
        "against": {"reference": figures},
    } | others


def run(*steps: dict[str, Any], status: str = "ok") -> ArmRun:
    return ArmRun(steps=steps, status=status, reason=None if status == "ok" else "because")


REFERENCE = [run(step(0, 90.0), step(1, 8.0), step(2, 3.0)), run(step(0, 90.0), step(1, 4.0), step(2, 3.0))]
ARM = [
    run(step(0, 50.0, 1e-6), step(1, 2.0, 3e-5, loss=0.75), step(2, 1.0, 2e-5)),
    run(step(0, 50.0), step(1, 4.0), step(2, 6.0)),
]


def figures(runs: list[ArmRun] = ARM, num_steps: int = 3, against: str | None = "reference") -> dict[str, Any]:
    return summary(runs, REFERENCE, num_steps=num_steps, warmup=1, against=against)


def test_times() -> None:
    found = figures()
    assert found["step_seconds_median"] == 3.0  # of 2, 1, 4, 6
    assert found["speedup_paired_median"] == 2.0  # of 8/2, 3/1, 4/4, 3/6; the ratio of medians is 3.5/3
    assert found["tokens_per_second"] == pytest.approx(40 / 13)
    assert found["peak_memory_bytes"] == 102


def test_the_worst_step_counts() -> None:
    found = figures()
    assert found["gradient_relative_difference_max"] == 3e-5
    assert found["gradient_cosine_min"] == 1 - 3e-5
    assert found["loss_max_abs_difference"] == 0.25
    assert found["update_cosine_min"] is None
    assert found["padding_efficiency"] == 0.5  # 30 of 60; the mean of the steps' own is 0.61
    assert (found["worst"]["step"], found["worst"]["window"]) == (1, 11)
    first = figures(against=None)
    assert (first["gradient_relative_difference_max"], first["weight_cosine_min"]) == (0.0, 1.0)


def test_noise_floor() -> None:
    quiet, loud = figures([run(step(0, 1.0), step(1, 1.0), step(2, 1.0))]), figures()
    assert noise_floor([quiet, quiet])["gradient_relative_difference_max"] == LEAST_NOISE == 1e-7
    assert noise_floor([loud, quiet])["gradient_relative_difference_max"] == 3e-5
    assert noise_floor([loud, quiet])["gradient_cosine_min"] == 1 - 3e-5
    assert (measured_noise([quiet]), measured_noise([quiet, loud])) == (0.0, 3e-5)


@pytest.mark.parametrize(
    "runs, num_steps, limit, expected",
    [
        (ARM, 3, 1e-4, None),
        (ARM, 3, None, None),
        (ARM, 3, 1e-5, "its gradient differs by 3e-05, more than 1e-05"),
        (ARM, 4, None, "crashed: 3 of 4 steps"),
        ([run(status="hung"), ARM[1]], 3, None, "hung: because"),
        ([ARM[0], run(*ARM[1].steps[:1], status="oom")], 3, None, "oom: because"),
        (
            [run(*ARM[0].steps[:2], step(2, 1.0, num_rows=3, wrong_rows=["r7"]))],
            3,
            None,
            "lost_rows: step 2 trained 3 of 4 rows exactly once; not r7",
        ),
        ([run(*(step(i, 1.0, against={}) for i in range(3)))], 3, 1e-5, "no step was compared"),
    ],
)
def test_what_fails(runs: list[ArmRun], num_steps: int, limit: float | None, expected: str | None) -> None:
    assert problem_of(figures(runs, num_steps), num_steps=num_steps, limit=limit) == expected


def test_where_it_began() -> None:
    found = first_deviation(figures(), 1e-5, "reference")
    assert found is not None
    assert (found["step"], found["window"], found["worst_parameter"]) == (1, 11, "w1")
    assert first_deviation(figures(), 1e-4, "reference") is None


def test_a_difference_is_over_all_parameters() -> None:
    difference = Difference()
    difference.add("small", torch.tensor([2e-3]), torch.tensor([1e-3]))
    difference.add("large", torch.tensor([[100.0, 0.0]]), torch.tensor([[100.0, 0.0]]), with_ulp=True)
    assert difference.relative == pytest.approx(1e-5)  # the parameters' own are 1 and 0
    assert difference.cosine == pytest.approx(1 - 0.5e-10, abs=1e-10)
    assert (difference.worst, difference.worst_relative) == ("small", pytest.approx(1.0))
    shifted = Difference()
    value = torch.tensor([1.0])
    shifted.add("w", torch.nextafter(torch.nextafter(value, 2 * value), 2 * value), value, with_ulp=True)
    assert shifted.largest_ulp == 2.0


@pytest.mark.parametrize("d, f, relative, cosine", [(0.0, 0.0, 0.0, 1.0), (3.0, 0.0, 1.0, 0.0), (0.0, 2.0, 1.0, 0.0)])
def test_nothing_against_nothing(d: float, f: float, relative: float, cosine: float) -> None:
    difference = Difference()
    difference.add("w", torch.tensor([d]), torch.tensor([f]))
    assert (difference.relative, difference.cosine) == (relative, cosine)
