"""Rollouts that the engine sampled from another policy than the trainer's are left out of the policy term, as a whole.

1. On two gloo ranks, replicated and FSDP2, with PPO, GSPO by rollout and CISPO, with old log-probs given, of the same
   pass (detached) or scored before: loss, gradient, metrics and kept_fraction equal the oracle to 1e-12.
2. A rollout is judged over all its rows, which ran on both ranks: split into more rows it keeps everything. Judged row
   by row other tokens would be left out, and the gradient would differ.
3. Rejected tokens stay in every denominator: with each normaliser the gradient is the sum over the kept rollouts alone,
   at the weights of the whole window; leaving them out of the counts would scale it.
4. KL and entropy terms of rejected rollouts stay; a window whose rollouts are all rejected keeps them.
5. Rows without the engine's log-probs are refused by name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import evenstep.train
import oracle
from evenstep.errors import ConfigError, RowError
from evenstep.types import Row
from loss_matrix import near_policies, split_row
from oracle import TokenLoss, oracle_step, rejected_rollouts
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, run_cases
from step_matrix import NORMALISERS
from tiny_models import tiny_model, true_float64
from tiny_rows import make_rows

MASK = {"sequence_mask": (0.8, 1.25)}
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.1},
    "gspo": {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "cispo": {"loss": "cispo", "clip_high": 0.1},
}
OLD = ("given", "detached", "reused plan", "other cells")
SHIFTS = {"g0/r0": 0.0, "g0/r1": 0.5, "g1/r0": -0.6, "g1/r1": 0.05}  # of the engine: two rollouts of four are far away
TOLERANCE = 1e-12

pytestmark = pytest.mark.timeout(400)


@functools.cache
def window() -> list[Row]:
    """Rows of one segment per rollout; the engine's log-probs are near, or shifted as a whole."""
    rows = []
    for row in near_policies(make_rows(((1, 1), (1, 1)), seed=5, min_tokens=9, max_tokens=12)):
        assert row.engine_logprobs is not None
        with true_float64():
            own = oracle_step(tiny_model(attention="eager"), [row]).logprobs[row.row_id].numpy()
        # the halves of a rollout lie far apart: either alone would be judged otherwise than the whole
        half = np.where(np.arange(row.num_tokens) < cut_of(row), 1.0, -1.0) * row.loss_mask
        half *= 0.4 / np.where(half > 0, (half > 0).sum(), max((half < 0).sum(), 1)) * row.num_trained_tokens / 2
        shifted = own + SHIFTS[str(row.rollout_id)] + half
        old = own + np.random.default_rng(3).normal(0, 0.02, row.num_tokens)
        rows.append(dataclasses.replace(row, engine_logprobs=shifted, old_logprobs=old))
    return rows


def cut_of(row: Row) -> int:
    return int(row.loss_mask.nonzero()[0][row.num_trained_tokens // 2])


def parts(rows: list[Row]) -> list[Row]:
    return [part for row in rows for part in split_row(row, cut_of(row))]


def cases() -> list[StepCase]:
    """Each loss with each kind of old log-probs, replicated and FSDP2 by turns, on whole rollouts and on split ones."""
    found = []
    for i, (loss, old) in enumerate(itertools.product(LOSSES, OLD)):
        is_sharded = (i + i // len(OLD)) % 2 == 1
        for form, change in (("whole", list), ("split", parts)):
            rows = change(window())
            if old != "given":
                rows = [dataclasses.replace(row, old_logprobs=None) for row in rows]
            shape = {"layout": "packed" if is_sharded else "padded", "max_tokens_per_gpu": 26}
            found.append(
                StepCase(
                    name=f"{loss} {old} {form}",
                    rows=rows,
                    trainer=LOSSES[loss] | MASK | shape | {"normaliser": "rollout"},
                    is_sharded=is_sharded,
                    scoring=old if old in ("reused plan", "other cells") else None,  # type: ignore[arg-type]
                )
            )
    assert {case.is_sharded for case in found if "detached" in case.name} == {False, True}
    return found


@once
def outcomes() -> dict[str, tuple[StepCase, list[CaseOutcome]]]:
    made = cases()
    by_rank = run_ranks(run_cases, 2, made, timeout_s=300, group_timeout_s=60)
    return {case.name: (case, [found[i] for found in by_rank]) for i, case in enumerate(made)}


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_oracle_split_or_whole(loss: str, old: str) -> None:
    whole, split = (outcomes()[f"{loss} {old} {form}"] for form in ("whole", "split"))
    for case, by_rank in (whole, split):
        expected, found = case.oracle(), by_rank[0]
        assert by_rank[1].metrics == found.metrics
        assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=TOLERANCE)
        assert oracle.relative_error(found.gradient, expected.gradient) <= TOLERANCE
        for name, value in expected.metrics.items():
            if name != "kl":  # no reference here
                assert found.metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
        kept = [row.num_trained_tokens for row in case.rows if abs(SHIFTS[str(row.rollout_id)]) < 0.2]
        total = sum(row.num_trained_tokens for row in case.rows)
        assert 0 < sum(kept) < total
        assert found.metrics["kept_fraction"] == pytest.approx(sum(kept) / total, rel=TOLERANCE)
        assert found.metrics["num_trained_tokens"] == total
    assert oracle.relative_error(split[1][0].gradient, whole[1][0].gradient) <= TOLERANCE
    ranks_of = {row_id: rank for rank, found in enumerate(split[1]) for row_id in found.own_logprobs}
    both = {o for o in SHIFTS if len({r for row_id, r in ranks_of.items() if str(row_id).startswith(o)}) == 2}
    assert both


def test_judged_row_by_row_differs() -> None:
    case, by_rank = outcomes()["ppo given split"]
    alone = [dataclasses.replace(row, rollout_id=row.row_id) for row in case.rows]
    settings = {name: case.trainer[name] for name in ("clip_low", "sequence_mask")}
    with true_float64():
        model = tiny_model(attention="eager")
        loss = TokenLoss(**settings)
        right, wrong = (rejected_rollouts(model, rows, loss) for rows in (case.rows, alone))
        assert {str(o).split("/s")[0] for o in wrong} != right
        exact, other = (oracle_step(model, rows, **settings).gradient for rows in (case.rows, alone))
    assert oracle.relative_error(other, exact) > 1e-2
    assert by_rank[0].metrics["kept_fraction"] not in (0.0, 1.0)


def step_of(rows: list[Row], **options: Any) -> tuple[float, dict[str, Any], dict[str, Any]]:
    model = tiny_model()
    trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    result = trainer.forward_backward(rows)
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return result.loss, gradient, result.metrics


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_rejected_tokens_stay_in_every_denominator(normaliser: str) -> None:
    rows, options = parts(window()), NORMALISERS[normaliser] | {"clip_low": 0.1}
    kept = [row for row in rows if abs(SHIFTS[str(row.rollout_id)]) < 0.2]
    without_signal = [row if row in kept else dataclasses.replace(row, advantage=0.0) for row in rows]
    with true_float64():
        loss, gradient, metrics = step_of(rows, **MASK, **options)
        same_loss, same, _ = step_of(without_signal, **options)
        _, wrong, _ = step_of(kept, **options)
    assert loss == pytest.approx(same_loss, rel=TOLERANCE)
    assert oracle.relative_error(gradient, same) <= TOLERANCE
    assert metrics["num_voters"] == 4
    assert oracle.relative_error(wrong, gradient) > 0.1


def test_other_terms_of_rejected_rollouts_stay() -> None:
    rows = [
        dataclasses.replace(row, ref_logprobs=row.old_logprobs)
        for row in window()
        if abs(SHIFTS[str(row.rollout_id)]) > 0.2
    ]
    quiet = [dataclasses.replace(row, advantage=0.0) for row in rows]
    terms = {"kl_coef": 0.2, "entropy_coef": 0.05}
    with true_float64():
        loss, gradient, metrics = step_of(rows, **MASK, **terms)
        same_loss, same, _ = step_of(quiet, **terms)
        _, nothing, _ = step_of(rows, **MASK)
    assert metrics["kept_fraction"] == 0.0
    assert loss == pytest.approx(same_loss, rel=TOLERANCE)
    assert oracle.relative_error(gradient, same) <= TOLERANCE
    assert oracle.gradient_norm(gradient) > 1e-3
    assert oracle.gradient_norm(nothing) == 0.0


def test_refusals() -> None:
    rows = [dataclasses.replace(row, engine_logprobs=None) for row in window()]
    with pytest.raises(RowError, match=r"sequence_mask = \(0\.8, 1\.25\) needs engine_logprobs on every row"):
        step_of(rows, **MASK)
    for bounds in ((1.0, 2.0), (0.5, 1.0), (-0.1, 2.0), (2.0, 0.5)):
        with pytest.raises(ConfigError, match=r"sequence_mask must be \(low, high\) with 0 <= low < 1 < high"):
            step_of(rows, sequence_mask=bounds)
