"""The rows of one plan in canonical order with exact integer costs: what the algorithms work on.

Costs are fixed-point integers, so every sum is exact and no order of additions, vector width or platform can change a
plan. Positions count rows from the longest to the shortest; ties go by row id, else by index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from evenstep.plan.cost import CostModel
from evenstep.plan.footprint import Room
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.trie import Trie, make_trie
from evenstep.types import Int64Array

__all__ = ["Problem", "cells_of_runs", "make_problem", "running_sums"]

_MOST_UNITS = 2.0**62
_COST_BITS = 50  # all cells together cost less than 2**50 units: exact in int64 and in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows of one plan, longest first."""

    room: Room
    num_ranks: int  # W
    order_R: Int64Array  # index into lengths of each position
    lengths_R: Int64Array  # real tokens
    widths_R: Int64Array  # tokens the row adds to a cell: a multiple of room.multiple, but in "tree" its length
    costs_R: Int64Array  # cost of the row at its own width, without c0
    c0: int  # cost of a micro-batch besides its rows
    c1: float  # units per footprint token
    scale: float  # units per unit of the cost model
    cost: CostModel
    min_microbatches: int  # K is at least this
    k_multiple: int  # and a multiple of this
    trie: Trie | None = None  # layout "tree": what the rows share

    @property
    def num_rows(self) -> int:
        return int(self.order_R.size)

    def round_k(self, num_microbatches: int) -> int:
        """Smallest allowed K that is at least ``num_microbatches``."""
        return -(-max(num_microbatches, self.min_microbatches, 1) // self.k_multiple) * self.k_multiple

    @property
    def without_idle_trie(self) -> Problem:
        """The problem itself, but as packed where its rows share nothing."""
        return self if self.trie is None or self.trie.is_shared else self.as_packed

    @property
    def as_packed(self) -> Problem:
        """A problem of layout ``tree`` as if its rows shared nothing."""
        return replace(self, room=replace(self.room, layout="packed"), trie=None)

    def costs_of_widths(self, widths: Int64Array) -> Int64Array:
        """Cost of a row of each width, without c0."""
        return _to_units(self.cost, widths, self.scale)

    def costs_of_beginnings(self, lengths: Int64Array) -> Int64Array:
        """Cost of the first so many tokens of a row of layout ``tree``."""
        return _costs_of_lengths(self.cost, lengths, self.scale)

    @property
    def num_overlong(self) -> int:
        """Rows that alone exceed the budget; they are the first positions."""
        capacity = self.room.capacity
        return 0 if capacity is None else int(np.searchsorted(-self.widths_R, -capacity, side="left"))

    def cost_of_cell(self, cell_B: Int64Array) -> int:
        """Cost of one cell, given its rows' positions, without c0."""
        return int(self.cell_costs(np.zeros_like(cell_B), 1, cell_B)[0])

    def padding_costs(self, sums_C: Int64Array) -> Int64Array:
        """[C] Cost of what a packed or tree cell is rounded up by."""
        zeros = np.zeros_like(sums_C)
        return np.rint((self.room.footprints(sums_C, zeros, zeros) - sums_C) * self.c1).astype(np.int64)

    def cell_tokens(self, cell_of_R: Int64Array, num_cells: int) -> Int64Array:
        """[C] Sum of the widths of each cell's rows; tokens that rows share count once."""
        sums = np.bincount(cell_of_R, weights=self.widths_R, minlength=num_cells).astype(np.int64)
        return sums if self.trie is None else sums - self.trie.saved(cell_of_R, num_cells)[0]

    def cell_costs(self, cell_of_R: Int64Array, num_cells: int, rows: Int64Array | None = None) -> Int64Array:
        """[C] Cost of each cell without c0, from the cell of each row (or of ``rows``); empty cells cost 0."""
        row_costs, widths = (self.costs_R, self.widths_R) if rows is None else (self.costs_R[rows], self.widths_R[rows])
        counts = np.bincount(cell_of_R, minlength=num_cells)
        if self.room.layout in ("packed", "tree"):
            costs = np.bincount(cell_of_R, weights=row_costs, minlength=num_cells).astype(np.int64)
            if self.room.bucket is not None or self.trie is not None:
                sums = np.bincount(cell_of_R, weights=widths, minlength=num_cells).astype(np.int64)
                if self.trie is not None:
                    saved_tokens, saved_costs = self.trie.saved(cell_of_R, num_cells, rows)
                    sums, costs = sums - saved_tokens, costs - saved_costs
                costs += self.padding_costs(sums)
            return np.where(counts > 0, costs, 0)
        most = np.zeros(num_cells, dtype=np.int64)
        np.maximum.at(most, cell_of_R, row_costs)
        return most * (np.where(counts > 0, self.room.cell_rows, 0) if self.room.layout == "fixed" else counts)


def _costs_of_lengths(cost: CostModel, lengths: Int64Array, scale: float) -> Int64Array:
    """Cost of the first ``lengths`` tokens of a row: no row is free, however long the others are."""
    return np.where(lengths > 0, np.maximum(1, _to_units(cost, lengths, scale)), 0)


def running_sums(values: Int64Array) -> Int64Array:
    """[R + 1] Sums of the first 0, 1, ..., R values."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])


def cells_of_runs(starts: list[int], num_rows: int) -> Int64Array:
    """[R] Cell of each row where cells are runs of rows, from the first row of each."""
    begins = np.zeros(num_rows, dtype=np.int64)
    begins[starts[1:]] = 1
    return np.cumsum(begins)


def _fixed_point_scale(cost: CostModel, room: Room, longest: int, num_rows: int, num_ranks: int) -> float:
    """Power of two that turns costs into integers below ``2**50`` in total."""
    width = room.round_up(np.array([longest], dtype=np.int64))
    if room.bucket is not None:
        width = room.ladder(int(width[0]))[-1:]
    most = (num_rows * room.cell_rows + num_ranks) * (float(cost.row_costs(width)[0]) + cost.c0)
    return 2.0 ** (_COST_BITS - math.frexp(most)[1])


def _to_units(cost: CostModel, widths: Int64Array, scale: float) -> Int64Array:
    # a budget far above all rows costs more than the integers hold: then it is no limit, however much
    return np.rint(np.minimum(cost.row_costs(widths) * scale, _MOST_UNITS)).astype(np.int64)


def make_problem(
    rows: Int64Array,
    lengths_R: Int64Array,
    tie_break_R: Int64Array | None,
    *,
    room: Room,
    cost: CostModel,
    num_ranks: int,
    min_microbatches: int,
    k_multiple: int,
    prefixes: SharedPrefixes | None = None,
) -> Problem:
    """Sort the rows with indices ``rows`` (of all lengths) and turn their costs into integers.

    ``prefixes`` of just these rows belong to layout ``tree``; without ids, rows of equal length then keep their order.
    """
    lengths = lengths_R[rows]
    if tie_break_R is None and prefixes is not None:
        tie_break_R = np.zeros(lengths_R.size, dtype=np.int64)
        tie_break_R[prefixes.order_R] = np.arange(prefixes.order_R.size)
    ties = rows if tie_break_R is None else tie_break_R[rows]
    order = np.lexsort((ties, -lengths))
    lengths = lengths[order]
    widths = room.widths(lengths)
    scale = _fixed_point_scale(cost, room, int(lengths[0]), lengths.size, num_ranks)
    return Problem(
        room=room,
        num_ranks=num_ranks,
        order_R=rows[order],
        lengths_R=lengths,
        widths_R=widths,
        costs_R=_costs_of_lengths(cost, widths, scale),
        c0=round(cost.c0 * scale),
        c1=cost.c1 * scale,
        scale=scale,
        cost=cost,
        min_microbatches=min_microbatches,
        k_multiple=k_multiple,
        trie=None
        if prefixes is None
        else make_trie(prefixes, rows[order], lengths, lambda shared: _costs_of_lengths(cost, shared, scale)),
    )
