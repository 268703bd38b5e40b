"""Losses as pure functions of per-token tensors. Anything with the signature of ``ppo_clip`` can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LOSSES", "LossFunction", "TokenBatch", "ppo_clip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trained tokens of a micro-batch, flat; N counts them."""

    logprobs_N: Tensor  # with gradient
    old_logprobs_N: Tensor  # the policy the ratio is taken against, no gradient
    advantages_N: Tensor
    ref_logprobs_N: Tensor | None
    engine_logprobs_N: Tensor | None
    clip_low: float  # the ratio's lower clip is 1 - clip_low
    clip_high: float  # its upper clip is 1 + clip_high


# -> (loss of each token [N], metrics of each token: name -> [N]); the caller weights and sums
LossFunction = Callable[[TokenBatch], tuple[Tensor, dict[str, Tensor]]]


def ppo_clip(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ρ·A, clip(ρ, 1 - low, 1 + high)·A) with ρ = exp(logprob - old_logprob) (Schulman et al. 2017).

    ``clip_fraction`` counts the tokens whose gradient the clip removed.

    >>> batch = TokenBatch(logprobs_N=torch.tensor([0.0, 0.5]), old_logprobs_N=torch.zeros(2),
    ...     advantages_N=torch.tensor([2.0, 1.0]), ref_logprobs_N=None, engine_logprobs_N=None,
    ...     clip_low=0.2, clip_high=0.2)
    >>> loss, metrics = ppo_clip(batch)
    >>> [round(x, 4) for x in loss.tolist()], metrics["clip_fraction"].tolist()
    ([-2.0, -1.2], [0.0, 1.0])
    """
    ratio_N = torch.exp(batch.logprobs_N - batch.old_logprobs_N)
    clipped_N = ratio_N.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_high)
    unclipped_gain_N = ratio_N * batch.advantages_N
    clipped_gain_N = clipped_N * batch.advantages_N
    is_clipped_N = clipped_gain_N < unclipped_gain_N
    return -torch.minimum(unclipped_gain_N, clipped_gain_N), {"clip_fraction": is_clipped_N.to(ratio_N.dtype)}


LOSSES: dict[str, LossFunction] = {"ppo_clip": ppo_clip}
