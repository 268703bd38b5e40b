"""Worked cases whose plans must come out exactly.

1. Each case as given, with the rows permuted (row ids given), and with lengths and budget scaled.
2. Group and window scope of layout ``fixed``: columns, fillers, real rows.
3. Local placement: budget on the padded rectangle, alignment, splitting to a count, windows, over-long rows.
4. Packed rows never exceed the budget; rows that cannot share do not.
5. Layout tree: what the budget forces to be repeated is in the lower bounds.
"""

import random
from typing import Any

import pytest

from evenstep.plan import CostModel, StepPlan, plan_step, shared_prefixes


def _cells(plan: StepPlan) -> list[list[list[int]]]:
    return [[list(cell) for cell in rank] for rank in plan.cells]


LOCAL: dict[str, Any] = {"num_ranks": 1, "placement": "local"}
CASES: dict[str, tuple[list[int], dict[str, Any], list[list[list[int]]]]] = {
    "padded rectangle": ([100, 1, 1, 1, 1], {**LOCAL, "max_tokens_per_gpu": 104}, [[[0], [1, 2, 3, 4]]]),
    "packed": ([100, 1, 1, 1, 1], {**LOCAL, "max_tokens_per_gpu": 104, "layout": "packed"}, [[[0, 1, 2, 3, 4]]]),
    "context parallel": ([5, 5], {**LOCAL, "max_tokens_per_gpu": 7, "cp": 2}, [[[0], [1]]]),
    "multiple 1": ([1001, 700], {**LOCAL, "max_tokens_per_gpu": 2047}, [[[0, 1]]]),
    "multiple 1024": ([1001, 700], {**LOCAL, "max_tokens_per_gpu": 2047, "pad_to_multiple": 1024}, [[[0], [1]]]),
    "split to count": ([8, 7, 2, 1], {**LOCAL, "max_tokens_per_gpu": 16, "min_microbatches": 3}, [[[0], [1], [2, 3]]]),
    "over the budget": ([12, 11, 1], {**LOCAL, "max_tokens_per_gpu": 10}, [[[0], [1], [2]]]),
    "two ranks": (
        [10, 9, 8, 7, 6, 5],
        {"num_ranks": 2, "placement": "local", "rank_rows": [[0, 1, 2], [3, 4, 5]], "max_tokens_per_gpu": 20},
        [[[0, 1], [2]], [[3, 4], [5]]],
    ),
    "splits the larger half first": (
        [9, 9, 9, 5, 5],
        {**LOCAL, "max_tokens_per_gpu": 27, "min_microbatches": 3},
        [[[0, 1], [3, 4], [2]]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_given(name: str) -> None:
    lengths, settings, expected = CASES[name]
    assert _cells(plan_step(lengths, **settings)) == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_permuted(name: str, seed: int) -> None:
    lengths, settings, expected = CASES[name]
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    moved = dict(settings)
    if "rank_rows" in settings:
        moved["rank_rows"] = [[order.index(row) for row in rows] for rows in settings["rank_rows"]]
    plan = plan_step([lengths[i] for i in order], row_ids=order, **moved)
    assert [[[order[i] for i in cell] for cell in rank] for rank in _cells(plan)] == expected


@pytest.mark.parametrize("factor", [2, 7, 100])
@pytest.mark.parametrize("name", CASES)
def test_scaled(name: str, factor: int) -> None:
    lengths, settings, expected = CASES[name]
    scaled = dict(settings, max_tokens_per_gpu=settings["max_tokens_per_gpu"] * factor)
    if "pad_to_multiple" in settings:
        scaled["pad_to_multiple"] = settings["pad_to_multiple"] * factor
    if settings.get("cp", 1) > 1:
        scaled["pad_to_multiple"] = 4 * factor  # the alignment of 4 scales too
    assert _cells(plan_step([n * factor for n in lengths], **scaled)) == expected


def test_widths_and_budget_of_the_context_parallel_case() -> None:
    plan = plan_step([5, 5], max_tokens_per_gpu=7, cp=2, **LOCAL)
    assert (plan.budget, plan.multiple, plan.padded_width(5)) == (14, 4, 8)
    assert plan_step([1001, 700], max_tokens_per_gpu=2047, pad_to_multiple=1024, **LOCAL).padded_width(700) == 1024


def test_two_windows() -> None:
    plans = plan_step([10, 9, 2, 1, 8, 7, 2, 1], max_tokens_per_gpu=20, windows=[[0, 1, 2, 3], [4, 5, 6, 7]], **LOCAL)
    assert [_cells(plan)[0] for plan in plans] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_over_long_rows_are_named() -> None:
    plan = plan_step([12, 11, 1], max_tokens_per_gpu=10, **LOCAL)
    assert plan.overlong == ((0, 12, 10), (1, 11, 10))


def test_group_scope_of_three_prompts() -> None:
    """Segments (1,3), (2,5), (1,1) on 4 ranks: 4, 7, 2 rows become 4, 8, 4: 13 real rows and 3 fillers."""
    groups = [0] * 4 + [1] * 7 + [2] * 2
    plan = plan_step([5] * 13, num_ranks=4, layout="fixed", pad_scope="group", group_ids=groups)
    assert plan.num_microbatches == 4
    assert plan.stats.num_fillers == 3
    assert plan.stats.num_rows == 13
    columns = [{groups[i] for rank in plan.cells for i in rank[k]} for k in range(4)]
    assert sorted(map(sorted, columns)) == [[0], [1], [1], [2]]  # micro-batches of the three groups: 1, 2, 1
    for group in range(3):
        per_rank = [sum(groups[i] == group for cell in rank for i in cell) for rank in plan.cells]
        assert max(per_rank) - min(per_rank) <= 1


@pytest.mark.parametrize(("scope", "slots"), [("group", 16), ("window", 8)])
def test_groups_of_five_one_and_one_rows(scope: str, slots: int) -> None:
    settings = {"layout": "fixed", "pad_scope": scope, "group_ids": [0] * 5 + [1, 2]}
    plan = plan_step([3, 4, 5, 6, 7, 8, 9], num_ranks=4, **settings)
    assert plan.num_ranks * plan.num_microbatches == slots
    assert plan.stats.num_fillers == slots - 7


def test_log_prob_rows_take_part_in_the_multiple() -> None:
    """Q = 2 ranks x lcm(2, 3) = 12: 13 rows become 24."""
    plan = plan_step([4] * 13, num_ranks=2, layout="fixed", micro_batch_rows=2, logprob_micro_batch_rows=3)
    assert plan.num_microbatches * 2 * 2 == 24
    assert plan.stats.num_fillers == 11


def test_rollouts_of_one_to_eight_rows_in_two_windows() -> None:
    rollout_of = [i for i in range(64) for _ in range(1 + i % 8)]
    windows = [[r for r, i in enumerate(rollout_of) if i // 32 == w] for w in range(2)]
    plans = plan_step(
        [7] * 288, num_ranks=4, max_tokens_per_gpu=64, layout="packed", windows=windows, rollout_ids=rollout_of
    )
    assert len(rollout_of) == 288
    assert [len({rollout_of[i] for i in plan.rows}) for plan in plans] == [32, 32]
    assert sum(plan.stats.num_rows for plan in plans) == 288


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("placement", ["global", "local"])
def test_rows_that_cannot_share(layout: str, placement: str) -> None:
    plan = plan_step([7] * 8, num_ranks=1, max_tokens_per_gpu=8, layout=layout, placement=placement)
    assert [len(cell) for cell in plan.cells[0]] == [1] * 8


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_packed_cells_stay_within_the_budget(num_ranks: int) -> None:
    lengths = [9, 5, 6, 10, 10]
    plan = plan_step(lengths, num_ranks=num_ranks, max_tokens_per_gpu=20, layout="packed")
    assert max(sum(lengths[i] for i in cell) for rank in plan.cells for cell in rank) <= 20


def test_what_the_budget_forces_to_be_repeated() -> None:
    # a prompt of 6 tokens fits with one output of 4, never with two, so it is computed three times
    keys = [[7] * 6 + [i] * 4 for i in range(3)] + [[9]]
    plan = plan_step(
        [len(key) for key in keys],
        num_ranks=1,
        max_tokens_per_gpu=11,
        layout="tree",
        prefixes=shared_prefixes(keys),
        cost=CostModel(c0=2.0, c1=1.0, c2=0.0),
    )
    assert (plan.stats.num_microbatches, plan.stats.num_microbatches_lower_bound) == (3, 3)
    assert plan.stats.footprint == 6 + 3 * 4 + 1 + 2 * 6
    assert plan.stats.lower_bound == plan.stats.step_cost == plan.stats.footprint + 3 * 2.0
