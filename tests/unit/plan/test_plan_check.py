"""``StepPlan.check``: a plan that breaks a promise is refused with its name, the ids and the numbers.

1. Each promise, broken on purpose, is found and named.
2. A plan is refused for other lengths than its own.
3. JSON: keys, round trip, tampering, another format version.
4. The hash is a pure function of what runs where: pinned value, equal in a process with another hash seed.
5. Ranks out of range are refused.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from evenstep.errors import PlanError
from evenstep.plan import Overlong, StepPlan, plan_step

LENGTHS = [9, 8, 7, 5, 4, 3, 2, 2]


def _plan(**options) -> StepPlan:
    return plan_step(LENGTHS, **{"num_ranks": 2, "max_tokens_per_gpu": 12, "layout": "packed", **options})


def _with(plan: StepPlan, cells: list[list[list[int]]], **changes) -> StepPlan:
    return replace(plan, cells=tuple(tuple(tuple(cell) for cell in rank) for rank in cells), **changes)


def _lists(plan: StepPlan) -> list[list[list[int]]]:
    return [[list(cell) for cell in rank] for rank in plan.cells]


def _refused(plan: StepPlan, message: str, lengths=LENGTHS, **ids) -> None:
    with pytest.raises(PlanError, match=message):
        plan.check(lengths, **ids)


def test_a_lost_row() -> None:
    plan, cells = _plan(), _lists(_plan())
    row = cells[0][0].pop()
    _refused(_with(plan, cells), rf"'coverage'.*row {row} in 0 cells")


def test_a_doubled_row() -> None:
    plan, cells = _plan(), _lists(_plan())
    cells[1][-1].append(cells[0][0][0])
    _refused(_with(plan, cells), rf"'coverage'.*row {cells[0][0][0]} in 2 cells \(rank, micro-batch: \[\(0, 0\)")


def test_a_row_that_does_not_exist() -> None:
    plan, cells = _plan(), _lists(_plan())
    cells[0][0].append(99)
    _refused(_with(plan, cells), r"'coverage'.*rows 0 to 7, found rows \[99\]")


def test_a_row_of_another_window() -> None:
    plan = plan_step(LENGTHS, num_ranks=1, windows=[[0, 1, 2], [3, 4, 5, 6, 7]])[0]
    _refused(replace(plan, window=(0, 1)), "'coverage'.*row 2 in 1 cells")


def test_unequal_counts() -> None:
    plan, cells = _plan(), _lists(_plan())
    cells[0].append([])
    _refused(_with(plan, cells), r"'equal counts'.*found \[5, 4\]|'equal counts'.*found \[\d, \d\]")


def test_counts_that_are_no_multiple() -> None:
    plan = _plan()
    k = plan.num_microbatches
    _refused(replace(plan, request=replace(plan.request, num_microbatches_multiple=k + 1)), f"multiple of {k + 1}")
    _refused(replace(plan, request=replace(plan.request, min_microbatches=k + 1)), f"at least {k + 1}, found {k}")


def test_a_cell_over_the_budget() -> None:
    plan = plan_step(LENGTHS, num_ranks=1, max_tokens_per_gpu=12, layout="packed")
    cells = _lists(plan)
    cells[0][0] += cells[0].pop()
    _refused(_with(plan, cells), r"'budget'.*at most 12 tokens, found \d+ at rank 0, micro-batch 0, rows")


def test_too_many_rows_in_a_cell() -> None:
    plan = _plan()
    _refused(replace(plan, request=replace(plan.request, max_rows_per_microbatch=1)), "'budget'.*at most 1 rows")


def test_over_long_rows_not_named() -> None:
    plan = plan_step([20, 3], num_ranks=1, max_tokens_per_gpu=12)
    _refused(replace(plan, overlong=()), r"'budget'.*\(0, 20, 12\)", [20, 3])
    _refused(replace(plan, overlong=(Overlong(1, 3, 12),)), "'budget'.*named", [20, 3])


def test_an_empty_cell_beside_a_full_one() -> None:
    plan = plan_step([3, 3], num_ranks=2, max_tokens_per_gpu=12)
    _refused(_with(plan, [[[0, 1]], [[]]]), "'few fillers'", [3, 3])


def test_a_filler_over_the_budget() -> None:
    plan = plan_step([1, 1], num_ranks=2, max_tokens_per_gpu=2)
    smaller = replace(plan, request=replace(plan.request, max_tokens_per_gpu=1))
    _refused(_with(smaller, [[[0], [1]], [[], []]]), "'no empty cell'.*filler of 2 tokens.*2 such cells", [1, 1])


def test_too_many_columns_of_a_fixed_plan() -> None:
    plan = plan_step([5] * 4, num_ranks=2, layout="fixed", micro_batch_rows=2)
    cells = [[*map(list, rank), []] for rank in plan.cells]
    _refused(_with(plan, cells), "'few fillers'.*needs 1 micro-batches per rank, found 2", [5] * 4)
    groups = plan_step([5] * 4, num_ranks=2, layout="fixed", pad_scope="group", group_ids=[0, 0, 1, 1])
    _refused(groups, "needs 3 micro-batches", [5] * 4, group_ids=[0, 1, 2, 2])


def test_small_columns_first() -> None:
    plan = _plan()
    _refused(_with(plan, [list(reversed(rank)) for rank in _lists(plan)]), "'largest first'.*micro-batch 1 costing")


def test_figures_of_other_lengths() -> None:
    plan = _plan()
    _refused(plan, "'own figures'.*num_tokens", [9, 8, 7, 5, 4, 3, 2, 1])
    _refused(plan, "'coverage'", LENGTHS[:-1])
    _refused(plan, "lengths must be", [0, *LENGTHS[1:]])


def test_json_round_trip_and_keys() -> None:
    plan = plan_step([20, 3, 2], num_ranks=2, max_tokens_per_gpu=12, bucket=0.125, windows=[[0, 2], [1]])[0]
    data = json.loads(plan.to_json())
    assert {"num_ranks", "max_tokens_per_gpu", "layout", "cells", "overlong", "stats", "hash", "cost"} <= set(data)
    assert data["cells"] == _lists(plan)
    assert data["overlong"] == [{"row": 0, "length": 20, "budget": 12}]
    assert StepPlan.from_json(plan.to_json()) == StepPlan.from_json(data) == plan


def test_json_that_was_changed() -> None:
    data = _plan().to_dict()
    data["cells"][0], data["cells"][1] = data["cells"][1], data["cells"][0]
    with pytest.raises(PlanError, match="changed by hand"):
        StepPlan.from_json(data)
    with pytest.raises(PlanError, match="format_version 1, found 2"):
        StepPlan.from_json({**_plan().to_dict(), "format_version": 2})
    with pytest.raises(PlanError, match="stats"):
        StepPlan.from_json({k: v for k, v in _plan().to_dict().items() if k != "stats"})
    with pytest.raises(PlanError, match="found also"):
        StepPlan.from_json({**_plan().to_dict(), "cost": {"c9": 1}})


def test_hash_depends_on_what_runs_where_alone() -> None:
    plan = _plan()
    assert plan.hash == _plan(effort="high").hash or plan.cells != _plan(effort="high").cells
    assert plan.hash != _plan(max_tokens_per_gpu=13).hash
    assert plan.hash != plan_step(LENGTHS, num_ranks=2, max_tokens_per_gpu=12, layout="padded").hash


def test_same_plan_in_another_process() -> None:
    code = (
        "from evenstep.plan import plan_step\n"
        "for layout in ('padded', 'packed'):\n"
        "    ids = [str(i) for i in range(60)]\n"
        "    print(plan_step([37 * i % 101 + 1 for i in range(60)], num_ranks=3, max_tokens_per_gpu=200,"
        " layout=layout, row_ids=ids).hash)"
    )
    found = set()
    for seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "NPY_DISABLE_CPU_FEATURES": "AVX2 AVX512F" if seed == "1" else ""}
        found.add(
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        )
    assert len(found) == 1


def test_cells_of_one_rank() -> None:
    plan = _plan()
    assert plan.for_rank(1) == plan.cells[1]
    with pytest.raises(PlanError, match="within 0 and 1, found 2"):
        plan.for_rank(2)
