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

__all__ = ["Bounds", "fewest_cells", "lower_bounds", "tree_lockstep_bound"]


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
    if problem.trie is not None and problem.trie.is_shared:
        rows = np.arange(problem.num_rows) if positions is None else positions
        in_cells = _fewest_tree_cells(problem, rows[alone:], capacity)
        return alone + (in_cells if room.max_rows is None else max(in_cells, -(-(rows.size - alone) // room.max_rows)))
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


def _fewest_tree_cells(problem: Problem, positions: Int64Array, capacity: int) -> int:
    """Cells that rows which fit need at least, in layout ``tree``.

    By tokens: n cells compute every distinct token and repeat at least ``_repeated`` ones. By what no two rows share: a
    cell holds its rows' own tokens beside the shared beginning of one of them.
    """
    if positions.size == 0:
        return 0
    lengths, shared, _ = _in_order_of_tokens(problem, positions)
    needed = int((lengths - shared).sum()) + _sums(np.sort(shared[1:]))  # n = 1, 2, ..., R
    enough = needed <= capacity * np.arange(1, positions.size + 1)
    by_tokens = int(enough.argmax()) + 1
    begins = np.maximum(shared, np.append(shared[1:], 0))
    own, least = np.sort(lengths - begins)[::-1], int(begins.min())
    return max(by_tokens, _fewest_bins(own[own > 0], capacity - least) if capacity > least else 1)


def _in_order_of_tokens(problem: Problem, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Of rows in the order of their tokens: lengths, what each shares with the one before, and the cost of that."""
    trie = problem.trie
    assert trie is not None
    places = np.sort(trie.place_R[positions])
    tokens, costs = trie.between(places[:-1], places[1:])
    return problem.lengths_R[trie.position_R[places]], np.append(0, tokens), np.append(0, costs)


def _sums(values: Int64Array) -> Int64Array:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])


def _tree_cost(problem: Problem, positions: Int64Array, num_cells: int) -> int:
    """Least that these rows cost together in ``num_cells`` cells with rows.

    At each depth d there are R_d sets of rows that are one or end there; n cells hold at least max(n, R_d) pairs of a
    cell and such a set, so beyond the distinct tokens at least n - R_d are repeated. Summed over depths, and weighed
    by what a token costs at its depth: the cost of the n - 1 least shared beginnings of neighbours.
    """
    _, _, costs = _in_order_of_tokens(problem, positions)
    distinct = int(problem.costs_R[positions].sum() - costs.sum())
    return distinct + int(np.sort(costs[1:])[: num_cells - 1].sum())


def tree_lockstep_bound(problem: Problem, num_microbatches: int) -> int:
    """Least lockstep cost of rows of layout ``tree`` that may go anywhere, in exactly K micro-batches."""
    rows = np.arange(problem.num_rows)
    num_cells = min(problem.num_rows, num_microbatches * problem.num_ranks)
    mean = -(-_tree_cost(problem, rows, num_cells) // problem.num_ranks)
    return max(mean, int(problem.costs_R[0])) + problem.c0 * num_microbatches


def _tree_bounds(problem: Problem, rank_of_R: Int64Array | None) -> Bounds:
    """As ``lower_bounds``. No cell may be empty while another has two rows, so K says how many cells have rows."""
    if rank_of_R is None:
        parts, num_ranks = [np.arange(problem.num_rows)], problem.num_ranks
    else:
        parts, num_ranks = [np.flatnonzero(rank_of_R == r) for r in range(problem.num_ranks)], 1
    k = problem.round_k(max(-(-fewest_cells(problem, part) // num_ranks) for part in parts))
    busiest = max(
        -(-_tree_cost(problem, part, min(part.size, k * num_ranks)) // num_ranks) for part in parts if part.size
    )
    bound = max(busiest, int(problem.costs_R[0]))
    overhead = problem.c0 * k
    return Bounds(num_microbatches=k, lockstep=bound + overhead, rank=bound + overhead)


def lower_bounds(problem: Problem, rank_of_R: Int64Array | None = None) -> Bounds:
    """Bounds for rows that may go anywhere, or (``rank_of_R``) that are already on their ranks.

    Every row costs at least its cost in a cell of its own, so the ranks together cost ``sum``, the busiest at least
    the mean (or its own rows' sum, when placement is given); in lockstep each column costs at least its mean. The
    longest row's cell costs at least that row. Each micro-batch adds c0.
    """
    problem = problem.without_idle_trie
    if problem.trie is not None:
        return _tree_bounds(problem, rank_of_R)
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
