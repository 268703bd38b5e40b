"""Promises of layout ``tree`` over random tries.

1. Coverage, equal counts, budget (by a trie built from sets of prefixes), over-long rows and few fillers hold.
2. The plan passes its own check, survives JSON, keeps its hash, and can be reused under a larger budget.
3. With row ids, permuting the rows permutes the plan; without them, up to copies of a row.
4. Windows are planned one by one, on what their own rows share.
5. A plan that was made for other prefixes does not pass the check.
6. Rows that share nothing cost what they cost packed.
"""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from evenstep.errors import PlanError
from evenstep.plan import SharedPrefixes, StepPlan, plan_step, reuse_plan, shared_prefixes
from plan_cases import assert_promises, num_nodes, tree_keys, tree_requests

_SLOW_DATA = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def _lengths(keys: list[list[int]]) -> list[int]:
    return [len(key) for key in keys]


def _promises_hold(request) -> None:
    keys, options = request
    lengths, prefixes = _lengths(keys), shared_prefixes(keys)
    plan = plan_step(lengths, prefixes=prefixes, **options)
    assert_promises(plan, lengths, list(range(len(keys))), options, keys)
    plan.check(lengths, prefixes=prefixes)
    again = StepPlan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash == plan_step(lengths, prefixes=prefixes, **options).hash
    assert 0 < plan.stats.lockstep_efficiency <= 1
    assert plan.stats.num_microbatches >= plan.stats.num_microbatches_lower_bound
    assert plan.stats.footprint >= num_nodes(keys)
    reused = reuse_plan(plan, lengths, max_tokens_per_gpu=None, prefixes=prefixes)
    assert reused.cells == plan.cells


def _permuting_permutes(request, seed: int) -> None:
    keys, options = request
    ids = [f"row-{i}" for i in range(len(keys))]
    order = list(range(len(keys)))
    random.Random(seed).shuffle(order)  # new index i holds old row order[i]
    moved = dict(options)
    if "rank_rows" in options:
        at = {old: new for new, old in enumerate(order)}
        moved["rank_rows"] = [[at[row] for row in rows] for rows in options["rank_rows"]]
    permuted_keys = [keys[i] for i in order]
    here, there = shared_prefixes(keys), shared_prefixes(permuted_keys)
    plan = plan_step(_lengths(keys), row_ids=ids, prefixes=here, **options)
    permuted = plan_step(_lengths(permuted_keys), row_ids=[ids[i] for i in order], prefixes=there, **moved)
    assert tuple(tuple(tuple(order[row] for row in cell) for cell in rank) for rank in permuted.cells) == plan.cells
    if "rank_rows" in options:
        return  # copies of a row on different ranks are told apart by their ranks alone
    anonymous = plan_step(_lengths(keys), prefixes=here, **options)
    anonymous_permuted = plan_step(_lengths(permuted_keys), prefixes=there, **moved)
    for a, b in zip(anonymous.cells, anonymous_permuted.cells, strict=True):
        assert [[keys[i] for i in cell] for cell in a] == [[permuted_keys[i] for i in cell] for cell in b]


@settings(max_examples=150, suppress_health_check=_SLOW_DATA)
@given(tree_requests(max_rows=30))
def test_promises_hold(request) -> None:
    _promises_hold(request)


@settings(max_examples=60, suppress_health_check=_SLOW_DATA)
@given(tree_requests(max_rows=30, max_ranks=8), st.integers(0, 2**32))
def test_permuting_the_rows_permutes_the_plan(request, seed: int) -> None:
    _permuting_permutes(request, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000, suppress_health_check=_SLOW_DATA)
@given(tree_requests(max_rows=300, max_ranks=64))
def test_promises_hold_for_many_rows(request) -> None:
    _promises_hold(request)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000, suppress_health_check=_SLOW_DATA)
@given(tree_requests(max_rows=100, max_ranks=64), st.integers(0, 2**32))
def test_permuting_many_rows_permutes_the_plan(request, seed: int) -> None:
    _permuting_permutes(request, seed)


@settings(max_examples=40, suppress_health_check=_SLOW_DATA)
@given(st.integers(1, 30), st.integers(0, 2**32), st.integers(1, 4), st.randoms(use_true_random=False))
def test_windows_are_planned_one_by_one(num_rows, seed, num_windows, rnd) -> None:
    keys = tree_keys(num_rows, 60, seed)
    rows = list(range(num_rows))
    rnd.shuffle(rows)
    windows = [part for part in (rows[i::num_windows] for i in range(num_windows)) if part]
    options = {"num_ranks": 3, "max_tokens_per_gpu": 80, "layout": "tree"}
    prefixes = shared_prefixes(keys)
    plans = plan_step(_lengths(keys), windows=windows, prefixes=prefixes, row_ids=list(range(num_rows)), **options)
    for part, plan in zip(windows, plans, strict=True):
        inside = sorted(part)
        assert plan.rows == tuple(inside)
        assert_promises(plan, _lengths(keys), part, options, keys)
        plan.check(_lengths(keys), prefixes=prefixes)
        own = [keys[i] for i in inside]
        alone = plan_step(_lengths(own), prefixes=shared_prefixes(own), row_ids=list(range(len(own))), **options)
        assert plan.cells == tuple(tuple(tuple(inside[i] for i in cell) for cell in rank) for rank in alone.cells)


@settings(max_examples=60)
@given(st.integers(2, 20), st.integers(0, 2**32))
def test_the_check_reads_the_prefixes(num_rows, seed) -> None:
    keys = tree_keys(num_rows, 30, seed)
    lengths, prefixes = _lengths(keys), shared_prefixes(keys)
    nothing = SharedPrefixes(np.arange(num_rows), np.zeros(num_rows, dtype=np.int64))
    plan = plan_step(lengths, num_ranks=1, max_tokens_per_gpu=200, layout="tree", prefixes=prefixes)
    assume(plan.stats.footprint < sum(lengths))
    with pytest.raises(PlanError, match="promise"):
        plan.check(lengths, prefixes=nothing)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=60),
    st.integers(1, 5),
    st.sampled_from(["micro_batch", "step"]),
    st.sampled_from(["global", "local"]),
    st.sampled_from(["default", "high"]),
)
def test_rows_that_share_nothing_cost_what_they_cost_packed(lengths, num_ranks, sync, placement, effort) -> None:
    nothing = shared_prefixes([[i] * n for i, n in enumerate(lengths)])
    options = {"num_ranks": num_ranks, "max_tokens_per_gpu": 1000, "sync": sync, "effort": effort}
    if placement == "local":
        ranks = [[i for i in range(len(lengths)) if i % num_ranks == r] for r in range(num_ranks)]
        options |= {"placement": "local", "rank_rows": ranks}
    ids = list(range(len(lengths)))
    packed = plan_step(lengths, layout="packed", row_ids=ids, **options)
    tree = plan_step(lengths, layout="tree", prefixes=nothing, row_ids=ids, **options)
    assert tree.cells == packed.cells
    assert tree.stats == packed.stats
