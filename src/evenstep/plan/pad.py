"""Padded cells of rows that may go anywhere: cut the sorted rows at cost caps, search the caps, then move the cuts.

Neighbours in length pad least, so cells are runs of the sorted rows. A run is cut where its budget or its cap is
reached. The first W cells that gain rows from it may use the first cap, the next W the second, and so on; all others
use the last. Sorting the cells into columns afterwards costs only the spread of their costs.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

import numpy as np

from evenstep.plan.anneal import Runs, move_cuts
from evenstep.plan.deal import lockstep_cost
from evenstep.plan.problem import Problem, cells_of_runs
from evenstep.types import Int64Array

__all__ = ["cut_rows", "runs_of"]

_TRIAL_CELLS = 50  # what a trial costs besides its cells
_SUBSET_ROWS = 8192  # caps are searched on about this many rows when there are more
_MOVES_PER_ROW = 100
_SCAN_LEVELS = tuple(range(800, 1400, 25))  # per mille of the mean cell
_SCAN_BEST = 12  # levels whose stairs are tried
_SCAN_STAIRS = (30, 60, 100)  # per mille of the last cap between one cap and the next
_PER_MILLE = (800, 850, 900, 940, 970, 985, 992, 996, 998, 1002, 1004, 1008, 1015, 1030, 1060, 1110, 1170, 1250)


def _cut_to_caps(runs: Runs, caps: list[int]) -> tuple[list[int], list[int]]:
    """First row of each cell and the cells' costs; ``caps[-1]`` has no limit on its cells, the others W each."""
    costs, most_rows, num_rows = runs.costs, runs.most_rows, len(runs.costs)
    last = caps[-1]
    extra = [[cap, runs.num_ranks] for cap in caps[:-1] if cap > last]
    starts: list[int] = []
    cell_costs: list[int] = []
    start = 0
    while start < num_rows:
        cost, most = costs[start], most_rows[start]
        if most > num_rows - start:
            most = num_rows - start
        count = last // cost
        if count >= most:
            count = most
        elif extra:
            chosen = None
            for slot in extra:
                more = min(slot[0] // cost, most)
                if more > count or (more == count and chosen is not None):  # the tightest cap that allows as many
                    count, chosen = more, slot
            if chosen is not None:
                chosen[1] -= 1
                if not chosen[1]:
                    extra.remove(chosen)
        if count < 1:
            count = 1
        starts.append(start)
        cell_costs.append(count * cost)
        start += count
    return starts, cell_costs


@dataclass(slots=True, kw_only=True)
class _Search:
    """Best caps so far, by the lockstep cost of the cells they give."""

    problem: Problem
    runs: Runs
    most_microbatches: int | None  # K may not exceed it
    caps: list[int]
    best: float = math.inf
    num_cells: int = 0  # of the last trial: the work it took

    def try_caps(self, caps: list[int]) -> float:
        """Cost of the cells these caps give, infinite for too large a K; the best caps are kept."""
        _, costs = _cut_to_caps(self.runs, caps)
        self.num_cells = len(costs)
        num_ranks = self.runs.num_ranks
        num_microbatches = self.problem.round_k(-(-len(costs) // num_ranks))
        if self.most_microbatches is not None and num_microbatches > self.most_microbatches:
            return math.inf
        cost = lockstep_cost(np.array(costs), num_ranks, num_microbatches, self.problem.c0)
        if cost <= self.best:  # equals too: plateaus are wide
            self.best, self.caps = cost, caps
        return cost

    def scan(self, num_microbatches: int, most: int) -> None:
        """One cap for all cells: the least that gives K columns or the next K, and a grid around the mean cell."""
        longest, num_caps, num_ranks = self.runs.costs[0], len(self.caps) - 1, self.runs.num_ranks
        mean = max(1, sum(self.runs.costs) // (num_ranks * num_microbatches))
        counts = (num_microbatches, self.problem.round_k(num_microbatches + 1))
        least = [_least_cap(self.runs, k * num_ranks, most) for k in counts]
        levels = [max(1, level) for level in (*least, *(mean * per_mille // 1000 for per_mille in _SCAN_LEVELS))]
        judged = sorted(range(len(levels)), key=lambda i: (self.try_caps([longest, *[levels[i]] * num_caps]), i))
        for i in judged[:_SCAN_BEST]:
            for per_mille in _SCAN_STAIRS:
                stairs = [levels[i] * (1000 + per_mille * j) // 1000 for j in reversed(range(num_caps))]
                self.try_caps([longest, *stairs])

    def climb(self, work: int) -> None:
        """Change one cap, or all of them, by a few per mille to ten per cent; keep what is better."""
        draw = random.Random(0)  # its random() is the same in every Python version
        everywhere = range(1, len(self.caps))
        for shift in (-8, -4, -2, 2, 4, 8):
            self.try_caps(self._scaled(everywhere, 1000 + shift))
        while work > 0:
            which = int(draw.random() * len(self.caps))
            factor = _PER_MILLE[int(draw.random() * len(_PER_MILLE))]
            self.try_caps(self._scaled((which,) if which else everywhere, factor))
            work -= self.num_cells + _TRIAL_CELLS

    def _scaled(self, which: range | tuple[int], per_mille: int) -> list[int]:
        return [max(1, cap * per_mille // 1000) if i in which else cap for i, cap in enumerate(self.caps)]


def _least_cap(runs: Runs, num_cells: int, most: int) -> int:
    """Smallest single cap that needs at most ``num_cells`` cells, within 4 per mille; ``most`` where none does."""
    low, high = 0, most
    if len(_cut_to_caps(runs, [high])[0]) > num_cells:
        return most
    while high - low > max(1, high // 250):
        middle = (low + high) // 2
        if len(_cut_to_caps(runs, [max(1, middle)])[0]) <= num_cells:
            high = middle
        else:
            low = middle
    return high


def cut_rows(
    problem: Problem, num_microbatches: int, *, work: int, num_caps: int, moves: int
) -> tuple[Int64Array, int]:
    """[R] Cell of each row, and K, which starts at ``num_microbatches`` and may grow under a budget.

    ``work`` bounds the cells that trial cuts make, once on a subset of the rows and once on all; ``moves`` bounds the
    exchanges between neighbouring cells times a thousand cells.
    """
    step = _subset_step(problem)
    longest = int(problem.costs_R[0])
    most = longest * problem.num_rows
    limit = None if problem.room.capacity is not None else num_microbatches
    caps = [longest] * num_caps + [most]
    for stride in (step, 1) if step > 1 else (1,):
        search = _Search(problem=problem, runs=runs_of(problem, stride), most_microbatches=limit, caps=caps)
        search.try_caps(caps)
        if stride == step:
            search.scan(num_microbatches, most)
        search.climb(work)
        caps = search.caps
    runs = runs_of(problem, 1)
    starts, _ = _cut_to_caps(runs, caps)
    num_microbatches = problem.round_k(-(-len(starts) // problem.num_ranks))
    starts = _split_largest(runs, starts, num_microbatches * problem.num_ranks)
    starts = move_cuts(
        runs, starts, moves=min(moves * 1000 // len(starts), 10 * moves, _MOVES_PER_ROW * problem.num_rows)
    )
    return cells_of_runs(starts, problem.num_rows), num_microbatches


def runs_of(problem: Problem, step: int) -> Runs:
    """Every ``step``-th row on a ``step``-th of the ranks: the same profile in fewer cells."""
    capacity, max_rows = problem.room.capacity, problem.room.max_rows or problem.num_rows
    widths = problem.widths_R[::step]
    fit = np.full(widths.size, max_rows) if capacity is None else np.minimum(capacity // widths, max_rows)
    return Runs(
        costs=problem.costs_R[::step].tolist(),
        most_rows=np.maximum(1, fit).tolist(),
        num_ranks=problem.num_ranks // step,
    )


def _subset_step(problem: Problem) -> int:
    """Largest divisor of the ranks that leaves enough rows."""
    most = problem.num_rows // _SUBSET_ROWS
    return max((d for d in range(1, most + 1) if problem.num_ranks % d == 0), default=1)


def _split_largest(runs: Runs, starts: list[int], num_cells: int) -> list[int]:
    """Halve the most expensive cells that have two rows until there are ``num_cells``: a filler runs for nothing."""
    ends = [*starts[1:], len(runs.costs)]
    heap = [(-(b - a) * runs.costs[a], a, b) for a, b in zip(starts, ends, strict=True) if b - a > 1]
    heapq.heapify(heap)
    all_starts = list(starts)
    while len(all_starts) < num_cells and heap:
        _, a, b = heapq.heappop(heap)
        middle = (a + b + 1) // 2
        all_starts.append(middle)
        for x, y in ((a, middle), (middle, b)):
            if y - x > 1:
                heapq.heappush(heap, (-(y - x) * runs.costs[x], x, y))
    return sorted(all_starts)
