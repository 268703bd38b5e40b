"""Locks:

1. grpo is (r - mean) / (sample std + 1e-6) over the group's voting rollouts, each once, whatever its rows
2. groups are told apart by id: uneven sizes, any order, two occurrences of one prompt
3. equal rewards give exactly 0, also where they are not exact in binary; a lone voter gives 0
4. failed rollouts are in no statistic; truncated ones vote
5. no z-score of n rewards exceeds (n - 1) / sqrt(n); the one-pass float32 formula does
6. a missing or non-finite reward, a rollout given twice and an unknown estimator are errors that name the id
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.credit import rollout_advantages
from evenstep.errors import CreditError
from evenstep.types import Call, Rollout


def rollout(group: str, name: str, reward: float | None, rows: int = 1, status: str = "ok") -> Rollout:
    calls = tuple(
        Call(order=i, prompt_ids=(9, i), output_ids=(1,), logprobs=(-1.0,), break_reason="compaction")
        for i in range(rows)
    )
    return Rollout(rollout_id=name, group_id=group, prompt_id="p", reward=reward, calls=calls, status=status)  # type: ignore[arg-type]


def test_rows_do_not_vote() -> None:
    found = rollout_advantages([rollout("g0", "a", 1.0, rows=3), rollout("g0", "b", 0.0)])
    wrong = statistics.stdev([1.0, 1.0, 1.0, 0.0])
    assert found["a"] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6), abs=1e-15)
    assert found["b"] == -found["a"]
    assert abs(found["a"] - 0.25 / (wrong + 1e-6)) > 0.1


def test_uneven_groups_by_id_in_any_order() -> None:
    members = [rollout("g1", "c", 7.0), rollout("g0", "a", 2.0), rollout("g1", "d", 7.0), rollout("g0", "b", 4.0)]
    found = rollout_advantages([*members, rollout("g1", "e", 7.0)])
    scale = 1.0 / (math.sqrt(2.0) + 1e-6)
    assert found == pytest.approx({"a": -scale, "b": scale, "c": 0.0, "d": 0.0, "e": 0.0}, abs=1e-15)


@pytest.mark.parametrize("reward", [0.7, 0.35, 0.95, 1e-30, -1e9])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_equal_rewards_and_lone_voters_give_exactly_zero(reward: float, size: int) -> None:
    found = rollout_advantages([rollout("g", str(i), reward) for i in range(size)])
    assert list(found.values()) == [0.0] * size


def test_failed_rollouts_are_in_no_statistic_and_truncated_ones_are() -> None:
    members = [rollout("g", "a", 1.0), rollout("g", "b", 0.0, status="truncated")]
    with_failed = rollout_advantages([*members, rollout("g", "c", None, rows=0, status="failed")])
    assert with_failed == rollout_advantages(members)
    assert set(with_failed) == {"a", "b"}


def test_one_odd_reward_among_eight_stays_within_the_bound() -> None:
    rewards = [0.0] + [0.7] * 7
    found = rollout_advantages([rollout("g", str(i), r) for i, r in enumerate(rewards)])
    assert max(map(abs, found.values())) <= 7 / math.sqrt(8)
    siblings = np.float32(rewards[1:])
    one_pass = np.sqrt(max((siblings**2).mean() - siblings.mean() ** 2, 0.0))
    assert one_pass == 0.0 or 0.7 / one_pass > 1000


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_formula_order_and_bound(rewards: list[float], random: object) -> None:
    members = [rollout("g", str(i), r) for i, r in enumerate(rewards)]
    found = rollout_advantages(members)
    random.shuffle(members)  # type: ignore[attr-defined]
    assert rollout_advantages(members) == pytest.approx(found, rel=1e-9, abs=1e-12)
    assert max(map(abs, found.values())) <= (len(rewards) - 1) / math.sqrt(len(rewards)) + 1e-9
    if min(rewards) == max(rewards):
        assert set(found.values()) == {0.0}
    else:
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for i, r in enumerate(rewards):
            assert found[str(i)] == pytest.approx((r - mean) / (std + 1e-6), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_voter_needs_a_finite_reward(reward: float | None) -> None:
    with pytest.raises(CreditError, match="'bad' of group 'g'"):
        rollout_advantages([rollout("g", "good", 1.0), rollout("g", "bad", reward)])


def test_a_rollout_votes_once() -> None:
    with pytest.raises(CreditError, match="'a' was given twice"):
        rollout_advantages([rollout("g", "a", 1.0), rollout("h", "a", 0.0)])


def test_unknown_estimators_are_named() -> None:
    with pytest.raises(CreditError, match="unknown estimator 'ppo'; choose one of"):
        rollout_advantages([], "ppo")
