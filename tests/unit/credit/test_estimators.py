"""Locks, for every estimator:

1. advantages by hand, and equal to the plain loops of the reference on random windows in any order
2. uneven groups, told apart by id; a lone voter gives exactly 0 wherever a group's mean is taken
3. flat rewards give exactly 0, in a group or over a whitened window, also where they are not exact in binary;
   rewards that differ by a rounding give advantages of that size
4. splitting a rollout into rows changes no bit
5. failed rollouts are in no result and no statistic, whatever reward and tokens they left
6. whitening counts a rollout once per token: token-weighted mean 0, population deviation 1; by rollouts or rows not
7. a voter without tokens is in its group's baseline and shapes no whitening
8. penalties are subtracted before any baseline, and flatness is that of what remains; one that is not finite is refused
   and so is a reward whose square is not
9. a constant added to a group's rewards changes nothing where the group's mean is taken
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_oracle import GROUP_ESTIMATORS, Credited, advantages
from evenstep.credit import ESTIMATORS, rollout_advantages
from evenstep.errors import CreditError
from evenstep.types import Call, Rollout

BASELINED = ("grpo", "dr_grpo", "rloo")  # a group's advantages depend on that group alone
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")
every_estimator = pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)


def call(order: int, num_tokens: int) -> Call:
    return Call(
        order=order,
        prompt_ids=(9, order),
        output_ids=(1,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        break_reason="compaction",
    )


def to_rollout(credited: Credited, num_rows: int = 1) -> Rollout:
    """A rollout whose tokens are dealt to ``num_rows`` calls that are a row each."""
    sizes = [len(range(i, credited.num_tokens, num_rows)) for i in range(num_rows)]
    return Rollout(
        rollout_id=credited.rollout_id,
        group_id=credited.group_id,
        prompt_id="p",
        reward=credited.reward,
        calls=tuple(call(i, size) for i, size in enumerate(sizes) if size),
        status="ok" if credited.is_voter else "failed",
    )


def window(groups: Mapping[str, Sequence[tuple[float, int]]]) -> list[Credited]:
    """Group id -> (reward, tokens) of its rollouts, named group and position."""
    return [
        Credited(rollout_id=f"{group_id}{i}", group_id=group_id, reward=reward, num_tokens=num_tokens)
        for group_id, members in groups.items()
        for i, (reward, num_tokens) in enumerate(members)
    ]


def found(
    members: Sequence[Credited], estimator: str, penalties: Mapping[str, float] | None = None
) -> dict[str, float]:
    return rollout_advantages([to_rollout(member) for member in members], estimator, penalties=penalties)


MEMBERS = window({"g": [(1.0, 4), (0.0, 1), (0.2, 2)], "h": [(0.7, 3)], "k": [(0.3, 5), (0.8, 1)]})


def test_the_reference_knows_every_estimator() -> None:
    assert tuple(ESTIMATORS) == GROUP_ESTIMATORS


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("dr_grpo", {"g0": 0.6, "g1": -0.4, "g2": -0.2, "h0": 0.0, "k0": -0.25, "k1": 0.25}),
        ("rloo", {"g0": 0.9, "g1": -0.6, "g2": -0.3, "h0": 0.0, "k0": -0.5, "k1": 0.5}),
    ],
)
def test_group_estimators_by_hand(estimator: str, expected: dict[str, float]) -> None:
    assert found(MEMBERS, estimator) == pytest.approx(expected, abs=1e-15)
    assert advantages(estimator, MEMBERS) == pytest.approx(expected, abs=1e-15)


def test_whitening_by_hand() -> None:
    members = window({"g": [(1.0, 1), (0.0, 3)], "h": [(0.5, 0)]})
    # tokens 1, 0, 0, 0: mean 1/4, variance 3/16
    std = math.sqrt(3) / 4 + 1e-6
    expected = {"g0": 0.75 / std, "g1": -0.25 / std, "h0": 0.25 / std}
    # r - mean is 1/2 and three times -1/2: mean -1/4, variance 3/16
    with_baseline = {"g0": 0.75 / std, "g1": -0.25 / std, "h0": 0.25 / std}
    assert found(members, "reinforce_pp") == pytest.approx(expected, abs=1e-15)
    assert found(members, "reinforce_pp_baseline") == pytest.approx(with_baseline, abs=1e-15)
    two_groups = window({"g": [(1.0, 1), (0.0, 1)], "h": [(3.0, 1), (0.0, 1)]})
    # baseline: ±1/2 and ±3/2, mean 0, variance 5/4; without it: mean 1, variance 3/2
    scale = math.sqrt(1.25) + 1e-6
    baselined = {"g0": 0.5 / scale, "g1": -0.5 / scale, "h0": 1.5 / scale, "h1": -1.5 / scale}
    assert found(two_groups, "reinforce_pp_baseline") == pytest.approx(baselined, abs=1e-15)
    scale = math.sqrt(1.5) + 1e-6
    plain = {"g0": 0.0, "g1": -1 / scale, "h0": 2 / scale, "h1": -1 / scale}
    assert found(two_groups, "reinforce_pp") == pytest.approx(plain, abs=1e-15)


rewards = st.integers(-7, 7).map(lambda n: n / 7)  # not exact in binary
members_of_groups = st.lists(
    st.builds(
        Credited,
        rollout_id=st.just(""),
        group_id=st.sampled_from(["g", "h", "k"]),
        reward=rewards,
        num_tokens=st.integers(0, 9),
        is_voter=st.sampled_from([True, True, True, False]),
    ),
    max_size=9,
).map(
    lambda members: [
        Credited(
            rollout_id=str(i),
            group_id=member.group_id,
            reward=member.reward,
            num_tokens=member.num_tokens,
            is_voter=member.is_voter,
        )
        for i, member in enumerate(members)
    ]
)


@every_estimator
@given(members=members_of_groups, penalised=st.booleans(), seed=st.integers(0, 99))
def test_equals_the_reference(estimator: str, members: list[Credited], penalised: bool, seed: int) -> None:
    penalties = {member.rollout_id: 0.1 * (i % 3) for i, member in enumerate(members)} if penalised else None
    expected = advantages(estimator, members, penalties)
    random.Random(seed).shuffle(members)
    result = found(members, estimator, penalties)
    assert result == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert set(result) == {member.rollout_id for member in members if member.is_voter}


@every_estimator
def test_rounding_is_not_magnified(estimator: str) -> None:
    """Sums of the same parts in another order differ by one rounding, which no division by a deviation may blow up."""
    rewards = (0.1 + 0.2, 0.3, 0.2 + 0.1, 0.3)
    members = [
        Credited(rollout_id=f"r{i}", group_id="g", reward=reward, num_tokens=i + 1) for i, reward in enumerate(rewards)
    ]
    assert max(map(abs, found(members, estimator).values())) < 1e-9


@every_estimator
@pytest.mark.parametrize("reward", [0.7, 0.1 + 0.2, -1e9, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_flat_windows_give_exactly_zero(estimator: str, reward: float, size: int) -> None:
    members = window({"g": [(reward, 3 + i) for i in range(size)], "h": [(reward, 2)]})
    assert set(found(members, estimator).values()) == {0.0}


@pytest.mark.parametrize("estimator", BASELINED)
def test_flat_groups_and_lone_voters_among_others_give_exactly_zero(estimator: str) -> None:
    members = window({"g": [(0.7, 3)] * 7, "h": [(0.1, 2)], "k": [(0.1, 1), (0.3, 2)]})
    result = found(members, estimator)
    assert {value for name, value in result.items() if name[0] in "gh"} == {0.0}
    assert result["k1"] > 0 > result["k0"]
    assert {name: result[name] for name in ("k0", "k1")} == found(members[-2:], estimator)


@every_estimator
def test_rows_change_nothing(estimator: str) -> None:
    whole = [to_rollout(member) for member in MEMBERS]
    split = [to_rollout(member, num_rows=1 + i) for i, member in enumerate(MEMBERS)]
    assert [len(rollout.calls) for rollout in split] == [1, 1, 2, 3, 5, 1]
    assert rollout_advantages(split, estimator) == rollout_advantages(whole, estimator)


@every_estimator
@pytest.mark.parametrize(("reward", "num_tokens"), [(None, 0), (0.0, 0), (100.0, 50), (math.nan, 3)])
def test_failed_rollouts_count_nowhere(estimator: str, reward: float | None, num_tokens: int) -> None:
    failed = [
        Credited(rollout_id=f"x{group}", group_id=group, reward=reward, num_tokens=num_tokens, is_voter=False)
        for group in ("g", "h", "z")
    ]
    assert found([*failed, *MEMBERS], estimator) == found(MEMBERS, estimator)
    assert found(failed, estimator) == {}


@pytest.mark.parametrize("estimator", WHITENED)
def test_whitening_counts_tokens(estimator: str) -> None:
    result = found(MEMBERS, estimator)

    def moments(counts: Sequence[int]) -> tuple[float, float]:
        """Mean and population deviation of the advantages, each taken so many times."""
        pairs = list(zip(counts, result.values(), strict=True))
        mean = sum(c * a for c, a in pairs) / sum(counts)
        return mean, math.sqrt(sum(c * (a - mean) ** 2 for c, a in pairs) / sum(counts))

    assert moments([member.num_tokens for member in MEMBERS]) == pytest.approx((0.0, 1.0), abs=1e-5)
    by_rollout, by_row = [1] * len(MEMBERS), [2, 1, 1, 3, 1, 1]
    for counts in (by_rollout, by_row):
        assert abs(moments(counts)[0]) > 0.01


def test_voters_without_tokens() -> None:
    members = window({"g": [(1.0, 2), (0.0, 2)], "h": [(0.9, 3), (0.1, 1)]})
    silent = Credited(rollout_id="s", group_id="g", reward=-2.0, num_tokens=0)
    pp = found([*members, silent], "reinforce_pp")
    assert {name: pp[name] for name in ("g0", "g1", "h0", "h1")} == found(members, "reinforce_pp")
    for estimator in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"):
        moved = found([*members, silent], estimator)
        assert abs(moved["g0"] - found(members, estimator)["g0"]) > 0.01
        assert moved == pytest.approx(advantages(estimator, [*members, silent]), abs=1e-12)
    # all that is trained is equal: nothing to whiten
    flat = window({"g": [(0.7, 2), (0.7, 5), (0.1, 0)]})
    assert set(found(flat, "reinforce_pp").values()) == {0.0}


@every_estimator
def test_penalties_come_first(estimator: str) -> None:
    penalties = {"g0": 0.3, "g2": -0.1, "k1": 0.05}
    penalised = [
        Credited(
            rollout_id=member.rollout_id,
            group_id=member.group_id,
            reward=(member.reward or 0.0) - penalties.get(member.rollout_id, 0.0),
            num_tokens=member.num_tokens,
        )
        for member in MEMBERS
    ]
    assert found(MEMBERS, estimator, penalties) == found(penalised, estimator)
    assert found(MEMBERS, estimator, penalties) != pytest.approx(found(MEMBERS, estimator), rel=0.01)
    halves = window({"g": [(1.0, 2), (0.5, 3)]})
    assert set(found(halves, estimator, {"g0": 0.5}).values()) == {0.0}
    equal = window({"g": [(0.5, 2), (0.5, 3)]})
    assert found(equal, estimator, {"g0": 0.25})["g1"] > 0


@every_estimator
@pytest.mark.parametrize("penalty", [math.nan, math.inf])
def test_penalties_are_finite(estimator: str, penalty: float) -> None:
    with pytest.raises(CreditError, match="k1"):
        found(MEMBERS, estimator, {"k1": penalty})


@every_estimator
def test_squares_are_finite(estimator: str) -> None:
    with pytest.raises(CreditError, match="1e\\+200 for rollout 'g0'"):
        found(window({"g": [(1e200, 2), (-1e200, 3)]}), estimator)
    large = found(window({"g": [(1e150, 2), (-1e150, 3)]}), estimator)
    assert large["g0"] > 0 > large["g1"]


@pytest.mark.parametrize("estimator", [*BASELINED, "reinforce_pp_baseline"])
def test_a_groups_constant_cancels(estimator: str) -> None:
    shifts = {"g": 3.0, "h": -1.0, "k": 0.25}
    shifted = [
        Credited(
            rollout_id=member.rollout_id,
            group_id=member.group_id,
            reward=(member.reward or 0.0) + shifts[member.group_id],
            num_tokens=member.num_tokens,
        )
        for member in MEMBERS
    ]
    assert found(shifted, estimator) == pytest.approx(found(MEMBERS, estimator), rel=1e-12, abs=1e-12)
