"""What no plan can beat: lower bounds on the number of micro-batches and on the step's cost.

A bound is only worth its name if it holds for every plan that keeps the promises, so each one here comes with the
argument for it. Costs are in the problem's integer units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.plan.problem import Problem, running_sums
from evenstep.plan.profile import heads_and_level
from evenstep.types import Int64Array

__all__ = ["Bounds", "TreeBound", "fewest_cells", "lower_bounds"]


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
    sums = running_sums(ascending)
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


class TreeBound:
    """What rows of layout ``tree``, all of them or those at some positions, need at least."""

    def __init__(self, problem: Problem, positions: Int64Array | None = None) -> None:
        trie = problem.trie
        assert trie is not None
        self.problem = problem
        self.capacity = problem.room.capacity
        every = np.arange(problem.num_rows) if positions is None else positions
        self.num_rows = int(every.size)
        places = np.sort(trie.place_R[every])
        self.shared_R, costs = trie.along(places)
        self.cost = int(problem.costs_R[every].sum() - costs.sum())  # of the distinct tokens
        # rows over the budget stand alone, so the others share among themselves
        fitting = np.sort(trie.place_R[every[every >= problem.num_overlong]])
        self.num_alone = self.num_rows - int(fitting.size)
        self.fitting_lengths_R = problem.lengths_R[trie.position_R[fitting]]
        self.fitting_shared_R, _ = trie.along(fitting)
        self.repeats = self._forced_repeats()

    def _forced_repeats(self) -> list[tuple[int, int, int]]:
        """(from, to, m - 1): beginnings that the budget puts into at least m cells, over depths above from up to to.

        Rows that have their first d tokens in common and t others, counted as often as they are repeated among
        themselves, need m = ⌈t / (budget - d)⌉ cells: each holds these d tokens.
        """
        if self.capacity is None or self.fitting_shared_R.size < 2:
            return []
        shared = self.fitting_shared_R
        new = running_sums(self.fitting_lengths_R - shared)  # tokens of the first i rows, each less what it shares
        nodes: list[list[int]] = []  # depth of the node above, its own depth, tokens below it, index of the one above
        stack = [(0, shared.size, 0, -1)]
        while stack:
            start, end, above, parent = stack.pop()
            inner = shared[start + 1 : end]
            depth = int(inner.min())
            cuts = np.concatenate([[start], np.flatnonzero(inner == depth) + start + 1, [end]])
            tokens = new[cuts[1:]] - new[cuts[:-1]] + shared[cuts[:-1]]  # of each child by itself
            is_over = tokens > self.capacity
            stack += [(int(cuts[i]), int(cuts[i + 1]), depth, len(nodes)) for i in np.flatnonzero(is_over).tolist()]
            nodes.append([above, depth, int((tokens - depth)[~is_over].sum()), parent])
        repeats: list[tuple[int, int, int]] = []
        for above, depth, below, parent in reversed(nodes):
            num_cells = -(-below // (self.capacity - depth)) if below else 1
            repeats.append((above, depth, num_cells - 1))
            if parent >= 0:
                nodes[parent][2] += num_cells * (depth - above) + below
        return repeats

    @property
    def num_cells(self) -> int:
        """Cells that the rows need.

        By tokens: n cells compute every distinct token and repeat the n - 1 least beginnings that neighbours share. By
        what no two rows share: a cell holds its rows' own tokens beside the shared beginning of one of them. By what
        the budget forces them to repeat.
        """
        lengths, shared, capacity = self.fitting_lengths_R, self.fitting_shared_R, self.capacity
        max_rows = self.problem.room.max_rows
        by_rows = min(1, shared.size) if max_rows is None else -(-shared.size // max_rows)
        if capacity is None or shared.size == 0:
            return self.num_alone + by_rows
        needed = int((lengths - shared).sum()) + running_sums(np.sort(shared[1:]))  # n = 1, 2, ..., R
        by_tokens = int((needed <= capacity * np.arange(1, shared.size + 1)).argmax()) + 1
        begins = np.maximum(shared, np.append(shared[1:], 0))
        own, least = np.sort(lengths - begins)[::-1], int(begins.min())
        in_bins = _fewest_bins(own[own > 0], capacity - least) if capacity > least else 1
        by_repeats = self.repeats[-1][2] + 1 if self.repeats else 1  # of the root, which comes last
        return self.num_alone + max(by_rows, by_tokens, in_bins, by_repeats)

    def cost_in(self, num_cells: int) -> int:
        """Least that the rows cost together in ``num_cells`` cells with rows.

        At each depth d there are R_d sets of rows that are one or end there; n cells hold at least max(n, R_d) pairs of
        a cell and such a set, and at least R_d and what the budget forces to repeat. So beyond the distinct tokens that
        many are repeated: summed over depths, and weighed by what a token costs at its depth.
        """
        least = np.sort(self.shared_R[1:])[: num_cells - 1]
        above, depths, more = np.array(self.repeats, dtype=np.int64).reshape(-1, 3).T
        ends = np.unique(np.concatenate([[0], least, above, depths]))
        forced = np.zeros(ends.size, dtype=np.int64)  # at the depths up to each end, above the one before
        np.add.at(forced, np.searchsorted(ends, above), more)
        np.add.at(forced, np.searchsorted(ends, depths), -more)
        forced = np.cumsum(forced)[:-1]
        spread = least.size - np.searchsorted(least, ends[1:])
        return self.cost + int((np.maximum(spread, forced) * np.diff(self.problem.costs_of_beginnings(ends))).sum())

    def lockstep(self, num_microbatches: int) -> int:
        """Least lockstep cost of rows that may go anywhere, in exactly K micro-batches."""
        num_ranks = self.problem.num_ranks
        mean = -(-self.cost_in(min(self.num_rows, num_microbatches * num_ranks)) // num_ranks)
        return max(mean, int(self.problem.costs_R[0])) + self.problem.c0 * num_microbatches


def _tree_bounds(problem: Problem, rank_of_R: Int64Array | None) -> Bounds:
    """As ``lower_bounds``. No cell may be empty while another has two rows, so K says how many cells have rows."""
    if rank_of_R is None:
        parts, num_ranks = [np.arange(problem.num_rows)], problem.num_ranks
    else:
        parts, num_ranks = [np.flatnonzero(rank_of_R == r) for r in range(problem.num_ranks)], 1
    found = [TreeBound(problem, part) for part in parts if part.size]
    k = problem.round_k(max(-(-each.num_cells // num_ranks) for each in found))
    busiest = max(-(-each.cost_in(min(each.num_rows, k * num_ranks)) // num_ranks) for each in found)
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
