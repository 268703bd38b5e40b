"""The step on 1, 2, 3 and 4 gloo ranks is the step of one row at a time in one process.

1. In float64, for every rank count × layout × budget × (replicated, FSDP2), and pairwise over windows (old log-probs or
   none, garbage in masked slots, shuffled rows, fewer rows than ranks, all rows but one masked, voters without rows),
   normalisers, model families, pad multiples, clip ranges and per-token advantages: loss, whole gradient, metrics and
   per-row log-probs equal the oracle to 1e-12, and (on 2 ranks) no float32 tensor appears.
2. Every rank reports the same loss, gradient, metrics and gathered log-probs; each row ran on exactly one rank.
3. In float32: 1e-6 against the float32 one-row run, 5e-6 against float64.
4. Mean of means and a forgotten sum over ranks give another gradient, by far more than the tolerance.
5. Token, rollout, prompt and constant weights survive splitting a rollout's rows at turn boundaries; row does not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oracle
from evenstep.types import Row
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, run_cases
from step_matrix import FACTORS, NORMALISERS, WORLD_SIZES, build_case, covering, random_points
from tiny_models import VOCAB, tiny_model, true_float64
from tiny_rows import REWARDS, make_rows, with_old_logprobs

POINTS = covering(FACTORS, ("world_size", "shape", "is_sharded"))
FLOAT32_FACTORS = FACTORS | {
    "world_size": (2, 3),
    "shape": ("padded-30", "packed-30", "fixed-2"),
    "dtype": (torch.float32,),
}
FLOAT32_POINTS = covering(FLOAT32_FACTORS, ("world_size", "shape", "is_sharded"))[:12]
METRICS = ("entropy", "clip_fraction", "ratio_max_deviation")


@once
def outcomes(world_size: int, dtype: torch.dtype) -> dict[str, tuple[StepCase, list[CaseOutcome]]]:
    """Case name -> (case, its outcome on every rank); one launch for all cases of a rank count."""
    points = POINTS if dtype == torch.float64 else FLOAT32_POINTS
    cases = [build_case(point) for point in points if point["world_size"] == world_size]
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=170)
    return {case.name: (case, [found[i] for found in by_rank]) for i, case in enumerate(cases)}


def concatenated(logprobs: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {repr(row_id): values.double() for row_id, values in logprobs.items()}


def assert_equal(case: StepCase, found: CaseOutcome, expected: oracle.OracleStep, tolerance: float) -> None:
    assert abs(found.loss - expected.loss) <= tolerance * max(1.0, abs(expected.loss))
    assert oracle.relative_error(found.gradient, expected.gradient) <= tolerance
    assert oracle.relative_error(concatenated(found.logprobs), concatenated(expected.logprobs)) <= tolerance
    for row in case.rows:
        assert found.logprobs[row.row_id].shape == (row.num_tokens,)
        assert not found.logprobs[row.row_id][torch.tensor(~row.loss_mask)].any()
    for name in METRICS:
        scale = max(1.0, abs(expected.metrics[name]))
        assert abs(found.metrics[name] - expected.metrics[name]) <= tolerance * scale, name
    assert found.metrics["num_rows"] == len(case.rows)
    assert found.metrics["num_trained_tokens"] == sum(row.num_trained_tokens for row in case.rows)
    voters = {row.rollout_id for row in case.rows} if case.voters is None else case.voters
    assert found.metrics["num_voters"] == len(voters)
    assert found.grad_norms[0] == pytest.approx(oracle.gradient_norm(expected.gradient), rel=tolerance)


def assert_ranks_agree(case: StepCase, by_rank: list[CaseOutcome]) -> None:
    first = by_rank[0]
    for other in by_rank[1:]:
        assert other.loss == first.loss
        assert other.metrics == first.metrics
        assert other.cells == first.cells
        for name, part in first.gradient.items():
            assert torch.equal(other.gradient[name], part)
        for row_id, values in first.logprobs.items():
            assert torch.equal(other.logprobs[row_id], values)
    ran = [row_id for found in by_rank for row_id in found.own_logprobs]
    assert sorted(map(repr, ran)) == sorted(repr(row.row_id) for row in case.rows)
    planned = [[case.rows[i].row_id for cell in cells for i in cell] for cells in first.cells]
    assert [sorted(ids, key=repr) for ids in planned] == [sorted(found.own_logprobs, key=repr) for found in by_rank]
    assert len({len(cells) for cells in first.cells}) == 1


def ids_of(points: list[dict[str, Any]]) -> list[str]:
    return [f"{i}-" + "-".join(str(value) for value in point.values()) for i, point in enumerate(points)]


@pytest.mark.parametrize("point", POINTS, ids=ids_of(POINTS))
def test_float64_equals_the_oracle(point: dict[str, Any]) -> None:
    case, by_rank = outcomes(point["world_size"], torch.float64)[build_case(point).name]
    assert_ranks_agree(case, by_rank)
    assert_equal(case, by_rank[0], case.oracle(), 1e-12)


@pytest.mark.parametrize("point", FLOAT32_POINTS, ids=ids_of(FLOAT32_POINTS))
def test_float32_equals_one_row_at_a_time(point: dict[str, Any]) -> None:
    case, by_rank = outcomes(point["world_size"], torch.float32)[build_case(point).name]
    assert_ranks_agree(case, by_rank)
    found = by_rank[0]
    assert {part.dtype for part in found.gradient.values()} == {torch.float32}
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 5e-6)):
        expected = case.oracle(dtype)
        assert oracle.relative_error(found.gradient, expected.gradient) <= tolerance
        assert oracle.relative_error(concatenated(found.logprobs), concatenated(expected.logprobs)) <= tolerance
        assert abs(found.loss - expected.loss) <= tolerance * max(1.0, abs(expected.loss))


def test_every_pair_of_values_is_covered() -> None:
    for world_size in WORLD_SIZES:
        for shape in FACTORS["shape"]:
            for is_sharded in (False, True):
                assert any(
                    (p["world_size"], p["shape"], p["is_sharded"]) == (world_size, shape, is_sharded) for p in POINTS
                )
    for a, b in [("window", "normaliser"), ("window", "shape"), ("normaliser", "world_size"), ("family", "shape")]:
        assert len({(p[a], p[b]) for p in POINTS}) == len(FACTORS[a]) * len(FACTORS[b])


@pytest.mark.parametrize("world_size", [2, 4])
def test_wrong_formulas_differ(world_size: int) -> None:
    with true_float64():
        rows = with_old_logprobs(make_rows(), tiny_model())
    case = StepCase(name="wrong", rows=rows, trainer={"layout": "padded", "max_tokens_per_gpu": 30})
    by_rank = [found[0] for found in run_ranks(run_cases, world_size, [case])]
    exact = case.oracle().gradient
    cells = [[case.rows[i] for i in cell] for rank in by_rank[0].cells for cell in rank if cell]
    assert len(cells) > world_size
    with true_float64():
        parts = [oracle.oracle_step(tiny_model(attention="eager"), cell).gradient for cell in cells]
    mean_of_means = {name: sum(part[name] for part in parts) / len(parts) for name in exact}
    averaged_over_ranks = {name: part / world_size for name, part in exact.items()}
    for wrong in (mean_of_means, averaged_over_ranks):
        assert oracle.relative_error(wrong, exact) > 1e-2
        assert oracle.relative_error(by_rank[0].gradient, wrong) > 1e-2
    assert oracle.relative_error(by_rank[0].gradient, exact) < 1e-12


def split_windows() -> dict[str, list[Row]]:
    """The same rollouts as one row each, and split into one row per turn: history is context in the later rows."""
    generator = torch.Generator().manual_seed(3)
    whole, split = [], []
    for r, num_turns in enumerate((3, 1, 4, 2)):
        ids, mask = torch.randint(VOCAB, (2,), generator=generator).tolist(), [0, 0]
        advantage = REWARDS[r] - 0.5
        fields: dict[str, Any] = {"rollout_id": f"r{r}", "group_id": f"g{r % 2}", "advantage": advantage}
        for turn in range(num_turns):
            num_sampled = 1 + (r + turn) % 3
            ids += torch.randint(VOCAB, (num_sampled,), generator=generator).tolist()
            turn_mask = [0] * len(mask) + [1] * num_sampled
            split.append(Row(row_id=f"r{r}/{turn}", token_ids=list(ids), loss_mask=turn_mask, **fields))
            mask += [1] * num_sampled
            if turn + 1 < num_turns:
                ids += torch.randint(VOCAB, (2,), generator=generator).tolist()
                mask += [0, 0]
        whole.append(Row(row_id=f"r{r}", token_ids=ids, loss_mask=mask, **fields))
    assert sum(row.num_trained_tokens for row in whole) == sum(row.num_trained_tokens for row in split)
    return {"whole": whole, "split": split}


@once
def split_outcomes() -> dict[str, CaseOutcome]:
    windows = split_windows()
    with true_float64():
        model = tiny_model()
        olds = {name: with_old_logprobs(rows, model, spread=0.0) for name, rows in windows.items()}
    cases = [
        StepCase(
            name=f"{normaliser} {name}", rows=rows, trainer={"max_tokens_per_gpu": 40, "layout": layout, **settings}
        )
        for normaliser, settings in NORMALISERS.items()
        for (name, rows), layout in zip(olds.items(), ("padded", "packed"), strict=True)
    ]
    by_rank = run_ranks(run_cases, 2, cases)
    return {case.name: found for case, found in zip(cases, by_rank[0], strict=True)}


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_splitting_a_rollout(normaliser: str) -> None:
    whole, split = (split_outcomes()[f"{normaliser} {name}"] for name in ("whole", "split"))
    error = oracle.relative_error(split.gradient, whole.gradient)
    if normaliser == "row":
        assert error > 1e-2
    else:
        assert error < 1e-12
        assert split.loss == pytest.approx(whole.loss, rel=1e-12)
        assert split.metrics["entropy"] == pytest.approx(whole.metrics["entropy"], rel=1e-12)
        assert split.metrics["num_trained_tokens"] == whole.metrics["num_trained_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.timeout(600)
def test_random_points(world_size: int, seed: int) -> None:
    points = random_points(FACTORS | {"world_size": (world_size,)}, 40, seed=seed)
    cases = [build_case(point, seed=seed + i) for i, point in enumerate(points)]
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=500, group_timeout_s=60)
    for i, case in enumerate(cases):
        assert_ranks_agree(case, [found[i] for found in by_rank])
        assert_equal(case, by_rank[0][i], case.oracle(), 1e-12)
