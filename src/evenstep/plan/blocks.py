"""Rows that begin alike, as blocks: runs of the trie that stay together while they are put into cells.

A block is a whole subtree that fits, or a run of small subtrees under one node; splitting one repeats their common
prefix. Blocks are again rows of a trie: what two blocks share is the least that is shared at any border between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evenstep.plan.problem import Problem
from evenstep.types import Int64Array

__all__ = ["Blocks", "cut_cell", "join_blocks", "make_blocks", "put_into_cells"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """M blocks in the order of tokens."""

    positions: list[Int64Array]  # of each block's rows
    tokens_M: Int64Array  # distinct tokens of each block by itself
    costs_M: Int64Array  # their cost, without rounding up
    counts_M: Int64Array  # rows
    shared_M: Int64Array  # tokens each block shares with the one before it
    shared_costs_M: Int64Array  # and their cost

    def cell_of_rows(self, cell_of_M: Int64Array, num_rows: int) -> Int64Array:
        """[R] Cell of each row from the cell of each block."""
        cell_of_R = np.empty(num_rows, dtype=np.int64)
        cell_of_R[np.concatenate(self.positions)] = np.repeat(cell_of_M, self.counts_M)
        return cell_of_R


def make_blocks(problem: Problem, positions: Int64Array, *, limit: int, max_rows: int) -> Blocks:
    """Blocks of at most ``limit`` distinct tokens and ``max_rows`` rows; a row by itself may exceed the limit."""
    trie = problem.trie
    assert trie is not None
    places = np.sort(trie.place_R[positions])
    positions = trie.position_R[places]
    shared = np.zeros(places.size, dtype=np.int64)
    shared_costs = np.zeros(places.size, dtype=np.int64)
    if places.size > 1:
        shared[1:], shared_costs[1:] = trie.between(places[:-1], places[1:])
    tokens = _sums(problem.widths_R[positions] - shared)
    costs = _sums(problem.costs_R[positions] - shared_costs)
    starts = np.array(_cut(shared, tokens, limit, max_rows), dtype=np.int64)
    ends = np.append(starts[1:], places.size)
    return Blocks(
        positions=np.split(positions, starts[1:]),
        tokens_M=tokens[ends] - tokens[starts] + shared[starts],
        costs_M=costs[ends] - costs[starts] + shared_costs[starts],
        counts_M=ends - starts,
        shared_M=shared[starts],
        shared_costs_M=shared_costs[starts],
    )


def _sums(values: Int64Array) -> Int64Array:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])


def _cut(shared: Int64Array, tokens: Int64Array, limit: int, max_rows: int) -> list[int]:
    """First row of each block."""

    def fits(start: int, end: int) -> bool:
        return end - start == 1 or (tokens[end] - tokens[start] + shared[start] <= limit and end - start <= max_rows)

    starts: list[int] = []
    runs = [(0, shared.size)]
    while runs:
        start, end = runs.pop()
        if fits(start, end):
            starts.append(start)
            continue
        inner = shared[start + 1 : end]
        prefix = int(inner.min())
        cuts = [start, *(np.flatnonzero(inner == prefix) + start + 1).tolist(), end]
        whole: list[tuple[int, int]] = []  # small subtrees side by side
        for a, b in pairwise(cuts):
            if not fits(a, b):
                runs.append((a, b))
                starts.extend(_even_runs(whole, prefix, shared, tokens, limit, max_rows))
                whole = []
            else:
                whole.append((a, b))
        starts.extend(_even_runs(whole, prefix, shared, tokens, limit, max_rows))
    return sorted(starts)


def _even_runs(
    subtrees: list[tuple[int, int]],
    prefix: int,
    shared: Int64Array,
    tokens: Int64Array,
    limit: int,
    max_rows: int,
) -> list[int]:
    """First rows of runs of neighbouring subtrees under one node of depth ``prefix``, of about equal size."""
    if prefix == 0 or len(subtrees) < 2:
        return [start for start, _ in subtrees]
    own = [int(tokens[end] - tokens[start] + shared[start]) - prefix for start, end in subtrees]
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


def put_into_cells(
    problem: Problem, blocks: Blocks, num_cells: int, *, affinity: int, capacity: int | None
) -> Int64Array | None:
    """[M] Cell of each block, or None when one finds no room.

    Blocks go, the most expensive first, to the cell that costs least with it; ``affinity`` counts what the block itself
    adds there that many times more, so that blocks look for cells which have their prefix.
    """
    open_cells = _OpenCells(problem, blocks, num_cells, capacity)
    for block in np.argsort(-blocks.costs_M, kind="stable").tolist():
        added_tokens, added_costs = open_cells.added_by(block)
        may = open_cells.have_room(block, added_tokens)
        key = np.where(may, open_cells.costs_C + (1 + affinity) * added_costs, np.iinfo(np.int64).max)
        cell = int(key.argmin())
        if not may[cell]:
            return None
        open_cells.put(block, cell, int(added_tokens[cell]), int(added_costs[cell]))
    return open_cells.cell_of_M


def join_blocks(problem: Problem, blocks: Blocks) -> list[list[int]]:
    """Positions of the rows of each cell, few cells: each block, the largest first, goes where it adds least."""
    open_cells = _OpenCells(problem, blocks, 1, problem.room.capacity)
    for block in np.argsort(-blocks.tokens_M, kind="stable").tolist():
        added_tokens, added_costs = open_cells.added_by(block)
        may = open_cells.have_room(block, added_tokens)
        # where it adds least and, among those, in the fullest; the last cell is always empty
        key = np.where(may, added_tokens * (open_cells.capacity + 1) - open_cells.tokens_C, np.iinfo(np.int64).max)
        key[-1] = np.iinfo(np.int64).max - 1
        cell = int(key.argmin())
        open_cells.put(block, cell, int(added_tokens[cell]), int(added_costs[cell]))
        if cell == key.size - 1:
            open_cells.add_cell()
    cells: list[list[int]] = [[] for _ in range(open_cells.tokens_C.size - 1)]
    for block, cell in enumerate(open_cells.cell_of_M.tolist()):
        cells[cell].extend(blocks.positions[block].tolist())
    return [sorted(cell) for cell in cells]


class _OpenCells:
    """Cells while blocks are put into them."""

    def __init__(self, problem: Problem, blocks: Blocks, num_cells: int, capacity: int | None) -> None:
        self.blocks = blocks
        self.capacity = int(blocks.tokens_M.sum()) if capacity is None else capacity
        self.max_rows = problem.room.max_rows or problem.num_rows
        self.tokens_C = np.zeros(num_cells, dtype=np.int64)
        self.costs_C = np.zeros(num_cells, dtype=np.int64)
        self.rows_C = np.zeros(num_cells, dtype=np.int64)
        self.cell_of_M = np.full(blocks.tokens_M.size, -1, dtype=np.int64)
        self._above_M, self._depths, self._depth_costs = _nodes_above(blocks)
        self._cells_below: list[dict[int, None]] = [{} for _ in self._depths]

    def add_cell(self) -> None:
        """One more, empty."""
        self.tokens_C, self.costs_C, self.rows_C = (
            np.append(values, 0) for values in (self.tokens_C, self.costs_C, self.rows_C)
        )

    def added_by(self, block: int) -> tuple[Int64Array, Int64Array]:
        """[C] Tokens and cost that a block would add to each cell: less what it shares with a block there."""
        tokens = np.full(self.tokens_C.size, self.blocks.tokens_M[block])
        costs = np.full(self.tokens_C.size, self.blocks.costs_M[block])
        for node in self._above_M[block]:  # the deepest last
            cells = list(self._cells_below[node])
            if not cells:
                break
            tokens[cells] = self.blocks.tokens_M[block] - self._depths[node]
            costs[cells] = self.blocks.costs_M[block] - self._depth_costs[node]
        return tokens, costs

    def have_room(self, block: int, added_tokens_C: Int64Array) -> np.ndarray:
        """[C] Cells that may take a block; an empty one may always."""
        fits = self.tokens_C + added_tokens_C <= self.capacity
        return (self.rows_C == 0) | (fits & (self.rows_C + self.blocks.counts_M[block] <= self.max_rows))

    def put(self, block: int, cell: int, added_tokens: int, added_cost: int) -> None:
        self.cell_of_M[block] = cell
        self.tokens_C[cell] += added_tokens
        self.costs_C[cell] += added_cost
        self.rows_C[cell] += self.blocks.counts_M[block]
        for node in self._above_M[block]:
            self._cells_below[node][cell] = None


def _nodes_above(blocks: Blocks) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """For each block the branching nodes above it, the deepest last; depth of each node and the cost down to it."""
    shared, costs = blocks.shared_M.tolist(), blocks.shared_costs_M.tolist()
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
    shared_costs = trie.between(places[:-1], places[1:])[1]
    before = np.cumsum(problem.costs_R[positions] - np.append(0, shared_costs))
    cost_left, cost_right = before[:-1], before[-1] - before[:-1] + shared_costs
    at = int(np.maximum(cost_left, cost_right).argmin()) + 1
    return sorted(positions[:at].tolist()), sorted(positions[at:].tolist())
