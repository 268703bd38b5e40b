"""From placed rows to a finished plan: its cells, its over-long rows, its figures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.errors import PlanError
from evenstep.plan.deal import Placed
from evenstep.plan.measure import measure, tabulate
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.problem import Problem
from evenstep.plan.request import Request, problem_of, read_lengths
from evenstep.plan.step_plan import Cells, Overlong, StepPlan

__all__ = ["build_plan", "name_overlong", "placed_as", "reuse_plan"]

_log = logging.getLogger(__name__)


def build_plan(
    request: Request,
    problem: Problem,
    placed: Placed,
    overlong: tuple[Overlong, ...],
    *,
    window: tuple[int, ...] | None,
) -> StepPlan:
    """Cells, stats and names of a placement; raises when a filler is needed that does not fit into the budget."""
    room, num_cells = request.room, request.num_ranks * placed.num_microbatches
    cell_of_R = placed.rank_R * placed.num_microbatches + placed.k_R
    table = tabulate(problem, cell_of_R, num_cells)
    num_empty = int((table.num_rows_C == 0).sum())
    if num_empty and room.budget is not None and room.filler_footprint > room.budget:
        raise PlanError(
            f"{num_empty} cells of {request.num_ranks} ranks x {placed.num_microbatches} micro-batches have no row and "
            f"need a filler of {room.filler_footprint} tokens, found a budget of {room.budget}; raise "
            f"max_tokens_per_gpu or use fewer ranks"
        )
    rank_of_R = placed.rank_R if request.placement == "local" else None
    return StepPlan(
        request=request,
        cells=_to_cells(problem, placed, request.num_ranks),
        window=window,
        overlong=overlong,
        stats=measure(problem, table, is_step_sync=request.sync == "step", rank_of_R=rank_of_R),
    )


def placed_as(plan: StepPlan, problem: Problem) -> Placed:
    """Where a plan's cells place the rows of a problem."""
    num_all = int(problem.order_R.max()) + 1
    rank = np.zeros(num_all, dtype=np.int64)
    k = np.zeros(num_all, dtype=np.int64)
    for r, cells in enumerate(plan.cells):
        for i, cell in enumerate(cells):
            rank[list(cell)], k[list(cell)] = r, i
    return Placed(rank_R=rank[problem.order_R], k_R=k[problem.order_R], num_microbatches=plan.num_microbatches)


def reuse_plan(
    plan: StepPlan,
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    max_tokens_per_gpu: int | None,
    prefixes: SharedPrefixes | None = None,
) -> StepPlan:
    """A forward-only plan with exactly the cells of a training plan, under a budget of its own.

    Layout ``tree`` needs the ``prefixes`` that it was planned with.

    Scoring in the training cells makes old and new log-probs of a row come from the same shapes.

    >>> from evenstep.plan import plan_step
    >>> training = plan_step([6, 3, 3], num_ranks=1, max_tokens_per_gpu=6)
    >>> scoring = reuse_plan(training, [6, 3, 3], max_tokens_per_gpu=48)
    >>> scoring.cells == training.cells, scoring.budget, scoring.hash == training.hash
    (True, 48, False)

    Raises:
        PlanError: a cell does not fit into the new budget, or the lengths are not the plan's.
    """
    lengths_R = read_lengths(lengths)
    plan.check(lengths_R, prefixes=prefixes)
    request = replace(plan.request, max_tokens_per_gpu=max_tokens_per_gpu)
    request.validate()
    problem = problem_of(request, np.array(plan.rows, dtype=np.int64), lengths_R, None, prefixes)
    overlong = name_overlong(request, problem)
    reused = build_plan(request, problem, placed_as(plan, problem), overlong, window=plan.window)
    reused = replace(reused, cells=plan.cells)  # equal lengths may be listed in another order
    reused.check(lengths_R, prefixes=prefixes)
    return reused


def name_overlong(request: Request, problem: Problem) -> tuple[Overlong, ...]:
    """Rows that alone exceed the budget, longest first."""
    room = problem.room
    if room.budget is None:
        return ()
    over = np.flatnonzero(room.alone(problem.lengths_R) > room.budget)
    named = tuple(Overlong(int(problem.order_R[p]), int(problem.lengths_R[p]), room.budget) for p in over)
    if not named:
        return ()
    shown = ", ".join(f"row {item.row} of {item.length} tokens" for item in named[:5])
    if request.overlong_policy == "error":
        raise PlanError(
            f"overlong='error' refuses rows over the budget of {room.budget} tokens, found {len(named)}: {shown}; "
            f"raise max_tokens_per_gpu, or allow them with overlong='alone'"
        )
    if room.layout == "fixed" and room.cell_rows > 1:
        raise PlanError(
            f"layout 'fixed' runs {room.cell_rows} rows at a time, {room.cell_rows} x the width of the longest must be "
            f"within the budget of {room.budget} tokens, found {len(named)} rows too long for it: {shown}; "
            f"lower micro_batch_rows, raise max_tokens_per_gpu, or use layout 'padded'"
        )
    _log.warning("%d rows exceed the budget of %d tokens and run alone: %s", len(named), room.budget, shown)
    return named


def _to_cells(problem: Problem, placed: Placed, num_ranks: int) -> Cells:
    """Row indices by rank and micro-batch, longest first inside a cell."""
    num_microbatches = placed.num_microbatches
    cell_of_R = placed.rank_R * num_microbatches + placed.k_R
    flat = problem.order_R[np.argsort(cell_of_R, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(cell_of_R, minlength=num_ranks * num_microbatches)).tolist()
    cells = [tuple(flat[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return tuple(tuple(cells[rank * num_microbatches : (rank + 1) * num_microbatches]) for rank in range(num_ranks))
