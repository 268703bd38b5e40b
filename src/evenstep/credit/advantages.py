"""Advantages: once per rollout, over the voting rollouts of its group, by group id."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from evenstep.errors import CreditError
from evenstep.types import Float64Array

__all__ = ["ESTIMATORS", "group_advantages"]

STD_FLOOR = 1e-6  # added to the standard deviation, as GRPO implementations do


class RewardedRollout(Protocol):
    @property
    def rollout_id(self) -> str: ...
    @property
    def group_id(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def is_voter(self) -> bool: ...


R = TypeVar("R", bound=RewardedRollout)


def grpo(rewards_G: Float64Array) -> Float64Array:
    """(r - mean) / (sample standard deviation + 1e-6), the standard deviation with ddof 1 (Shao et al. 2024)."""
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (np.sqrt((centred_G**2).sum() / (len(rewards_G) - 1)) + STD_FLOOR)


ESTIMATORS: dict[str, Callable[[Float64Array], Float64Array]] = {"grpo": grpo}


def group_advantages(rollouts: Iterable[R], estimator: str = "grpo") -> dict[str, float]:
    """One advantage per voting rollout, in float64, over the voters of its group.

    Equal rewards (``max == min``) give exactly 0, and so does a lone voter. Rollouts that do not vote are left out of
    the result and of every statistic. Groups are told apart by ``group_id`` alone, so two occurrences of one prompt are
    two groups, and how many rows a rollout has does not matter.

    Returns:
        rollout id -> advantage.

    Raises:
        CreditError: a voter without a finite reward, a rollout id that occurs twice, an unknown estimator.

    >>> from evenstep.types import Rollout
    >>> def rollout(group, name, reward, **kw):
    ...     return Rollout(rollout_id=name, group_id=group, prompt_id=group, reward=reward, **kw)
    >>> found = group_advantages([rollout("g0", "a", 1.0), rollout("g0", "b", 0.0), rollout("g1", "c", 0.7),
    ...                           rollout("g1", "d", 0.7), rollout("g0", "e", None, status="failed")])
    >>> {name: round(value, 5) for name, value in found.items()}
    {'a': 0.7071, 'b': -0.7071, 'c': 0.0, 'd': 0.0}
    """
    if estimator not in ESTIMATORS:
        raise CreditError(f"unknown estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
    voters_by_group: dict[Hashable, list[R]] = {}
    seen: set[str] = set()
    for rollout in rollouts:
        if rollout.rollout_id in seen:
            raise CreditError(f"rollout {rollout.rollout_id!r} was given twice; each rollout votes once")
        seen.add(rollout.rollout_id)
        if rollout.is_voter:
            voters_by_group.setdefault(rollout.group_id, []).append(rollout)
    advantages: dict[str, float] = {}
    for voters in voters_by_group.values():
        rewards_G = _rewards(voters)
        if rewards_G.max() == rewards_G.min():
            values_G = np.zeros_like(rewards_G)
        else:
            values_G = ESTIMATORS[estimator](rewards_G)
        for voter, value in zip(voters, values_G.tolist(), strict=True):
            advantages[voter.rollout_id] = value
    return advantages


def _rewards(voters: Sequence[RewardedRollout]) -> Float64Array:
    for voter in voters:
        if voter.reward is None or not np.isfinite(voter.reward):
            raise CreditError(
                f"rollout {voter.rollout_id!r} of group {voter.group_id!r} votes, but its reward is {voter.reward}; "
                f"give a finite reward, or set its status to failed"
            )
    return np.asarray([voter.reward for voter in voters], dtype=np.float64)
