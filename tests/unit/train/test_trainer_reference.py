"""The reference that the Trainer is judged by, itself judged by numbers known by hand.

1. Token weights of the five normalisers are the fractions worked out by hand, also with voters that have no rows.
2. Log-probs are those of a model whose P(next | current) is given; token t is scored by the logits of token t - 1.
3. The token loss takes the clipped side where that is larger, and only there; its gradient is then 0.
4. The gradient equals finite differences of the loss.
5. The written-out SGD, AdamW and clip equal torch's.
6. GRPO advantages: sample deviation + 1e-6; equal rewards and lone voters give exactly 0.
7. A "float64" transformers model is only half true; within ``true_float64`` nothing is float32, forward or backward.
8. ``no_float32`` sees a float32 tensor that exists in the backward pass only.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from evenstep.types import Row
from tiny_models import bigram_model, no_float32, tiny_model, true_float64
from tiny_rows import REWARDS, make_rows, with_old_logprobs


def row(name: str, rollout: str, group: str, mask: list[int], **fields: Any) -> Row:
    fields.setdefault("token_ids", [0] * len(mask))
    return Row(row_id=name, rollout_id=rollout, group_id=group, loss_mask=mask, **fields)


ROWS = [
    row("a0", "A", "g", [0, 1, 1]),
    row("a1", "A", "g", [0, 0, 0, 1]),
    row("b0", "B", "g", [0, 1]),
    row("c0", "C", "h", [0, 1, 1, 0, 1, 1]),
    row("c1", "C", "h", [0, 0]),
]


@pytest.mark.parametrize(
    ("normaliser", "expected"),
    [
        ("token", {"a0": 1 / 8, "a1": 1 / 8, "b0": 1 / 8, "c0": 1 / 8}),
        ("rollout", {"a0": 1 / 9, "a1": 1 / 9, "b0": 1 / 3, "c0": 1 / 12}),
        ("prompt", {"a0": 1 / 8, "a1": 1 / 8, "b0": 1 / 8, "c0": 1 / 8}),
        ("constant", {"a0": 1 / 30, "a1": 1 / 30, "b0": 1 / 30, "c0": 1 / 30}),
        ("row", {"a0": 1 / 8, "a1": 1 / 4, "b0": 1 / 4, "c0": 1 / 16}),
    ],
)
def test_weights_by_hand(normaliser: str, expected: dict[str, float]) -> None:
    found = oracle.token_weights(ROWS, None, normaliser, 10.0)
    for r in ROWS:
        assert found[r.row_id] == [expected[str(r.row_id)] if trained else 0.0 for trained in r.loss_mask]


def test_voters_without_rows_count() -> None:
    voters = {"A": "g", "B": "g", "C": "h", "D": "h", "E": "i"}  # D and E have no tokens, E alone in its group
    weights = {name: oracle.token_weights(ROWS, voters, name, 10.0)["b0"][1] for name in ("token", "rollout", "prompt")}
    assert weights == {"token": 1 / 8, "rollout": 1 / 5, "prompt": 1 / 12}
    assert oracle.token_weights(ROWS, voters, "constant", 10.0)["b0"][1] == 1 / 50


def test_logprobs_of_a_known_model() -> None:
    model = bigram_model([[0.1, 0.7, 0.2], [0.15, 0.25, 0.6], [0.3, 0.3, 0.4]])
    with true_float64():
        step = oracle.oracle_step(model, [row("r", "A", "g", [0, 1, 1], token_ids=[0, 1, 2], advantage=1.0)])
    assert step.logprobs["r"].tolist() == pytest.approx([0.0, math.log(0.7), math.log(0.6)], rel=1e-12)
    entropy = [-sum(p * math.log(p) for p in ps) for ps in ([0.1, 0.7, 0.2], [0.15, 0.25, 0.6])]
    assert step.metrics["entropy"] == pytest.approx(sum(entropy) / 2, rel=1e-12)
    assert step.loss == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.6, True),  # 1 + 0.3
        (0.5, 2.0, -1.0, False),
        (1.5, -2.0, 3.0, False),
        (0.5, -2.0, 1.6, True),  # 1 - 0.2
        (1.5, 0.0, 0.0, False),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, loss: float, is_clipped: bool) -> None:
    logprob = torch.tensor(math.log(ratio) - 1.0, dtype=torch.float64, requires_grad=True)
    found, clipped, deviation = oracle.ppo_clip(logprob, -1.0, advantage, 0.2, 0.3)
    assert float(found.detach()) == pytest.approx(loss)
    assert clipped is is_clipped
    assert deviation == pytest.approx(abs(ratio - 1))
    (gradient,) = torch.autograd.grad((found + 0 * logprob), logprob)
    assert float(gradient) == pytest.approx(0.0 if is_clipped else -advantage * ratio)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_gradient_equals_finite_differences(family: str) -> None:
    with true_float64():
        model = tiny_model(family)
        rows = with_old_logprobs(make_rows(((1, 2),), has_uneven_advantages=True), model)
        step = oracle.oracle_step(model, rows, normaliser="rollout", clip_low=0.1, clip_high=0.3)
        assert 0.1 < step.metrics["clip_fraction"] < 0.9
        random = np.random.default_rng(0)
        for name, parameter in model.named_parameters():
            place = tuple(int(random.integers(0, n)) for n in parameter.shape)
            losses = []
            for h in (1e-6, -1e-6):
                with torch.no_grad():
                    parameter[place] += h
                losses.append(oracle.oracle_step(model, rows, normaliser="rollout", clip_low=0.1, clip_high=0.3).loss)
                with torch.no_grad():
                    parameter[place] -= h
            expected = (losses[0] - losses[1]) / 2e-6
            assert float(step.gradient[name][place]) == pytest.approx(expected, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("max_norm", [None, 0.05, 1e9])
def test_written_out_optimizers_equal_torch(max_norm: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(3, 4, generator=generator, dtype=torch.float64) for name in "ab"}
    gradients = [{name: torch.randn(3, 4, generator=generator, dtype=torch.float64) for name in "ab"} for _ in range(3)]
    settings = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    adam, written = {name: torch.nn.Parameter(part.clone()) for name, part in start.items()}, dict(start)
    sgd, written_sgd = {name: torch.nn.Parameter(part.clone()) for name, part in start.items()}, dict(start)
    reference = oracle.AdamW(**settings)
    optimizers = [torch.optim.AdamW(adam.values(), **settings), torch.optim.SGD(sgd.values(), lr=0.3)]
    for gradient in gradients:
        for parameters in (adam, sgd):
            for name, parameter in parameters.items():
                parameter.grad = oracle.clipped(gradient, max_norm)[name]
        for optimizer in optimizers:
            optimizer.step()
        written = reference.step(written, gradient, max_norm)
        written_sgd = oracle.sgd_step(written_sgd, gradient, lr=0.3, max_norm=max_norm)
    assert oracle.relative_error(written, {name: p.data for name, p in adam.items()}) < 1e-14
    assert oracle.relative_error(written_sgd, {name: p.data for name, p in sgd.items()}) < 1e-14
    if max_norm is not None:
        assert oracle.gradient_norm(oracle.clipped(gradients[0], max_norm)) == pytest.approx(
            min(max_norm, oracle.gradient_norm(gradients[0]))
        )


def test_grpo_by_hand() -> None:
    rollouts = [("a", "g", 0.7, True), ("b", "g", 0.35, True), ("x", "g", 9.0, False), ("c", "h", 0.95, True)]
    rollouts += [("d", "i", 0.7, True), ("e", "i", 0.7, True)]
    found = oracle.grpo_advantages([*rollouts, ("f", "h", None, False)])
    std = 0.35 / math.sqrt(2)
    assert found == {
        "a": pytest.approx(0.175 / (std + 1e-6)),
        "b": pytest.approx(-0.175 / (std + 1e-6)),
        "c": 0.0,
        "d": 0.0,
        "e": 0.0,
    }
    assert all(reward != round(reward * 64) / 64 for reward in REWARDS)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_true_float64(family: str, attention: str) -> None:
    rows = make_rows(((1, 1),))
    model = tiny_model(family, attention=attention)
    with no_float32(), pytest.raises(AssertionError, match=r"torch\.float32"):
        oracle.oracle_step(model, rows)
    half_true = oracle.oracle_step(model, rows)
    with true_float64(), no_float32():
        true = oracle.oracle_step(model, rows)
    assert 1e-9 < oracle.relative_error(half_true.gradient, true.gradient) < 1e-5
    with no_float32(), pytest.raises(AssertionError, match=r"torch\.float32"):
        oracle.oracle_step(model, rows)  # the patch ends with the block


class Float32Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return (2 * grads[0].float()).double()


def test_no_float32_sees_the_backward_pass() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with no_float32():
        y = Float32Backward.apply(x).sum()
        with pytest.raises(AssertionError, match=r"torch\.float32"):
            y.backward()
