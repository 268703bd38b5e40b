"""Locks:

1. δ and A by hand; returns = advantages + values; equal to the direct sum over later tokens
2. λ = 1, γ = 1 is reward - V with the reward as every return; λ = 0 is one step; a perfect critic gives 0
3. across segments: any split of a rollout, with context and garbage at masked slots, gives what the unsplit one gives;
   starting anew in each segment, or stepping over context tokens, does not
4. the reward is paid at the last trained token; the terminal value is 0 unless one is given
5. token rewards (a KL penalty) are added where they are, and the caller's arrays stay as they were
6. no trained token gives nothing; unequal lengths, values that are not finite and factors outside [0, 1] are refused
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from credit_oracle import gae_by_segment
from evenstep.credit import gae
from evenstep.errors import CreditError

VALUES = [0.3, -0.2, 0.55, 0.1, 0.7, 0.45]
FACTORS = [(1.0, 1.0), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0), (0.99, 0.95)]


def test_by_hand() -> None:
    advantages, returns = gae([0.5, 0.25, 1.0], 2.0, gamma=0.5, lam=0.5, terminal_value=4.0)
    # δ = 0.5·0.25 - 0.5, 0.5·1 - 0.25, 2 + 0.5·4 - 1; γλ = 0.25
    assert advantages.tolist() == [-0.375 + 0.25 * 1.0, 0.25 + 0.25 * 3.0, 3.0]
    assert returns.tolist() == [0.375, 1.25, 4.0]


@pytest.mark.parametrize(("gamma", "lam"), FACTORS)
@pytest.mark.parametrize("terminal_value", [0.0, -0.8])
def test_equals_the_direct_sum(gamma: float, lam: float, terminal_value: float) -> None:
    settings = {"gamma": gamma, "lam": lam, "terminal_value": terminal_value}
    found = gae(VALUES, 0.7, **settings)
    ((advantages, returns),) = gae_by_segment([([1] * len(VALUES), VALUES)], 0.7, **settings)
    assert found.advantages.tolist() == pytest.approx(advantages, rel=1e-13, abs=1e-15)
    assert found.returns.tolist() == pytest.approx(returns, rel=1e-13, abs=1e-15)


def test_special_cases() -> None:
    found = gae(VALUES, 0.7)
    assert found.advantages.tolist() == pytest.approx([0.7 - value for value in VALUES], abs=1e-15)
    assert found.returns.tolist() == pytest.approx([0.7] * len(VALUES), abs=1e-15)
    one_step = gae(VALUES, 0.7, gamma=0.9, lam=0.0).advantages.tolist()
    assert one_step == pytest.approx([0.9 * b - a for a, b in zip(VALUES, [*VALUES[1:], 0.7 / 0.9], strict=True)])
    perfect = [0.5**m for m in range(4, -1, -1)]
    assert gae(perfect, 1.0, gamma=0.5, lam=0.5).advantages.tolist() == [0.0] * 5


# masks of a rollout's segments: context before, between and after trained tokens; one segment is context only
SPLITS = [
    [[0, 1, 1, 0, 1], [0, 0, 1, 1, 1]],
    [[0, 1], [0, 1, 0], [0, 0, 0, 1, 0, 1, 1, 0], [0, 1]],
    [[0, 1, 1, 1, 1, 1, 1, 0]],
    [[0, 1, 1], [0, 0], [0, 1, 1, 1, 1]],
]


def across(masks: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """VALUES at the trained tokens of the segments, garbage elsewhere."""
    left = iter(VALUES)
    return [(mask, [next(left) if trained else math.nan for trained in mask]) for mask in masks]


@pytest.mark.parametrize("masks", SPLITS)
@pytest.mark.parametrize(("gamma", "lam"), FACTORS)
def test_across_segments(masks: list[list[int]], gamma: float, lam: float) -> None:
    segments = across(masks)
    trained = [np.asarray(values)[np.asarray(mask) == 1] for mask, values in segments]
    found = gae(np.concatenate(trained), -0.35, gamma=gamma, lam=lam)
    unsplit = gae(VALUES, -0.35, gamma=gamma, lam=lam)
    assert found.advantages.tolist() == unsplit.advantages.tolist()
    expected = gae_by_segment(segments, -0.35, gamma=gamma, lam=lam)
    flat = [
        (a, r)
        for (mask, _), (advantages, returns) in zip(segments, expected, strict=True)
        for is_trained, a, r in zip(mask, advantages, returns, strict=True)
        if is_trained
    ]
    assert found.advantages.tolist() == pytest.approx([a for a, _ in flat], rel=1e-13, abs=1e-15)
    assert found.returns.tolist() == pytest.approx([r for _, r in flat], rel=1e-13, abs=1e-15)


def test_wrong_formulas_differ() -> None:
    exact = gae(VALUES, 0.7, gamma=0.9, lam=0.5).advantages
    first, second = (gae(part, 0.7, gamma=0.9, lam=0.5).advantages for part in (VALUES[:3], VALUES[3:]))
    assert abs(np.concatenate([first, second]) - exact).max() > 0.1
    # a context token between the segments that takes a step of its own
    with_context = gae([*VALUES[:3], 0.0, *VALUES[3:]], 0.7, gamma=0.9, lam=0.5).advantages
    assert abs(np.delete(with_context, 3) - exact).max() > 0.1


def test_terminal_value() -> None:
    ended, cut = (gae(VALUES, 0.7, gamma=0.9, lam=0.5, terminal_value=value).advantages for value in (0.0, 2.0))
    assert (cut - ended).tolist() == pytest.approx([0.45**m * 1.8 for m in range(5, -1, -1)], rel=1e-12)
    assert ended[-1] == pytest.approx(0.7 - VALUES[-1], abs=1e-15)


def test_token_rewards() -> None:
    values = np.asarray(VALUES, dtype=np.float32)
    penalties = np.asarray([0.0, -0.1, 0.0, -0.2, 0.0, -0.3])
    before = values.copy(), penalties.copy()
    found = gae(values, 0.7, token_rewards=penalties)
    assert found.advantages.dtype == np.float64
    later = np.cumsum(penalties[::-1])[::-1]
    assert found.returns.tolist() == pytest.approx((0.7 + later).tolist(), abs=1e-7)
    assert (values == before[0]).all()
    assert (penalties == before[1]).all()


def test_no_trained_token() -> None:
    found = gae([], 0.7)
    assert found.advantages.shape == found.returns.shape == (0,)


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        ([0.1, 0.2], {"token_rewards": [0.1]}, r"one value and one reward per trained token, found shapes \(2,\)"),
        ([[0.1], [0.2]], {}, r"found shapes \(2, 1\)"),
        ([0.1, math.nan], {}, "finite values and rewards"),
        ([0.1], {"token_rewards": [math.inf]}, "finite values and rewards"),
        ([0.1], {"reward": math.nan}, "finite values and rewards"),
        ([0.1], {"terminal_value": math.inf}, "finite values and rewards"),
        ([0.1], {"gamma": 1.1}, "gamma must be between 0 and 1, found 1.1"),
        ([0.1], {"lam": -0.1}, "lam must be between 0 and 1, found -0.1"),
        ([0.1], {"lam": math.nan}, "lam must be between 0 and 1, found nan"),
    ],
)
def test_refused(values: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditError, match=message):
        gae(values, **{"reward": 0.5} | settings)
