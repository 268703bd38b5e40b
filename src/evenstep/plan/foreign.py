"""The figures of cells that somebody else has chosen, by the same rules as a plan's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.errors import PlanError
from evenstep.plan.measure import CellTable, PlanStats, measure, tabulate
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.problem import Problem
from evenstep.plan.request import Request, problem_of, read_lengths
from evenstep.types import Float64Array, Int64Array

__all__ = ["MeasuredCells", "measure_cells"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredCells:
    """Any cells under a request's rules; costs are in the cost model's unit."""

    request: Request
    problem: Problem
    table: CellTable

    @property
    def stats(self) -> PlanStats:
        """As a plan has them; cells that break the rules may cost less than the bounds of those that keep them."""
        return measure(self.problem, self.table, is_step_sync=self.request.sync == "step", rank_of_R=None)

    @property
    def num_over_budget(self) -> int:
        """Cells of several rows above the budget."""
        budget = self.request.room.budget
        if budget is None:
            return 0
        return int(((self.table.footprints_C > budget) & (self.table.num_rows_C > 1)).sum())

    @property
    def costs_WK(self) -> Float64Array:
        """Cost of each cell, c0 included."""
        return (self.table.costs_WK + self.problem.c0) / self.problem.scale

    @property
    def footprints_WK(self) -> Int64Array:
        """Tokens that each cell takes, those of fillers too."""
        table = self.table
        taken = np.where(table.num_rows_C > 0, table.footprints_C, self.request.room.filler_footprint)
        return taken.reshape(table.num_ranks, -1)


def measure_cells(
    request: Request,
    lengths: Sequence[int] | Int64Array,
    cells: Sequence[Sequence[Sequence[int]]],
    *,
    prefixes: SharedPrefixes | None = None,
) -> MeasuredCells:
    """Measure ``cells[rank][k]`` (row indices), whoever chose them; layout ``tree`` needs the rows' ``prefixes``.

    >>> from evenstep.plan import plan_step
    >>> plan = plan_step([7, 5, 4, 3, 2], num_ranks=2, max_tokens_per_gpu=12, layout="packed")
    >>> measure_cells(plan.request, [7, 5, 4, 3, 2], plan.cells).stats == plan.stats
    True
    >>> worse = measure_cells(plan.request, [7, 5, 4, 3, 2], [[[0, 1, 2]], [[3, 4]]])
    >>> worse.stats.max_footprint, worse.num_over_budget
    (16, 1)

    Raises:
        PlanError: a row is in no cell or in several, or the ranks are not those of the request or have unequal counts.
    """
    lengths_R = read_lengths(lengths)
    counts = sorted({len(rank) for rank in cells})
    if len(cells) != request.num_ranks or len(counts) != 1 or counts[0] < 1:
        raise PlanError(
            f"every one of {request.num_ranks} ranks must have the same number of cells, found {len(cells)} ranks with "
            f"{counts} cells; fill up with empty ones"
        )
    num_cells = request.num_ranks * counts[0]
    flat = [rows for rank in cells for rows in rank]
    sizes = np.array([len(rows) for rows in flat], dtype=np.int64)
    rows_R = np.array([row for rows in flat for row in rows], dtype=np.int64)
    seen = np.bincount(rows_R, minlength=lengths_R.size)
    if seen.size != lengths_R.size or (seen != 1).any():
        row = int(np.flatnonzero(seen != 1)[0])
        raise PlanError(f"every row must be in exactly one cell, found row {row} in {seen[row]}")
    cell_of_row = np.empty(lengths_R.size, dtype=np.int64)
    cell_of_row[rows_R] = np.repeat(np.arange(num_cells), sizes)
    problem = problem_of(request, np.arange(lengths_R.size), lengths_R, None, prefixes)
    table = tabulate(problem, cell_of_row[problem.order_R], num_cells)
    return MeasuredCells(request=request, problem=problem, table=table)
