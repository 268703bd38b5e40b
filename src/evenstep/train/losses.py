"""Losses as pure functions of per-token tensors. Anything with the signature of ``ppo_clip`` can be used.

A loss returns one number per trained token; weighting and summing are the caller's, so a loss never sees a denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigError

__all__ = [
    "LOSSES",
    "VALUE_LOSSES",
    "LossFunction",
    "TokenBatch",
    "ValueBatch",
    "cispo",
    "gspo",
    "kl_estimate",
    "needs_sequence_ratio",
    "ppo_clip",
    "value_clip",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trained tokens of a micro-batch, flat; N counts them."""

    logprobs_N: Tensor  # with gradient
    old_logprobs_N: Tensor  # the policy the ratio is taken against, no gradient
    advantages_N: Tensor
    sequence_log_ratio_N: Tensor | None = None  # gspo: mean log-ratio of the token's rollout or segment, no gradient
    clip_low: float = 0.2  # the ratio's lower clip is 1 - clip_low
    clip_high: float = 0.2  # its upper clip is 1 + clip_high
    dual_clip: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBatch:
    """What a critic says of the trained tokens of a micro-batch, flat; N counts them."""

    values_N: Tensor  # with gradient
    old_values_N: Tensor  # before the first update, no gradient
    returns_N: Tensor  # what the values are trained towards
    clip: float | None = None  # how far a value may leave the old one; None: any distance


# TokenBatch or, of a critic, ValueBatch -> (loss of each token [N], metrics of each token: name -> [N])
LossFunction = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]


def ppo_clip(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ρ·A, clip(ρ, 1 - low, 1 + high)·A) with ρ = exp(logprob - old_logprob) (Schulman et al. 2017).

    With ``dual_clip`` c the loss of a token with A < 0 is at most -c·A (Ye et al. 2020). ``clip_fraction`` counts the
    tokens whose gradient a clip removed.

    >>> batch = TokenBatch(logprobs_N=torch.tensor([0.0, 0.5, 3.0]), old_logprobs_N=torch.zeros(3),
    ...                    advantages_N=torch.tensor([2.0, 1.0, -1.0]), dual_clip=3.0)
    >>> loss, metrics = ppo_clip(batch)
    >>> [round(x, 4) for x in loss.tolist()], metrics["clip_fraction"].tolist()
    ([-2.0, -1.2, 3.0], [0.0, 1.0, 1.0])
    """
    return _clipped(batch.logprobs_N - batch.old_logprobs_N, batch)


def needs_sequence_ratio(loss: LossFunction) -> bool:
    """Whether a loss asks for ``sequence_log_ratio_N``: ``gspo``, and any function with that attribute set to True."""
    return bool(getattr(getattr(loss, "func", loss), "needs_sequence_ratio", False))


def gspo(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO clip on the length-normalised ratio of a whole sequence, s = exp(Σ log-ratio / M) (Zheng et al. 2025).

    Every token of the sequence has the value s, and the gradient goes through its own log-prob: s·exp(lp - sg(lp)).

    >>> lp = torch.tensor([0.1, 0.3], requires_grad=True)
    >>> batch = TokenBatch(logprobs_N=lp, old_logprobs_N=torch.zeros(2), advantages_N=torch.ones(2),
    ...                    sequence_log_ratio_N=torch.full((2,), 0.2), clip_high=1.0)
    >>> loss, _ = gspo(batch)
    >>> loss.sum().backward(); [round(x, 4) for x in lp.grad.tolist()]
    [-1.2214, -1.2214]
    """
    assert batch.sequence_log_ratio_N is not None
    return _clipped(batch.sequence_log_ratio_N + (batch.logprobs_N - batch.logprobs_N.detach()), batch)


gspo.needs_sequence_ratio = True  # type: ignore[attr-defined]


def cispo(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(ρ, 1 - low, 1 + high))·A·logprob: clipped weights, no token loses its gradient (MiniMax 2025).

    >>> lp = torch.tensor([0.5], requires_grad=True)
    >>> loss, _ = cispo(TokenBatch(logprobs_N=lp, old_logprobs_N=torch.zeros(1), advantages_N=torch.tensor([2.0])))
    >>> loss.sum().backward(); round(lp.grad.item(), 4)
    -2.4
    """
    ratio_N = torch.exp(batch.logprobs_N - batch.old_logprobs_N).detach()
    clipped_N = ratio_N.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_high)
    is_clipped_N = clipped_N != ratio_N
    return -clipped_N * batch.advantages_N * batch.logprobs_N, {"clip_fraction": is_clipped_N.to(ratio_N.dtype)}


def _clipped(log_ratio_N: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    advantages_N, ratio_N = batch.advantages_N, torch.exp(log_ratio_N.detach())
    bound_N = ratio_N.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_high)
    is_clipped_N = bound_N * advantages_N < ratio_N * advantages_N
    if batch.dual_clip is not None:
        is_floored_N = (advantages_N < 0) & (ratio_N > batch.dual_clip)
        bound_N = torch.where(is_floored_N, batch.dual_clip, bound_N)
        is_clipped_N = is_clipped_N | is_floored_N
    # no gradient reaches a clipped ratio or one without advantage, also not the 0 * inf of one that overflows
    kept_N = torch.exp(torch.where(is_clipped_N | (advantages_N == 0), 0.0, log_ratio_N))
    return -torch.where(is_clipped_N, bound_N, kept_N) * advantages_N, {"clip_fraction": is_clipped_N.to(ratio_N.dtype)}


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: str) -> Tensor:
    """[N] Estimate of KL(policy || reference) at sampled tokens, with x = ref - logprob (Schulman 2020).

    k2 = x²/2 (its gradient is unbiased on-policy), k3 = exp(x) - 1 - x (never negative).

    >>> round(kl_estimate(torch.tensor([0.0]), torch.tensor([0.1]), "k2").item(), 6)
    0.005
    """
    if estimator not in ("k2", "k3"):
        raise ConfigError(f"a KL estimate in the loss is k2 or k3, found {estimator!r}; k1 has no gradient on-policy")
    log_ratio_N = ref_logprobs_N - logprobs_N
    return 0.5 * log_ratio_N**2 if estimator == "k2" else torch.expm1(log_ratio_N) - log_ratio_N


def value_clip(batch: ValueBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """½·max((V - R)², (clip(V, V_old - c, V_old + c) - R)²), without ``clip`` ½·(V - R)² (Schulman et al. 2017).

    ``value_clip_fraction`` counts the tokens where the clipped error is the larger one.

    >>> batch = ValueBatch(values_N=torch.tensor([1.0, 0.1]), old_values_N=torch.zeros(2),
    ...                    returns_N=torch.tensor([2.0, 1.0]), clip=0.5)
    >>> loss, metrics = value_clip(batch)
    >>> [round(x, 4) for x in loss.tolist()], metrics["value_clip_fraction"].tolist()
    ([1.125, 0.405], [1.0, 0.0])
    """
    error_N = (batch.values_N - batch.returns_N) ** 2
    if batch.clip is None:
        return 0.5 * error_N, {"value_clip_fraction": torch.zeros_like(error_N.detach())}
    moved_N = (batch.values_N - batch.old_values_N).clamp(-batch.clip, batch.clip)
    clipped_N = (batch.old_values_N + moved_N - batch.returns_N) ** 2
    is_clipped_N = clipped_N > error_N
    return 0.5 * torch.where(is_clipped_N, clipped_N, error_N), {"value_clip_fraction": is_clipped_N.to(error_N.dtype)}


LOSSES: dict[str, LossFunction] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}
VALUE_LOSSES: dict[str, LossFunction] = {"value_clip": value_clip}
