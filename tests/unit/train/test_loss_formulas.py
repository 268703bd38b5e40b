"""Losses by hand: the formulas of production and of the reference meet the same numbers, then the Trainer does.

1. PPO clip and dual clip: loss, gradient and clip flag on each side of each bound, at a bound exactly, and for A = 0.
2. GSPO: every token has the value of its sequence's ratio, and its gradient goes through its own log-prob; tokens are
   clipped by the sequence's ratio and never by their own.
3. CISPO: the weight is clipped on both sides whatever the sign of A, and no token loses its gradient.
4. At ratio 1 all losses have one gradient, -A.
5. KL by hand, k2 and k3. On-policy k2 has the gradient of KL(policy || reference), k3 that of KL(reference || policy);
   the value of k3 is unbiased, and neither is ever negative.
6. Through the Trainer, on a model with known probabilities: each term, temperature, every metric; tokens with a
   truncated importance weight stay in N.
7. A user's own loss with the signature of the others is run, weighted and counted like them, also as a partial or an
   object; its metrics may not take the name of one that every loss has.
8. Rows without the log-probs that a term needs, or with them on some rows only, are refused by name; so are settings
   out of range.
9. NaN, infinities and huge numbers in masked slots change no bit of any loss with any term.
10. A KL or entropy term gives a window without advantages a step, and so does a loss of one's own that has a gradient
    without them, as of distillation; an importance weight does not.
11. Where a clip acts the gradient is 0 even when the ratio is beyond the largest float.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import evenstep.train
from evenstep.errors import ConfigError, RowError
from evenstep.train.losses import TokenBatch, cispo, gspo, kl_estimate, ppo_clip
from evenstep.types import Row
from loss_matrix import LOSSES, TERMS, policy_rows
from oracle import TokenLoss
from step_cases import StepCase, run_case
from tiny_models import bigram_model, true_float64
from tiny_rows import with_garbage

Judged = Callable[..., tuple[float, float, bool]]
FUNCTIONS = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}


def production(loss: str, logprob: float, old: float, advantage: float, **settings: Any) -> tuple[float, float, bool]:
    """(loss, gradient, whether a clip acted) of one token; ``log_ratio`` is that of its sequence."""
    logprob_N = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    if "log_ratio" in settings:
        settings["sequence_log_ratio_N"] = torch.tensor([settings.pop("log_ratio")], dtype=torch.float64)
    batch = TokenBatch(
        logprobs_N=logprob_N,
        old_logprobs_N=torch.tensor([old], dtype=torch.float64),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        **settings,
    )
    loss_N, metrics = FUNCTIONS[loss](batch)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprob_N)
    return loss_N.item(), gradient_N.item(), bool(metrics["clip_fraction"].item())


def reference(loss: str, logprob: float, old: float, advantage: float, **settings: Any) -> tuple[float, float, bool]:
    log_ratio = settings.pop("log_ratio", None)
    value = torch.tensor(logprob, dtype=torch.float64, requires_grad=True)
    found, is_clipped = TokenLoss(loss=loss, **settings)(
        one_token(advantage, old_logprobs=[0.0, old]), 1, value, value, log_ratio
    )
    gradient = torch.autograd.grad(found, value)[0].item() if found.requires_grad else 0.0
    return found.item(), gradient, is_clipped


def one_token(advantage: float, **fields: Any) -> Row:
    return Row(
        row_id="r", rollout_id="o", group_id="g", token_ids=[0, 1], loss_mask=[0, 1], advantage=advantage, **fields
    )


judges = pytest.mark.parametrize("judged", [production, reference])


@judges
@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "gradient", "is_clipped"),
    [
        (1.1, 2.0, {}, -2.2, -2.2, False),
        (1.5, 2.0, {}, -2.4, 0.0, True),
        (1.25, 2.0, {"clip_high": 0.28}, -2.5, -2.5, False),
        (0.5, 2.0, {}, -1.0, -1.0, False),
        (1.5, -2.0, {}, 3.0, 3.0, False),
        (0.5, -2.0, {}, 1.6, 0.0, True),
        (0.75, -2.0, {"clip_low": 0.3}, 1.5, 1.5, False),
        (4.0, 0.0, {}, 0.0, 0.0, False),
        (0.1, 0.0, {"dual_clip": 3.0}, 0.0, 0.0, False),
        (2.5, -2.0, {"dual_clip": 3.0}, 5.0, 5.0, False),
        (4.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0, True),
        (0.5, -2.0, {"dual_clip": 3.0}, 1.6, 0.0, True),
        (4.0, 2.0, {"dual_clip": 3.0}, -2.4, 0.0, True),
        (0.25, 2.0, {"dual_clip": 3.0}, -0.5, -0.5, False),
        # dual clip nearer than the upper clip
        (1.4, -1.0, {"dual_clip": 1.25, "clip_high": 0.5}, 1.25, 0.0, True),
        # at a bound exactly, nothing is clipped yet
        (1.0, 2.0, {"clip_low": 0.0, "clip_high": 0.0}, -2.0, -2.0, False),
        (1.0, -2.0, {"clip_low": 0.0, "clip_high": 0.0}, 2.0, 2.0, False),
    ],
)
def test_ppo_clip(
    judged: Judged,
    ratio: float,
    advantage: float,
    settings: dict[str, Any],
    loss: float,
    gradient: float,
    is_clipped: bool,
) -> None:
    found = judged("ppo_clip", math.log(ratio) - 0.7, -0.7, advantage, **settings)
    assert found == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), is_clipped)


@judges
@pytest.mark.parametrize(
    ("own_ratio", "sequence_ratio", "advantage", "settings", "loss", "gradient", "is_clipped"),
    [
        (5.0, 1.1, 2.0, {}, -2.2, -2.2, False),
        (0.01, 1.1, -2.0, {}, 2.2, 2.2, False),
        (1.0, 1.5, 2.0, {}, -2.4, 0.0, True),
        (1.0, 0.5, -2.0, {"clip_low": 0.1}, 1.8, 0.0, True),
        (0.01, 0.5, 2.0, {}, -1.0, -1.0, False),
        (1.0, 2.0, -1.0, {"dual_clip": 1.5}, 1.5, 0.0, True),
    ],
)
def test_gspo(
    judged: Judged,
    own_ratio: float,
    sequence_ratio: float,
    advantage: float,
    settings: dict[str, Any],
    loss: float,
    gradient: float,
    is_clipped: bool,
) -> None:
    log_ratio = math.log(sequence_ratio)
    found = judged("gspo", math.log(own_ratio) - 0.7, -0.7, advantage, log_ratio=log_ratio, **settings)
    assert found == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), is_clipped)


@judges
@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "is_clipped"),
    [
        (1.1, 2.0, 1.1, False),
        (1.5, 2.0, 1.28, True),
        (1.5, -2.0, 1.28, True),
        (0.5, 2.0, 0.8, True),
        (0.5, -2.0, 0.8, True),
        (0.9, -2.0, 0.9, False),
    ],
)
def test_cispo(judged: Judged, ratio: float, advantage: float, weight: float, is_clipped: bool) -> None:
    logprob = math.log(ratio) - 2.0
    loss, gradient, found_clip = judged("cispo", logprob, -2.0, advantage, clip_high=0.28)
    assert loss == pytest.approx(-weight * advantage * logprob, abs=1e-14)
    assert gradient == pytest.approx(-weight * advantage, abs=1e-14)
    assert found_clip == is_clipped


@judges
@pytest.mark.parametrize("advantage", [1.5, -0.25])
def test_one_gradient_at_ratio_one(judged: Judged, advantage: float) -> None:
    found = {
        loss: judged(loss, -1.25, -1.25, advantage, **({"log_ratio": 0.0} if loss == "gspo" else {}))
        for loss in FUNCTIONS
    }
    assert found["ppo_clip"] == found["gspo"] == (-advantage, -advantage, False)
    assert found["cispo"] == (1.25 * advantage, -advantage, False)


def test_kl_by_hand() -> None:
    logprob_N = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref_N = torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64)
    for estimator, values, gradients in (
        ("k2", [0.0, 0.5, 0.125], [0.0, 1.0, -0.5]),
        ("k3", [0.0, math.exp(-1.0), math.exp(0.5) - 1.5], [0.0, 1 - math.exp(-1.0), 1 - math.exp(0.5)]),
    ):
        kl_N = kl_estimate(logprob_N, ref_N, estimator)
        (gradient_N,) = torch.autograd.grad(kl_N.sum(), logprob_N)
        assert kl_N.tolist() == pytest.approx(values, abs=1e-15)
        assert gradient_N.tolist() == pytest.approx(gradients, abs=1e-15)
        assert min(kl_N.tolist()) == kl_N.tolist()[0] == 0.0


def test_expected_gradients_of_kl() -> None:
    logits_V = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref_V = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    logp_V = torch.log_softmax(logits_V, 0)
    p_V = logp_V.detach().exp()

    def gradient(value: Tensor) -> list[float]:
        return torch.autograd.grad(value, logits_V, retain_graph=True)[0].tolist()

    forward = gradient((logp_V.exp() * (logp_V - ref_V)).sum())
    backward = gradient((ref_V.exp() * (ref_V - logp_V)).sum())
    assert gradient((p_V * kl_estimate(logp_V, ref_V, "k2")).sum()) == pytest.approx(forward, abs=1e-15)
    assert gradient((p_V * kl_estimate(logp_V, ref_V, "k3")).sum()) == pytest.approx(backward, abs=1e-15)
    assert forward != pytest.approx(backward, rel=0.01)
    # the values of both estimate KL(policy || reference), k3 without bias
    own_V = logp_V.detach()
    exact = float((p_V * (own_V - ref_V)).sum())
    assert float((p_V * kl_estimate(own_V, ref_V, "k3")).sum()) == pytest.approx(exact, abs=1e-15)


# ---------------------------------------------------------------------------------------- through the Trainer

PROBABILITIES = [[0.1, 0.7, 0.2], [0.15, 0.25, 0.6], [0.3, 0.3, 0.4]]
# (token before, token, advantage, old - logprob, ref - logprob, engine - logprob)
TOKENS = [(0, 1, 1.5, 0.3, -0.4, 0.5), (1, 2, 1.5, -0.1, 0.2, -0.6), (2, 0, -0.75, 0.25, 0.6, 0.0)]


def known_rows(temperature: float) -> list[Row]:
    """A row with the first two tokens of TOKENS and one with the last."""

    def row(name: str, tokens: list[tuple[Any, ...]]) -> Row:
        own = [math.log(distribution(before, temperature)[token]) for before, token, *_ in tokens]
        fields = {
            field: [0.0, *(lp + token[i] for lp, token in zip(own, tokens, strict=True))]
            for field, i in (("old_logprobs", 3), ("ref_logprobs", 4), ("engine_logprobs", 5))
        }
        return Row(
            row_id=name,
            rollout_id=name,
            group_id="g",
            token_ids=[tokens[0][0], *(token[1] for token in tokens)],
            loss_mask=[0] + [1] * len(tokens),
            advantage=tokens[0][2],
            **fields,
        )

    return [row("a", TOKENS[:2]), row("b", TOKENS[2:])]


def distribution(before: int, temperature: float) -> list[float]:
    powers = [p ** (1 / temperature) for p in PROBABILITIES[before]]
    return [power / sum(powers) for power in powers]


def entropy(before: int, temperature: float) -> float:
    return -sum(p * math.log(p) for p in distribution(before, temperature))


def run_known(rows: list[Row], **settings: Any) -> evenstep.train.StepResult:
    model = bigram_model(PROBABILITIES)
    trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    with true_float64():
        return trainer.forward_backward(rows)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("terms", [{}, *({name: value} for name, value in (("kl_coef", 0.5), ("entropy_coef", 0.1)))])
@pytest.mark.parametrize("cap", [None, 1.2])
def test_terms_by_hand(temperature: float, terms: dict[str, float], cap: float | None) -> None:
    found = run_known(known_rows(temperature), temperature=temperature, importance_cap=cap, **terms)
    losses, kls, engine_kls, num_clipped = [], [], [], 0
    for before, _, advantage, old, ref, engine in TOKENS:
        ratio = math.exp(-old)
        bounded = min(max(ratio, 0.8), 1.2)
        num_clipped += -bounded * advantage > -ratio * advantage
        loss = max(-ratio * advantage, -bounded * advantage)
        if cap is not None:
            loss *= min(cap, math.exp(old - engine))
        kls.append(math.exp(ref) - 1 - ref)
        engine_kls.append(math.exp(old - engine) - 1 - (old - engine))
        loss += terms.get("kl_coef", 0.0) * kls[-1] - terms.get("entropy_coef", 0.0) * entropy(before, temperature)
        losses.append(loss)
    assert num_clipped == 1  # exp(-0.25) with a negative advantage
    assert found.loss == pytest.approx(sum(losses) / 3, abs=1e-12)
    expected = {
        "kl": sum(kls) / 3,
        "engine_trainer_kl": sum(engine_kls) / 3,
        "entropy": sum(entropy(before, temperature) for before, *_ in TOKENS) / 3,
        "clip_fraction": 1 / 3,
        "ratio_max_deviation": 1 - math.exp(-0.3),
        "num_trained_tokens": 3,
    }
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_the_engines_logprobs_as_old_ones() -> None:
    """They say nothing of the trainer's, so the engine is compared with the present policy."""
    rows = [dataclasses.replace(row, old_logprobs=row.engine_logprobs) for row in known_rows(1.0)]
    found = run_known(rows).metrics
    engine = [ratio for *_, ratio in TOKENS]  # of the engine to the policy, as logarithms
    assert found["engine_trainer_kl"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in engine) / 3, abs=1e-12)
    assert found["engine_logprob_difference_max"] == pytest.approx(max(map(abs, engine)), abs=1e-12)


def test_truncated_tokens_stay_in_the_count() -> None:
    """With a cap next to 0 the policy term is gone, and a KL term has the size that it has without a cap."""
    rows = known_rows(1.0)
    kl = run_known([dataclasses.replace(row, advantage=0.0) for row in rows], kl_coef=0.5).loss
    assert run_known(rows, kl_coef=0.5, importance_cap=1e-12).loss == pytest.approx(kl, abs=1e-11)
    capped, halved = (run_known(rows, importance_cap=cap).loss for cap in (0.1, 0.05))
    assert capped == pytest.approx(2 * halved, rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gspo_by_hand(temperature: float) -> None:
    """Row a has the mean log-ratio -(0.3 - 0.1) / 2, row b -0.25; nothing is clipped within 0.3."""
    rows = known_rows(temperature)
    found = run_known(rows, temperature=temperature, loss="gspo", ratio_unit="rollout", clip_low=0.3)
    expected = (-2 * 1.5 * math.exp(-0.1) + 0.75 * math.exp(-0.25)) / 3
    assert found.loss == pytest.approx(expected, abs=1e-12)
    assert found.metrics["clip_fraction"] == 0.0
    joined = [dataclasses.replace(row, rollout_id="o", advantage=1.0) for row in rows]
    for unit, loss in (
        ("rollout", -math.exp(-0.45 / 3)),
        ("segment", -(2 * math.exp(-0.1) + math.exp(-0.25)) / 3),
    ):
        found = run_known(joined, temperature=temperature, loss="gspo", ratio_unit=unit)
        assert found.loss == pytest.approx(loss, abs=1e-12)


def policy_gradient(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -batch.advantages_N * batch.logprobs_N, {"positive_fraction": (batch.advantages_N > 0).double()}


@pytest.mark.parametrize("max_tokens_per_gpu", [3, 50])
def test_own_loss(max_tokens_per_gpu: int) -> None:
    rows = known_rows(1.0)
    settings: dict[str, Any] = {"normaliser": "rollout", "max_tokens_per_gpu": max_tokens_per_gpu}
    found = run_known(rows, loss=policy_gradient, **settings)
    a, b, c = (-advantage * math.log(PROBABILITIES[before][token]) for before, token, advantage, *_ in TOKENS)
    assert found.loss == pytest.approx((a / 2 + b / 2 + c) / 2, abs=1e-12)
    assert found.metrics["positive_fraction"] == pytest.approx(2 / 3, abs=1e-15)
    assert "clip_fraction" not in found.metrics
    with_kl = run_known(rows, loss=policy_gradient, kl_coef=0.5, **settings)
    kl = [math.exp(ref) - 1 - ref for *_, ref, _ in TOKENS]
    assert with_kl.loss - found.loss == pytest.approx(0.5 * (kl[0] / 2 + kl[1] / 2 + kl[2]) / 2, abs=1e-12)


def scaled_gradient(batch: TokenBatch, *, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
    return scale * policy_gradient(batch)[0], {}


class ScaledGradient:
    def __call__(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return scaled_gradient(batch, scale=2.0)


@pytest.mark.parametrize("loss", [functools.partial(scaled_gradient, scale=2.0), ScaledGradient()])
def test_own_loss_need_not_be_a_plain_function(loss: Any) -> None:
    rows = known_rows(1.0)
    assert run_known(rows, loss=loss).loss == pytest.approx(2 * run_known(rows, loss=policy_gradient).loss, rel=1e-12)


@pytest.mark.parametrize("name", ["loss", "entropy", "kl", "engine_trainer_kl", "bad", "num_fillers"])
def test_own_metrics_have_names_of_their_own(name: str) -> None:
    def colliding(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_gradient(batch)[0], {name: batch.advantages_N}

    with pytest.raises(ConfigError, match=rf"\b{name}\b"):
        run_known(known_rows(1.0), loss=colliding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
@pytest.mark.parametrize(("advantage", "dual_clip", "value"), [(1.0, None, -1.2), (1.0, 3.0, -1.2), (-1.0, 3.0, 3.0)])
def test_overflowing_ratios(
    loss: str, dtype: torch.dtype, advantage: float, dual_clip: float | None, value: float
) -> None:
    far = 2000.0 if dtype == torch.float64 else 100.0
    logprobs_N = torch.zeros(1, dtype=dtype, requires_grad=True)
    batch = TokenBatch(
        logprobs_N=logprobs_N,
        old_logprobs_N=torch.full((1,), -far, dtype=dtype),
        advantages_N=torch.full((1,), advantage, dtype=dtype),
        sequence_log_ratio_N=torch.full((1,), far, dtype=dtype),
        dual_clip=dual_clip,
    )
    loss_N, metrics = FUNCTIONS[loss](batch)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    assert loss_N.item() == pytest.approx(value, rel=1e-6)
    assert gradient_N.item() == 0.0
    assert metrics["clip_fraction"].item() == 1.0


@pytest.mark.parametrize(
    ("setting", "field"), [({"kl_coef": 0.1}, "ref_logprobs"), ({"importance_cap": 2.0}, "engine_logprobs")]
)
def test_missing_logprobs(setting: dict[str, float], field: str) -> None:
    rows = known_rows(1.0)
    (name,) = setting
    with pytest.raises(RowError, match=rf"{name} = .* needs {field} on every row, found none; add"):
        run_known([dataclasses.replace(row, **{field: None}) for row in rows], **setting)
    with pytest.raises(RowError, match=rf"{field} must be on all rows .* row 'a' has it and row 'b' has not"):
        run_known([rows[0], dataclasses.replace(rows[1], **{field: None})], **setting)
    other = {"ref_logprobs": "kl", "engine_logprobs": "engine_trainer_kl"}[field]
    assert run_known([dataclasses.replace(row, **{field: None}) for row in rows]).metrics[other] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_estimator": "k1"}, "k2, k3, found 'k1'; k1 has no gradient on-policy"),
        ({"kl_coef": -0.1}, "kl_coef must be at least 0, found -0.1"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1, found 1.0"),
        ({"importance_cap": 0.0}, "importance_cap must be above 0, found 0.0"),
        ({"temperature": 0.0}, "temperature must be above 0, found 0.0"),
        ({"entropy_coef": math.nan}, "entropy_coef must be above -inf, found nan"),
        ({"kl_coef": None}, "kl_coef must be .*, found None"),
        ({"temperature": None}, "temperature must be .*, found None"),
        ({"ratio_unit": "row"}, "ratio_unit must be one of rollout, segment, found 'row'"),
        ({"loss": "reinforce"}, "unknown loss 'reinforce'; choose one of ppo_clip, gspo, cispo"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_known(known_rows(1.0), **settings)


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
@pytest.mark.parametrize("loss", LOSSES)
def test_masked_slots_are_never_read(loss: str, layout: str) -> None:
    settings = LOSSES[loss] | TERMS["all"] | {"layout": layout, "max_tokens_per_gpu": 25}
    clean = policy_rows(1.0)
    found = [run_case(StepCase(name="garbage", rows=rows, trainer=settings)) for rows in (clean, with_garbage(clean))]
    assert (found[0].loss, found[0].metrics) == (found[1].loss, found[1].metrics)
    for name, part in found[0].gradient.items():
        assert torch.equal(part, found[1].gradient[name])


@pytest.mark.parametrize(
    ("settings", "is_stepped"),
    [({}, False), ({"importance_cap": 1.0}, False), ({"kl_coef": 0.1}, True), ({"entropy_coef": -0.1}, True)],
)
def test_terms_without_advantages(settings: dict[str, float], is_stepped: bool) -> None:
    rows = [dataclasses.replace(row, advantage=0.0) for row in policy_rows(1.0)]
    found = run_case(StepCase(name="flat", rows=rows, trainer={"max_tokens_per_gpu": 60, **settings}))
    assert found.stepped == (is_stepped,)
    assert (found.grad_norms[0] > 0) == is_stepped
    assert found.skip_reasons == (None if is_stepped else "all advantages are exactly 0",)


def likelihood(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -batch.logprobs_N, {}


@pytest.mark.parametrize(
    ("loss", "is_stepped"),
    [
        (likelihood, True),
        (policy_gradient, False),
        (functools.partial(scaled_gradient, scale=2.0), False),
        (functools.partial(ppo_clip), False),
        ("cispo", False),
    ],
)
def test_own_loss_without_advantages(loss: Any, is_stepped: bool) -> None:
    rows = [dataclasses.replace(row, advantage=0.0) for row in policy_rows(1.0)]
    found = run_case(StepCase(name="flat", rows=rows, trainer={"max_tokens_per_gpu": 60, "loss": loss}))
    assert found.stepped == (is_stepped,)
    assert (found.grad_norms[0] > 0) == is_stepped
