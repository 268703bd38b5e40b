"""Local search on tree cells: pairs trade single rows by what a row adds to its cell and would to the other.

A row adds its length less the longest beginning that it shares with a row there: its neighbour in the order of tokens.
A trade is judged with the other row still in place; what comes of it is then counted exactly, and undone where it does
not pay.
"""

from __future__ import annotations

import numpy as np

from evenstep.plan.deal import lockstep_cost
from evenstep.plan.problem import Problem
from evenstep.types import BoolArray, Int64Array

__all__ = ["trade_rows"]

_NEVER = np.iinfo(np.int64).max // 4


class _Cells:
    """Rows of all cells in one order: by cell, then by tokens."""

    def __init__(self, problem: Problem, cell_of_R: Int64Array, num_cells: int) -> None:
        self.problem = problem
        self.num_cells = num_cells
        capacity = problem.room.capacity
        self.capacity = _NEVER if capacity is None else capacity
        self.max_rows = problem.room.max_rows or problem.num_rows
        self.count(cell_of_R)

    def count(self, cell_of_R: Int64Array) -> None:
        """Order the rows of these cells, and count their tokens and costs."""
        problem, trie = self.problem, self.problem.trie
        assert trie is not None
        self.cell_of_R = cell_of_R
        keys = cell_of_R * (problem.num_rows + 1) + trie.place_R
        self.order = np.argsort(keys)  # positions; no two keys are equal
        self.keys = keys[self.order]
        cells, places = cell_of_R[self.order], trie.place_R[self.order]
        same = np.flatnonzero(cells[1:] == cells[:-1])
        tokens, costs = problem.widths_R[self.order], problem.costs_R[self.order]
        shared_tokens, shared_costs = trie.between(places[same], places[same + 1])
        tokens[same + 1] -= shared_tokens
        costs[same + 1] -= shared_costs
        self.counts_C = np.bincount(cells, minlength=self.num_cells)
        self.starts_C = np.cumsum(self.counts_C) - self.counts_C
        self.tokens_C = np.bincount(cells, weights=tokens, minlength=self.num_cells).astype(np.int64)
        self.costs_C = np.bincount(cells, weights=costs, minlength=self.num_cells).astype(np.int64)
        self.costs_C += problem.padding_costs(self.tokens_C)

    def added(self, rows: Int64Array, cells: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Tokens and cost that each row adds to its cell there, or would add (both of one shape)."""
        problem, trie = self.problem, self.problem.trie
        assert trie is not None
        places = trie.place_R[rows]
        keys = cells * (problem.num_rows + 1) + places
        at = np.searchsorted(self.keys, keys)
        here = self.cell_of_R[rows] == cells
        before, after = at - 1, at + here
        tokens, costs = np.zeros_like(rows), np.zeros_like(rows)
        for near, is_in in (
            (before, before >= self.starts_C[cells]),
            (after, after < self.starts_C[cells] + self.counts_C[cells]),
        ):
            other = trie.place_R[self.order[np.where(is_in, near, 0)]]
            first, last = np.minimum(places, other), np.maximum(places, other)
            shared_tokens, shared_costs = trie.between(first[is_in], last[is_in])
            tokens[is_in] = np.maximum(tokens[is_in], shared_tokens)
            costs[is_in] = np.maximum(costs[is_in], shared_costs)
        return problem.widths_R[rows] - tokens, problem.costs_R[rows] - costs

    def look_at(self, cells: Int64Array, width: int, turn: int) -> tuple[Int64Array, BoolArray]:
        """[pairs, width] Rows to try, all of a small cell or a moving choice, and which of them are real."""
        counts = self.counts_C[cells][:, None]
        index = np.arange(width)[None, :]
        spread = (index * counts + turn * 7) // width % counts
        slots = np.where(counts <= width, np.minimum(index, counts - 1), spread)
        return self.order[self.starts_C[cells][:, None] + slots], index < counts


def trade_rows(
    problem: Problem, cell_of_R: Int64Array, num_microbatches: int, *, rounds: int, width: int
) -> Int64Array:
    """[R] Cells after ``rounds`` rounds of trades, never costlier in lockstep than before.

    Columns whose most expensive cell is a single row cannot get cheaper; cells below them trade among themselves, each
    expensive one with a cheap one.
    """
    num_ranks = problem.num_ranks
    cells = _Cells(problem, cell_of_R, num_microbatches * num_ranks)
    best, best_cost = cell_of_R, lockstep_cost(cells.costs_C, num_ranks, num_microbatches, 0)
    if not cells.counts_C.all():
        return best  # only single rows
    idle = 0
    for turn in range(rounds):
        order = np.argsort(-cells.costs_C, kind="stable")
        is_single = cells.counts_C[order[::num_ranks]] == 1
        num_heads = num_microbatches if is_single.all() else int(is_single.argmin())
        level = order[num_heads * num_ranks :]
        half = level.size // 2
        if half == 0:
            break
        givers, takers = level[:half], np.roll(level[::-1][:half], turn // 2)
        changed = _trade(cells, givers, takers, width, turn)
        idle = 0 if changed else idle + 1
        if idle > 3:
            break
        cost = lockstep_cost(cells.costs_C, num_ranks, num_microbatches, 0)
        if cost < best_cost:
            best, best_cost = cells.cell_of_R, cost
    return best


def _trade(cells: _Cells, givers: Int64Array, takers: Int64Array, width: int, turn: int) -> bool:
    """The best trade of each pair: a row of the giver for a row of the taker, or for none."""
    rows_g, real_g = cells.look_at(givers, width, turn)
    rows_t, real_t = cells.look_at(takers, width, turn + 3)
    wide_g, wide_t = np.broadcast_to(givers[:, None], rows_g.shape), np.broadcast_to(takers[:, None], rows_t.shape)
    leave_g, out_g = cells.added(rows_g, wide_g)
    enter_t, in_t = cells.added(rows_g, wide_t)
    leave_t, out_t = cells.added(rows_t, wide_t)
    enter_g, in_g = cells.added(rows_t, wide_g)
    none = np.zeros((givers.size, 1), dtype=np.int64)  # the last choice of the taker: no row

    def both(of_giver: Int64Array, of_taker: Int64Array) -> Int64Array:
        return of_giver[:, :, None] + np.concatenate([of_taker, none], axis=1)[:, None, :]

    tokens_g = cells.tokens_C[givers][:, None, None] + both(-leave_g, enter_g)
    tokens_t = cells.tokens_C[takers][:, None, None] + both(enter_t, -leave_t)
    costs_g = cells.costs_C[givers][:, None, None] + both(-out_g, in_g)
    costs_t = cells.costs_C[takers][:, None, None] + both(in_t, -out_t)
    may = (tokens_g <= cells.capacity) & (tokens_t <= cells.capacity) & real_g[:, :, None]
    may[:, :, :-1] &= real_t[:, None, :]
    may[:, :, -1] &= ((cells.counts_C[givers] > 1) & (cells.counts_C[takers] < cells.max_rows))[:, None]
    gain = np.where(may, cells.costs_C[givers][:, None, None] - np.maximum(costs_g, costs_t), 0).reshape(
        givers.size, -1
    )
    best = gain.argmax(axis=1)
    use = np.flatnonzero(gain[np.arange(givers.size), best] > 0)
    if use.size == 0:
        return False
    given = rows_g[use, best[use] // (width + 1)]
    at = best[use] % (width + 1)
    is_swap = at < width
    taken = rows_t[use, np.minimum(at, width - 1)]
    g, t = givers[use], takers[use]
    before = cells.costs_C[g]
    after = cells.cell_of_R.copy()
    after[given] = t
    after[taken[is_swap]] = g[is_swap]
    cells.count(after)
    wrong = (np.maximum(cells.tokens_C[g], cells.tokens_C[t]) > cells.capacity) | (
        np.maximum(cells.costs_C[g], cells.costs_C[t]) >= before
    )
    if wrong.any():
        after = after.copy()
        after[given[wrong]] = g[wrong]
        after[taken[wrong & is_swap]] = t[wrong & is_swap]
        cells.count(after)
    return not wrong.all()
