"""The step on 1, 2, 3 and 4 gloo ranks is the step of one row at a time in one process.

1. In float64, for every rank count × layout and budget, and pairwise over everything else: replicated or FSDP2; fewer
   rows than ranks, all rows but one masked, no trained token at all, voters without rows; shuffled rows; NaN, infinite
   and huge values in masked slots; 0 to K·ranks - 1 filler rows full of garbage; random tokens in the executor's own
   fillers and in padding; rollouts' rows split at turns, or merged; old log-probs given, none, scored with the plan of
   training, scored in other cells; rows of a group that begin alike; KL, entropy and importance terms; normalisers, clip ranges, advantages per token,
   pad multiples, clipping by norm, model families. Loss, whole gradient, metrics, per-row log-probs and the weights
   after the SGD step equal the oracle of the unsplit, unshuffled, clean rows to 1e-12 (how far weights moved: 1e-11),
   and (on 2 ranks) no float32 tensor appears.
2. Counts of rows, trained tokens, voters, segments, micro-batches and fillers are those of the window and of its plan;
   the plan is the one that this process makes alone.
3. Every rank reports the same loss, gradient, weights, metrics and log-probs; each row ran on exactly one rank.
4. A ratio against log-probs scored with the training plan is exactly 1.
5. In float32: 1e-6 against the float32 one-row run, 5e-6 against float64.
6. The points hold every pair of values of any two factors, and on every rank count each of the situations above has
   really happened.
7. Mean of means, an average over ranks and fillers in N give another gradient, by far more than the tolerance; so does
   splitting rows with normaliser row.
8. Long: random points on random segments; the seed changes with the day or CI run, is printed, and EVENSTEP_TEST_SEED
   repeats it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, run_cases
from step_matrix import FACTORS, PINNED, WORLD_SIZES, build_case, covering, random_points
from tiny_models import tiny_model, true_float64
from tiny_rows import filler_rows, split_at_turns

FULL = ("world_size", "shape")  # whose product is complete
POINTS = covering(FACTORS, FULL, seed=1, num_tries=120, pinned=PINNED)  # of 50 lists one of the fastest
FLOAT32_FACTORS = FACTORS | {
    "world_size": (3,),
    "shape": ("padded-30", "packed-30", "tree-30", "fixed-2"),
    "dtype": (torch.float32,),
}
FLOAT32_POINTS = covering(FLOAT32_FACTORS, ("shape", "is_sharded"))[:6]
LR = 0.1  # of every StepCase
TOLERANCE = 1e-12

Found = tuple[StepCase, list[CaseOutcome]]  # a case and its outcome on every rank


@functools.cache
def case_of(index: int, is_float64: bool = True) -> StepCase:
    return build_case((POINTS if is_float64 else FLOAT32_POINTS)[index])


def plain_point(**values: Any) -> dict[str, Any]:
    return {name: choices[0] for name, choices in FACTORS.items()} | values


def extra_cases(world_size: int) -> list[StepCase]:
    """For the tests of wrong formulas: normaliser row with rows whole and split, and a plain window."""
    points: dict[str, dict[str, Any]] = {}
    if world_size == 2:
        row = plain_point(world_size=2, shape="padded-200", normaliser="row")
        points = {"row whole": row, "row split": row | {"segments": "split"}}
    elif world_size == 4:
        points = {"plain": plain_point(world_size=4, shape="padded-11")}
    return [dataclasses.replace(build_case(point), name=name) for name, point in points.items()]


@once
def launch(world_size: int, is_float64: bool) -> dict[int | str, Found]:
    """Index of a point, or name of an extra case -> what was found; one launch for all cases of a rank count."""
    points = POINTS if is_float64 else FLOAT32_POINTS
    cases: dict[int | str, StepCase] = {
        i: case_of(i, is_float64) for i, point in enumerate(points) if point["world_size"] == world_size
    }
    if is_float64:
        cases |= {case.name: case for case in extra_cases(world_size)}
    by_rank = run_ranks(run_cases, world_size, list(cases.values()), timeout_s=170)
    return {key: (case, [found[i] for found in by_rank]) for i, (key, case) in enumerate(cases.items())}


def by_token(rows: Any, logprobs: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Row id before splitting -> [T] the log-prob of each trained token, wherever it was trained."""
    found: dict[str, torch.Tensor] = {}
    for row in rows:
        if row.num_trained_tokens:
            origin, values = str(row.row_id).split("#")[0], logprobs[row.row_id].double()
            before = found.get(origin, torch.zeros(0, dtype=torch.float64))
            longest = max(len(before), len(values))
            found[origin] = sum(torch.nn.functional.pad(part, (0, longest - len(part))) for part in (before, values))
    return found


def assert_close(found: float | None, expected: float, tolerance: float, what: str) -> None:
    assert found is not None, what
    assert abs(found - expected) <= tolerance * max(1.0, abs(expected)), what


def assert_numbers(case: StepCase, found: CaseOutcome, expected: oracle.OracleStep, tolerance: float) -> None:
    """Loss, gradient, per-row log-probs and metrics."""
    assert_close(found.loss, expected.loss, tolerance, "loss")
    assert oracle.relative_error(found.gradient, expected.gradient) <= tolerance
    assert {row.row_id for row in case.rows} == set(found.logprobs)
    for row in case.rows:
        assert found.logprobs[row.row_id].shape == (row.num_tokens,)
        assert not found.logprobs[row.row_id][torch.tensor(~row.loss_mask)].any()
    values = by_token(case.rows, found.logprobs), by_token(case.reference_rows, expected.logprobs)
    assert oracle.relative_error(*values) <= tolerance
    for name, value in expected.metrics.items():
        if has_data(case, name):
            assert_close(found.metrics[name], value, tolerance, name)
        else:
            assert found.metrics.get(name) is None, name
            assert value == 0.0, name


def has_data(case: StepCase, metric: str) -> bool:
    """Whether the window says anything about a metric: means over no token and fields that no row carries are null."""
    sources = {"kl": "ref_logprobs", "engine_trainer_kl": "engine_logprobs"}
    if metric in sources and getattr(case.rows[0], sources[metric]) is None:
        return False
    is_mean = metric in ("entropy", "clip_fraction", *sources)
    return metric == "ratio_max_deviation" or (is_mean and any(row.num_trained_tokens for row in case.rows))


def assert_counts(case: StepCase, found: CaseOutcome) -> None:
    per_rollout: dict[Any, int] = {}
    for row in case.rows:
        per_rollout[row.rollout_id] = per_rollout.get(row.rollout_id, 0) + 1
    cells = [cell for rank in found.cells for cell in rank]
    num_slots = case.trainer.get("micro_batch_rows", 1) if case.trainer["layout"] == "fixed" else 1
    num_fillers = sum(max(0, num_slots - len(cell)) for cell in cells)
    metrics = found.metrics
    assert found.cells == case.plan(len(found.cells)).cells
    assert {len(rank) for rank in found.cells} == {metrics["num_microbatches"]}
    assert metrics["num_fillers"] == found.stats.num_fillers == num_fillers
    assert metrics["num_rows"] == len(case.rows)
    assert metrics["num_trained_tokens"] == sum(row.num_trained_tokens for row in case.rows)
    assert metrics["num_voters"] == len(per_rollout if case.voters is None else case.voters)
    assert metrics["segments_per_rollout_mean"] == len(case.rows) / len(per_rollout)
    assert metrics["segments_per_rollout_max"] == max(per_rollout.values())


def assert_stepped(case: StepCase, found: CaseOutcome, expected: oracle.OracleStep) -> None:
    """The weights moved by the oracle's clipped gradient, or not at all."""
    before, after = found.weights
    assert found.grad_norms[0] == pytest.approx(oracle.gradient_norm(expected.gradient), rel=TOLERANCE)
    has_signal = any(row.advantages_T.any() for row in case.rows) or case.trainer.get("kl_coef", 0) != 0
    reason = None
    if not any(row.num_trained_tokens for row in case.rows):
        reason = "no trained tokens in the window"
    elif not has_signal:
        reason = "all advantages are exactly 0"
    assert found.skip_reasons == (reason,)
    assert found.stepped == (reason is None,)
    if reason is not None:
        assert oracle.gradient_norm(expected.gradient) == 0.0
        assert all(torch.equal(after[name], before[name]) for name in before)
        return
    max_norm = case.trainer["max_grad_norm"]
    weights = oracle.sgd_step(before, expected.gradient, lr=LR, max_norm=max_norm)
    assert oracle.relative_error(after, weights) <= TOLERANCE
    moved, should_move = ({name: end[name] - before[name] for name in before} for end in (after, weights))
    assert oracle.relative_error(moved, should_move) <= 1e-11  # the weights' rounding, against a small step


def assert_ranks_agree(case: StepCase, by_rank: list[CaseOutcome]) -> None:
    first = by_rank[0]
    for other in by_rank[1:]:
        assert other.loss == first.loss
        assert other.metrics == first.metrics
        assert other.cells == first.cells
        for name, part in first.gradient.items():
            assert torch.equal(other.gradient[name], part)
        for name, part in first.weights[-1].items():
            assert torch.equal(other.weights[-1][name], part)
        for row_id, values in first.logprobs.items():
            assert torch.equal(other.logprobs[row_id], values)
    ran = [row_id for found in by_rank for row_id in found.own_logprobs]
    assert sorted(ran) == sorted(row.row_id for row in case.rows)
    planned = [[case.rows[i].row_id for cell in cells for i in cell] for cells in first.cells]
    assert [sorted(ids) for ids in planned] == [sorted(found.own_logprobs) for found in by_rank]


def assert_equals_the_oracle(case: StepCase, by_rank: list[CaseOutcome]) -> None:
    expected = case.oracle()
    assert_ranks_agree(case, by_rank)
    assert_numbers(case, by_rank[0], expected, TOLERANCE)
    assert_counts(case, by_rank[0])
    assert_stepped(case, by_rank[0], expected)
    if case.scoring == "reused plan":
        assert by_rank[0].scored_cells == (by_rank[0].cells,)
        # an expert multiplies the padding that chose it together with the tokens: other garbage, other rounding
        is_rounded = case.has_dirty_fillers and case.model["family"] == "gpt_oss"
        assert 0 <= by_rank[0].metrics["ratio_max_deviation"] <= (1e-14 if is_rounded else 0.0)


def ids_of(points: list[dict[str, Any]]) -> list[str]:
    return [f"{i}-" + "-".join(str(value) for value in point.values()) for i, point in enumerate(points)]


@pytest.mark.parametrize("index", range(len(POINTS)), ids=ids_of(POINTS))
def test_float64_equals_the_oracle(index: int) -> None:
    assert_equals_the_oracle(*launch(POINTS[index]["world_size"], True)[index])


@pytest.mark.parametrize("index", range(len(FLOAT32_POINTS)), ids=ids_of(FLOAT32_POINTS))
def test_float32_equals_one_row_at_a_time(index: int) -> None:
    case, by_rank = launch(FLOAT32_POINTS[index]["world_size"], False)[index]
    assert_ranks_agree(case, by_rank)
    found = by_rank[0]
    assert {part.dtype for part in found.gradient.values()} == {torch.float32}
    if case.scoring == "reused plan":
        assert found.metrics["ratio_max_deviation"] == 0.0
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 5e-6)):
        assert_numbers(case, found, case.oracle(dtype), tolerance)


def test_every_pair_of_values_is_covered() -> None:
    assert {tuple(point[name] for name in FULL) for point in POINTS} == set(
        itertools.product(*(FACTORS[name] for name in FULL))
    )
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(p[a], p[b]) for p in POINTS} == set(itertools.product(FACTORS[a], FACTORS[b])), (a, b)


def situations(case: StepCase, by_rank: list[CaseOutcome]) -> set[str]:
    """What happened in a case, from its rows and from what its ranks did."""
    first, rows, num_ranks = by_rank[0], case.rows, len(by_rank)
    happened = set()
    cells = [cell for rank in first.cells for cell in rank]
    trained_on = [{row_id for row_id, values in found.own_logprobs.items() if values.any()} for found in by_rank]
    num_added = sum(str(row.row_id).startswith("filler/") for row in rows)
    most = num_ranks * len(dataclasses.replace(case, rows=rows_without_fillers(case)).plan(num_ranks).cells[0]) - 1
    if most > 0 and num_added in (0, most):
        happened.add("no filler added" if num_added == 0 else "K·ranks - 1 fillers added")
    if 0 < num_added < most:
        happened.add("some fillers added")
    if any(found.num_dirty_fillers for found in by_rank):
        happened.add("random tokens in inert rows")
    if len(rows) < num_ranks and any(not any(rank) for rank in first.cells):
        happened.add("fewer rows than ranks")
    if any(found.own_logprobs and not trained for found, trained in zip(by_rank, trained_on, strict=True)):
        happened.add("a rank all masked beside others" if any(trained_on) else "all ranks all masked")
    row_ids = [row.row_id for row in rows_without_fillers(case)]
    if row_ids != sorted(row_ids):
        happened.add("shuffled")
    for name in ("old_logprobs", "ref_logprobs", "engine_logprobs"):
        values = [getattr(row, name) for row in rows if row.num_trained_tokens]
        if any(value is not None and np.isnan(value).any() and np.isinf(value).any() for value in values):
            happened.add(f"NaN and inf in {name} of trained rows")
    if any(np.isnan(row.advantage).any() for row in rows if row.num_trained_tokens):
        happened.add("NaN in advantages of trained rows")
    assert case.reference_rows is not None
    origins: dict[str, set[int]] = {}
    for rank, found in enumerate(by_rank):
        for row_id in found.own_logprobs:
            origins.setdefault(str(row_id).split("#")[0], set()).add(rank)
    if len(rows) - num_added > len(case.reference_rows):
        happened.add("split")
        if any(len(ranks) > 1 for ranks in origins.values()):
            happened.add("parts of a row on several ranks")
    if len(rows) - num_added < len(case.reference_rows):
        happened.add("merged")
    if case.scoring is not None:
        has_same_cells = first.scored_cells == (first.cells,)
        happened.add(f"scored in {'the training' if has_same_cells else 'other'} cells")
    if any(
        len(cell) == 1 and rows[cell[0]].num_tokens > case.trainer.get("max_tokens_per_gpu", rows[cell[0]].num_tokens)
        for cell in cells
    ):
        happened.add("a row over the budget")
    if 0.1 < (first.metrics["clip_fraction"] or 0) < 0.9:
        happened.add("some tokens clipped")
    if case.trainer["layout"] == "tree" and first.stats.padding_efficiency > 1:
        happened.add("fewer tokens computed than the rows have")
    max_norm = case.trainer["max_grad_norm"]
    if first.stepped[0] and max_norm is not None:
        happened.add("norm clipped" if first.grad_norms[0] > max_norm else "norm below the limit")
    return happened


def rows_without_fillers(case: StepCase) -> list[Any]:
    return [row for row in case.rows if not str(row.row_id).startswith("filler/")]


SITUATIONS = {
    *("no filler added", "some fillers added", "K·ranks - 1 fillers added", "random tokens in inert rows"),
    *("fewer rows than ranks", "a rank all masked beside others", "all ranks all masked", "shuffled"),
    *(f"NaN and inf in {name} of trained rows" for name in ("old_logprobs", "ref_logprobs", "engine_logprobs")),
    *("NaN in advantages of trained rows", "split", "parts of a row on several ranks", "merged"),
    *("scored in the training cells", "scored in other cells", "a row over the budget"),
    *("some tokens clipped", "norm clipped", "fewer tokens computed than the rows have"),
}
NEED_SEVERAL_RANKS = {"fewer rows than ranks", "a rank all masked beside others", "parts of a row on several ranks"}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_situation_happened(world_size: int) -> None:
    happened = set()
    for key, found in launch(world_size, True).items():
        if isinstance(key, int):
            happened |= situations(*found)
    assert (SITUATIONS if world_size > 1 else SITUATIONS - NEED_SEVERAL_RANKS) <= happened


def test_wrong_formulas_differ() -> None:
    case, by_rank = launch(4, True)["plain"]
    expected = case.oracle()
    assert_equals_the_oracle(case, by_rank)
    exact = expected.gradient
    cells = [[case.rows[i] for i in cell] for rank in by_rank[0].cells for cell in rank if cell]
    assert len(cells) > 4
    num_tokens = sum(row.num_trained_tokens for row in case.rows)
    num_filler_tokens = sum(row.num_tokens - 1 for row in filler_rows(case.rows, 3))
    with true_float64():
        model = tiny_model(attention="eager")
        parts = [oracle.oracle_step(model, cell).gradient for cell in cells]
    wrong = {
        "mean of means": {name: sum(part[name] for part in parts) / len(parts) for name in exact},
        "averaged over ranks": {name: part / 4 for name, part in exact.items()},
        "fillers in N": {name: part * num_tokens / (num_tokens + num_filler_tokens) for name, part in exact.items()},
    }
    for what, gradient in wrong.items():
        assert oracle.relative_error(by_rank[0].gradient, gradient) > 1e-2, what


def test_row_weights_do_not_survive_splitting() -> None:
    whole, split = (launch(2, True)[f"row {name}"] for name in ("whole", "split"))
    for case, by_rank in (whole, split):
        assert_equals_the_oracle(case, by_rank)
    assert len(split[0].rows) > len(whole[0].rows)
    assert oracle.relative_error(split[1][0].gradient, whole[1][0].gradient) > 1e-2


def test_split_rows_train_each_token_once() -> None:
    for row in build_case(plain_point()).rows:
        parts = split_at_turns(row)
        trained = [{int(t) for t in np.flatnonzero(part.loss_mask)} for part in parts]
        assert sum(map(len, trained)) == row.num_trained_tokens
        assert set().union(*trained) == {int(t) for t in np.flatnonzero(row.loss_mask)}
        for part in parts:
            assert part.token_ids.tolist() == row.token_ids[: part.num_tokens].tolist()


def rotating_seed() -> int:
    """Another one each CI run, or each day; EVENSTEP_TEST_SEED repeats one."""
    for name in ("EVENSTEP_TEST_SEED", "GITHUB_RUN_ID", "CI_PIPELINE_ID"):
        if os.environ.get(name):
            return int(os.environ[name])
    return datetime.date.today().toordinal()


@pytest.mark.long
@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.timeout(600)
def test_random_points(world_size: int, batch: int) -> None:
    seed = rotating_seed()
    print(f"random points; repeat with EVENSTEP_TEST_SEED={seed}")
    first = 1000 * seed + 100 * batch + 1  # never 0, which stands for the segments of the quick part
    points = random_points(FACTORS | {"world_size": (world_size,)}, 40, seed=first)
    cases = [build_case(point, seed=first + i) for i, point in enumerate(points)]
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=500, group_timeout_s=60)
    for i, case in enumerate(cases):
        try:
            assert_equals_the_oracle(case, [found[i] for found in by_rank])
        except AssertionError as error:
            error.add_note(f"in case {case.name!r}; repeat with EVENSTEP_TEST_SEED={seed}")
            raise
