"""What no plan can beat: lower bounds on the number of micro-batches and on the step's cost.

A bound is only worth its name if it holds for every plan that keeps the promises, so each one here comes with the
argument for it. Costs are in the problem's integer units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.plan.problem import Problem
from evenstep.plan.profile import heads_and_level
from evenstep.types import Int64Array

__all__ = ["Bounds", "fewest_cells", "lower_bounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of one problem."""

    num_microbatches: int  # K
    lockstep: int  # sum over k of the most expensive cell, c0 * K included
    rank: int  # most expensive rank, c0 * K included


def fewest_cells(problem: Problem, positions: Int64Array | None = None) -> int:
    """Cells that these rows (all by default) need at least, whatever the ranks."""
    widths = problem.widths_R if positions is None else problem.widths_R[positions]
    room = problem.room
    if widths.size == 0:
        return 0
    by_rows = 1 if room.max_rows is None else -(-widths.size // room.max_rows)
    if room.layout == "fixed":
        return -(-widths.size // room.cell_rows)
    capacity = room.capacity
    if capacity is None:
        return by_rows
    alone = int(np.searchsorted(-widths, -capacity, side="left"))
    rest = widths[alone:]
    if room.layout == "padded":
        return alone + _fewest_groups(rest, capacity, room.max_rows)
    in_bins = _fewest_bins(rest, capacity)
    if room.max_rows is not None:
        in_bins = max(in_bins, -(-rest.size // room.max_rows))
    return alone + in_bins


def _fewest_groups(widths: Int64Array, capacity: int, max_rows: int | None) -> int:
    """Padded groups: taking as many rows as fit, longest first, is optimal (exchange argument)."""
    groups = start = 0
    while start < widths.size:
        fit = capacity // int(widths[start])
        start += fit if max_rows is None else min(fit, max_rows)
        groups += 1
    return groups


def _fewest_bins(widths_desc: Int64Array, capacity: int) -> int:
    """Bin-packing bound of Martello and Toth (L2), over every threshold.

    For a threshold t <= capacity / 2: rows above capacity - t are alone among the rows of at least t; rows above
    capacity / 2 need a bin each; rows of at least t fill what the latter leave, then bins of their own.
    """
    if widths_desc.size == 0:
        return 0
    ascending = widths_desc[::-1]
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ascending)])
    total = int(sums[-1])
    half = int(np.searchsorted(ascending, capacity // 2, side="right"))  # rows above it cannot share with each other
    is_new = np.diff(ascending[:half], prepend=0) > 0
    thresholds = np.concatenate([np.zeros(1, dtype=np.int64), ascending[:half][is_new]])
    light = np.searchsorted(ascending, thresholds, side="left")  # first row of at least t
    heavy = np.maximum(np.searchsorted(ascending, capacity - thresholds, side="right"), half)  # first row above C - t
    num_heavy = ascending.size - heavy
    num_middle = heavy - half
    room_left = num_middle * capacity - (sums[heavy] - sums[half])
    small = sums[half] - sums[np.minimum(light, half)]
    extra = np.maximum(0, -(-(small - room_left) // capacity))
    return max(-(-total // capacity), int((num_heavy + num_middle + extra).max()))


def lower_bounds(problem: Problem, rank_of_R: Int64Array | None = None) -> Bounds:
    """Bounds for rows that may go anywhere, or (``rank_of_R``) that are already on their ranks.

    Every row costs at least its cost in a cell of its own, so the ranks together cost ``sum``, the busiest at least
    the mean (or its own rows' sum, when placement is given); in lockstep each column costs at least its mean. The
    longest row's cell costs at least that row. Each micro-batch adds c0.
    """
    costs = problem.costs_R * problem.room.cell_rows if problem.room.layout == "fixed" else problem.costs_R
    if problem.room.layout == "fixed":
        costs = costs[:: problem.room.cell_rows]
    longest = int(costs[0])
    if rank_of_R is None:
        cells = fewest_cells(problem)
        k = problem.round_k(-(-cells // problem.num_ranks))
        busiest = -(-int(costs.sum()) // problem.num_ranks)
    else:
        per_rank = [np.flatnonzero(rank_of_R == r) for r in range(problem.num_ranks)]
        k = problem.round_k(max(fewest_cells(problem, part) for part in per_rank))
        if problem.room.layout == "fixed":
            rows = problem.room.cell_rows
            busiest = max(int((problem.costs_R[part] * rows)[::rows].sum()) for part in per_rank)
        else:
            busiest = max(int(problem.costs_R[part].sum()) for part in per_rank)
    bound = max(busiest, longest)
    is_profiled = rank_of_R is None and problem.room.layout != "fixed"
    lockstep = max(bound, heads_and_level(problem, k).bound) if is_profiled else bound
    overhead = problem.c0 * k
    return Bounds(num_microbatches=k, lockstep=lockstep + overhead, rank=bound + overhead)
