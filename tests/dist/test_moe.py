"""Models with experts on 1, 2 and 3 gloo ranks: the step of one row at a time in one process.

1. In float64, with and without the load-balancing loss, replicated and FSDP2, for Qwen3-MoE and Mixtral: loss, whole
   gradient, per-row log-probs and the balance itself equal the reference to 1e-12, the same on every rank, for padded,
   packed, tree and fixed layouts; with activation checkpointing, fillers full of other tokens, shuffled rows, and fewer rows
   than ranks (so that experts receive nothing on a rank, and a rank has no tokens at all).
2. In float32 with transformers' default way of multiplying with experts: 1e-6 against the float32 one-row run.
3. Fractions counted by rank, and an average over ranks, give another loss.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from evenstep.types import Row
from moe_oracle import OracleBalance, oracle_balance
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, run_cases
from tiny_models import EXPERTS_PER_TOKEN, tiny_model
from tiny_rows import make_rows, with_shared_beginnings

COEF = 0.7
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded", "max_tokens_per_gpu": 30, "pad_to_multiple": 2},
    "packed": {"layout": "packed", "max_tokens_per_gpu": 24, "activation_checkpointing": True},
    "tree": {"layout": "tree", "max_tokens_per_gpu": 24},
    "fixed": {"layout": "fixed", "micro_batch_rows": 2},
}
WINDOWS = ("usual", "few rows")


@functools.cache
def window(name: str) -> list[Row]:
    return with_shared_beginnings(make_rows(((1, 3), (2, 1)))) if name == "usual" else make_rows(((1,), (1,)), seed=3)


def cases() -> dict[str, StepCase]:
    """By name; every family, shape, window, coefficient and way of sharding occurs with most of the others."""
    found: dict[str, StepCase] = {}
    for i, (name, trainer) in enumerate(SHAPES.items()):
        for j, family in enumerate(("mixtral", "qwen3_moe")):
            for k, rows in enumerate(WINDOWS):
                for is_sharded in (False, True):
                    coef = 0.0 if (i + j + k) % 3 == 2 else COEF
                    label = f"{family}-{name}-{rows}-{'sharded' if is_sharded else 'replicated'}-{coef}"
                    order = np.random.default_rng(i).permutation(len(window(rows)))
                    found[label] = StepCase(
                        name=label,
                        rows=[window(rows)[index] for index in order],
                        model={"family": family},
                        trainer=trainer | {"moe_balance_coef": coef},
                        is_sharded=is_sharded,
                        has_dirty_fillers=True,
                    )
    for is_sharded in (False, True):
        label = f"float32-{'sharded' if is_sharded else 'replicated'}"
        found[label] = StepCase(
            name=label,
            rows=window("usual"),
            model={"family": "qwen3_moe", "dtype": torch.float32, "scale": 0.15, "experts": "grouped_mm"},
            trainer=SHAPES["padded"] | {"moe_balance_coef": COEF},
            is_sharded=is_sharded,
        )
    return found


CASES = cases()


@once
def launch(world_size: int) -> dict[str, list[CaseOutcome]]:
    by_rank = run_ranks(run_cases, world_size, list(CASES.values()), timeout_s=110)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(CASES)}


@functools.cache
def reference(name: str) -> tuple[oracle.OracleStep, OracleBalance]:
    case = CASES[name]
    with case.precision():
        model = tiny_model(**{"dtype": torch.float64} | dict(case.model))
        return case.oracle(), oracle_balance(model, case.rows, EXPERTS_PER_TOKEN)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 3))])
def test_the_exact_step(world_size: int, name: str) -> None:
    case, found = CASES[name], launch(world_size)[name]
    coef, tolerance = case.trainer["moe_balance_coef"], 1e-12 if case.is_float64 else 1e-6
    expected, balance = reference(name)
    loss = expected.loss + coef * balance.loss
    gradient = {key: part + coef * balance.gradient[key] for key, part in expected.gradient.items()}
    for outcome in found:
        assert abs(outcome.loss - loss) <= tolerance * max(1.0, abs(loss))
        assert oracle.relative_error(outcome.gradient, gradient) <= tolerance
        assert oracle.relative_error(outcome.logprobs, expected.logprobs) <= tolerance
        assert outcome.metrics.get("moe_balance", 0.0) == pytest.approx(balance.loss * (coef > 0), rel=tolerance)
        assert dataclasses.replace(outcome, own_logprobs={}).metrics == found[0].metrics


@pytest.mark.long
@pytest.mark.timeout(150)
def test_situations_have_happened() -> None:
    few = next(name for name in CASES if "padded-few rows" in name)
    cells = launch(3)[few][0].cells
    assert len(cells) == 3
    assert sum(not any(rank) for rank in cells) == 1  # a rank with fillers only
    assert sum(outcome.num_dirty_fillers for outcome in launch(3)[few]) > 0


@pytest.mark.timeout(150)
def test_wrong_formulas_differ() -> None:
    name = f"mixtral-padded-usual-replicated-{COEF}"
    case, found = CASES[name], launch(2)[name]
    right = found[0].metrics["moe_balance"]
    with case.precision():
        model = tiny_model("mixtral")
        own = [
            oracle_balance(model, [case.rows[i] for cell in rank for i in cell], EXPERTS_PER_TOKEN).loss
            for rank in found[0].cells
        ]
    assert abs(right - sum(own) / 2) > 0.01
    assert abs(right - right / 2) > 0.01
