"""Rows of a problem as a prefix trie: what any set of them computes, each shared token once.

In the order of tokens, neighbours share most: the trie of any subset is the sum of its rows less what each shares with
the one before it, and what two rows share is the least that any neighbours between them do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evenstep.plan.prefixes import SharedPrefixes
from evenstep.types import Int64Array

__all__ = ["Trie", "make_trie"]

Costs = Callable[[Int64Array], Int64Array]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trie:
    """Places count rows in the order of their tokens; positions are the problem's, longest row first."""

    position_R: Int64Array  # position of the row at each place
    place_R: Int64Array  # and the place of each position
    shared_R: Int64Array  # tokens the row at each place shares with the one before it
    least_LR: Int64Array  # least of 2**level of shared_R from each place on
    least_costs_LR: Int64Array  # the same of what they cost in the problem's units; never falls where shared_R rises

    @property
    def is_shared(self) -> bool:
        """Whether any two rows begin alike."""
        return bool(self.shared_R.any())

    def between(self, first: Int64Array, last: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Tokens that rows at places ``first < last`` share, and their cost."""
        level = np.frexp((last - first).astype(np.float64))[1].astype(np.int64) - 1
        start, end = first + 1, last + 1 - (1 << level)
        return (
            np.minimum(self.least_LR[level, start], self.least_LR[level, end]),
            np.minimum(self.least_costs_LR[level, start], self.least_costs_LR[level, end]),
        )

    def along(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """[B] Tokens that the row at each of these ascending places shares with the one before it, and their cost."""
        tokens, costs = np.zeros_like(places), np.zeros_like(places)
        tokens[1:], costs[1:] = self.between(places[:-1], places[1:])
        return tokens, costs

    def saved(
        self, cell_of_B: Int64Array, num_cells: int, positions_B: Int64Array | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """[C] Tokens that the rows of each cell share, and their cost; of all rows, or of those at some positions."""
        places = self.place_R if positions_B is None else self.place_R[positions_B]
        order = np.argsort(cell_of_B * self.place_R.size + places)  # no two are equal
        cells, places = cell_of_B[order], places[order]
        same = np.flatnonzero(cells[1:] == cells[:-1])
        tokens, costs = self.between(places[same], places[same + 1])
        return (
            np.bincount(cells[same], weights=tokens, minlength=num_cells).astype(np.int64),
            np.bincount(cells[same], weights=costs, minlength=num_cells).astype(np.int64),
        )


def make_trie(prefixes: SharedPrefixes, order_R: Int64Array, lengths_R: Int64Array, costs: Costs) -> Trie:
    """The trie of the rows ``order_R`` (row indices by position); equal rows are put in the order of positions."""
    position_of = np.empty(int(order_R.max()) + 1, dtype=np.int64)
    position_of[order_R] = np.arange(order_R.size)
    positions, shared = position_of[prefixes.order_R], prefixes.shared_R
    lengths = lengths_R[positions]
    is_copy = np.zeros(positions.size, dtype=bool)
    is_copy[1:] = (shared[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
    positions = positions[np.lexsort((positions, np.cumsum(~is_copy)))]
    place_R = np.empty_like(positions)
    place_R[positions] = np.arange(positions.size)
    return Trie(
        position_R=positions,
        place_R=place_R,
        shared_R=shared,
        least_LR=_least(shared),
        least_costs_LR=_least(costs(shared)),
    )


def _least(values_R: Int64Array) -> Int64Array:
    """[L, R] Least of 1, 2, 4, ... values from each place on; runs that would leave the end repeat the last level."""
    levels = [values_R]
    span = 1
    while 2 * span <= values_R.size:
        before = levels[-1]
        longer = before.copy()
        longer[: before.size - span] = np.minimum(before[: before.size - span], before[span:])
        levels.append(longer)
        span *= 2
    return np.stack(levels)
