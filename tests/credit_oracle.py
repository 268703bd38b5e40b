"""Reference for advantages: plain loops over the formulas, sharing no code with what they judge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oracle import grpo_advantages

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """What an estimator may know of a rollout."""

    rollout_id: str
    group_id: str
    reward: float | None
    num_tokens: int = 1  # trained, over all its rows
    is_voter: bool = True


def advantages(
    estimator: str, rollouts: Sequence[Credited], penalties: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Rollout id -> advantage of every voter.

    dr_grpo r - mean    rloo r - mean of the others    (0 where all voters of the group are equal)
    reinforce_pp r, reinforce_pp_baseline r - mean; then (a - mean) / (std + 1e-6) over the window's trained tokens
    """
    rewards: dict[str, float] = {}
    for rollout in rollouts:
        if rollout.is_voter:
            assert rollout.reward is not None
            rewards[rollout.rollout_id] = rollout.reward - (penalties or {}).get(rollout.rollout_id, 0.0)
    voters = [rollout for rollout in rollouts if rollout.is_voter]
    if estimator == "grpo":
        return grpo_advantages([(v.rollout_id, v.group_id, rewards[v.rollout_id], True) for v in voters])
    found: dict[str, float] = {}
    for voter in voters:
        own = rewards[voter.rollout_id]
        peers = [rewards[v.rollout_id] for v in voters if v.group_id == voter.group_id]
        others = [rewards[v.rollout_id] for v in voters if v.group_id == voter.group_id and v is not voter]
        if estimator == "reinforce_pp":
            found[voter.rollout_id] = own
        elif len(set(peers)) == 1:
            found[voter.rollout_id] = 0.0
        elif estimator == "rloo":
            found[voter.rollout_id] = own - math.fsum(others) / len(others)
        else:
            assert estimator in ("dr_grpo", "reinforce_pp_baseline"), estimator
            found[voter.rollout_id] = own - math.fsum(peers) / len(peers)
    if estimator in ("dr_grpo", "rloo"):
        return found
    token_values = []  # one entry per trained token of the window
    for voter in voters:
        token_values += [found[voter.rollout_id]] * voter.num_tokens
    if len(set(token_values)) <= 1:
        return dict.fromkeys(found, 0.0)
    mean = math.fsum(token_values) / len(token_values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in token_values) / len(token_values))
    return {rollout_id: (value - mean) / (std + 1e-6) for rollout_id, value in found.items()}


def gae_by_segment(
    segments: Sequence[tuple[Sequence[int], Sequence[float]]],
    reward: float,
    *,
    gamma: float,
    lam: float,
    terminal_value: float = 0.0,
) -> list[tuple[list[float], list[float]]]:
    """For (mask, values) of each segment in call order: ([T] advantages, [T] returns), 0.0 where the mask is 0.

    A of a trained token = Σ over it and all later trained tokens of (γλ)^distance · δ, δ = r + γ·V(next) - V, where the
    next trained token may stand in a later segment.
    """
    steps = [(s, t) for s, (mask, _) in enumerate(segments) for t in range(len(mask)) if mask[t]]
    values = [float(segments[s][1][t]) for s, t in steps]
    deltas = []
    for m, value in enumerate(values):
        is_last = m == len(values) - 1
        following = terminal_value if is_last else values[m + 1]
        deltas.append((reward if is_last else 0.0) + gamma * following - value)
    found = [([0.0] * len(mask), [0.0] * len(mask)) for mask, _ in segments]
    for m, (s, t) in enumerate(steps):
        advantage = math.fsum((gamma * lam) ** (j - m) * deltas[j] for j in range(m, len(deltas)))
        found[s][0][t], found[s][1][t] = advantage, advantage + values[m]
    return found
