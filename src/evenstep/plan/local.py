"""Rows that are already on their ranks: each rank groups its own, then the counts are made equal by splitting."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

from evenstep.plan.blocks import cut_cell, join_blocks, make_blocks
from evenstep.plan.deal import Placed
from evenstep.plan.problem import Problem
from evenstep.types import Int64Array

__all__ = ["Cell", "group_rows", "number_by_cost", "place_local", "split_to_count"]

Cell = list[int]  # canonical positions, longest row first


def place_local(problem: Problem, rank_of_R: Int64Array) -> Placed:
    """Group longest first, agree on K, split the most expensive divisible cell until every rank has K."""
    grouped = [group_rows(problem, np.flatnonzero(rank_of_R == r)) for r in range(problem.num_ranks)]
    num_microbatches = problem.round_k(max(len(cells) for cells in grouped))
    k_R = np.zeros(problem.num_rows, dtype=np.int64)
    for cells in grouped:
        parts = split_to_count(problem, cells, num_microbatches)
        number_by_cost(problem, parts, k_R)
    return Placed(rank_R=rank_of_R, k_R=k_R, num_microbatches=num_microbatches)


def group_rows(problem: Problem, positions: Int64Array) -> list[Cell]:
    """Cells within the budget of these rows, taken longest first."""
    if problem.room.layout == "tree":
        return _join_blocks(problem, positions)
    if problem.room.layout == "packed":
        return _best_fit(problem, positions)
    capacity, max_rows = problem.room.capacity, problem.room.max_rows or positions.size
    widths = problem.widths_R[positions]
    listed = positions.tolist()
    cells: list[Cell] = []
    start = 0
    while start < len(listed):
        fit = len(listed) if capacity is None else max(1, capacity // int(widths[start]))
        cells.append(listed[start : start + min(fit, max_rows)])
        start += len(cells[-1])
    return cells


def _join_blocks(problem: Problem, positions: Int64Array) -> list[Cell]:
    """Subtrees that fit, joined by best fit: a prefix is repeated only where its rows need more than a cell."""
    if positions.size == 0:
        return []
    capacity = problem.room.capacity
    limit = int(problem.widths_R.sum()) if capacity is None else capacity
    max_rows = problem.room.max_rows or problem.num_rows
    return join_blocks(problem, make_blocks(problem, positions, limit=limit, max_rows=max_rows))


def _best_fit(problem: Problem, positions: Int64Array) -> list[Cell]:
    """Best-fit decreasing: each row goes where it leaves the least room, else into a new cell."""
    capacity, max_rows = problem.room.capacity, problem.room.max_rows
    if capacity is None:
        capacity = int(problem.widths_R.sum())
    cells: list[Cell] = []
    free: list[tuple[int, int]] = []  # (room left, cell), ascending
    for position in positions.tolist():
        width = int(problem.widths_R[position])
        at = bisect_left(free, (width, -1))
        if at < len(free):
            left, cell = free.pop(at)
            cells[cell].append(position)
        else:
            left, cell = capacity, len(cells)
            cells.append([position])
        if left > width and (max_rows is None or len(cells[cell]) < max_rows):
            insort(free, (left - width, cell))
    return cells


def number_by_cost(problem: Problem, cells: list[Cell], k_R: Int64Array) -> None:
    """Number a rank's cells, the most expensive first: pairing sorted cells makes the sum of column maxima least."""
    costs = [_cost(problem, cell) for cell in cells]
    for k, i in enumerate(sorted(range(len(cells)), key=lambda i: -costs[i])):
        k_R[cells[i]] = k


def _cost(problem: Problem, cell: Cell) -> int:
    return problem.cost_of_cell(np.array(cell, dtype=np.int64))


def split_to_count(problem: Problem, cells: list[Cell], count: int) -> list[Cell]:
    """Halve the most expensive divisible cell, the larger half first, until there are ``count`` or none divides.

    In ``tree`` it is cut in the order of tokens, where the larger part costs least.

    Halves stay where their cell was; equal costs are split at the lowest k.
    """
    placed: dict[tuple[int, ...], Cell] = {(k,): cell for k, cell in enumerate(cells)}
    heap = [(-_cost(problem, cell), key) for key, cell in placed.items() if len(cell) > 1]
    heapq.heapify(heap)
    while len(placed) < count and heap:
        _, key = heapq.heappop(heap)
        cell = placed.pop(key)
        half = (len(cell) + 1) // 2
        parts = (cell[:half], cell[half:]) if problem.trie is None else cut_cell(problem, cell)
        for i, part in enumerate(parts):
            placed[(*key, i)] = part
            if len(part) > 1:
                heapq.heappush(heap, (-_cost(problem, part), (*key, i)))
    return [placed[key] for key in sorted(placed)]
