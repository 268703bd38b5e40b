"""Public ways to form micro-batches, written from their published descriptions, to compare plans with.

No code is taken from the projects; each function says what it describes and details may differ from a given release.
Every rank runs its cells most expensive first, which is at least as good as any order the descriptions name. A public
planner may break the budget or refuse its input: that is counted, not repaired.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from evenstep.errors import PlanError
from evenstep.types import Float64Array

__all__ = ["PACKED", "PADDED", "PublicPlanner", "RefusedError"]

Cells = list[list[list[int]]]  # [W][K] row indices
# (lengths, cost of each row alone and without c0, ranks, budget) -> cells
PublicPlanner = Callable[[Sequence[int], Float64Array, int, int], Cells]


class RefusedError(PlanError):
    """The public planner does not take this input."""


def largest_differencing(values: Sequence[float], num_parts: int, *, is_equal_count: bool) -> list[list[int]]:
    """Karmarkar-Karp: join the two most uneven partial partitions, largest part to smallest, until one is left."""
    if is_equal_count and len(values) % num_parts:
        raise RefusedError(f"{len(values)} rows must divide by {num_parts} ranks; leave rows out, or change the ranks")
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if is_equal_count:
        starts = [order[i : i + num_parts] for i in range(0, len(order), num_parts)]
    else:
        starts = [[i] for i in order]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, rows in enumerate(starts):
        parts: list[tuple[float, list[int]]] = [(values[i], [i]) for i in rows] + [
            (0.0, []) for _ in range(num_parts - len(rows))
        ]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], number, parts))
    number = len(starts)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [rows for _, rows in heap[0][2]]


def first_fit_decreasing(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[list[int]]:
    """Longest first into the first bin with room."""
    bins: list[list[int]] = []
    room = np.full(len(rows), -1, dtype=np.int64)
    for i in sorted(rows, key=lambda i: (-lengths[i], i)):
        first = int(np.argmax(room >= lengths[i]))
        if room[first] < lengths[i]:
            first = len(bins)
            bins.append([])
            room[first] = budget
        bins[first].append(i)
        room[first] -= lengths[i]
    return bins


def emptiest_fit_decreasing(lengths: Sequence[int], rows: Sequence[int], budget: int, least: int) -> list[list[int]]:
    """Longest first into the emptiest of at least ``least`` bins, a new bin where that has no room."""
    bins: list[list[int]] = [[] for _ in range(least)]
    heap = [(0, number) for number in range(least)]
    for i in sorted(rows, key=lambda i: (-lengths[i], i)):
        if not heap or heap[0][0] + lengths[i] > budget:
            heapq.heappush(heap, (lengths[i], len(bins)))
            bins.append([i])
            continue
        load, number = heap[0]
        bins[number].append(i)
        heapq.heapreplace(heap, (load + lengths[i], number))
    return bins


def _cost(row_costs_R: Float64Array, rows: Sequence[int], *, is_padded: bool) -> float:
    if not rows:
        return 0.0
    costs = row_costs_R[list(rows)]
    return float(len(rows) * costs.max() if is_padded else costs.sum())


def _even(row_costs_R: Float64Array, ranks: list[list[list[int]]], *, is_padded: bool = False) -> Cells:
    """Most expensive cell first on each rank, empty cells behind until all counts are equal."""
    most = max(len(rank) for rank in ranks)
    ordered = [sorted(rank, key=lambda rows: -_cost(row_costs_R, rows, is_padded=is_padded)) for rank in ranks]
    return [rank + [[] for _ in range(most - len(rank))] for rank in ordered]


def _ranks_by_count(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Equal numbers of rows on each rank, longest first to the rank with the fewest tokens that has a place left."""
    if len(lengths) % num_ranks:
        raise RefusedError(f"{len(lengths)} rows must divide by {num_ranks} ranks; leave rows out, or change the ranks")
    places = len(lengths) // num_ranks
    heap = [(0, rank) for rank in range(num_ranks)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(i)
        if len(ranks[rank]) < places:
            heapq.heappush(heap, (load + lengths[i], rank))
    return ranks


def areal_first_fit(lengths: Sequence[int], row_costs_R: Float64Array, num_ranks: int, budget: int) -> Cells:
    """AReaL's documented default: rows balanced over ranks, first-fit decreasing on each, counts raised together."""
    if max(lengths) > budget:
        raise RefusedError(
            f"no row may exceed the budget of {budget} tokens, found one of {max(lengths)}; raise the budget"
        )
    ranks = _ranks_by_count(lengths, num_ranks)
    least = max(math.ceil(sum(lengths[i] for i in rows) / budget) for rows in ranks)
    while True:
        found = [emptiest_fit_decreasing(lengths, rows, budget, least) for rows in ranks]
        most = max(len(bins) for bins in found)
        if most == least:
            return _even(row_costs_R, found)
        least = most


def verl_balanced(lengths: Sequence[int], row_costs_R: Float64Array, num_ranks: int, budget: int) -> Cells:
    """verl: equal counts and balanced workload over ranks, then max ceil(tokens / budget) even parts on each."""
    ranks = largest_differencing(row_costs_R.tolist(), num_ranks, is_equal_count=True)
    parts = max(math.ceil(sum(lengths[i] for i in rows) / budget) for rows in ranks)
    cells: Cells = []
    for rows in ranks:
        split = largest_differencing([float(row_costs_R[i]) for i in rows], parts, is_equal_count=False)
        cells.append([[rows[i] for i in part] for part in split])
    return _even(row_costs_R, cells)


def miles_first_fit(lengths: Sequence[int], row_costs_R: Float64Array, num_ranks: int, budget: int) -> Cells:
    """miles / slime: tokens balanced over ranks, first-fit decreasing gives the count, the largest count is shared."""
    ranks = largest_differencing([float(n) for n in lengths], num_ranks, is_equal_count=len(lengths) % num_ranks == 0)
    return _even(row_costs_R, [first_fit_decreasing(lengths, rows, budget) for rows in ranks])


def nemo_packing(lengths: Sequence[int], row_costs_R: Float64Array, num_ranks: int, budget: int) -> Cells:
    """NeMo-RL sequence packing: one global first-fit-decreasing pass, bins dealt to the ranks in turn."""
    bins = first_fit_decreasing(lengths, range(len(lengths)), budget)
    return _even(row_costs_R, [bins[rank::num_ranks] for rank in range(num_ranks)])


def in_order(lengths: Sequence[int], row_costs_R: Float64Array, num_ranks: int, budget: int) -> Cells:
    """TRL's token budget: each rank's rows in the order they came, a new cell when the next row does not fit."""
    ranks: list[list[list[int]]] = []
    for rank in range(num_ranks):
        cells: list[list[int]] = []
        load = 0
        for i in range(rank * len(lengths) // num_ranks, (rank + 1) * len(lengths) // num_ranks):
            if not cells or load + lengths[i] > budget:
                cells.append([])
                load = 0
            cells[-1].append(i)
            load += lengths[i]
        ranks.append(cells)
    most = max(len(cells) for cells in ranks)
    return [cells + [[] for _ in range(most - len(cells))] for cells in ranks]


def _runs(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[list[int]]:
    """Sorted rows in runs of rows x longest within the budget."""
    cells: list[list[int]] = []
    for i in sorted(rows, key=lambda i: (-lengths[i], i)):
        if cells and (len(cells[-1]) + 1) * lengths[cells[-1][0]] <= budget:
            cells[-1].append(i)
        else:
            cells.append([i])
    return cells


def nemo_dynamic(lengths: Sequence[int], row_costs_R: Float64Array, num_ranks: int, budget: int) -> Cells:
    """NeMo-RL dynamic batching: sorted rows dealt in turn, all ranks cut where the longest shard would overflow."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shards = [order[rank::num_ranks] for rank in range(num_ranks)]
    cells: Cells = [[] for _ in range(num_ranks)]
    start = 0
    while start < len(shards[0]):
        count = max(1, budget // lengths[shards[0][start]])
        for rank, shard in enumerate(shards):
            cells[rank].append(shard[start : start + count])
        start += count
    return cells


def proposal_dynamic(lengths: Sequence[int], row_costs_R: Float64Array, num_ranks: int, budget: int) -> Cells:
    """The dynamic-batching proposal for molt: balanced ranks, runs within the budget, counts made equal by halving."""
    ranks = largest_differencing([float(n) for n in lengths], num_ranks, is_equal_count=len(lengths) % num_ranks == 0)
    found = [_runs(lengths, rows, budget) for rows in ranks]
    most = max(len(cells) for cells in found)
    for cells in found:
        while len(cells) < most and any(len(rows) > 1 for rows in cells):
            divisible = [i for i in range(len(cells)) if len(cells[i]) > 1]
            widest = max(divisible, key=lambda i: (_cost(row_costs_R, cells[i], is_padded=True), -i))
            half = (len(cells[widest]) + 1) // 2
            cells[widest : widest + 1] = [cells[widest][:half], cells[widest][half:]]
    return _even(row_costs_R, found, is_padded=True)


def one_row(lengths: Sequence[int], row_costs_R: Float64Array, num_ranks: int, budget: int) -> Cells:
    """One row in every micro-batch, longest first."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return _even(row_costs_R, [[[i] for i in order[rank::num_ranks]] for rank in range(num_ranks)], is_padded=True)


PACKED: dict[str, PublicPlanner] = {
    "AReaL first-fit": areal_first_fit,
    "verl balanced": verl_balanced,
    "miles first-fit": miles_first_fit,
    "NeMo-RL packing": nemo_packing,
    "TRL token budget": in_order,
}
PADDED: dict[str, PublicPlanner] = {
    "NeMo-RL dynamic": nemo_dynamic,
    "dynamic-batching proposal": proposal_dynamic,
    "one row at a time": one_row,
}
