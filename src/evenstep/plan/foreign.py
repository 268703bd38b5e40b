"""The figures of cells that somebody else has chosen, by the same rules as a plan's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenstep.errors import PlanError
from evenstep.plan.build import problem_of
from evenstep.plan.measure import PlanStats, measure, tabulate
from evenstep.plan.request import Request, read_lengths

__all__ = ["measure_cells"]


def measure_cells(
    request: Request, lengths: Sequence[int], cells: Sequence[Sequence[Sequence[int]]]
) -> tuple[PlanStats, int]:
    """Figures of ``cells[rank][k]`` (row indices), and how many cells of several rows exceed the budget.

    The bounds are those of plans that keep the request's rules, so cells that break the budget may cost less.

    >>> from evenstep.plan import plan_step
    >>> plan = plan_step([7, 5, 4, 3, 2], num_ranks=2, max_tokens_per_gpu=12, layout="packed")
    >>> measure_cells(plan.request, [7, 5, 4, 3, 2], plan.cells) == (plan.stats, 0)
    True
    >>> stats, num_over_budget = measure_cells(plan.request, [7, 5, 4, 3, 2], [[[0, 1, 2]], [[3, 4]]])
    >>> stats.max_footprint, num_over_budget
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
    problem = problem_of(request, np.arange(lengths_R.size), lengths_R, None)
    table = tabulate(problem, cell_of_row[problem.order_R], num_cells)
    budget = request.room.budget
    num_over = 0 if budget is None else int(((table.footprints_C > budget) & (table.num_rows_C > 1)).sum())
    return measure(problem, table, is_step_sync=request.sync == "step", rank_of_R=None), num_over
