"""The shape of the best step: which columns are ruled by a single long row, and how much the others can take over.

Rows above half the budget never share a cell, so the k-th most expensive column costs at least the row at position
``(k - 1) * W``: its head. What the cells of the first j columns can hold is limited by the budget and by their heads;
everything else has to fit below one level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.plan.problem import Problem, running_sums
from evenstep.types import Int64Array

__all__ = ["Profile", "heads_and_level"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Lower bound of a step's cost, c0 excluded, and the target cost of each column that reaches it."""

    bound: int  # sum over k of the column maxima, at least
    heads_K: Int64Array  # cost of the row at each multiple of W, most expensive first
    num_heads: int  # columns whose head exceeds the level
    level: int  # cost of the cells in all other columns

    def targets(self, level: int) -> Int64Array:
        """[K] Cost each column should have when the level is ``level``."""
        return np.maximum(self.heads_K, level)


def heads_and_level(problem: Problem, num_microbatches: int) -> Profile:
    """Profile of padded or packed rows that may go anywhere, in K columns.

    For every number j of head columns: ``sum_{k<=j} head_k + (total - held_j) / W`` is a lower bound, ``held_j`` being
    the most that the cells of j columns can hold. Raising a column above its head holds at most W times more, so heads
    are the cheapest maxima; matching the largest cells with the largest heads holds most.
    """
    costs, num_ranks = problem.costs_R, problem.num_ranks
    total = int(costs.sum())
    heads = costs[: num_microbatches * num_ranks : num_ranks]
    heads = np.concatenate([heads, np.zeros(num_microbatches - heads.size, dtype=np.int64)])
    sums = np.zeros(1, dtype=np.int64)
    held = np.zeros(1, dtype=np.int64)
    capacity = problem.room.capacity
    if capacity is not None:
        num_long = int(np.searchsorted(-problem.widths_R, -(capacity // 2), side="left"))
        num_columns = min(num_microbatches, max(1, -(-num_long // num_ranks)))
        held = np.concatenate([held, _held(problem, heads[:num_columns], num_long, capacity)])
        sums = running_sums(heads[:num_columns])
    bounds = sums + np.maximum(0, -((held - total) // num_ranks))
    bound = max(int(bounds.max()), int(costs[0]))
    level, num_heads = _level(heads, bound)
    return Profile(bound=bound, heads_K=heads, num_heads=num_heads, level=level)


def _level(heads_K: Int64Array, bound: int) -> tuple[int, int]:
    """Level of the other columns so that all columns sum to the bound: water filled over the heads."""
    above = running_sums(heads_K)
    for num_heads in range(heads_K.size):
        level = -(-(bound - int(above[num_heads])) // (heads_K.size - num_heads))
        if level >= int(heads_K[num_heads]):
            return level, num_heads
    return int(heads_K[-1]), heads_K.size


def _held(problem: Problem, heads: Int64Array, num_long: int, capacity: int) -> Int64Array:
    """[j] Upper bound on the cost that the rows in any j columns have, given the columns' heads."""
    num_ranks = problem.num_ranks
    num_cells = heads.size * num_ranks
    by_cell = np.cumsum(
        np.minimum(np.repeat(heads, num_ranks), _cell_potentials(problem, num_long, capacity, num_cells))
    )
    by_tokens = _by_tokens(problem, capacity, num_cells)
    return np.minimum(by_cell, by_tokens)[num_ranks - 1 :: num_ranks]


def _cell_potentials(problem: Problem, num_long: int, capacity: int, num_cells: int) -> Int64Array:
    """Most that single cells can cost, largest first.

    A cell with a long row has ``capacity - width`` tokens left (none in ``padded``); a token costs at most what it does
    in the longest row that fits. A cell without one holds rows of at most half the budget.
    """
    costs, widths = problem.costs_R, problem.widths_R
    potentials = costs[:num_long].astype(np.float64)
    ascending = widths[::-1]
    if problem.room.layout == "packed":
        left = np.maximum(0, capacity - widths[:num_long])
        fits = np.searchsorted(ascending, left, side="right")
        has_fit = fits > 0
        filler = widths.size - np.maximum(fits, 1)  # position of the longest row that fits
        potentials += np.where(has_fit, left * (costs[filler] / widths[filler]), 0.0)
    rest = 0.0
    if num_long < widths.size:
        rest = capacity * (int(costs[num_long]) / int(widths[num_long]))
    potentials = np.concatenate([potentials, np.full(num_cells, rest)])
    potentials = -np.sort(-potentials)[:num_cells]
    return np.ceil(np.minimum(potentials, 2.0**62)).astype(np.int64) + 1  # where the budget is far above all rows


def _by_tokens(problem: Problem, capacity: int, num_cells: int) -> Int64Array:
    """Most that m cells can cost, m = 1..num_cells: over-long rows alone, then the longest rows up to the budgets.

    Longer rows cost more per token, so taking them first, the last one in part, holds most.
    """
    num_over = problem.num_overlong
    costs, widths = problem.costs_R[num_over:], problem.widths_R[num_over:]
    over = running_sums(problem.costs_R[:num_over])
    num_alone = np.minimum(np.arange(1, num_cells + 1), num_over)
    tokens = (np.arange(1, num_cells + 1) - num_alone) * capacity
    token_sums, cost_sums = running_sums(widths), running_sums(costs)
    whole = np.searchsorted(token_sums, tokens, side="right") - 1
    part = np.minimum(whole, max(0, widths.size - 1))
    density = costs[part] / widths[part] if widths.size else np.zeros(num_cells)
    extra = np.where(whole < widths.size, (tokens - token_sums[whole]) * density, 0.0)
    return over[num_alone] + cost_sums[whole] + np.ceil(extra).astype(np.int64) + 1
