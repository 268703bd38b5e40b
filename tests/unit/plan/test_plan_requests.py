"""Arguments of ``plan_step``: each does what it says, and bad or contradictory ones are refused.

1. Bad values name the argument, the value and the fix.
2. Contradictory combinations are refused, never ignored.
3. K respects its minimum and multiple; cells respect the row limit; without a budget K is the least allowed.
4. Layout ``fixed``: budget, minimum, multiple, local placement.
5. ``sync="step"`` judges and balances ranks; ``sync="micro_batch"`` judges columns.
6. The bucket ladder limits the number of widths and their waste, and never exceeds the budget.
7. Row ids decide between rows of equal length; their order is that of their values.
8. Reuse keeps the cells of a training plan; refining is for global plans only.
9. The plan is on NumPy integers and arrays as on plain ones.
"""

import math
import random
import sys
from typing import Any

import numpy as np
import pytest

from evenstep.errors import PlanError
from evenstep.plan import CostModel, SharedPrefixes, StepPlan, plan_step, refine_plan, reuse_plan
from evenstep.plan.footprint import Room


def _prefixes(order: list[int], shared: list[int]) -> SharedPrefixes:
    return SharedPrefixes(np.array(order), np.array(shared))


BAD = [
    ([], {}, "at least one row, found 0"),
    ([3, 0], {}, r"lengths\[1\] = 0"),
    ([3, -4], {}, r"lengths\[1\] = -4"),
    ([3, 2.5], {}, r"lengths\[1\] = 2.5|lengths\[0\]"),
    ([math.nan], {}, r"lengths\[0\] = nan"),
    ([True], {}, r"lengths\[0\] = True"),
    (["7"], {}, r"lengths\[0\] = '7'"),
    ([[1, 2]], {}, r"shape \(1, 2\)"),
    ([2**31], {}, "2147483647"),
    ([3], {"num_ranks": 0}, "num_ranks must be an integer ≥ 1, found 0"),
    ([3], {"num_ranks": 1.0}, "num_ranks must be a whole number, found 1.0"),
    ([3], {"num_ranks": True}, "num_ranks must be a whole number, found True"),
    ([3], {"max_tokens_per_gpu": 0}, "max_tokens_per_gpu must be an integer ≥ 1 or None, found 0"),
    ([3], {"max_tokens_per_gpu": -5}, "found -5"),
    ([3], {"pad_to_multiple": 0}, "pad_to_multiple"),
    ([3], {"cp": 0}, "cp must"),
    ([3], {"tp": -1}, "tp must"),
    ([3], {"min_microbatches": 0}, "min_microbatches"),
    ([3], {"num_microbatches_multiple": 0}, "num_microbatches_multiple"),
    ([3], {"max_rows_per_microbatch": 0}, "max_rows_per_microbatch"),
    ([3], {"layout": "ragged"}, "layout must be one of 'fixed', 'padded', 'packed', 'tree', found 'ragged'"),
    ([3], {"layout": "tree"}, "layout 'tree' needs prefixes: which rows begin alike, found NoneType"),
    ([3], {"layout": "tree", "prefixes": [[1, 2, 3]]}, "needs prefixes: which rows begin alike, found list"),
    ([3], {"layout": "tree", "prefixes": _prefixes([0, 1], [0, 1])}, "must cover each of the 1 rows, found 2 rows"),
    ([3, 3], {"layout": "tree", "prefixes": _prefixes([0, 0], [0, 1])}, "must name each of the 2 rows once"),
    ([3, 2], {"layout": "tree", "prefixes": _prefixes([0, 1], [0, 3])}, "row 1 of 2 tokens sharing 3, at most 2 are"),
    ([3, 2], {"layout": "tree", "prefixes": _prefixes([0, 1], [1, 0])}, "row 0 of 3 tokens sharing 1, at most 0 are"),
    (
        [3, 2],
        {"layout": "tree", "prefixes": SharedPrefixes([0, 1], [0, 0])},
        "must be an array of integers",
    ),
    ([3, 2], {"layout": "packed", "prefixes": _prefixes([0, 1], [0, 2])}, "prefixes say what rows share in layout"),
    ([3], {"placement": "nearby"}, "placement"),
    ([3], {"sync": "never"}, "sync"),
    ([3], {"effort": 9}, "effort"),
    ([3], {"overlong": "drop"}, "overlong"),
    ([3], {"pad_scope": "rollout"}, "pad_scope"),
    ([3], {"bucket": 1.0}, "bucket"),
    ([3], {"bucket": math.nan}, "bucket"),
    ([3], {"cost": 3.0}, "cost must be a CostModel"),
    ([3], {"pad_to_multiple": 64, "max_tokens_per_gpu": 63}, "multiple of 64.*more than the budget of 63"),
    ([3], {"cp": 4, "max_tokens_per_gpu": 1}, "multiple of 8.*more than the budget of 4"),
    ([3, 3], {"row_ids": ["a"]}, "row_ids must name each of the 2 rows, found 1"),
    ([3, 3], {"row_ids": ["a", "a"]}, "row_ids must be unique, found 'a' at rows"),
    ([3], {"row_ids": [object()]}, "found object"),
    ([3], {"rollout_ids": []}, "rollout_ids"),
    ([3, 3], {"rollout_ids": ["x", "x"], "group_ids": [0, 1]}, "'x' at rows 0 and 1"),
    ([3, 3], {"windows": [[0]]}, "windows must name every row exactly once, found row 1 0 times"),
    ([3, 3], {"windows": [[0, 1], [1]]}, "row 1 2 times"),
    ([3], {"windows": [[0], []]}, r"windows\[1\] must name at least one row"),
    ([3], {"windows": []}, "row 0 0 times"),
    ([3], {"windows": [[1]]}, "names row 1, there are rows 0 to 0"),
    ([3], {"windows": "0"}, "list of index lists"),
    ([3], {"windows": [[0.0]]}, "flat list of row indices"),
    ([3, 3], {"placement": "local", "num_ranks": 2}, "needs rank_rows, found None"),
    ([3, 3], {"placement": "local", "num_ranks": 2, "rank_rows": [[0, 1]]}, "one list for each of 2 ranks, found 1"),
    ([3, 3], {"placement": "local", "num_ranks": 2, "rank_rows": [[0], []]}, "row 1 0 times"),
    ([3, 3], {"placement": "local", "num_ranks": 2, "rank_rows": [[0, 1], [1]]}, "row 1 2 times"),
    ([3, 3], {"rank_rows": [[0, 1]]}, "needs placement='local'"),
    ([3], {"micro_batch_rows": 2}, "micro_batch_rows = 2 applies to layout 'fixed' only"),
    ([3], {"logprob_micro_batch_rows": 2}, "logprob_micro_batch_rows"),
    ([3], {"pad_scope": "group"}, "pad_scope"),
    ([3], {"layout": "fixed", "pad_scope": "group"}, "needs group_ids"),
    ([3], {"layout": "fixed", "micro_batch_rows": 4, "max_rows_per_microbatch": 2}, "more than max_rows_per_micro"),
    ([9], {"layout": "fixed", "micro_batch_rows": 2, "max_tokens_per_gpu": 16}, "lower micro_batch_rows"),
    ([1], {"num_ranks": 2, "max_tokens_per_gpu": 1}, "need a filler of 2 tokens, found a budget of 1"),
]


@pytest.mark.parametrize(("lengths", "options", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_is_refused(lengths, options, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_step(lengths, **{"num_ranks": 1, **options})


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("placement", ["global", "local"])
def test_minimum_multiple_and_row_limit(layout: str, placement: str) -> None:
    lengths = [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    options = {"num_ranks": 1, "max_tokens_per_gpu": 60, "layout": layout, "placement": placement}
    assert plan_step(lengths, min_microbatches=4, **options).num_microbatches >= 4
    assert plan_step(lengths, num_microbatches_multiple=3, **options).num_microbatches % 3 == 0
    few = plan_step(lengths, max_rows_per_microbatch=2, **options)
    assert max(len(cell) for cell in few.cells[0]) == 2
    assert few.num_microbatches == few.stats.num_microbatches_lower_bound == 5


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_without_a_budget_each_rank_runs_one_cell(layout: str) -> None:
    plan = plan_step([50_000] * 3 + [10] * 20, num_ranks=4, layout=layout)
    assert plan.num_microbatches == 1
    assert plan.stats.fill is None
    assert plan_step([5] * 9, num_ranks=2, layout=layout, num_microbatches_multiple=2).num_microbatches == 2


def test_fixed_layout_within_a_budget() -> None:
    plan = plan_step([8, 7, 6], num_ranks=1, layout="fixed", micro_batch_rows=2, max_tokens_per_gpu=16)
    assert plan.cells == (((0, 1), (2,)),)
    assert plan.micro_batch_rows == 2
    assert (plan.stats.num_fillers, plan.stats.footprint) == (1, 2 * 8 + 2 * 6)
    alone = plan_step([20, 3], num_ranks=1, layout="fixed", max_tokens_per_gpu=16)
    assert alone.overlong == ((0, 20, 16),)
    wide = plan_step([8, 7, 6], num_ranks=1, layout="fixed", num_microbatches_multiple=4, min_microbatches=5)
    assert wide.num_microbatches == 8
    assert wide.stats.num_fillers == 5


def test_fixed_layout_of_placed_rows() -> None:
    rank_rows = [[0, 1, 2, 3, 4], [5]]
    plan = plan_step(
        [9, 8, 7, 6, 5, 4], num_ranks=2, layout="fixed", micro_batch_rows=2, placement="local", rank_rows=rank_rows
    )
    assert plan.cells == (((0, 1), (2, 3), (4,)), ((5,), (), ()))
    assert plan.stats.num_fillers == 6


def test_step_sync_balances_ranks() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 3000) for _ in range(200)]
    options = {"num_ranks": 4, "max_tokens_per_gpu": 4000}
    for layout in ("padded", "packed"):
        by_step = plan_step(lengths, layout=layout, sync="step", **options)
        by_column = plan_step(lengths, layout=layout, **options)
        assert by_step.stats.rank_cost <= by_column.stats.rank_cost
        assert by_column.stats.lockstep_cost <= by_step.stats.lockstep_cost
        assert by_step.stats.step_cost == by_step.stats.rank_cost
        assert by_column.stats.step_cost == by_column.stats.lockstep_cost
        assert by_step.stats.rank_imbalance < 1.01


def test_costs_by_hand() -> None:
    cost = CostModel(c0=10.0, c1=1.0, c2=0.5)
    plan = plan_step([4, 2], num_ranks=1, max_tokens_per_gpu=8, cost=cost)
    assert plan.cells == (((0, 1),),)  # one launch of 2 x 4 is cheaper than two
    assert plan.stats.lockstep_cost == 10 + 2 * (4 + 0.5 * 10)
    plan = plan_step([4, 2], num_ranks=1, max_tokens_per_gpu=8, layout="packed", cost=cost)
    assert plan.stats.lockstep_cost == 10 + (4 + 0.5 * 10) + (2 + 0.5 * 3)
    plan = plan_step([4, 2], num_ranks=2, max_tokens_per_gpu=8, cost=cost)
    assert plan.stats.lockstep_cost == plan.stats.rank_cost == 10 + 9
    assert plan.stats.lower_bound == 10 + 9


def test_bucket_ladder() -> None:
    room = Room(layout="padded", budget=10_000, multiple=8, bucket=0.125)
    lengths = np.arange(1, 10_001)
    widths = room.widths(lengths)
    assert (widths >= lengths).all()
    assert (widths % 8 == 0).all()
    assert widths.max() <= 10_000
    assert len(np.unique(widths)) < 60
    large = lengths >= 64
    assert ((widths - lengths)[large] / widths[large]).max() <= 0.125


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_bucket_ladder_in_plans(layout: str) -> None:
    draw = random.Random(5)
    lengths = [draw.randint(1, 900) for _ in range(150)]
    options = {"num_ranks": 2, "max_tokens_per_gpu": 1000, "layout": layout}
    plain, bucketed = plan_step(lengths, **options), plan_step(lengths, bucket=0.25, **options)
    assert bucketed.stats.max_footprint <= 1000
    assert not bucketed.overlong
    if layout == "padded":
        shapes = {
            plan: {plan.padded_width(max(lengths[i] for i in c)) for r in plan.cells for c in r if c}
            for plan in (plain, bucketed)
        }
        assert len(shapes[bucketed]) <= 20 < len(shapes[plain])
    assert bucketed.stats.padding_efficiency < plain.stats.padding_efficiency


def test_ids_order_by_value() -> None:
    for ids in ([10, 9, 2, 1], ["d", "c", "b", "a"], [("x", 4), ("x", 3), ("x", 2), ("x", 1)], np.array([4, 3, 2, 1])):
        plan = plan_step([5, 5, 5, 5], num_ranks=4, max_tokens_per_gpu=5, row_ids=ids)
        assert plan.cells == (((3,),), ((2,),), ((1,),), ((0,),))
    assert plan_step([5, 5], num_ranks=2, row_ids=["a", 1]).cells == (((1,),), ((0,),))
    assert plan_step([5, 5], num_ranks=2, row_ids=[2**70, 2**69]).num_microbatches == 1
    assert plan_step([5, 5], num_ranks=2, row_ids=[np.int64(7), np.str_("x")]).cells == (((0,),), ((1,),))


def test_reuse_of_a_training_plan() -> None:
    lengths = [5, 5, 5, 5, 5, 9]
    plan = plan_step(lengths, num_ranks=2, max_tokens_per_gpu=10, row_ids=list("fedcba"))
    scoring = reuse_plan(plan, lengths, max_tokens_per_gpu=30)
    assert scoring.cells == plan.cells
    assert scoring.budget == 30
    assert reuse_plan(plan, lengths, max_tokens_per_gpu=None).budget is None
    with pytest.raises(PlanError, match="'budget'"):
        reuse_plan(plan, lengths, max_tokens_per_gpu=9)
    with pytest.raises(PlanError, match="'own figures'"):
        reuse_plan(plan, [5, 5, 5, 5, 5, 8], max_tokens_per_gpu=30)


def test_refining_has_its_limits() -> None:
    for options in ({"layout": "fixed"}, {"placement": "local"}, {"sync": "step"}):
        plan = plan_step([5, 4, 3], num_ranks=1, **options)
        with pytest.raises(PlanError, match="refine_plan improves global"):
            refine_plan(plan, [5, 4, 3], time_limit_s=0.1)
    plan = plan_step([5, 4, 3], num_ranks=1)
    for limit in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(PlanError, match="time_limit_s"):
            refine_plan(plan, [5, 4, 3], time_limit_s=limit)


@pytest.mark.parametrize("layout", ["padded", "packed", "fixed"])
@pytest.mark.parametrize("most", [None, 2**20])
def test_extreme_lengths_together(layout: str, most: int | None) -> None:
    lengths = [2**31 - 1] * 3 + [1] * 50
    plan = plan_step(lengths, num_ranks=4, max_tokens_per_gpu=most, layout=layout)
    assert sorted(i for rank in plan.cells for cell in rank for i in cell) == list(range(53))
    assert len(plan.overlong) == (0 if most is None else 3)
    free = plan_step([5] * 40, num_ranks=3, max_tokens_per_gpu=20, cost=CostModel(c0=1e12, c1=1e-9, c2=0.0))
    assert free.num_microbatches == 4


def test_numpy_integers() -> None:
    plain = plan_step([5, 4, 3], num_ranks=2, max_tokens_per_gpu=8)
    array = plan_step(np.array([5, 4, 3], dtype=np.uint16), num_ranks=np.int64(2), max_tokens_per_gpu=np.int32(8))
    assert array == plain
    assert array.hash == plain.hash


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_budget_far_above_all_rows_is_no_limit(layout: str) -> None:
    cost = CostModel(c0=1.0, c1=1.0, c2=0.01)
    options = {"num_ranks": 2, "layout": layout, "cost": cost}
    plan = plan_step([9, 7, 5, 3], max_tokens_per_gpu=2**30, **options)
    assert plan.cells == plan_step([9, 7, 5, 3], max_tokens_per_gpu=100, **options).cells


@pytest.mark.parametrize("budget", [2**53, 2**60, 2**62, sys.maxsize, 2**63, 10**30])
@pytest.mark.parametrize("extra", [{}, {"bucket": 0.125}, {"cp": 2, "tp": 2}, {"layout": "packed"}])
def test_a_budget_beyond_all_integers_is_no_limit(budget: int, extra: dict[str, Any]) -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, 5000) for _ in range(300)]
    options: dict[str, Any] = {"num_ranks": 2, **extra}
    plan = plan_step(lengths, max_tokens_per_gpu=budget, **options)
    plan.check(lengths)
    assert plan.cells == plan_step(lengths, max_tokens_per_gpu=2**31, **options).cells
    assert plan.max_tokens_per_gpu == budget
    assert StepPlan.from_json(plan.to_json()) == plan


def test_a_multiple_beyond_all_windows_is_refused() -> None:
    with pytest.raises(PlanError, match="pad_to_multiple must be at most"):
        plan_step([3], num_ranks=1, pad_to_multiple=10**20)
