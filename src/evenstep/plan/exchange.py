"""Local search on packed cells: many pairs of cells exchange one row each, all at once.

A sweep looks at disjoint pairs (giver, taker). In each pair it tries every exchange of a row of the giver for a row of
the taker, or for none, and takes the best that keeps both within the budget. Work is counted in pairs and slots.
"""

from __future__ import annotations

import numpy as np

from evenstep.plan.deal import lockstep_cost
from evenstep.plan.problem import Problem
from evenstep.types import BoolArray, Int64Array

__all__ = ["exchange_rows"]

_PAIRS_AT_ONCE = 4096  # bounds the memory of a sweep


class _Cells:
    """Rows of each cell as a matrix; the position ``num_rows`` stands for an empty slot."""

    def __init__(self, problem: Problem, cell_of_R: Int64Array, num_cells: int) -> None:
        self.empty = problem.num_rows
        self.row_costs = np.append(problem.costs_R, 0)
        self.row_widths = np.append(problem.widths_R, 0)
        capacity = problem.room.capacity
        self.capacity = int(problem.widths_R.sum()) if capacity is None else capacity
        self.max_rows = problem.room.max_rows or problem.num_rows
        self.counts_C = np.bincount(cell_of_R, minlength=num_cells)
        order = np.argsort(cell_of_R, kind="stable")
        starts = np.cumsum(self.counts_C) - self.counts_C
        self.slots = np.full((num_cells, int(self.counts_C.max()) + 1), self.empty, dtype=np.int64)
        self.slots[cell_of_R[order], np.arange(order.size) - starts[cell_of_R[order]]] = order
        self.costs_C = self.row_costs[self.slots].sum(axis=1)
        self.tokens_C = self.row_widths[self.slots].sum(axis=1)

    def cell_of_rows(self) -> Int64Array:
        """[R] Cell of each row."""
        cell_of = np.empty(self.empty + 1, dtype=np.int64)
        cell_of[self.slots] = np.arange(self.slots.shape[0])[:, None]
        return cell_of[: self.empty]

    def sweep(self, givers: Int64Array, takers: Int64Array, limits: Int64Array | None, width: int, phase: int) -> None:
        """One exchange in each pair; ``limits`` None: make the two costs equal; else fill the taker up to its limit."""
        for start in range(0, givers.size, _PAIRS_AT_ONCE):
            part = slice(start, start + _PAIRS_AT_ONCE)
            self._sweep_part(givers[part], takers[part], None if limits is None else limits[part], width, phase)

    def _sweep_part(
        self, givers: Int64Array, takers: Int64Array, limits: Int64Array | None, width: int, phase: int
    ) -> None:
        slots_g, slots_t = self._look_at(givers, width, phase), self._look_at(takers, width, phase + 3)
        rows_g = self.slots[givers[:, None], slots_g]
        rows_t = self.slots[takers[:, None], slots_t]
        cost = self.row_costs[rows_g][:, :, None] - self.row_costs[rows_t][:, None, :]
        tokens = self.row_widths[rows_g][:, :, None] - self.row_widths[rows_t][:, None, :]
        may = (cost > 0) & (tokens <= (self.capacity - self.tokens_C[takers])[:, None, None])
        may &= tokens >= (self.tokens_C[givers] - self.capacity)[:, None, None]
        # Giving a row for nothing must neither empty the giver nor crowd the taker.
        is_closed = (self.counts_C[givers] == 1) | (self.counts_C[takers] >= self.max_rows)
        may &= ~(is_closed[:, None, None] & (rows_t == self.empty)[:, None, :])
        gap = (self.costs_C[givers] - self.costs_C[takers])[:, None, None]
        if limits is None:
            gain = np.where(may & (cost < gap), gap - np.abs(gap - 2 * cost), 0)
        else:
            gain = np.where(may & (cost <= (limits - self.costs_C[takers])[:, None, None]), cost, 0)
        flat = gain.reshape(givers.size, -1)
        best = flat.argmax(axis=1)
        use = np.flatnonzero(flat[np.arange(givers.size), best] > 0)
        if use.size:
            at_g = slots_g[use, best[use] // width]
            at_t = slots_t[use, best[use] % width]
            self._swap(givers[use], at_g, takers[use], at_t)

    def _look_at(self, cells: Int64Array, width: int, phase: int) -> Int64Array:
        """[pairs, width] Slots to try: all of a small cell and an empty one; a moving choice in a large one."""
        counts = self.counts_C[cells][:, None]
        index = np.arange(width)[None, :]
        spread = (index * counts + phase * 7) // width % np.maximum(counts, 1)
        return np.where(counts < width, np.minimum(index, counts), spread)

    def _swap(self, givers: Int64Array, at_g: Int64Array, takers: Int64Array, at_t: Int64Array) -> None:
        given, taken = self.slots[givers, at_g], self.slots[takers, at_t]
        self.slots[givers, at_g], self.slots[takers, at_t] = taken, given
        cost = self.row_costs[given] - self.row_costs[taken]
        tokens = self.row_widths[given] - self.row_widths[taken]
        self.costs_C[givers] -= cost
        self.costs_C[takers] += cost
        self.tokens_C[givers] -= tokens
        self.tokens_C[takers] += tokens
        is_move: BoolArray = taken == self.empty
        if is_move.any():
            self.counts_C[givers[is_move]] -= 1
            self.counts_C[takers[is_move]] += 1
            touched = np.concatenate([givers[is_move], takers[is_move]])
            self.slots[touched] = np.sort(self.slots[touched], axis=1)  # empty slots last
            if int(self.counts_C.max()) == self.slots.shape[1]:
                more = np.full((self.slots.shape[0], 4), self.empty, dtype=np.int64)
                self.slots = np.concatenate([self.slots, more], axis=1)


def exchange_rows(
    problem: Problem, cell_of_R: Int64Array, num_microbatches: int, *, rounds: int, width: int, first_turn: int = 0
) -> Int64Array:
    """[R] Cells after at most ``rounds`` rounds of exchanges, never costlier in lockstep than before.

    Columns whose most expensive cell is a single row cannot get cheaper: their other cells are filled up to it with
    cost taken from the columns below, and those are made equal among themselves.
    """
    num_ranks = problem.num_ranks
    cells = _Cells(problem, cell_of_R, num_microbatches * num_ranks)
    best_cost = lockstep_cost(cells.costs_C, num_ranks, num_microbatches, 0)
    best = cell_of_R
    for turn in range(first_turn, first_turn + rounds):
        order = np.argsort(-cells.costs_C, kind="stable")
        tops = order[::num_ranks]
        is_single = cells.counts_C[tops] == 1
        num_heads = num_microbatches if is_single.all() else int(is_single.argmin())
        level = order[num_heads * num_ranks :]
        half = level.size // 2
        if half:
            cells.sweep(level[:half], np.roll(level[::-1][:half], turn // 2), None, width, turn)
        if num_heads and level.size:
            heads = order[: num_heads * num_ranks]
            limits = np.repeat(cells.costs_C[tops[:num_heads]], num_ranks)
            slack = limits - cells.costs_C[heads]
            by_slack = np.argsort(-slack, kind="stable")[: int((slack > 0).sum())]
            givers = level[np.argsort(-cells.costs_C[level], kind="stable")]
            count = min(by_slack.size, givers.size)
            if count:
                chosen = np.roll(by_slack, turn * 3)[:count]
                cells.sweep(np.roll(givers, turn)[:count], heads[chosen], limits[chosen], width, turn)
        cost = lockstep_cost(cells.costs_C, num_ranks, num_microbatches, 0)
        if cost < best_cost:
            best_cost, best = cost, cells.cell_of_rows()
    return best
