"""The reference step: one process, one row at a time, no padding, plain loops. Everything else must equal it.

It follows the formulas of the exact step and shares no code with what it judges: weights are exact fractions of integer
counts, the token loss is written as its cases, the optimizer step is written out.

    L = Σ_rows Σ_trained t  weight · ℓ_t          N = trained tokens, M = those of the rollout, n = those of the row

    token 1/N    rollout 1/(voters·M)    prompt 1/(groups·tokens of the group)    constant 1/(voters·C)
    row 1/(rows with trained tokens·n)

The model decides the precision: a float64 model (see ``tiny_models.true_float64``) gives the reference, a float32 model
the "float32 one-row run".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from evenstep.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleStep:
    """What one huge batch on one machine would have computed."""

    loss: float
    gradient: dict[str, Tensor]  # parameter name -> gradient, float64
    logprobs: dict[Hashable, Tensor]  # row id -> [T], 0.0 at tokens that are not trained
    metrics: dict[str, float]
    weights: dict[Hashable, list[float]]  # row id -> [T]


def token_weights(
    rows: Sequence[Row],
    voters: Mapping[Hashable, Hashable] | None,
    normaliser: str,
    normaliser_constant: float | None = None,
) -> dict[Hashable, list[float]]:
    """Row id -> [T] the weight of each token, 0.0 where it is not trained."""
    if voters is None:
        voters = {row.rollout_id: row.group_id for row in rows}
    num_voters = len(voters)
    num_groups = len(set(voters.values()))
    num_trained: dict[tuple[str, Hashable], int] = {}
    for row in rows:
        for is_trained in row.loss_mask:
            if is_trained:
                for key in (
                    ("window", None),
                    ("rollout", row.rollout_id),
                    ("group", row.group_id),
                    ("row", row.row_id),
                ):
                    num_trained[key] = num_trained.get(key, 0) + 1
    num_trained_rows = sum(1 for row in rows if ("row", row.row_id) in num_trained)
    weights: dict[Hashable, list[float]] = {}
    for row in rows:
        weights[row.row_id] = [0.0] * len(row.token_ids)
        for t, is_trained in enumerate(row.loss_mask):
            if not is_trained:
                continue
            if normaliser == "token":
                divisor = Fraction(num_trained["window", None])
            elif normaliser == "rollout":
                divisor = Fraction(num_voters * num_trained["rollout", row.rollout_id])
            elif normaliser == "prompt":
                divisor = Fraction(num_groups * num_trained["group", row.group_id])
            elif normaliser == "constant":
                assert normaliser_constant is not None
                divisor = num_voters * Fraction(normaliser_constant)
            else:
                assert normaliser == "row"
                divisor = Fraction(num_trained_rows * num_trained["row", row.row_id])
            weights[row.row_id][t] = float(1 / divisor)
    return weights


def oracle_step(
    model: Any,
    rows: Sequence[Row],
    *,
    voters: Mapping[Hashable, Hashable] | None = None,
    normaliser: str = "token",
    normaliser_constant: float | None = None,
    **loss_settings: Any,
) -> OracleStep:
    """Loss, full gradient, log-probs and metrics of the window; leaves the model's ``.grad`` as None.

    ``loss_settings`` are fields of ``TokenLoss``.
    """
    token_loss = TokenLoss(**loss_settings)
    weights = token_weights(rows, voters, normaliser, normaliser_constant)
    log_ratios = mean_log_ratios(model, rows, token_loss)
    rejected = rejected_rollouts(model, rows, token_loss)
    model.zero_grad(set_to_none=True)
    loss, num_tokens, max_deviation = 0.0, 0, 0.0
    sums = dict.fromkeys(("entropy", "clip_fraction", "kl", "engine_trainer_kl"), 0.0)
    if token_loss.sequence_mask is not None:
        sums["kept_fraction"] = 0.0
    logprobs: dict[Hashable, Tensor] = {}
    for row in rows:
        ids = [int(token) for token in row.token_ids]
        logprobs_TV = row_logprobs(model, row, token_loss.temperature)
        entropies_T = -(logprobs_TV.exp() * logprobs_TV).sum(dim=1)
        logprobs[row.row_id] = torch.zeros(len(ids), dtype=logprobs_TV.dtype)
        terms = []
        for t in range(len(ids)):
            if not row.loss_mask[t]:
                continue
            logprob, entropy = logprobs_TV[t - 1, ids[t]], entropies_T[t - 1]
            value = float(logprob.detach())
            logprobs[row.row_id][t] = value
            is_kept = row.rollout_id not in rejected
            term, is_clipped = token_loss(row, t, logprob, entropy, log_ratios.get(row.row_id), is_kept=is_kept)
            terms.append(weights[row.row_id][t] * term)
            num_tokens += 1
            max_deviation = max(max_deviation, abs(math.exp(value - old_logprob(row, t, value)) - 1))
            sums["clip_fraction"] += is_clipped
            if "kept_fraction" in sums:
                sums["kept_fraction"] += is_kept
            sums["entropy"] += float(entropy.detach())
            if row.ref_logprobs is not None:
                sums["kl"] += k3(value, float(row.ref_logprobs[t]))
            if row.engine_logprobs is not None:
                sums["engine_trainer_kl"] += k3(float(row.engine_logprobs[t]), old_logprob(row, t, value))
        if terms:
            row_loss = torch.stack(terms).sum()
            loss += float(row_loss.detach())
            if row_loss.requires_grad:
                row_loss.backward()
    metrics = {name: total / max(1, num_tokens) for name, total in sums.items()}
    metrics["ratio_max_deviation"] = max_deviation
    return OracleStep(loss=loss, gradient=taken_gradient(model), logprobs=logprobs, metrics=metrics, weights=weights)


def taken_gradient(model: Any) -> dict[str, Tensor]:
    """By parameter, in float64, 0 where there is none; the model has none afterwards."""
    gradient = {
        name: torch.zeros_like(parameter).double() if parameter.grad is None else parameter.grad.double()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return gradient


def row_logprobs(model: Any, row: Row, temperature: float) -> Tensor:
    """[T, V] log-softmax of the row's logits over the temperature; entry t - 1 speaks of token t."""
    ids = torch.tensor([[int(token) for token in row.token_ids]])
    logits_TV = model(input_ids=ids, use_cache=False).logits[0] / temperature
    return logits_TV - torch.logsumexp(logits_TV, dim=1, keepdim=True)


def old_logprob(row: Row, t: int, current: float) -> float:
    return current if row.old_logprobs is None else float(row.old_logprobs[t])


def k3(first: float, second: float) -> float:
    """Estimate of KL(first || second) from a token drawn from the first: r - 1 - log r with r = second / first."""
    return math.exp(second - first) - 1 - (second - first)


def mean_log_ratios(model: Any, rows: Sequence[Row], token_loss: TokenLoss) -> dict[Hashable, float]:
    """GSPO: row id -> mean of current - old over the trained tokens of the row's rollout, or of the row alone."""
    if token_loss.loss != "gspo":
        return {}
    per_row: dict[Hashable, list[float]] = {}
    for row in rows:
        with torch.no_grad():
            logprobs_TV = row_logprobs(model, row, token_loss.temperature)
        per_row[row.row_id] = []
        for t, is_trained in enumerate(row.loss_mask):
            if is_trained:
                current = float(logprobs_TV[t - 1, int(row.token_ids[t])])
                per_row[row.row_id].append(current - old_logprob(row, t, current))
    means: dict[Hashable, float] = {}
    for row in rows:
        members = [row]
        if token_loss.ratio_unit == "rollout":
            members = [other for other in rows if other.rollout_id == row.rollout_id]
        else:
            assert token_loss.ratio_unit == "segment"
        found = [log_ratio for member in members for log_ratio in per_row[member.row_id]]
        means[row.row_id] = math.fsum(found) / len(found) if found else 0.0
    return means


def rejected_rollouts(model: Any, rows: Sequence[Row], token_loss: TokenLoss) -> set[Hashable]:
    """Rollouts whose geometric mean of old / engine, over the trained tokens of all their rows, is out of bounds."""
    if token_loss.sequence_mask is None:
        return set()
    low, high = token_loss.sequence_mask
    differences: dict[Hashable, list[float]] = {row.rollout_id: [] for row in rows}
    for row in rows:
        assert row.engine_logprobs is not None
        with torch.no_grad():
            logprobs_TV = row_logprobs(model, row, token_loss.temperature)
        for t, is_trained in enumerate(row.loss_mask):
            if is_trained:
                old = old_logprob(row, t, float(logprobs_TV[t - 1, int(row.token_ids[t])]))
                differences[row.rollout_id].append(old - float(row.engine_logprobs[t]))
    rejected: set[Hashable] = set()
    for rollout_id, found in differences.items():
        ratio = math.exp(math.fsum(found) / len(found)) if found else 1.0
        if ratio < low or ratio > high:
            rejected.add(rollout_id)
    return rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of one trained token: importance weight · policy term + kl_coef · KL - entropy_coef · entropy.

    The policy term is 0 where ``sequence_mask`` rejects the token's rollout.
    """

    loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio_unit: str = "rollout"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    importance_cap: float | None = None
    sequence_mask: tuple[float, float] | None = None
    temperature: float = 1.0

    def __call__(
        self, row: Row, t: int, logprob: Tensor, entropy: Tensor, log_ratio: float | None, *, is_kept: bool = True
    ) -> tuple[Tensor, bool]:
        """(the token's loss with gradient, whether a clip acted on it)."""
        advantage = float(row.advantage if isinstance(row.advantage, float) else row.advantage[t])
        old = old_logprob(row, t, float(logprob.detach()))
        limits = (self.clip_low, self.clip_high)
        if self.loss == "gspo":
            assert log_ratio is not None
            ratio = math.exp(log_ratio) * torch.exp(logprob - logprob.detach())
            total, is_clipped = clipped_surrogate(ratio, advantage, *limits, self.dual_clip)
        elif self.loss == "cispo":
            ratio_value = math.exp(float(logprob.detach()) - old)
            bounded = min(max(ratio_value, 1 - self.clip_low), 1 + self.clip_high)
            total, is_clipped = -bounded * advantage * logprob, bounded != ratio_value
        else:
            assert self.loss == "ppo_clip"
            total, is_clipped, _ = ppo_clip(logprob, old, advantage, *limits, self.dual_clip)
        if self.importance_cap is not None:
            assert row.engine_logprobs is not None
            total = min(self.importance_cap, math.exp(old - float(row.engine_logprobs[t]))) * total
        if not is_kept:
            total = torch.zeros_like(logprob, requires_grad=False)
        if self.kl_coef != 0:
            assert row.ref_logprobs is not None
            difference = float(row.ref_logprobs[t]) - logprob
            kl = difference * difference / 2
            if self.kl_estimator == "k3":
                kl = torch.exp(difference) - 1 - difference
            total = total + self.kl_coef * kl
        if self.entropy_coef != 0:
            total = total - self.entropy_coef * entropy
        return total, is_clipped


def ppo_clip(
    logprob: Tensor,
    old: Tensor | float,
    advantage: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, bool, float]:
    """(-min(ratio·A, clip(ratio, 1-low, 1+high)·A), whether a clip acted, |ratio - 1|)."""
    ratio = torch.exp(logprob - old)
    loss, is_clipped = clipped_surrogate(ratio, advantage, clip_low, clip_high, dual_clip)
    return loss, is_clipped, abs(float(ratio.detach()) - 1)


def clipped_surrogate(
    ratio: Tensor, advantage: float, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, bool]:
    """(loss, whether a clip acted): where one acts the loss is that of the bound, and has no gradient.

    A > 0 is bounded at ratio 1 + high; A < 0 at 1 - low from below and, with dual clip, at ``dual_clip`` from above.
    """
    value = float(ratio.detach())
    bound = None
    if advantage > 0 and value > 1 + clip_high:
        bound = 1 + clip_high
    elif advantage < 0 and value < 1 - clip_low:
        bound = 1 - clip_low
    elif advantage < 0 and dual_clip is not None and value > dual_clip:
        bound = dual_clip
    if bound is None:
        return -advantage * ratio, False
    return torch.full_like(ratio, -advantage * bound, requires_grad=False), True


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleValues:
    """What one huge batch on one machine would have computed for a critic."""

    loss: float
    gradient: dict[str, Tensor]  # parameter name -> gradient, float64
    values: dict[Hashable, Tensor]  # row id -> [T], 0.0 at tokens that are not trained
    metrics: dict[str, float | None]


def oracle_value_step(
    model: Any,
    rows: Sequence[Row],
    *,
    voters: Mapping[Hashable, Hashable] | None = None,
    normaliser: str = "token",
    normaliser_constant: float | None = None,
    value_clip: float | None = None,
    token_loss: Callable[[Tensor, float, float, float | None], tuple[Tensor, bool]] | None = None,
    read_at: int = -1,
) -> OracleValues:
    """Loss, full gradient, values and metrics of the window; leaves the model's ``.grad`` as None.

    ``token_loss`` and ``read_at`` (which output speaks of token t, from t on) are there to show wrong ones.
    """
    loss_of = value_loss if token_loss is None else token_loss
    weights = token_weights(rows, voters, normaliser, normaliser_constant)
    model.zero_grad(set_to_none=True)
    loss, num_clipped = 0.0, 0
    values: dict[Hashable, Tensor] = {}
    pairs: list[tuple[float, float]] = []  # (value, return) of every trained token
    for row in rows:
        values_T = model(input_ids=torch.tensor([[int(token) for token in row.token_ids]])).logits[0, :, 0]
        values[row.row_id] = torch.zeros(len(row.token_ids), dtype=values_T.dtype)
        terms = []
        for t, is_trained in enumerate(row.loss_mask):
            if not is_trained:
                continue
            value = values_T[t + read_at]
            number = float(value.detach())
            values[row.row_id][t] = number
            assert row.returns is not None
            old = number if row.old_values is None else float(row.old_values[t])
            term, is_clipped = loss_of(value, old, float(row.returns[t]), value_clip)
            terms.append(weights[row.row_id][t] * term)
            num_clipped += is_clipped
            pairs.append((number, float(row.returns[t])))
        if terms:
            row_loss = torch.stack(terms).sum()
            loss += float(row_loss.detach())
            if row_loss.requires_grad:
                row_loss.backward()
    return OracleValues(
        loss=loss, gradient=taken_gradient(model), values=values, metrics=value_metrics(pairs, num_clipped)
    )


def value_loss(value: Tensor, old: float, target: float, clip: float | None) -> tuple[Tensor, bool]:
    """(loss of one token, whether the clip acted on it).

    Half the squared error of the value; but where the value moved away from the old one by more than ``clip`` and the
    point that it was allowed to reach is farther from the target than the value itself, half the squared error of that
    point, which has no gradient.
    """
    error = value - target
    reached = float(value.detach())
    if clip is not None and abs(reached - old) > clip:
        allowed = old + clip if reached > old else old - clip
        if abs(allowed - target) > abs(reached - target):
            return torch.full_like(value, (allowed - target) ** 2 / 2, requires_grad=False), True
    return error * error / 2, False


def value_metrics(pairs: Sequence[tuple[float, float]], num_clipped: int) -> dict[str, float | None]:
    """Token means over the window, and 1 - Var(R - V) / Var(R), each variance about its own mean."""
    names = ("value_mean", "return_mean", "value_error", "value_clip_fraction", "explained_variance")
    if not pairs:
        return dict.fromkeys(names)
    count = len(pairs)

    def variance(numbers: Sequence[float]) -> float:
        mean = math.fsum(numbers) / count
        return math.fsum((number - mean) ** 2 for number in numbers) / count

    returns, errors = [r for _, r in pairs], [r - v for v, r in pairs]
    is_flat = max(returns) == min(returns)
    return {
        "value_mean": math.fsum(v for v, _ in pairs) / count,
        "return_mean": math.fsum(returns) / count,
        "value_error": math.fsum(error * error for error in errors) / count,
        "value_clip_fraction": num_clipped / count,
        "explained_variance": None if is_flat else 1 - variance(errors) / variance(returns),
    }


def gradient_norm(gradient: Mapping[str, Tensor]) -> float:
    """The norm of the whole gradient as one vector."""
    return math.sqrt(sum(float((part.double() ** 2).sum()) for part in gradient.values()))


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """‖found - expected‖ / ‖expected‖ over all names at once; plain ‖found‖ where expected is 0."""
    assert sorted(found) == sorted(expected), set(found) ^ set(expected)
    difference = gradient_norm({name: found[name].double() - expected[name].double() for name in expected})
    norm = gradient_norm(expected)
    return difference / norm if norm > 0 else difference


def clipped(gradient: Mapping[str, Tensor], max_norm: float | None) -> dict[str, Tensor]:
    """The whole gradient scaled once, so that its norm is at most ``max_norm``."""
    norm = gradient_norm(gradient)
    scale = 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
    return {name: part * scale for name, part in gradient.items()}


def sgd_step(
    parameters: Mapping[str, Tensor], gradient: Mapping[str, Tensor], *, lr: float, max_norm: float | None = None
) -> dict[str, Tensor]:
    """θ - lr·g after one clip."""
    step = clipped(gradient, max_norm)
    return {name: parameters[name].double() - lr * step[name] for name in parameters}


@dataclass(slots=True, kw_only=True)
class AdamW:
    """Decoupled weight decay, bias-corrected moments; keeps its own state between steps."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    num_steps: int = 0
    first: dict[str, Tensor] | None = None
    second: dict[str, Tensor] | None = None

    def step(
        self, parameters: Mapping[str, Tensor], gradient: Mapping[str, Tensor], max_norm: float | None = None
    ) -> dict[str, Tensor]:
        clipped_gradient = clipped(gradient, max_norm)
        first = self.first or {name: torch.zeros_like(part) for name, part in clipped_gradient.items()}
        second = self.second or {name: torch.zeros_like(part) for name, part in clipped_gradient.items()}
        self.num_steps += 1
        beta1, beta2 = self.betas
        after: dict[str, Tensor] = {}
        for name, g in clipped_gradient.items():
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            mean = first[name] / (1 - beta1**self.num_steps)
            scale = torch.sqrt(second[name] / (1 - beta2**self.num_steps)) + self.eps
            after[name] = parameters[name].double() * (1 - self.lr * self.weight_decay) - self.lr * mean / scale
        self.first, self.second = first, second
        return after


def grpo_advantages(rollouts: Sequence[tuple[str, str, float | None, bool]]) -> dict[str, float]:
    """(rollout id, group id, reward, votes) of every rollout -> advantage of every voter.

    (r - mean) / (sample standard deviation + 1e-6) over the group's voters; 0 when all are equal or only one votes.
    """
    advantages: dict[str, float] = {}
    for rollout_id, group_id, reward, votes in rollouts:
        if not votes:
            continue
        assert reward is not None
        peers = [r for _, other, r, is_voter in rollouts if other == group_id and is_voter and r is not None]
        if len(peers) == 1 or max(peers) == min(peers):
            advantages[rollout_id] = 0.0
            continue
        mean = math.fsum(peers) / len(peers)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        advantages[rollout_id] = (reward - mean) / (std + 1e-6)
    return advantages
