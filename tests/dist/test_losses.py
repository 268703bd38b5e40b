"""Every loss × normaliser × estimator on two gloo ranks is the step of one row at a time in one process.

1. In float64, for every loss (PPO clip, with dual clip, GSPO by rollout and by segment, CISPO) × normaliser ×
   estimator, and pairwise over the other terms (KL k2 and k3, entropy bonus, truncated importance weights, sequence
   masks), layouts,
   replicated and FSDP2, old log-probs or none, garbage in masked slots, temperatures and log-prob chunks: loss, whole
   gradient, metrics and per-row log-probs equal the oracle to 1e-12, and both ranks report the same.
2. The windows hold what losses are told apart by: tokens that a clip acts on and others, rollouts whose rows ran on
   different ranks, a voter without tokens, a failed rollout.
3. With whole rollouts split into segments every loss but GSPO by segment keeps loss, gradient and metrics; GSPO by
   segment does not.
4. GSPO whose mean is taken over the rows of one rank, or over each row, gives another gradient.
5. A user's own loss with the signature of the others runs on ranks and equals the loss that it restates; its metrics
   are token means over the window.
6. A rank without a row of its own, one inert cell and all, takes part in every loss with every term.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import oracle
from evenstep.types import Row
from loss_matrix import (
    FACTORS,
    LOSSES,
    TERMS,
    build_case,
    near_policies,
    oracle_case,
    own_ppo_clip,
    policy_rows,
    split_row,
)
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, run_cases
from step_matrix import covering, random_points
from tiny_models import tiny_model, true_float64
from tiny_rows import make_rows

TRIPLE = ("loss", "normaliser", "estimator")
POINTS = covering(FACTORS, TRIPLE)
SPLIT_SEGMENTS = ((1, 1), (1, 1, 1))  # one row a rollout, to be split
METRICS = ("entropy", "clip_fraction", "ratio_max_deviation", "kl", "engine_trainer_kl")
TOLERANCE = 1e-12

pytestmark = pytest.mark.timeout(400)  # the first test waits for the launch


def point_id(point: dict[str, Any]) -> str:
    return "-".join(str(value) for value in point.values())


def split_cases() -> list[StepCase]:
    """Each loss on rollouts of one row, and on the same rollouts with every row split in two."""
    whole = near_policies(make_rows(SPLIT_SEGMENTS, seed=5, min_tokens=8, max_tokens=12))
    windows = {"whole": whole, "split": [part for row in whole for part in split_row(row, cut_of(row))]}
    return [
        StepCase(
            name=f"{loss} {name}",
            rows=rows,
            trainer={"normaliser": "rollout", "layout": layout, "max_tokens_per_gpu": 24, **settings, **TERMS["all"]},
        )
        for loss, settings in LOSSES.items()
        for (name, rows), layout in zip(windows.items(), ("padded", "packed"), strict=True)
    ]


def cut_of(row: Row) -> int:
    """After the second trained token, so that both parts have some."""
    return int(row.loss_mask.nonzero()[0][1]) + 1


def own_loss_cases() -> list[StepCase]:
    case = build_case(dict.fromkeys(FACTORS) | {name: values[0] for name, values in FACTORS.items()})
    own = case.trainer | {"loss": own_ppo_clip}
    return [
        dataclasses.replace(case, name=f"own {is_sharded}", trainer=own, is_sharded=is_sharded)
        for is_sharded in (False, True)
    ]


@once
def outcomes() -> dict[str, tuple[StepCase, list[CaseOutcome]]]:
    """Case name -> (case, its outcome on either rank): one launch for all of this file."""
    cases = [*(build_case(point) for point in POINTS), *split_cases(), *own_loss_cases()]
    by_rank = run_ranks(run_cases, 2, cases, timeout_s=380, group_timeout_s=60)
    return {case.name: (case, [found[i] for found in by_rank]) for i, case in enumerate(cases)}


def as_names(logprobs: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(row_id): values for row_id, values in logprobs.items()}


def assert_equal(found: CaseOutcome, expected: oracle.OracleStep, rows: Any) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=TOLERANCE)
    assert oracle.relative_error(found.gradient, expected.gradient) <= TOLERANCE
    assert oracle.relative_error(as_names(found.logprobs), as_names(expected.logprobs)) <= TOLERANCE
    assert {row.row_id: (row.num_tokens,) for row in rows} == {k: tuple(v.shape) for k, v in found.logprobs.items()}
    assert set(expected.metrics) >= set(METRICS)
    for name in expected.metrics:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=TOLERANCE, abs=TOLERANCE), name


def assert_ranks_agree(by_rank: list[CaseOutcome]) -> None:
    first, second = by_rank
    assert (first.loss, first.metrics, first.cells) == (second.loss, second.metrics, second.cells)
    assert all(torch.equal(part, second.gradient[name]) for name, part in first.gradient.items())


@pytest.mark.parametrize("point", POINTS, ids=point_id)
def test_equals_the_oracle(point: dict[str, Any]) -> None:
    case, by_rank = outcomes()[build_case(point).name]
    assert_ranks_agree(by_rank)
    assert_equal(by_rank[0], oracle_case(point).oracle(), case.rows)


def test_every_combination_is_there() -> None:
    assert {tuple(point[name] for name in TRIPLE) for point in POINTS} == {
        (loss, normaliser, estimator)
        for loss in FACTORS["loss"]
        for normaliser in FACTORS["normaliser"]
        for estimator in FACTORS["estimator"]
    }
    for a in FACTORS:
        for b in FACTORS:
            if a != b:
                assert len({(p[a], p[b]) for p in POINTS}) == len(FACTORS[a]) * len(FACTORS[b])


def test_the_windows_tell_losses_apart() -> None:
    for point in POINTS:
        case, by_rank = outcomes()[build_case(point).name]
        ranks_of = {row_id: rank for rank, found in enumerate(by_rank) for row_id in found.own_logprobs}
        rollouts = {row.rollout_id for row in case.rows}
        assert any(len({ranks_of[row.row_id] for row in case.rows if row.rollout_id == o}) == 2 for o in rollouts)
        assert case.voters is not None
        assert set(case.voters) - rollouts == {"g0/r2"}
        assert by_rank[0].metrics["num_voters"] == 6
        if point["has_old"]:
            assert 0.1 < by_rank[0].metrics["clip_fraction"] < 0.9
        elif point["loss"] != "cispo":
            assert by_rank[0].metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize("loss", LOSSES)
def test_splitting_rollouts(loss: str) -> None:
    whole, split = (outcomes()[f"{loss} {name}"] for name in ("whole", "split"))
    assert_ranks_agree(whole[1])
    assert_ranks_agree(split[1])
    for case, by_rank in (whole, split):
        assert_equal(by_rank[0], case.oracle(), case.rows)
    error = oracle.relative_error(split[1][0].gradient, whole[1][0].gradient)
    if loss == "gspo-segment":
        assert error > 1e-2
        return
    assert error <= TOLERANCE
    assert split[1][0].loss == pytest.approx(whole[1][0].loss, rel=TOLERANCE)
    for name in METRICS:
        assert split[1][0].metrics[name] == pytest.approx(whole[1][0].metrics[name], rel=TOLERANCE, abs=TOLERANCE)


def test_ratio_of_one_rank_or_one_row_differs() -> None:
    case, by_rank = outcomes()["gspo-rollout split"]
    rank_of = {row_id: rank for rank, found in enumerate(by_rank) for row_id in found.own_logprobs}
    settings = {name: value for name, value in case.trainer.items() if name not in ("layout", "max_tokens_per_gpu")}
    # as if the rows of a rollout on another rank were another rollout's; weights by token stay what they are
    local = [dataclasses.replace(row, rollout_id=(row.rollout_id, rank_of[row.row_id])) for row in case.rows]
    with true_float64():
        exact, one_rank, one_row = (
            oracle.oracle_step(
                tiny_model(attention="eager"), rows, **settings | {"normaliser": "token", "ratio_unit": u}
            )
            for rows, u in ((case.rows, "rollout"), (local, "rollout"), (case.rows, "segment"))
        )
    for wrong in (one_rank, one_row):
        assert oracle.relative_error(wrong.gradient, exact.gradient) > 1e-3


@pytest.mark.parametrize("is_sharded", [False, True])
def test_own_loss(is_sharded: bool) -> None:
    case, by_rank = outcomes()[f"own {is_sharded}"]
    assert_ranks_agree(by_rank)
    restated = dataclasses.replace(case, trainer=case.trainer | {"loss": "ppo_clip"})
    expected = restated.oracle()
    assert oracle.relative_error(by_rank[0].gradient, expected.gradient) <= TOLERANCE
    assert by_rank[0].loss == pytest.approx(expected.loss, rel=TOLERANCE)
    squares = [float(a) ** 2 for row in case.rows for a in row.advantages_T[row.loss_mask]]
    assert by_rank[0].metrics["squared_advantage"] == pytest.approx(sum(squares) / len(squares), rel=TOLERANCE)
    assert "clip_fraction" not in by_rank[0].metrics


def lone_cases() -> list[StepCase]:
    """One row, so that the second rank has an inert cell and no other: each loss, each term, both kinds of ranks."""
    row = policy_rows(1.0)[1]
    return [
        StepCase(
            name=f"{loss} {terms} {is_sharded}", rows=[row], trainer=settings | TERMS[terms], is_sharded=is_sharded
        )
        for loss, settings in LOSSES.items()
        for terms in ("none", "k2", "capped", "all")
        for is_sharded in (False, True)
    ]


@once
def lone_outcomes() -> dict[str, tuple[StepCase, list[CaseOutcome]]]:
    cases = lone_cases()
    by_rank = run_ranks(run_cases, 2, cases, timeout_s=170)
    return {case.name: (case, [found[i] for found in by_rank]) for i, case in enumerate(cases)}


@pytest.mark.parametrize("name", [case.name for case in lone_cases()])
def test_fewer_rows_than_ranks(name: str) -> None:
    case, by_rank = lone_outcomes()[name]
    assert_ranks_agree(by_rank)
    assert sorted(len(found.own_logprobs) for found in by_rank) == [0, 1]
    assert_equal(by_rank[0], case.oracle(), case.rows)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_random_points(world_size: int) -> None:
    points = random_points(FACTORS, 40, seed=100 + world_size)
    cases = [build_case(point) for point in points]
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=500, group_timeout_s=60)
    for i, (case, point) in enumerate(zip(cases, points, strict=True)):
        assert_equal(by_rank[0][i], oracle_case(point).oracle(), case.rows)
