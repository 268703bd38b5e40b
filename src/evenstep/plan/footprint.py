"""How much room rows take: the one rule that planner, checks and report share.

``fixed``/``padded``: rows x padded width of the longest; ``packed``: sum of the rows' widths; ``tree``: the distinct
nodes of the rows' prefix trie. A width is the length rounded up to
``multiple = lcm(2 * cp if cp > 1 else 1, pad_to_multiple)`` (in ``tree`` the sum of nodes is) and, with a bucket
ladder, up to its next rung.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evenstep.types import Int64Array

__all__ = ["FILLER_TOKENS", "LAYOUTS", "Layout", "Room"]

Layout = Literal["fixed", "padded", "packed", "tree"]
LAYOUTS: tuple[Layout, ...] = ("fixed", "padded", "packed", "tree")
FILLER_TOKENS = 2  # one context token and one to predict: the least a forward and backward can work on


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The shape rules of a plan's cells.

    >>> room = Room(layout="padded", budget=2047, multiple=1024)
    >>> room.widths(np.array([1001, 700])), room.cell_footprint(np.array([1001, 700]))
    (array([1024, 1024]), 2048)
    """

    layout: Layout
    budget: int | None  # most tokens a cell may occupy; None: no limit
    multiple: int = 1  # widths are multiples of it
    bucket: float | None = None  # most of a width that the ladder may waste
    max_rows: int | None = None  # most rows in a cell
    cell_rows: int = 1  # layout "fixed": the rows a cell's shape has

    @property
    def capacity(self) -> int | None:
        """Largest multiple within the budget."""
        return None if self.budget is None else self.budget // self.multiple * self.multiple

    def ladder(self, longest: int) -> Int64Array:
        """Rungs of the bucket ladder up to the first that holds ``longest`` tokens; the budget itself is a rung.

        Rung w after rung v wastes at most ``bucket``: ``(w - (v + 1)) / w <= bucket`` wherever the multiple allows it.
        """
        assert self.bucket is not None
        rungs, top = [self.multiple], self.capacity
        while rungs[-1] < longest:
            previous = rungs[-1]
            step = math.floor((previous + 1) / (1.0 - self.bucket)) // self.multiple * self.multiple
            rung = max(step, previous + self.multiple)
            if top is not None and previous < top < rung:
                rung = top
            rungs.append(rung)
        return np.array(rungs, dtype=np.int64)

    def round_up(self, lengths_R: Int64Array) -> Int64Array:
        """[R] Lengths rounded up to the multiple."""
        return (lengths_R + (self.multiple - 1)) // self.multiple * self.multiple

    def _to_ladder(self, widths: Int64Array) -> Int64Array:
        if self.bucket is None or widths.size == 0:
            return widths
        rungs = self.ladder(int(widths.max()))
        return rungs[np.searchsorted(rungs, widths)]

    def widths(self, lengths_R: Int64Array) -> Int64Array:
        """[R] Tokens each row adds to a cell; ``packed``: the ladder, ``tree``: all rounding acts on the sum only."""
        if self.layout == "tree":
            return lengths_R
        rounded = self.round_up(lengths_R)
        return rounded if self.layout == "packed" else self._to_ladder(rounded)

    def alone(self, lengths_R: Int64Array) -> Int64Array:
        """[R] Footprint of each row when it stands alone."""
        return self._to_ladder(self.round_up(lengths_R)) * (self.cell_rows if self.layout == "fixed" else 1)

    def footprints(self, sums_C: Int64Array, longest_C: Int64Array, rows_C: Int64Array) -> Int64Array:
        """[C] Footprints of cells from the sum and the maximum of their rows' widths and their number of rows.

        In ``tree`` the sum counts tokens that rows share once.
        """
        if self.layout == "tree":
            return self._to_ladder(self.round_up(sums_C))
        if self.layout == "packed":
            return self._to_ladder(sums_C)
        if self.layout == "fixed":
            return self.cell_rows * longest_C
        return rows_C * longest_C

    def cell_footprint(self, lengths_B: Int64Array) -> int:
        """Footprint of one cell that holds rows of these lengths and, in ``tree``, share nothing."""
        widths = self.widths(lengths_B)
        one = np.array([widths.sum()]), np.array([widths.max()]), np.array([widths.size])
        return int(self.footprints(*one)[0])

    @property
    def filler_footprint(self) -> int:
        """Tokens an inert filler cell occupies."""
        return int(self.alone(np.array([FILLER_TOKENS], dtype=np.int64))[0])
