"""Gradients are accumulated in float32 over 64 micro-batches, however low the precision that computes them.

1. With ``compute_dtype="bfloat16"``, 64 micro-batches per rank, on 1 and 2 ranks, replicated and FSDP2, reduced once
   per window and in every micro-batch: the window's gradient is the float64 sum of the gradients of the single
   micro-batches, each computed alone in the same bfloat16, to float32 accuracy (1e-6).
2. While it grows, every gradient that a parameter holds, sharded or gathered, is float32.
3. Gradients are float32 before an optimizer step, parameters and Adam's moments after it.
4. The wrong formula differs: the same gradients added up in bfloat16 are off by more than 1e-3.
5. Chunks of logits within a micro-batch add up in float32 too.

``pytest -s`` prints the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import evenstep.train
from evenstep.train.losses import TokenBatch, ppo_clip
from evenstep.types import Row
from oracle import relative_error
from ranks import once, run_ranks
from step_cases import whole
from tiny_models import VOCAB, tiny_model

NUM_MICROBATCHES = 64
# one row in each micro-batch, and weights that do not depend on which rows a window has
STEP = {
    "layout": "fixed",
    "micro_batch_rows": 1,
    "normaliser": "constant",
    "normaliser_constant": 8.0,
    "compute_dtype": "bfloat16",
}
WAYS = ("replicated", "sharded last", "sharded each")  # parameters and `sync`


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """What one rank saw."""

    gradient: dict[str, Tensor]
    num_microbatches: int
    growing: set[tuple[str, torch.dtype]]  # (sharded or whole, dtype) of gradients seen between micro-batches
    dtypes: dict[str, set[torch.dtype]]  # of parameters, gradients and moments after a step


def window(num_ranks: int) -> list[Row]:
    random = np.random.default_rng(0)
    rows = []
    for i in range(NUM_MICROBATCHES * num_ranks):
        num_tokens = int(random.integers(4, 13))
        mask = [0, 0] + [1] * (num_tokens - 2)
        ids = random.integers(0, VOCAB, num_tokens)
        advantage = float(random.normal())
        rows.append(Row(row_id=i, rollout_id=i, group_id=0, token_ids=ids, loss_mask=mask, advantage=advantage))
    return rows


def voters(num_ranks: int) -> dict[int, int]:
    return dict.fromkeys(range(NUM_MICROBATCHES * num_ranks), 0)


def make_model(way: str) -> Any:
    model = tiny_model(dtype=torch.float32, scale=0.15)
    if way != "replicated":
        evenstep.train.shard(model)
    return model


def accumulate(num_ranks: int) -> dict[str, Accumulated]:
    """Runs on every rank."""
    return {way: accumulate_one(way, num_ranks) for way in WAYS}


def accumulate_one(way: str, num_ranks: int) -> Accumulated:
    model = make_model(way)
    growing: set[tuple[str, torch.dtype]] = set()

    def observed(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch is taken after its forward pass, when earlier gradients are already there."""
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        growing.update(("sharded" if isinstance(grad, DTensor) else "whole", grad.dtype) for grad in grads)
        return ppo_clip(batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = "each" if way == "sharded each" else "last"
    trainer = evenstep.train.Trainer(model, optimizer, loss=observed, sync=sync, **STEP)
    result = trainer.forward_backward(window(num_ranks), voters(num_ranks))
    gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    dtypes = {"gradients": {parameter.grad.dtype for parameter in model.parameters()}}
    assert trainer.optim_step().stepped
    dtypes["parameters"] = {parameter.dtype for parameter in model.parameters()}
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(list(model.parameters()))
    dtypes["moments"] = {moment.dtype for moment in moments}
    return Accumulated(
        gradient=gradient,
        num_microbatches=len(result.plan.cells[0]),
        growing=growing,
        dtypes=dtypes,
    )


def alone(num_ranks: int) -> list[dict[str, Tensor]]:
    """The gradient of each micro-batch, each in a window of its own; runs on one rank."""
    model = make_model("replicated")
    trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=ppo_clip, **STEP)
    gradients = []
    for row in window(num_ranks):
        trainer.forward_backward([row], voters(num_ranks))
        gradients.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
        trainer.optim_step()
    return gradients


@once
def found(num_ranks: int) -> list[dict[str, Accumulated]]:
    return run_ranks(accumulate, num_ranks, num_ranks, timeout_s=120)


@once
def parts(num_ranks: int) -> list[dict[str, Tensor]]:
    return run_ranks(alone, 1, num_ranks, timeout_s=120)[0]


def summed(gradients: list[dict[str, Tensor]], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Σ over micro-batches, accumulated in ``dtype``."""
    total = {name: torch.zeros_like(part, dtype=dtype) for name, part in gradients[0].items()}
    for gradient in gradients:
        for name, part in gradient.items():
            total[name] += part.to(dtype)
    return total


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_the_float64_sum_of_single_micro_batches(way: str, num_ranks: int) -> None:
    expected = summed(parts(num_ranks), torch.float64)
    for rank in found(num_ranks):
        assert rank[way].num_microbatches == NUM_MICROBATCHES
        error = relative_error(rank[way].gradient, expected)
        print(f"{way}, {num_ranks} ranks: {error:.1e}")
        assert error <= 1e-6


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("way", "growing"),
    [
        ("replicated", {"whole"}),
        ("sharded last", {"whole"}),  # gathered parameters add up, and are reduced once
        ("sharded each", {"sharded"}),
    ],
)
def test_float32_between_micro_batches_and_after_the_step(way: str, growing: set[str], num_ranks: int) -> None:
    for rank in found(num_ranks):
        assert rank[way].growing == {(kind, torch.float32) for kind in growing}
        assert rank[way].dtypes == {name: {torch.float32} for name in ("gradients", "parameters", "moments")}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_accumulating_in_bfloat16_differs(num_ranks: int) -> None:
    expected = summed(parts(num_ranks), torch.float64)
    assert relative_error(summed(parts(num_ranks), torch.float32), expected) <= 1e-6
    error = relative_error(summed(parts(num_ranks), torch.bfloat16), expected)
    print(f"added up in bfloat16, {num_ranks} ranks: {error:.1e}")
    assert error > 1e-3


def chunked(num_tokens: int, compute_dtype: str) -> dict[str, Tensor]:
    """The output head's gradient from one micro-batch whose logits are computed ``num_tokens`` at a time."""
    model = make_model("replicated")
    options = {**STEP, "layout": "packed", "compute_dtype": compute_dtype, "logprob_chunk_tokens": num_tokens}
    trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)
    assert trainer.forward_backward(window(1)).metrics["num_microbatches"] == 1
    return {"head": whole(model.lm_head.weight.grad)}


def test_chunks_of_logits_add_up_in_float32() -> None:
    exact = chunked(10_000, "float32")
    at_once = relative_error(chunked(10_000, "bfloat16"), exact)
    in_chunks = relative_error(chunked(8, "bfloat16"), exact)
    assert 1e-3 < at_once < 1e-2
    assert in_chunks < 1.1 * at_once  # 1.5 times where chunks share one bfloat16 copy of the head
