"""Padded cells of rows that may go anywhere."""

from __future__ import annotations

import numpy as np

from evenstep.plan.problem import Problem
from evenstep.types import Int64Array

__all__ = ["cut_at"]


def cut_at(problem: Problem, positions: Int64Array, threshold: int) -> Int64Array:
    """[R] Cells of neighbours in length, each as long as its cost stays within ``threshold`` and the budget allows."""
    capacity, max_rows = problem.room.capacity, problem.room.max_rows or positions.size
    cell_of = np.zeros(positions.size, dtype=np.int64)
    start = cell = 0
    while start < positions.size:
        width, cost = int(problem.widths_R[positions[start]]), int(problem.costs_R[positions[start]])
        fit = (
            min(threshold // cost, max_rows)
            if capacity is None
            else min(threshold // cost, capacity // width, max_rows)
        )
        end = start + max(1, fit)
        cell_of[start:end] = cell
        start, cell = end, cell + 1
    return cell_of
