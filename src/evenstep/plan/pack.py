"""Packed cells of rows that may go anywhere."""

from __future__ import annotations

import heapq

import numpy as np

from evenstep.plan.problem import Problem
from evenstep.types import Int64Array

__all__ = ["pack_into"]


def pack_into(problem: Problem, positions: Int64Array, num_cells: int) -> Int64Array | None:
    """[R] Cell of each of these rows, or None when they were not made to fit into ``num_cells``.

    Longest first, each row to the cheapest cell that still has room for it.
    """
    capacity = problem.room.capacity
    if capacity is None:
        capacity = int(problem.widths_R.sum())
    max_rows = problem.room.max_rows or positions.size
    cell_of = np.zeros(positions.size, dtype=np.int64)
    heap = [(0, cell, 0, 0) for cell in range(num_cells)]  # (cost, cell, tokens, rows)
    for i, position in enumerate(positions.tolist()):
        width, cost = int(problem.widths_R[position]), int(problem.costs_R[position])
        passed: list[tuple[int, int, int, int]] = []
        while heap and heap[0][2] + width > capacity:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        total, cell, tokens, rows = heapq.heappop(heap)
        cell_of[i] = cell
        if rows + 1 < max_rows:
            passed.append((total + cost, cell, tokens + width, rows + 1))
        for item in passed:
            heapq.heappush(heap, item)
    return cell_of
