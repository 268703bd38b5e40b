"""Locks:

1. nothing of a quarter of trained tokens × vocabulary or more is saved for the backward pass: plain, tied and
   soft-capped heads, padded and packed
2. log-probs, entropies and gradients do not depend on the chunk size, given or a CPU's own, and equal those of the
   model's own logits, with temperature, soft cap and logit scale
3. a cell without trained tokens gives every parameter a zero gradient
4. an id whose logit is -inf, as of a vocabulary that was filled up, changes no log-prob, entropy or gradient
5. activation checkpointing changes no gradient and refuses dropout
6. bfloat16 is compute only: parameters and gradients stay float32; half-precision parameters are refused
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import evenstep
from evenstep.errors import ConfigError
from evenstep.train import Trainer
from evenstep.train.collate import Cell, collate
from evenstep.train.logprobs import cell_logprobs, chunked_logprobs, score_logits

VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Any] = {
    "untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "soft_capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SHAPE, final_logit_softcapping=2.0, attn_logit_softcapping=None, attn_implementation="eager",
            sliding_window=1024,
        )
    ),
    "scaled": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
}  # fmt: skip


def make_model(kind: str, scale: float = 8.0) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)  # away from the uniform distribution
    return model


def make_rows(lengths: tuple[int, ...] = (40, 25, 9)) -> list[evenstep.Row]:
    generator = torch.Generator().manual_seed(1)
    return [
        evenstep.Row(
            row_id=i,
            rollout_id=i,
            group_id=0,
            token_ids=torch.randint(VOCAB, (length,), generator=generator).tolist(),
            loss_mask=[0] + [1] * (length - 1),
            advantage=0.7 - i,
        )
        for i, length in enumerate(lengths)
    ]


def make_cell(rows: list[evenstep.Row], layout: str = "padded") -> Cell:
    return collate(
        rows,
        [0.01] * len(rows),
        layout=layout,
        multiple=1,
        num_shape_rows=1,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("kind", ["untied", "tied", "soft_capped"])
@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_no_logits_are_saved(kind: str, layout: str) -> None:
    model, saved = make_model(kind), []
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), layout=layout, logprob_chunk_tokens=32)
    rows = make_rows((50,) * 16)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() if not isinstance(tensor, torch.nn.Parameter) else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.forward_backward(rows)
    num_trained = sum(row.num_trained_tokens for row in rows)
    assert 0 < max(saved) < num_trained * VOCAB / 4


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_equal_the_models_own_logits(kind: str, temperature: float) -> None:
    model, rows = make_model(kind), make_rows()
    cell = make_cell(rows)
    logits = model(input_ids=cell.input_ids_BT, use_cache=False).logits / temperature
    logp = torch.log_softmax(logits, -1)
    flat = logp.reshape(-1, VOCAB)[cell.gather_N]
    expected = flat.gather(1, cell.targets_N[:, None]).squeeze(1)
    entropy = -(flat.exp() * flat).sum(1)
    (expected.sum() + 0.3 * entropy.sum()).backward()
    reference = gradient(model)
    for chunk_tokens in (1, 7, 1000):
        model.zero_grad()
        out = cell_logprobs(model, cell, temperature=temperature, chunk_tokens=chunk_tokens, entropy_gradient=True)
        assert torch.allclose(out.logprobs_N, expected, rtol=1e-12, atol=1e-12)
        assert torch.allclose(out.entropies_N, entropy, rtol=1e-12, atol=1e-12)
        (out.logprobs_N.sum() + 0.3 * out.entropies_N.sum() + out.anchor).backward()
        assert float((gradient(model) - reference).norm() / reference.norm()) < 1e-12


@pytest.mark.parametrize("filled", [-math.inf, torch.finfo(torch.float64).min])
def test_ids_that_cannot_be_drawn_have_no_part(filled: float) -> None:
    logits = torch.tensor([[1.0, 0.5, -2.0]], dtype=torch.float64, requires_grad=True)
    found = []
    for given in (logits, torch.cat([logits, torch.full((1, 2), filled, dtype=torch.float64)], dim=1)):
        logprobs, entropies = score_logits(given, torch.tensor([1]), 0.5, entropy_gradient=True)
        (change,) = torch.autograd.grad(logprobs.sum() - 0.3 * entropies.sum(), logits)
        found.append((logprobs.item(), entropies.item(), change.tolist()))
    assert found[1] == found[0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", ["padded", "fixed"])
def test_an_inert_cell_has_a_zero_gradient_everywhere(kind: str, layout: str) -> None:
    model = make_model(kind)
    out = cell_logprobs(model, make_cell([], layout))
    assert out.logprobs_N.numel() == 0
    (out.logprobs_N.sum() + out.anchor).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_activation_checkpointing_changes_no_gradient(layout: str) -> None:
    gradients = []
    for activation_checkpointing in (False, True):
        model = make_model("tied")
        options = {"layout": layout, "max_tokens_per_gpu": 50, "activation_checkpointing": activation_checkpointing}
        trainer = Trainer(model, torch.optim.SGD(model.parameters()), **options)
        trainer.forward_backward(make_rows())
        gradients.append(gradient(model))
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-12


def test_activation_checkpointing_refuses_dropout() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, attention_dropout=0.1))
    with pytest.raises(ConfigError, match="attention_dropout"):
        Trainer(model, torch.optim.SGD(model.parameters()), activation_checkpointing=True)


def test_bfloat16_is_compute_only() -> None:
    results = {}
    for compute_dtype in (None, "bfloat16"):
        model = make_model("tied", scale=1.0).float()
        trainer = Trainer(model, torch.optim.SGD(model.parameters()), compute_dtype=compute_dtype)
        trainer.forward_backward(make_rows())
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
        results[compute_dtype] = gradient(model)
    difference = float((results["bfloat16"] - results[None]).norm() / results[None].norm())
    assert 1e-5 < difference < 0.1


def test_half_precision_parameters_are_refused() -> None:
    model = make_model("tied").bfloat16()
    with pytest.raises(ConfigError, match=r"must be float32 .* found torch.bfloat16 in model.embed_tokens.weight"):
        Trainer(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("num_tokens, widest", [(0, 0), (256, 256), (600, 256)])
def test_chunks_fit_the_cache_of_a_cpu(num_tokens: int, widest: int, entropy_gradient: bool) -> None:
    """Of 5,000 ids no more than 256 tokens at a time; both runs of a chunk, but entropies once, and nothing changes."""
    torch.manual_seed(1)
    head = torch.nn.Linear(4, 5000, bias=False, dtype=torch.float64)
    hidden, targets = torch.randn(num_tokens, 4, dtype=torch.float64), torch.randint(5000, (num_tokens,))
    sizes: list[int] = []

    def watched(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return head(hidden)

    def gradients(logprobs: Tensor, entropies: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.linspace(-1, 1, num_tokens, dtype=torch.float64)
        loss = (weights * logprobs).sum() + ((weights * entropies).sum() if entropy_gradient else 0.0)
        given_gradient, head_gradient = torch.autograd.grad(loss, [given, head.weight])
        return given_gradient, head_gradient

    given = [hidden.clone().requires_grad_() for _ in range(2)]
    found = chunked_logprobs(watched, given[0], targets, 0.7, 1024, entropy_gradient, 5000)
    whole = score_logits(head(given[1]), targets, 0.7, entropy_gradient)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(*found, given[0]), gradients(*whole, given[1]), rtol=0, atol=1e-12)
    assert (max(sizes), sum(sizes)) == (widest, 2 * num_tokens)
