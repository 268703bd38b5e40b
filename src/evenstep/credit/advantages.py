"""Advantages: once per rollout, over voting rollouts, by group id; float64, two passes.

==========================  ==============================================================================
estimator                   advantage of a rollout with reward r
==========================  ==============================================================================
``grpo``                    (r - mean) / (sample standard deviation + 1e-6), within the group
``dr_grpo``                 r - mean, within the group
``rloo``                    r - mean of the other rollouts of the group
``reinforce_pp``            r, whitened over the window
``reinforce_pp_baseline``   r - mean of the group, whitened over the window
==========================  ==============================================================================

Whitening takes mean and population standard deviation over the trained tokens of the window, so a rollout counts as
often as it has tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from evenstep.errors import CreditError
from evenstep.types import Float64Array

__all__ = ["ESTIMATORS", "rollout_advantages", "zero_spread_groups"]

LARGEST = 1e150  # of a reward, so that its square is a number
STD_FLOOR = 1e-6  # added to a standard deviation, as GRPO implementations do


class RewardedRollout(Protocol):
    @property
    def rollout_id(self) -> str: ...
    @property
    def group_id(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def is_voter(self) -> bool: ...
    @property
    def num_sampled_tokens(self) -> int: ...


R = TypeVar("R", bound=RewardedRollout)


def _minus_mean(rewards_G: Float64Array) -> Float64Array:
    return rewards_G - rewards_G.mean()


def _grpo(rewards_G: Float64Array) -> Float64Array:
    centred_G = _minus_mean(rewards_G)
    return centred_G / (np.sqrt((centred_G**2).sum() / (len(rewards_G) - 1)) + STD_FLOOR)


def _rloo(rewards_G: Float64Array) -> Float64Array:
    # r - (sum - r) / (G - 1)
    return _minus_mean(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))


# name -> (baseline within the group, or none; whether the window is whitened)
ESTIMATORS: dict[str, tuple[Callable[[Float64Array], Float64Array] | None, bool]] = {
    "grpo": (_grpo, False),
    "dr_grpo": (_minus_mean, False),
    "rloo": (_rloo, False),
    "reinforce_pp": (None, True),
    "reinforce_pp_baseline": (_minus_mean, True),
}


def rollout_advantages(
    rollouts: Iterable[R],
    estimator: str = "grpo",
    *,
    penalties: Mapping[str, float] | None = None,
    num_trained_tokens: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """One advantage per voting rollout of a window.

    Equal rewards (``max == min``) give exactly 0, and so does a lone voter; whitening comes after that, and moves these
    zeros by the window's token-weighted mean as it moves everything else. Rollouts that do not vote are left out of
    the result and of every statistic. Groups are told apart by ``group_id`` alone, so two occurrences of one prompt are
    two groups, and how many rows a rollout has does not matter.

    Args:
        rollouts: of one window.
        estimator: a name in ``ESTIMATORS``.
        penalties: rollout id -> what is subtracted from its reward before any baseline, e.g. beta times its summed KL.
        num_trained_tokens: rollout id -> its trained tokens, where not all that were sampled are (realigned drifts);
            a rollout that is not named has none. None: all sampled ones.

    Returns:
        rollout id -> advantage.

    Raises:
        CreditError: a voter without a finite reward or penalty, or with one whose square is not, a rollout id that
            occurs twice, an unknown estimator.

    >>> from evenstep.types import Rollout
    >>> def rollout(group, name, reward, **kw):
    ...     return Rollout(rollout_id=name, group_id=group, prompt_id=group, reward=reward, **kw)
    >>> found = rollout_advantages([rollout("g0", "a", 1.0), rollout("g0", "b", 0.0), rollout("g1", "c", 0.7),
    ...                             rollout("g1", "d", 0.7), rollout("g0", "e", None, status="failed")])
    >>> {name: round(value, 5) for name, value in found.items()}
    {'a': 0.70711, 'b': -0.70711, 'c': 0.0, 'd': 0.0}

    Sources: Shao et al. 2024 (grpo), Liu et al. 2025 (dr_grpo), Ahmadian et al. 2024 (rloo), Hu et al. 2025
    (reinforce_pp).
    """
    if estimator not in ESTIMATORS:
        raise CreditError(f"unknown estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
    baseline, is_whitened = ESTIMATORS[estimator]
    voters_by_group: dict[str, list[R]] = {}
    seen: set[str] = set()
    for rollout in rollouts:
        if rollout.rollout_id in seen:
            raise CreditError(f"rollout {rollout.rollout_id!r} was given twice; each rollout votes once")
        seen.add(rollout.rollout_id)
        if rollout.is_voter:
            voters_by_group.setdefault(rollout.group_id, []).append(rollout)
    voters = [voter for group in voters_by_group.values() for voter in group]
    values: list[float] = []
    for group in voters_by_group.values():
        rewards_G = _rewards(group, penalties or {})
        if baseline is not None:
            rewards_G = np.zeros_like(rewards_G) if _is_flat(rewards_G) else baseline(rewards_G)
        values += rewards_G.tolist()
    if is_whitened:
        trained = {voter.rollout_id: voter.num_sampled_tokens for voter in voters}
        if num_trained_tokens is not None:
            trained = num_trained_tokens
        tokens = np.asarray([trained.get(voter.rollout_id, 0) for voter in voters], dtype=np.int64)
        values = _whitened(np.asarray(values), tokens).tolist()
    return {voter.rollout_id: value for voter, value in zip(voters, values, strict=True)}


def zero_spread_groups(rollouts: Iterable[RewardedRollout]) -> list[str]:
    """Ids of the groups whose voters all have the same raw reward, in order of appearance: nothing to learn from.

    A lone voter has no spread either; a group without voters is not listed.

    >>> from evenstep.types import Rollout
    >>> zero_spread_groups([Rollout(rollout_id=f"{g}{i}", group_id=g, prompt_id=g, reward=r)
    ...                     for g, rewards in (("a", [0.7, 0.7]), ("b", [0.7, 0.1])) for i, r in enumerate(rewards)])
    ['a']

    Source: dynamic sampling of DAPO (Yu et al. 2025).
    """
    rewards: dict[str, set[float | None]] = {}
    for rollout in rollouts:
        if rollout.is_voter:
            # equal numbers of another type, such as tensors, need not be equal in a set
            reward = None if rollout.reward is None else float(rollout.reward)
            rewards.setdefault(rollout.group_id, set()).add(reward)
    return [group_id for group_id, found in rewards.items() if len(found) == 1]


def _is_flat(values: Float64Array) -> bool:
    return bool(values.max() == values.min())


def _whitened(values_O: Float64Array, tokens_O: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Float64Array:
    """(a - mean) / (std + 1e-6) with each value counted once per token; values without tokens shape nothing."""
    trained_O = tokens_O > 0
    if not trained_O.any() or _is_flat(values_O[trained_O]):
        return np.zeros_like(values_O)
    total = int(tokens_O.sum())
    mean = float((values_O * tokens_O).sum() / total)
    std = float(np.sqrt(((values_O - mean) ** 2 * tokens_O).sum() / total))
    return (values_O - mean) / (std + STD_FLOOR)


def _rewards(voters: Sequence[RewardedRollout], penalties: Mapping[str, float]) -> Float64Array:
    rewards: list[float] = []
    for voter in voters:
        if voter.reward is None or not np.isfinite(voter.reward):
            raise CreditError(
                f"rollout {voter.rollout_id!r} of group {voter.group_id!r} votes, but its reward is {voter.reward}; "
                f"give a finite reward, or set its status to failed"
            )
        penalty = penalties.get(voter.rollout_id, 0.0)
        if not np.isfinite(penalty):
            raise CreditError(
                f"the penalty of rollout {voter.rollout_id!r} must be finite, found {penalty}; look at the log-probs "
                f"that its KL was computed from"
            )
        if abs(voter.reward - penalty) > LARGEST:
            raise CreditError(
                f"a reward less its penalty must be at most {LARGEST:g} away from 0, because a standard deviation "
                f"squares it, found {voter.reward - penalty} for rollout {voter.rollout_id!r}; bound it at its source"
            )
        rewards.append(voter.reward - penalty)
    return np.asarray(rewards, dtype=np.float64)
