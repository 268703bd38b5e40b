"""Promises of the planner over random requests.

1. Coverage, equal counts, budget, over-long rows, few fillers and fixed rules hold for every request.
2. The plan passes its own check, survives JSON and keeps its hash.
3. With row ids, permuting the rows permutes the plan; without them, up to rows of equal length.
4. The bound never exceeds the cost; efficiency is within 0 and 1.
5. Windows are planned one by one: each plan is the plan of its rows alone.
6. Refining never costs more and keeps every promise.
"""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep.plan import StepPlan, plan_step, refine_plan
from plan_cases import assert_promises, requests

_SLOW_DATA = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def _promises_hold(request) -> None:
    lengths, options = request
    plan = plan_step(lengths, **options)
    assert_promises(plan, lengths, list(range(len(lengths))), options)
    plan.check(lengths)
    again = StepPlan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash == plan_step(lengths, **options).hash
    assert 0 < plan.stats.lockstep_efficiency <= 1
    assert plan.stats.num_microbatches >= plan.stats.num_microbatches_lower_bound
    assert plan.stats.lower_bound <= plan.stats.step_cost


def _permuting_permutes(request, seed: int) -> None:
    lengths, options = request
    num_rows = len(lengths)
    ids = [f"row-{i}" for i in range(num_rows)]
    plan = plan_step(lengths, row_ids=ids, **options)
    order = list(range(num_rows))
    random.Random(seed).shuffle(order)  # new index i holds old row order[i]
    moved = dict(options)
    if "rank_rows" in options:
        at = {old: new for new, old in enumerate(order)}
        moved["rank_rows"] = [[at[row] for row in rows] for rows in options["rank_rows"]]
    permuted_lengths = [lengths[i] for i in order]
    permuted = plan_step(permuted_lengths, row_ids=[ids[i] for i in order], **moved)
    back = tuple(tuple(tuple(order[row] for row in cell) for cell in rank) for rank in permuted.cells)
    assert back == plan.cells
    anonymous, anonymous_permuted = plan_step(lengths, **options), plan_step(permuted_lengths, **moved)
    for a, b in zip(anonymous.cells, anonymous_permuted.cells, strict=True):
        assert [[lengths[i] for i in cell] for cell in a] == [[permuted_lengths[i] for i in cell] for cell in b]


@settings(max_examples=150, suppress_health_check=_SLOW_DATA)
@given(requests(max_rows=40))
def test_promises_hold(request) -> None:
    _promises_hold(request)


@settings(max_examples=60, suppress_health_check=_SLOW_DATA)
@given(requests(max_rows=30, max_ranks=8), st.integers(0, 2**32))
def test_permuting_the_rows_permutes_the_plan(request, seed: int) -> None:
    _permuting_permutes(request, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000, suppress_health_check=_SLOW_DATA)
@given(requests(max_rows=2000))
def test_promises_hold_for_many_rows(request) -> None:
    _promises_hold(request)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000, suppress_health_check=_SLOW_DATA)
@given(requests(max_rows=200), st.integers(0, 2**32))
def test_permuting_many_rows_permutes_the_plan(request, seed: int) -> None:
    _permuting_permutes(request, seed)


@settings(max_examples=60, suppress_health_check=_SLOW_DATA)
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from(["padded", "packed", "fixed"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_windows_are_planned_one_by_one(lengths, num_windows, layout, is_local, rnd) -> None:
    rows = list(range(len(lengths)))
    rnd.shuffle(rows)
    windows = [part for part in (rows[i::num_windows] for i in range(num_windows)) if part]
    options = {"num_ranks": 3, "max_tokens_per_gpu": 700, "layout": layout}
    homes = [rnd.randrange(3) for _ in lengths]

    def placement(part: list[int]) -> dict:
        if not is_local:
            return {}
        return {
            "placement": "local",
            "rank_rows": [[i for i, row in enumerate(part) if homes[row] == rank] for rank in range(3)],
        }

    options |= {"placement": "local" if is_local else "global"}
    every_row = list(range(len(lengths)))
    plans = plan_step(lengths, windows=windows, **{**options, **placement(every_row)})
    assert len(plans) == len(windows)
    for part, plan in zip(windows, plans, strict=True):
        assert plan.rows == tuple(sorted(part))
        assert_promises(plan, lengths, part, options)
        plan.check(lengths)
        alone = plan_step([lengths[i] for i in sorted(part)], **{**options, **placement(sorted(part))})
        assert plan.cells == tuple(tuple(tuple(sorted(part)[i] for i in c) for c in rank) for rank in alone.cells)


@settings(max_examples=30, suppress_health_check=_SLOW_DATA)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=60),
    st.integers(1, 4),
    st.sampled_from(["padded", "packed"]),
    st.booleans(),
)
def test_refining_keeps_the_promises(lengths, num_ranks, layout, has_ids) -> None:
    options = {"num_ranks": num_ranks, "max_tokens_per_gpu": 1000, "layout": layout}
    ids = [f"row-{i * 7919 % 61:03}" for i in range(len(lengths))] if has_ids else None
    plan = plan_step(lengths, row_ids=ids, **options)
    refined = refine_plan(plan, lengths, time_limit_s=0.001)
    assert refined.stats.step_cost <= plan.stats.step_cost
    assert_promises(refined, lengths, list(range(len(lengths))), options)
    refined.check(lengths)
