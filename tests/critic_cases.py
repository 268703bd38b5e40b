"""Windows for a critic: tiny token classifiers, returns and old values near their own, and one way of running each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForTokenClassification,
    Qwen3Config,
    Qwen3ForTokenClassification,
)

import evenstep.train
from evenstep.types import PER_TOKEN_FIELDS, Row
from oracle import OracleValues, oracle_value_step
from step_cases import dirty_fillers, whole, whole_weights
from step_matrix import NORMALISERS
from tiny_models import VOCAB, no_float32, true_float64, with_dtype
from tiny_rows import make_rows, with_shared_beginnings

SEGMENTS = ((1, 3), (2, 2), (1, 1))  # 10 rows
VALUE_CLIP = 0.15
SHAPES: dict[str, dict[str, Any]] = {
    **{f"padded-{n}": {"layout": "padded", "max_tokens_per_gpu": n} for n in (11, 30)},
    **{f"packed-{n}": {"layout": "packed", "max_tokens_per_gpu": n} for n in (11, 30)},
    **{f"tree-{n}": {"layout": "tree", "max_tokens_per_gpu": n} for n in (11, 30)},
    "fixed-1": {"layout": "fixed", "micro_batch_rows": 1, "pad_scope": "group"},
    "fixed-3": {"layout": "fixed", "micro_batch_rows": 3},
}


def tiny_critic(
    family: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    attention: str = "sdpa",
    scale: float = 0.4,
    num_labels: int = 1,
) -> Any:
    """A token classifier of a few thousand parameters whose weights, head included, are a pure function of ``seed``."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 256,
        "attn_implementation": attention,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "num_labels": num_labels,
    }
    if family == "qwen3":
        model: Any = Qwen3ForTokenClassification(Qwen3Config(**shape))
    else:
        assert family == "llama"
        model = LlamaForTokenClassification(LlamaConfig(**shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.5 * scale * noise if parameter.shape == (16,) else scale * noise)
    return with_dtype(model, dtype).eval()  # transformers puts a dropout before the head


@functools.cache
def value_rows(family: str = "qwen3") -> tuple[Row, ...]:
    """Rows with returns and old values some tenths from the critic's own, so that clips act on a part of the tokens."""
    rows = [
        dataclasses.replace(row, returns=np.zeros(row.num_tokens))
        for row in with_shared_beginnings(make_rows(SEGMENTS, seed=3, max_tokens=13))
    ]
    with true_float64():
        own = oracle_value_step(tiny_critic(family, attention="eager"), rows).values
    draw = np.random.default_rng(4)
    near = []
    for row in rows:
        values = own[row.row_id].numpy()
        near.append(
            dataclasses.replace(
                row,
                returns=values + draw.normal(0.2, 0.5, row.num_tokens),
                old_values=values + draw.normal(0, 0.3, row.num_tokens),
            )
        )
    return tuple(near)


def with_garbage(rows: Sequence[Row]) -> list[Row]:
    """The rows with NaN, infinities and huge values in every per-token field wherever the mask is 0."""
    junk = np.asarray([np.nan, np.inf, -np.inf, 1e30, -1e30])
    dirty = []
    for i, row in enumerate(rows):
        fields: dict[str, Any] = {}
        for shift, name in enumerate(PER_TOKEN_FIELDS):
            if (values := getattr(row, name)) is not None:
                fields[name] = np.where(row.loss_mask, values, junk[(np.arange(row.num_tokens) + i + shift) % 5])
        dirty.append(dataclasses.replace(row, **fields))
    return dirty


def _untrained(rows: Sequence[Row]) -> list[Row]:
    return [dataclasses.replace(row, loss_mask=[0] * row.num_tokens) for row in rows]


# what a window holds, and how many rows; the voters of all rollouts come along
CONTENTS: dict[str, Callable[[Sequence[Row]], list[Row]]] = {
    "all": list,
    "one-row": lambda rows: [rows[1]],  # fewer rows than ranks
    "one-trained": lambda rows: [rows[0], *_untrained(rows[1:])],
    "untrained": _untrained,
    "one-group": lambda rows: [row for row in rows if row.group_id == "g1"],  # the others vote without rows
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "world_size": (1, 2, 3),
    "shape": tuple(SHAPES),
    "is_sharded": (False, True),
    "contents": tuple(CONTENTS),
    "normaliser": tuple(NORMALISERS),
    "value_clip": (VALUE_CLIP, None),
    "has_old": (True, False),
    "is_dirty": (False, True),
    "order": ("given", "shuffled"),
    "multiple": (1, 4),
    "max_grad_norm": (None, 0.05),
    "family": ("qwen3", "llama"),
    "checkpointing": (False, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCase:
    """One window on one tiny critic under one way of running it."""

    name: str
    rows: Sequence[Row]
    reference_rows: Sequence[Row]  # the same ones, clean
    voters: Mapping[Hashable, Hashable] | None = None
    family: str = "qwen3"
    trainer: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of Trainer
    is_sharded: bool = False
    has_dirty_fillers: bool = False
    forbids_float32: bool = False

    def oracle(self, **wrong: Any) -> OracleValues:
        names = ("normaliser", "normaliser_constant", "value_clip")
        settings = {name: self.trainer[name] for name in names if name in self.trainer}
        with true_float64():
            model = tiny_critic(self.family, attention="eager")
            return oracle_value_step(model, self.reference_rows, voters=self.voters, **settings, **wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOutcome:
    """What one rank saw; tensors are whole."""

    loss: float
    gradient: dict[str, Tensor]  # final, not clipped
    values: dict[Hashable, Tensor]  # of all rows
    scored: dict[Hashable, Tensor]  # of all rows, by a pass without gradient
    num_own_rows: int
    num_logprobs: int
    metrics: dict[str, Any]
    before: dict[str, Tensor]
    after: dict[str, Tensor]  # weights after one SGD step
    grad_norm: float
    stepped: bool
    skip_reason: str | None


def build_case(point: Mapping[str, Any]) -> ValueCase:
    """The case of one point of the product."""
    every = value_rows(point["family"])
    clean = CONTENTS[point["contents"]](every)
    if not point["has_old"] and point["value_clip"] is None:  # with a clip old values are needed
        clean = [dataclasses.replace(row, old_values=None) for row in clean]
    rows = with_garbage(clean) if point["is_dirty"] else list(clean)
    if point["order"] == "shuffled":
        random.Random(1).shuffle(rows)
    settings = SHAPES[point["shape"]] | NORMALISERS[point["normaliser"]]
    return ValueCase(
        name=" ".join(f"{name}={value}" for name, value in point.items()),
        rows=rows,
        reference_rows=clean,
        voters={row.rollout_id: row.group_id for row in every} | {"g7/r0": "g7"},
        family=point["family"],
        trainer=settings
        | {"loss": "value_clip", "value_clip": point["value_clip"], "pad_to_multiple": point["multiple"]}
        | {"max_grad_norm": point["max_grad_norm"], "activation_checkpointing": point["checkpointing"]},
        is_sharded=point["is_sharded"],
        has_dirty_fillers=point["is_dirty"],
        forbids_float32=point["world_size"] == 2 and point["contents"] == "all",
    )


def run_value_case(case: ValueCase) -> ValueOutcome:
    with true_float64(), contextlib.ExitStack() as stack:
        model = tiny_critic(case.family)
        model.dropout.p = 0.0
        if case.is_sharded:
            evenstep.train.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = evenstep.train.Trainer(model, optimizer, **case.trainer)
        before = whole_weights(model)
        if case.has_dirty_fillers:
            stack.enter_context(dirty_fillers())
        with no_float32() if case.forbids_float32 else contextlib.nullcontext():
            scored = trainer.gather(trainer.score(case.rows, case.voters))
            result = trainer.forward_backward(case.rows, case.voters)
        gradient = {
            name: whole(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in model.named_parameters()
        }
        step = trainer.optim_step()
        return ValueOutcome(
            loss=result.loss,
            gradient=gradient,
            values=trainer.gather(result.values),
            scored=scored,
            num_own_rows=len(result.values),
            num_logprobs=len(result.logprobs),
            metrics=result.metrics,
            before=before,
            after=whole_weights(model),
            grad_norm=step.grad_norm,
            stepped=step.stepped,
            skip_reason=step.skip_reason,
        )


def run_value_cases(cases: Sequence[ValueCase]) -> list[ValueOutcome]:
    """The function that runs on every rank."""
    outcomes = []
    for case in cases:
        try:
            outcomes.append(run_value_case(case))
        except BaseException as error:
            error.add_note(f"in case {case.name!r}")
            raise
    return outcomes
