"""What a window's rollouts say, counted in rollouts and groups, never in rows."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from evenstep.credit import zero_spread_groups
from evenstep.types import Rollout, Window

__all__ = ["METRIC_NAMES", "rollout_metrics"]

# every window's line in metrics.jsonl has these, null where nothing was computed
METRIC_NAMES = (
    *("window", "optimizer_step", "stepped", "skip_reason", "lr"),
    *("num_rollouts", "num_voters", "num_failed", "num_truncated", "num_replaced", "num_rows", "num_fillers"),
    *("segments_per_rollout_mean", "segments_per_rollout_max", "num_trained_tokens", "num_microbatches", "layout"),
    *("padding_efficiency", "lockstep_efficiency", "reward_mean", "reward_std", "zero_spread_fraction"),
    *("loss", "grad_norm", "entropy", "kl", "clip_fraction", "ratio_max_deviation", "engine_trainer_kl"),
    *("engine_logprob_difference_mean", "engine_logprob_difference_max"),  # in nats per token, absolute
    *("kept_fraction", "kl_penalty_mean", "moe_balance"),
    *("num_realigned_tokens", "num_undeclared_breaks", "num_quarantined_calls"),
    *("critic_loss", "critic_grad_norm", "value_error", "value_clip_fraction", "explained_variance"),
    *("staleness_max", "num_straddling", "tokens_per_second", "peak_memory_bytes", "predicted_memory_bytes"),
    *("seconds_generate", "seconds_score", "seconds_train"),
)


def rollout_metrics(
    window: Window, *, optimizer_step: int, replaced: Set[str] = frozenset()
) -> dict[str, float | int | None]:
    """Counts of rollouts by status, reward mean and sample standard deviation over voters, groups without spread.

    A rollout counts once, however many rows it has.

    Args:
        window: the rollouts of one optimizer step.
        optimizer_step: steps taken before it; staleness is counted from there.
        replaced: ids of groups that stand in for a dropped one; ``num_replaced`` counts those in the window.

    >>> from evenstep.types import Call, Group
    >>> def rollout(name, reward, calls):
    ...     made = tuple(Call(order=i, prompt_ids=(1,), output_ids=(2,), logprobs=(0.0,)) for i in range(calls))
    ...     return Rollout(rollout_id=name, group_id="g", prompt_id="p", reward=reward, calls=made)
    >>> group = Group(group_id="g", prompt_id="p", rollouts=(rollout("a", 1.0, 1), rollout("b", 0.0, 4)))
    >>> found = rollout_metrics(Window(window=0, collection=0, epoch=0, groups=(group,)), optimizer_step=0)
    >>> found["reward_mean"], found["num_voters"], found["zero_spread_fraction"]
    (0.5, 2, 0.0)
    """
    rollouts: Sequence[Rollout] = window.rollouts
    rewards = np.asarray([r.reward for r in rollouts if r.is_voter], dtype=np.float64)
    num_voting_groups = len({r.group_id for r in rollouts if r.is_voter})
    versions = [r.weight_version for r in rollouts if r.weight_version is not None]
    return {
        "num_rollouts": len(rollouts),
        "num_voters": len(rewards),
        "num_failed": sum(r.status == "failed" for r in rollouts),
        "num_truncated": sum(r.status == "truncated" for r in rollouts),
        "num_replaced": sum(group.group_id in replaced for group in window.groups),
        "reward_mean": float(rewards.mean()) if len(rewards) else None,
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else None,
        "zero_spread_fraction": len(zero_spread_groups(rollouts)) / num_voting_groups if num_voting_groups else None,
        "staleness_max": optimizer_step - min(versions) if versions else None,
        # rollouts that begin with one policy and end with another
        "num_straddling": sum(len({call.weight_version for call in r.calls}) > 1 for r in rollouts),
    }
