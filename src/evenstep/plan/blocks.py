"""Rows that begin alike, as blocks: runs of the trie that stay together while they are put into cells.

A block is a whole subtree that fits, or a run of small subtrees under one node; splitting one repeats their common
prefix. Blocks are again rows of a trie: what two blocks share is the least that is shared at any border between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evenstep.plan.problem import Problem, cells_of_runs, running_sums
from evenstep.types import Int64Array

__all__ = ["Blocks", "cut_cell", "even_runs", "join_blocks", "make_blocks", "put_into_cells"]

_LEAST_PART = 12  # of the limit: blocks need not be smaller, however little they repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """M blocks in the order of tokens."""

    positions: list[Int64Array]  # of each block's rows
    tokens_M: Int64Array  # distinct tokens of each block by itself
    costs_M: Int64Array  # their cost, without rounding up
    counts_M: Int64Array  # rows
    # branching nodes above each block, the deepest last; the depth of each node, and the cost down to it
    nodes_above: tuple[list[tuple[int, ...]], list[int], list[int]]

    def cell_of_rows(self, cell_of_M: Int64Array, num_rows: int) -> Int64Array:
        """[R] Cell of each row from the cell of each block."""
        cell_of_R = np.empty(num_rows, dtype=np.int64)
        cell_of_R[np.concatenate(self.positions)] = np.repeat(cell_of_M, self.counts_M)
        return cell_of_R


def make_blocks(
    problem: Problem, positions: Int64Array, *, limit: int, max_rows: int, ratio: int | None = None
) -> Blocks:
    """Blocks of at most ``limit`` distinct tokens and ``max_rows`` rows; a row by itself may exceed the limit.

    With ``ratio`` also of at most that many times the tokens that all their rows begin with: where little is repeated,
    blocks are small, and fill what the large ones leave.
    """
    trie = problem.trie
    assert trie is not None
    places = np.sort(trie.place_R[positions])
    positions = trie.position_R[places]
    shared, shared_costs = trie.along(places)
    tokens = running_sums(problem.widths_R[positions] - shared)
    costs = running_sums(problem.costs_R[positions] - shared_costs)
    starts = np.array(_cut(shared, tokens.tolist(), limit, max_rows, ratio), dtype=np.int64)
    ends = np.append(starts[1:], places.size)
    return Blocks(
        positions=np.split(positions, starts[1:]),
        tokens_M=tokens[ends] - tokens[starts] + shared[starts],
        costs_M=costs[ends] - costs[starts] + shared_costs[starts],
        counts_M=ends - starts,
        nodes_above=_nodes_above(shared[starts], shared_costs[starts]),
    )


def _cut(shared_R: Int64Array, tokens: list[int], limit: int, max_rows: int, ratio: int | None) -> list[int]:
    """First row of each block; ``tokens[i]`` are those of the first i rows, each less what it shares."""
    shared = shared_R.tolist()

    def most(start: int, end: int) -> int:
        if ratio is None:
            return limit
        return min(limit, max(limit // _LEAST_PART, ratio * int(shared_R[start + 1 : end].min())))

    def fits(start: int, end: int) -> bool:
        if end - start == 1:
            return True
        return tokens[end] - tokens[start] + shared[start] <= most(start, end) and end - start <= max_rows

    starts: list[int] = []
    runs = [(0, shared_R.size)]
    while runs:
        start, end = runs.pop()
        if fits(start, end):
            starts.append(start)
            continue
        inner = shared_R[start + 1 : end]
        prefix = int(inner.min())
        cuts = [start, *(np.flatnonzero(inner == prefix) + start + 1).tolist(), end]
        whole: list[tuple[int, int]] = []  # small subtrees side by side
        for a, b in pairwise(cuts):
            if not fits(a, b):
                runs.append((a, b))
                starts.extend(_even_runs(whole, prefix, shared, tokens, most(start, end), max_rows))
                whole = []
            else:
                whole.append((a, b))
        starts.extend(_even_runs(whole, prefix, shared, tokens, most(start, end), max_rows))
    return sorted(starts)


def _even_runs(
    subtrees: list[tuple[int, int]],
    prefix: int,
    shared: list[int],
    tokens: list[int],
    limit: int,
    max_rows: int,
) -> list[int]:
    """First rows of runs of neighbouring subtrees under one node of depth ``prefix``, of about equal size."""
    if prefix == 0 or len(subtrees) < 2:
        return [start for start, _ in subtrees]
    own = [tokens[end] - tokens[start] + shared[start] - prefix for start, end in subtrees]
    room = max(1, limit - prefix)
    total = max(1, sum(own))  # copies add nothing
    share = -(-total // -(-total // room))
    starts: list[int] = []
    size, rows = 0, 0
    for (start, end), more in zip(subtrees, own, strict=True):
        is_full = prefix + size + more > limit or size + more // 2 >= share or rows + end - start > max_rows
        if not starts or is_full:
            starts.append(start)
            size, rows = 0, 0
        size += more
        rows += end - start
    return starts


def even_runs(problem: Problem, num_cells: int) -> Int64Array | None:
    """[R] Cells that are runs of the rows in the order of tokens, the most expensive as cheap as it can be.

    Each cut repeats one beginning. None when the budget needs more cells; rows over it get theirs first.
    """
    trie, capacity = problem.trie, problem.room.capacity
    assert trie is not None
    over = problem.num_overlong
    places = np.sort(trie.place_R[over:])
    cell_of_R = np.arange(problem.num_rows)
    num_cells -= over
    if places.size == 0:
        return cell_of_R
    if num_cells < 1:
        return None
    positions = trie.position_R[places]
    shared, shared_costs = trie.along(places)
    tokens = running_sums(problem.widths_R[positions] - shared).tolist()
    costs = running_sums(problem.costs_R[positions] - shared_costs).tolist()
    most_tokens = tokens[-1] if capacity is None else capacity
    max_rows = problem.room.max_rows or places.size
    begin, begin_cost = shared.tolist(), shared_costs.tolist()

    def cut(limit: int) -> list[int] | None:
        starts = [0]
        while len(starts) <= num_cells:
            start = starts[-1]
            end = min(
                bisect_right(costs, costs[start] - begin_cost[start] + limit) - 1,
                bisect_right(tokens, tokens[start] - begin[start] + most_tokens) - 1,
                start + max_rows,
            )
            if end <= start:
                return None
            if end >= places.size:
                return starts
            starts.append(end)
        return None

    low, high = 0, max(costs[-1], int(problem.costs_R[0]))
    found = cut(high)
    if found is None:
        return None
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        trial = cut(middle)
        if trial is None:
            low = middle
        else:
            high, found = middle, trial
    cell_of_R[positions] = over + cells_of_runs(found, places.size)
    return cell_of_R


def put_into_cells(
    problem: Problem, blocks: Blocks, num_cells: int, *, affinity: int, capacity: int | None
) -> Int64Array | None:
    """[M] Cell of each block, or None when one finds no room.

    Blocks go, the most expensive first, to the cell that costs least with it; ``affinity`` counts what the block itself
    adds there that many times more, so that blocks look for cells which have their prefix.
    """
    cells = _OpenCells(problem, blocks, num_cells, capacity)
    weight = 1 + affinity
    for block in np.argsort(-blocks.costs_M, kind="stable").tolist():
        found = cells.best(block, lambda here, _, added: cells.costs_C[here] + weight * added)
        if found is None:
            return None
        cells.put(block, *found)
    return cells.cell_of_M


def join_blocks(problem: Problem, blocks: Blocks) -> list[list[int]]:
    """Positions of the rows of each cell, few cells: each block, the largest first, goes where it adds least.

    Among cells where it adds equally it goes to the fullest.
    """
    cells = _OpenCells(problem, blocks, 0, problem.room.capacity)
    scale = cells.capacity + 1
    for block in np.argsort(-blocks.tokens_M, kind="stable").tolist():
        found = cells.best(block, lambda here, added, _: added * scale + cells.room_C[here])
        if found is None:
            cells.add_cell()
            found = (cells.rows_C.size - 1, int(blocks.tokens_M[block]), int(blocks.costs_M[block]))
        cells.put(block, *found)
    parts: list[list[int]] = [[] for _ in range(cells.rows_C.size)]
    for block, cell in enumerate(cells.cell_of_M.tolist()):
        parts[cell].extend(blocks.positions[block].tolist())
    return [sorted(part) for part in parts]


# what a choice costs, from cells and what a block would add to them: tokens, cost
_Key = Callable[[Int64Array, int, int], Int64Array]


class _OpenCells:
    """Cells while blocks are put into them."""

    def __init__(self, problem: Problem, blocks: Blocks, num_cells: int, capacity: int | None) -> None:
        self.blocks = blocks
        self.capacity = int(blocks.tokens_M.sum()) if capacity is None else capacity
        self.num_rows = int(blocks.counts_M.sum())
        self.max_rows = problem.room.max_rows or self.num_rows
        self.room_C = np.full(num_cells, self.capacity, dtype=np.int64)
        self.costs_C = np.zeros(num_cells, dtype=np.int64)
        self.rows_C = np.zeros(num_cells, dtype=np.int64)
        self.cell_of_M = np.full(blocks.tokens_M.size, -1, dtype=np.int64)
        self._above_M, self._depths, self._depth_costs = blocks.nodes_above
        self._cells_below: dict[int, list[int]] = {}

    def add_cell(self) -> None:
        """One more, empty."""
        self.room_C = np.append(self.room_C, self.capacity)
        self.costs_C, self.rows_C = np.append(self.costs_C, 0), np.append(self.rows_C, 0)

    def best(self, block: int, key: _Key) -> tuple[int, int, int] | None:
        """The cell with the least key that has room for a block, and the tokens and cost that it adds there.

        It adds what it has by itself, less what it shares with a block there: the depth of the deepest node above it
        that the cell has rows below. An empty cell takes a row of any length.
        """
        tokens, cost = int(self.blocks.tokens_M[block]), int(self.blocks.costs_M[block])
        choices: list[tuple[int, int, int, int]] = []
        for node in (*self._above_M[block][::-1], 0):
            below = self._cells_below.get(node)
            if node and not below:
                continue
            added_tokens, added_cost = tokens - self._depths[node], cost - self._depth_costs[node]
            here = np.arange(self.rows_C.size) if below is None else np.array(below)
            may = (self.room_C[here] >= added_tokens) | (self.rows_C[here] == 0)
            if self.max_rows < self.num_rows:
                may &= self.rows_C[here] + self.blocks.counts_M[block] <= self.max_rows
            here = here[may]
            if here.size:
                keys = key(here, added_tokens, added_cost)
                at = int(keys.argmin())
                choices.append((int(keys[at]), int(here[at]), added_tokens, added_cost))
        return min(choices)[1:] if choices else None

    def put(self, block: int, cell: int, added_tokens: int, added_cost: int) -> None:
        self.cell_of_M[block] = cell
        self.room_C[cell] -= added_tokens
        self.costs_C[cell] += added_cost
        self.rows_C[cell] += self.blocks.counts_M[block]
        for node in self._above_M[block]:
            below = self._cells_below.setdefault(node, [])
            if cell not in below:
                below.append(cell)


def _nodes_above(
    shared_M: Int64Array, shared_costs_M: Int64Array
) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """For each block the branching nodes above it, the deepest last; depth of each node and the cost down to it."""
    shared, costs = shared_M.tolist(), shared_costs_M.tolist()
    shared.append(0)
    costs.append(0)
    depths, depth_costs, parents = [0], [0], [-1]
    homes: list[int] = []
    path = [0]
    for block in range(len(shared) - 1):
        after = shared[block + 1]
        if after > depths[path[-1]]:
            parents.append(path[-1])
            depths.append(after)
            depth_costs.append(costs[block + 1])
            path.append(len(depths) - 1)
        homes.append(path[-1])
        closed = -1
        while depths[path[-1]] > after:
            closed = path.pop()
        if closed >= 0 and depths[path[-1]] < after:
            parents.append(path[-1])
            depths.append(after)
            depth_costs.append(costs[block + 1])
            path.append(len(depths) - 1)
            parents[closed] = path[-1]
    above: list[tuple[int, ...]] = []
    for home in homes:
        chain: list[int] = []
        while home > 0:
            chain.append(home)
            home = parents[home]
        above.append(tuple(reversed(chain)))
    return above, depths, depth_costs


def cut_cell(problem: Problem, cell: list[int]) -> tuple[list[int], list[int]]:
    """Two parts of a cell in the order of tokens, the larger of them as cheap as can be; longest rows first."""
    trie = problem.trie
    assert trie is not None
    places = np.sort(trie.place_R[cell])
    positions = trie.position_R[places]
    _, shared_costs = trie.along(places)
    before = np.cumsum(problem.costs_R[positions] - shared_costs)
    cost_left, cost_right = before[:-1], before[-1] - before[:-1] + shared_costs[1:]
    at = int(np.maximum(cost_left, cost_right).argmin()) + 1
    return sorted(positions[:at].tolist()), sorted(positions[at:].tolist())
