"""Rows that may go anywhere: choose K, fill the cells, deal them into columns."""

from __future__ import annotations

import numpy as np

from evenstep.plan.bounds import lower_bounds
from evenstep.plan.deal import Placed, deal
from evenstep.plan.pack import pack_into
from evenstep.plan.pad import cut_at
from evenstep.plan.problem import Problem
from evenstep.plan.request import Effort, Sync
from evenstep.types import Int64Array

__all__ = ["place_global"]


def place_global(problem: Problem, *, sync: Sync, effort: Effort) -> Placed:
    """Cells under the budget for rows that may go anywhere."""
    capacity = problem.room.capacity
    num_ranks = problem.num_ranks
    alone = 0 if capacity is None else int(np.searchsorted(-problem.widths_R, -capacity, side="left"))
    rest = np.arange(alone, problem.num_rows)
    k = lower_bounds(problem).num_microbatches
    while True:
        num_cells = max(k * num_ranks - alone, 0)
        found = None
        if rest.size == 0 and alone <= k * num_ranks:
            found = rest
        elif num_cells >= rest.size:
            found = np.arange(rest.size)
        elif num_cells > 0:
            found = _fill(problem, rest, num_cells)
        if found is not None:
            cell_of_R = np.concatenate([np.arange(alone), alone + found]).astype(np.int64)
            costs = problem.cell_costs(cell_of_R, k * num_ranks)
            return deal(cell_of_R, costs, num_ranks, k)
        k = problem.round_k(k + 1)


def _fill(problem: Problem, rest: Int64Array, num_cells: int) -> Int64Array | None:
    if problem.room.layout == "packed":
        return pack_into(problem, rest, num_cells)
    low, high = 0, int(problem.costs_R[rest].sum()) * 2
    high = max(high, int(problem.costs_R[rest[0]]) * rest.size)
    if int(cut_at(problem, rest, high).max()) >= num_cells:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if int(cut_at(problem, rest, middle).max()) < num_cells:
            high = middle
        else:
            low = middle
    return _split_empty(problem, cut_at(problem, rest, high), num_cells)


def _split_empty(problem: Problem, cell_of: Int64Array, num_cells: int) -> Int64Array:
    """Give every cell a row: split the cells with the most rows until there are ``num_cells``."""
    starts = np.flatnonzero(np.diff(cell_of, prepend=-1)).tolist()
    cells = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], cell_of.size], strict=True)]
    while len(cells) < num_cells:
        most = max(range(len(cells)), key=lambda i: (len(cells[i]), -i))
        half = (len(cells[most]) + 1) // 2
        cells[most : most + 1] = [cells[most][:half], cells[most][half:]]
    out = np.zeros_like(cell_of)
    for i, cell in enumerate(cells):
        out[cell] = i
    return out
