"""The planner against exhaustive search on small inputs.

1. The lower bound never exceeds the true optimum (lockstep, rank, and the number of micro-batches).
2. The planner's gap to the optimum is printed and bounded, for packed and padded rows and both ways to synchronise.
3. High effort is never worse than default effort.
4. Bin-packing bound: the number of micro-batches is never below it, and the bound is what hand-made cases say.
5. Layout ``tree``: all of it for random tries and for groups, under the rule that no cell is empty beside two rows.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from evenstep.plan import CostModel, plan_step, shared_prefixes
from plan_cases import tree_keys

COST = CostModel(c0=4.0, c1=1.0, c2=0.02)


def _partitions(num_rows: int) -> Iterator[list[list[int]]]:
    """All set partitions of rows 0..n-1."""

    def extend(row: int, cells: list[list[int]]) -> Iterator[list[list[int]]]:
        if row == num_rows:
            yield cells
            return
        for i in range(len(cells)):
            yield from extend(row + 1, [*cells[:i], [*cells[i], row], *cells[i + 1 :]])
        yield from extend(row + 1, [*cells, [row]])

    return extend(0, [])


def _cell(lengths: list[int], layout: str, budget: int) -> float | None:
    """Cost of a cell without c0; None when it breaks the budget."""
    if layout == "packed":
        size, cost = sum(lengths), float(COST.row_costs(np.array(lengths)).sum())
    else:
        size = len(lengths) * max(lengths)
        cost = len(lengths) * float(COST.row_costs(np.array([max(lengths)]))[0])
    return cost if size <= budget or len(lengths) == 1 else None


def _best_rank_cost(costs: list[float], num_ranks: int, k: int) -> float:
    """Least possible cost of the most expensive rank when each runs at most k of these cells."""
    best = float("inf")

    def place(i: int, loads: list[float], counts: list[int]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if i == len(costs):
            best = max(loads)
            return
        for rank in range(num_ranks):
            if counts[rank] < k:
                loads[rank] += costs[i]
                counts[rank] += 1
                place(i + 1, loads, counts)
                loads[rank] -= costs[i]
                counts[rank] -= 1
                if counts[rank] == 0:
                    break  # empty ranks are alike

    place(0, [0.0] * num_ranks, [0] * num_ranks)
    return best


def _optimum(lengths: list[int], num_ranks: int, budget: int, layout: str) -> tuple[float, float, int]:
    """Least lockstep cost, least rank cost, least K."""
    lockstep, rank, fewest = float("inf"), float("inf"), 10**9
    for cells in _partitions(len(lengths)):
        costs = [_cell([lengths[i] for i in cell], layout, budget) for cell in cells]
        if any(cost is None for cost in costs):
            continue
        found = sorted((cost for cost in costs if cost is not None), reverse=True)
        k = -(-len(found) // num_ranks)
        lockstep = min(lockstep, sum(found[::num_ranks]) + COST.c0 * k)
        fewest = min(fewest, k)
        while sum(found) / num_ranks + COST.c0 * k < rank and k <= len(found):
            rank = min(rank, _best_rank_cost(found, num_ranks, k) + COST.c0 * k)
            k += 1
    return lockstep, rank, fewest


def _inputs(count: int, num_rows: int) -> Iterator[tuple[list[int], int, int]]:
    draw = random.Random(7)
    for i in range(count):
        budget = draw.randint(12, 40)
        longest = (budget // 2, budget, budget + budget // 3)[i % 3]
        yield [draw.randint(1, longest) for _ in range(draw.randint(2, num_rows))], draw.randint(1, 3), budget


def _gaps(layout: str, sync: str, effort: str, count: int, num_rows: int) -> list[float]:
    gaps = []
    for lengths, num_ranks, budget in _inputs(count, num_rows):
        best_lockstep, best_rank, fewest = _optimum(lengths, num_ranks, budget, layout)
        plan = plan_step(
            lengths, num_ranks=num_ranks, max_tokens_per_gpu=budget, layout=layout, sync=sync, effort=effort, cost=COST
        )
        best = best_lockstep if sync == "micro_batch" else best_rank
        assert plan.stats.lower_bound <= best + 1e-6, (lengths, num_ranks, budget)
        assert plan.stats.num_microbatches_lower_bound <= fewest, (lengths, num_ranks, budget)
        assert plan.stats.step_cost >= best - 1e-6, "the search above is not exhaustive"
        gaps.append(plan.stats.step_cost / best)
    return gaps


@pytest.mark.parametrize(
    ("layout", "sync", "most_mean", "most"),
    [
        ("packed", "micro_batch", 1.002, 1.03),
        ("packed", "step", 1.003, 1.10),
        ("padded", "micro_batch", 1.004, 1.08),
        ("padded", "step", 1.008, 1.14),
    ],
)
def test_gap_to_the_optimum(layout: str, sync: str, most_mean: float, most: float) -> None:
    gaps = _gaps(layout, sync, "default", 120, 7)
    mean, worst = sum(gaps) / len(gaps), max(gaps)
    print(f"{layout}, {sync}: mean gap {mean:.4f}, worst {worst:.4f}, optimal {sum(g < 1 + 1e-9 for g in gaps)} of 120")
    assert mean <= most_mean
    assert worst <= most


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_bounds_hold_on_many_inputs(layout: str) -> None:
    _gaps(layout, "micro_batch", "default", 1500, 8)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_high_effort_is_never_worse(layout: str) -> None:
    draw = random.Random(1)
    for _ in range(4):
        lengths = [draw.randint(1, 900) for _ in range(60)]
        options = {"num_ranks": 4, "max_tokens_per_gpu": 1000, "layout": layout}
        default, high = plan_step(lengths, **options), plan_step(lengths, effort="high", **options)
        assert high.stats.step_cost <= default.stats.step_cost


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([6, 6, 6], 10, 3),  # no two share, although ceil(18 / 10) = 2
        ([5, 5, 5, 5, 5], 8, 5),
        ([7, 7, 3, 3], 10, 2),
        ([7, 7, 4, 4], 10, 3),  # 4 fits beside neither 7, and two of them fill one more
        ([12, 1], 10, 2),  # over-long rows stand alone
    ],
)
def test_bin_packing_bound(lengths: list[int], budget: int, expected: int) -> None:
    plan = plan_step(lengths, num_ranks=1, max_tokens_per_gpu=budget, layout="packed")
    assert plan.stats.num_microbatches_lower_bound == expected
    assert plan.num_microbatches == expected


def _tree_cell(keys: list[list[int]], budget: int) -> float | None:
    """Cost of a cell's distinct nodes; None when it breaks the budget."""
    nodes = {tuple(key[: i + 1]) for key in keys for i in range(len(key))}
    if len(nodes) > budget and len(keys) > 1:
        return None
    return sum(COST.c1 + COST.c2 * len(node) for node in nodes)


def _tree_optimum(keys: list[list[int]], num_ranks: int, budget: int, sync: str) -> tuple[float, int]:
    """Least step cost, least K."""
    best, fewest = float("inf"), 10**9
    known: dict[tuple[int, ...], float | None] = {}
    for cells in _partitions(len(keys)):
        for cell in cells:
            if tuple(cell) not in known:
                known[tuple(cell)] = _tree_cell([keys[i] for i in cell], budget)
        costs = [known[tuple(cell)] for cell in cells]
        if any(cost is None for cost in costs):
            continue
        found = sorted((cost for cost in costs if cost is not None), reverse=True)
        k = -(-len(found) // num_ranks)
        fewest = min(fewest, k)
        if len(found) not in (k * num_ranks, len(keys)):
            continue  # a filler beside a cell of two rows
        if sync == "micro_batch":
            best = min(best, sum(found[::num_ranks]) + COST.c0 * k)
        elif sum(found) / num_ranks + COST.c0 * k < best:
            best = min(best, _best_rank_cost(found, num_ranks, k) + COST.c0 * k)
    return best, fewest


def _tree_inputs(count: int, num_rows: int, kind: str) -> Iterator[tuple[list[list[int]], int, int]]:
    draw = random.Random(11)
    for _ in range(count):
        rows, num_ranks = draw.randint(2, num_rows), draw.randint(1, 3)
        if kind == "tries":
            keys = tree_keys(rows, draw.choice([6, 15, 30]), draw.randrange(2**32))
        else:
            group = draw.randint(1, 4)
            prompts = [[100 + i] * draw.randint(2, 15) for i in range(rows)]
            keys = [prompts[i // group] + [i] * draw.randint(1, 12) for i in range(rows)]
        longest = max(map(len, keys))
        yield keys, num_ranks, draw.randint(longest * 2 // 3 + 2, 2 * longest + 2)


def _tree_gaps(kind: str, sync: str, count: int, num_rows: int) -> list[float]:
    gaps = []
    for keys, num_ranks, budget in _tree_inputs(count, num_rows, kind):
        best, fewest = _tree_optimum(keys, num_ranks, budget, sync)
        plan = plan_step(
            [len(key) for key in keys],
            num_ranks=num_ranks,
            max_tokens_per_gpu=budget,
            layout="tree",
            prefixes=shared_prefixes(keys),
            sync=sync,
            cost=COST,
        )
        assert plan.stats.lower_bound <= best + 1e-6, (keys, num_ranks, budget)
        assert plan.stats.num_microbatches_lower_bound <= fewest, (keys, num_ranks, budget)
        assert plan.stats.step_cost >= best - 1e-6, "the search above is not exhaustive"
        gaps.append(plan.stats.step_cost / best)
    return gaps


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
@pytest.mark.parametrize(("kind", "least_equal", "most"), [("tries", 95, 1.05), ("groups", 85, 1.12)])
def test_gap_of_trees_to_the_optimum(kind: str, sync: str, least_equal: int, most: float) -> None:
    gaps = _tree_gaps(kind, sync, 100, 7)
    num_equal = sum(gap < 1 + 1e-9 for gap in gaps)
    print(f"tree, {kind}, {sync}: mean gap {np.mean(gaps):.4f}, worst {max(gaps):.4f}, optimal {num_equal} of 100")
    assert num_equal >= least_equal
    assert max(gaps) <= most


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["tries", "groups"])
def test_tree_bounds_hold_on_many_inputs(kind: str) -> None:
    for sync in ("micro_batch", "step"):
        _tree_gaps(kind, sync, 1500, 8)
