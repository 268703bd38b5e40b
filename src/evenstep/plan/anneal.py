"""Local search on padded cells: move the cut between two neighbouring runs, accepting small losses at first.

Threshold accepting: a move is kept when it costs less than a threshold that sinks to zero. The best state seen is
returned, so the result is never worse than the start.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from dataclasses import dataclass

__all__ = ["Runs", "move_cuts"]

_LEAST_MOVES = 1000  # fewer are not worth setting up
_THRESHOLD_SHARE = 2000  # the first threshold is the step's cost over this


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Sorted rows as plain lists: cutting is sequential, and lists are fastest for that."""

    costs: list[int]  # of each row at its own width
    most_rows: list[int]  # rows of this width that fit into the budget, at least one
    num_ranks: int


def move_cuts(runs: Runs, starts: list[int], *, moves: int, seed: int = 0) -> list[int]:
    """Cells (their first rows) after ``moves`` tries; a lone over-long row keeps its cell to itself."""
    num_cells = len(starts)
    if moves < _LEAST_MOVES or num_cells < 2:
        return starts
    costs, most_rows, num_ranks = runs.costs, runs.most_rows, runs.num_ranks
    draw = random.Random(seed).random  # the same draws in every Python version
    cuts = [*starts, len(costs)]
    cell_costs = [(cuts[i + 1] - cuts[i]) * costs[cuts[i]] for i in range(num_cells)]
    ascending = sorted(cell_costs)
    current = best = sum(ascending[::-num_ranks])
    best_cuts = list(cuts)
    first_threshold = current // _THRESHOLD_SHARE
    for move in range(moves):
        cell = int(draw() * (num_cells - 1))
        left, cut, right = cuts[cell], cuts[cell + 1], cuts[cell + 2]
        kind = draw()
        cut = cut + 1 if kind < 0.4 else cut - 1 if kind < 0.8 else left + 1 + int(draw() * (right - left - 1))
        if not left < cut < right or cut - left > most_rows[left] or right - cut > most_rows[cut]:
            continue
        here, there = (cut - left) * costs[left], (right - cut) * costs[cut]
        changed = ascending.copy()
        del changed[bisect_left(changed, cell_costs[cell])]
        del changed[bisect_left(changed, cell_costs[cell + 1])]
        insort(changed, here)
        insort(changed, there)
        cost = sum(changed[::-num_ranks])
        if cost < current + first_threshold * (1 - move / moves) * draw():
            current, ascending = cost, changed
            cell_costs[cell], cell_costs[cell + 1], cuts[cell + 1] = here, there, cut
            if cost < best:
                best, best_cuts = cost, list(cuts)
    return best_cuts[:-1]
