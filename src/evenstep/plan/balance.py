"""Ranks that meet once a step: make the most expensive rank as cheap as possible, whatever its columns look like."""

from __future__ import annotations

import heapq

import numpy as np

from evenstep.plan.deal import Placed, deal
from evenstep.plan.local import group_rows, number_by_cost, split_to_count
from evenstep.plan.problem import Problem
from evenstep.types import Int64Array

__all__ = ["place_for_ranks", "rank_cost"]


def rank_cost(problem: Problem, placed: Placed) -> int:
    """Cost of the most expensive rank, c0 included."""
    return int(_costs_WK(problem, placed).sum(axis=1).max()) + problem.c0 * placed.num_microbatches


def _costs_WK(problem: Problem, placed: Placed) -> Int64Array:
    num_cells = problem.num_ranks * placed.num_microbatches
    costs = problem.cell_costs(placed.rank_R * placed.num_microbatches + placed.k_R, num_cells)
    return costs.reshape(problem.num_ranks, placed.num_microbatches)


def place_for_ranks(problem: Problem, partitions: list[tuple[Int64Array, int]]) -> Placed:
    """Best of: given partitions into cells (cell of each row, K) dealt to even ranks, or rows dealt to ranks first."""
    candidates: list[Placed] = []
    for cell_of_R, k in partitions:
        costs = problem.cell_costs(cell_of_R, k * problem.num_ranks)
        candidates.append(_swap_cells(problem, deal(cell_of_R, costs, problem.num_ranks, k)))
    by_rows = _rows_to_ranks(problem)
    if by_rows is not None and (problem.room.capacity is not None or by_rows.num_microbatches <= partitions[0][1]):
        candidates.append(by_rows)
    return min(candidates, key=lambda placed: rank_cost(problem, placed))


def _rows_to_ranks(problem: Problem) -> Placed | None:
    """Rows longest first to the cheapest rank, grouped there; None where a rank lacks rows that others could spare."""
    heap = [(0, rank) for rank in range(problem.num_ranks)]
    rank_R = np.empty(problem.num_rows, dtype=np.int64)
    for position, cost in enumerate(problem.costs_R.tolist()):
        load, rank = heap[0]
        rank_R[position] = rank
        heapq.heapreplace(heap, (load + cost, rank))
    grouped = [group_rows(problem, np.flatnonzero(rank_R == rank)) for rank in range(problem.num_ranks)]
    num_microbatches = problem.round_k(max(len(cells) for cells in grouped))
    k_R = np.zeros(problem.num_rows, dtype=np.int64)
    fewest, most = num_microbatches, 0
    for cells in grouped:
        parts = split_to_count(problem, cells, num_microbatches)
        fewest = min(fewest, len(parts))
        most = max(most, max((len(part) for part in parts), default=0))
        number_by_cost(problem, parts, k_R)
    if fewest < num_microbatches and most > 1:
        return None
    return Placed(rank_R=rank_R, k_R=k_R, num_microbatches=num_microbatches)


def _swap_cells(problem: Problem, placed: Placed) -> Placed:
    """Swap cells between the most and the least expensive rank while that lowers the larger of the two."""
    num_ranks, num_microbatches = problem.num_ranks, placed.num_microbatches
    costs = _costs_WK(problem, placed)
    home = np.arange(num_ranks * num_microbatches).reshape(num_ranks, num_microbatches)
    for _ in range(4 * num_ranks):
        loads = costs.sum(axis=1)
        high, low = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[high] - loads[low])
        change = costs[high][:, None] - costs[low][None, :]
        gain = np.where((change > 0) & (change < gap), gap - np.abs(gap - 2 * change), 0)
        best = int(gain.argmax())
        if gain.flat[best] <= 0:
            break
        i, j = divmod(best, num_microbatches)
        costs[high, i], costs[low, j] = costs[low, j], costs[high, i]
        home[high, i], home[low, j] = home[low, j], home[high, i]
    order = np.argsort(-costs, axis=1, kind="stable")
    place = np.empty(num_ranks * num_microbatches, dtype=np.int64)
    place[np.take_along_axis(home, order, axis=1).ravel()] = np.arange(num_ranks * num_microbatches)
    new = place[placed.rank_R * num_microbatches + placed.k_R]
    return Placed(rank_R=new // num_microbatches, k_R=new % num_microbatches, num_microbatches=num_microbatches)
