"""Faults this kind of planner is known for, each as a test of its whole kind.

1. Ranks run equally many micro-batches, also when their rows are already placed (also in a scoring pass).
2. Fewer rows than cells is normal: every number of rows from 1 to W * K works, fillers are exactly the rest.
3. The budget is on the padded rectangle, by one rule that planner, check and figures share.
4. Row counts need not divide by the ranks; K is minimal for equal rows.
5. Windows never cut a rollout or a group.
6. ``ceil(sum / budget)`` is not the answer: cells are re-checked, K grows for all ranks together.
7. An over-long row is kept, alone and named; ``overlong="error"`` refuses first; nothing joins it.
8. A cell without trained tokens is a cell like any other: plans never see masks.
"""

import inspect
import logging
import random

import pytest

from evenstep.errors import PlanError
from evenstep.plan import plan_step, reuse_plan


def _lengths_by_cell(plan, lengths):
    return [[sorted((lengths[i] for i in cell), reverse=True) for cell in rank] for rank in plan.cells]


def test_counts_are_agreed_for_placed_rows() -> None:
    lengths = [8, 8, 8, 2, 2, 2]
    plan = plan_step(lengths, num_ranks=2, max_tokens_per_gpu=8, placement="local", rank_rows=[[0, 1, 2], [3, 4, 5]])
    assert _lengths_by_cell(plan, lengths) == [[[8], [8], [8]], [[2], [2], [2]]]
    assert plan.stats.num_fillers == 0
    scoring = reuse_plan(plan, lengths, max_tokens_per_gpu=64)
    assert {len(rank) for rank in scoring.cells} == {3}


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_counts_are_agreed_whatever_the_ranks_hold(layout: str) -> None:
    draw = random.Random(3)
    for _ in range(30):
        num_ranks = draw.randint(2, 5)
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 40))]
        homes = [draw.randrange(num_ranks) for _ in lengths]
        rank_rows = [[i for i, home in enumerate(homes) if home == rank] for rank in range(num_ranks)]
        plan = plan_step(
            lengths, num_ranks=num_ranks, max_tokens_per_gpu=32, layout=layout, placement="local", rank_rows=rank_rows
        )
        assert len({len(rank) for rank in plan.cells}) == 1
        for rows, rank in zip(rank_rows, plan.cells, strict=True):
            assert sorted(i for cell in rank for i in cell) == rows
            empty = sum(not cell for cell in rank)
            assert empty == max(0, plan.num_microbatches - len(rows))


def test_light_rank_runs_fillers() -> None:
    plan = plan_step([8, 8, 8, 2], num_ranks=2, max_tokens_per_gpu=8, placement="local", rank_rows=[[0, 1, 2], [3]])
    assert plan.cells == (((0,), (1,), (2,)), ((3,), (), ()))
    plan = plan_step([4, 4, 4], num_ranks=4, max_tokens_per_gpu=4)
    assert plan.num_microbatches == 1
    assert plan.stats.num_fillers == 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("num_rows", range(1, 13))
def test_any_number_of_rows_up_to_the_cells(num_rows: int, layout: str) -> None:
    plan = plan_step([4] * num_rows, num_ranks=4, max_tokens_per_gpu=4, layout=layout)
    assert plan.num_microbatches == -(-num_rows // 4)
    assert plan.stats.num_fillers == 4 * plan.num_microbatches - num_rows
    wide = plan_step([4] * num_rows, num_ranks=4, max_tokens_per_gpu=4, layout=layout, min_microbatches=3)
    assert wide.num_microbatches == 3
    assert wide.stats.num_fillers == 12 - num_rows


def test_one_row_on_512_ranks() -> None:
    plan = plan_step([9], num_ranks=512, max_tokens_per_gpu=16)
    assert plan.stats.num_fillers == 511


@pytest.mark.parametrize("placement", ["global", "local"])
def test_the_budget_is_on_the_rectangle(placement: str) -> None:
    lengths = [90, 20, 20, 20]
    plan = plan_step(lengths, num_ranks=1, max_tokens_per_gpu=150, placement=placement)
    assert _lengths_by_cell(plan, lengths) == [[[90], [20, 20, 20]]]
    assert (plan.stats.footprint, plan.stats.max_footprint) == (150, 90)
    lengths = [6, 6, 4, 4]
    plan = plan_step(lengths, num_ranks=1, max_tokens_per_gpu=10, placement=placement)
    assert _lengths_by_cell(plan, lengths)[0] == [[4, 4], [6], [6]] or _lengths_by_cell(plan, lengths)[0][-1] == [4, 4]
    assert plan.num_microbatches == 3
    packed = plan_step(lengths, num_ranks=1, max_tokens_per_gpu=10, layout="packed", placement=placement)
    assert _lengths_by_cell(packed, lengths) == [[[6, 4], [6, 4]]]


def test_rows_need_not_divide_by_the_ranks() -> None:
    plan = plan_step([4] * 7, num_ranks=4, max_tokens_per_gpu=4)
    assert plan.num_microbatches == 2
    assert sorted(sum(map(len, rank)) for rank in plan.cells) == [1, 2, 2, 2]
    assert plan.stats.num_fillers == 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_equal_rows_take_the_fewest_micro_batches(layout: str) -> None:
    for num_rows in (1, 3, 5, 7, 11, 29, 64):
        for num_ranks in (1, 2, 3, 8):
            for fit in (1, 2, 5):
                plan = plan_step([10] * num_rows, num_ranks=num_ranks, max_tokens_per_gpu=10 * fit + 3, layout=layout)
                assert plan.num_microbatches == -(-num_rows // (num_ranks * fit))


def test_windows_keep_rollouts_and_groups_whole() -> None:
    rollouts = ["a", "b", "b", "c", "c"]
    plans = plan_step([3] * 5, num_ranks=2, max_tokens_per_gpu=3, windows=[[0, 1, 2], [3, 4]], rollout_ids=rollouts)
    assert [plan.rows for plan in plans] == [(0, 1, 2), (3, 4)]
    assert plans[0].stats.num_fillers == 1
    with pytest.raises(PlanError, match=r"rollout_ids.*'c' at rows 3 and 4"):
        plan_step([3] * 5, num_ranks=2, max_tokens_per_gpu=3, windows=[[0, 1, 2, 3], [4]], rollout_ids=rollouts)
    with pytest.raises(PlanError, match="group_ids"):
        plan_step([3] * 4, num_ranks=2, windows=[[0, 1], [2, 3]], group_ids=[0, 1, 1, 2])
    with pytest.raises(PlanError, match=r"'whole rollouts'.*'b'"):
        plan_step([3] * 3, num_ranks=1, windows=[[0, 1], [2]])[0].check([3] * 3, rollout_ids=["a", "b", "b"])


def test_the_sum_bound_is_not_the_answer() -> None:
    for layout in ("padded", "packed"):
        plan = plan_step([5] * 5, num_ranks=1, max_tokens_per_gpu=8, layout=layout)
        assert plan.num_microbatches == 5
        plan = plan_step([5] * 5, num_ranks=2, max_tokens_per_gpu=8, layout=layout)
        assert plan.num_microbatches == 3
        assert plan.stats.num_microbatches_lower_bound == 3


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("placement", ["global", "local"])
def test_over_long_rows_stand_alone(layout: str, placement: str, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [3, 12, 3]
    with caplog.at_level(logging.WARNING, logger="evenstep.plan"):
        plan = plan_step(lengths, num_ranks=1, max_tokens_per_gpu=8, layout=layout, placement=placement)
    assert plan.cells == (((1,), (0, 2)),)
    assert plan.overlong == ((1, 12, 8),)
    assert "row 1 of 12 tokens" in caplog.text
    with pytest.raises(PlanError, match=r"overlong='error'.*row 1 of 12 tokens"):
        plan_step(lengths, num_ranks=1, max_tokens_per_gpu=8, layout=layout, placement=placement, overlong="error")


def test_a_row_is_over_long_by_its_width() -> None:
    plan = plan_step([9, 2], num_ranks=1, max_tokens_per_gpu=10, pad_to_multiple=6, layout="packed")
    assert plan.overlong == ((0, 9, 10),)
    assert plan.cells == (((0,), (1,)),)


def test_plans_never_see_masks() -> None:
    assert not {"mask", "loss_mask", "weights", "rows"} & set(inspect.signature(plan_step).parameters)
