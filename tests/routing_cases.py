"""Windows whose rows carry experts, and what the step must be: one row at a time, routers written out by hand.

With I the recorded experts of a token (those that the router likes best, where none are recorded) and z its logits, the
weights of the families here are softmax over I of z: all of them divide by the sum over the chosen. It shares no code
with what it judges.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_oracle
import oracle
from evenstep.types import Row
from moe_oracle import OracleBalance, oracle_balance
from step_cases import StepCase
from tiny_models import EXPERTS_PER_TOKEN, NUM_EXPERTS, tiny_model, true_float64
from tiny_rows import make_rows, with_shared_beginnings

COEF = 0.7
NUM_LAYERS = 2
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded", "max_tokens_per_gpu": 30, "pad_to_multiple": 4},
    "packed": {"layout": "packed", "max_tokens_per_gpu": 24, "activation_checkpointing": True},
    "tree": {"layout": "tree", "max_tokens_per_gpu": 24, "pad_to_multiple": 2},
    "fixed": {"layout": "fixed", "micro_batch_rows": 3},
}


def recorded(row: Row, layer: int, t: int) -> list[int] | None:
    if row.routed_experts is None:
        return None
    experts = row.routed_experts.experts_TLX[t, layer].tolist()
    return None if experts[0] == -1 else experts


def with_experts(rows: Sequence[Row], *, seed: int = 0, unknown: float = 0.2) -> list[Row]:
    """The rows with random experts, equal where rows of a group begin alike, but for every third row.

    A share of the tokens is unknown in one layer or in all, the last one of each row always; the second row has none.
    """
    found: list[Row] = []
    for i, row in enumerate(rows):
        experts = np.full((row.num_tokens, NUM_LAYERS, EXPERTS_PER_TOKEN), -1)
        for t in range(row.num_tokens - 1):
            draw = random.Random(f"{seed} {row.group_id} {i % 3 == 2} {row.token_ids[: t + 1].tolist()}")
            for layer in range(NUM_LAYERS):
                if draw.random() >= unknown:
                    experts[t, layer] = draw.sample(range(NUM_EXPERTS), EXPERTS_PER_TOKEN)
        found.append(row if i == 1 and unknown else replace(row, routed_experts=experts))
    return found


@functools.cache
def window(name: str = "usual") -> list[Row]:
    if name == "usual":
        return with_experts(with_shared_beginnings(make_rows(((1, 3), (2, 1)))))
    return with_experts(make_rows(((1,), (1,)), seed=3))


def case_of(family: str, shape: str, *, rows: str = "usual", is_sharded: bool = False, coef: float = COEF) -> StepCase:
    return StepCase(
        name=f"{family}-{shape}-{rows}-{'sharded' if is_sharded else 'replicated'}-{coef}",
        rows=window(rows),
        model={"family": family},
        trainer=SHAPES[shape] | {"moe_balance_coef": coef},
        is_sharded=is_sharded,
        has_dirty_fillers=True,
    )


@contextlib.contextmanager
def routed_by_hand(model: Any) -> Iterator[None]:
    """Within the block, the oracles' forward passes of a row send its tokens where the row says."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    present: list[Row] = []

    def forward(router: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
        if hasattr(router, "bias"):
            logits_TE = logits_TE + router.bias
        scores, experts = [], []
        for t, logits_E in enumerate(logits_TE):
            best = torch.argsort(logits_E.detach(), descending=True)[:EXPERTS_PER_TOKEN].tolist()
            experts.append(recorded(present[-1], layer, t) or best)
            powers = torch.stack([torch.exp(logits_E[e] - logits_E.max().detach()) for e in experts[-1]])
            scores.append(powers / powers.sum())
        return logits_TE, torch.stack(scores), torch.tensor(experts)

    with pytest.MonkeyPatch.context() as patch:
        for layer, router in enumerate(routers):
            patch.setattr(router, "forward", functools.partial(forward, router, layer), raising=False)
        for module, name in ((oracle, "row_logprobs"), (moe_oracle, "router_logits")):
            original = vars(module)[name]

            def noting(model: Any, row: Row, *args: Any, original: Any = original) -> Any:
                present.append(row)
                return original(model, row, *args)

            patch.setattr(module, name, noting)
        yield


@functools.cache
def reference(family: str, rows: str) -> tuple[oracle.OracleStep, OracleBalance]:
    """(the step without the load-balancing loss, that loss without its coefficient)."""
    with true_float64():
        model = tiny_model(family, attention="eager")
        with routed_by_hand(model):
            step = oracle.oracle_step(model, window(rows))
            balance = oracle_balance(model, window(rows), EXPERTS_PER_TOKEN, recorded)
    return step, balance
