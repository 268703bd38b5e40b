"""Search on from a finished plan for as long as the caller allows: the result then depends on the machine's speed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.errors import PlanError
from evenstep.plan.anneal import move_cuts
from evenstep.plan.build import build_plan, placed_as
from evenstep.plan.exchange import exchange_rows
from evenstep.plan.pad import runs_of
from evenstep.plan.problem import Problem, cells_of_runs
from evenstep.plan.request import problem_of, read_lengths
from evenstep.plan.spread import deal_found
from evenstep.plan.step_plan import StepPlan
from evenstep.types import Int64Array

__all__ = ["refine_plan"]

_ROUNDS = 8  # exchanges between two looks at the clock
_MOVES = 5000  # moves of cuts between two looks at the clock


def refine_plan(
    plan: StepPlan, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], *, time_limit_s: float
) -> StepPlan:
    """Improve a ``global`` plan for ranks that meet in every micro-batch, for ``time_limit_s`` seconds of search.

    Unlike ``plan_step``, two calls may return different plans: plan on one rank and ship the result.

    >>> from evenstep.plan import plan_step
    >>> plan = plan_step([9, 8, 7, 5, 4, 3, 2, 2], num_ranks=2, max_tokens_per_gpu=20, layout="packed")
    >>> refine_plan(plan, [9, 8, 7, 5, 4, 3, 2, 2], time_limit_s=0.01).stats.step_cost <= plan.stats.step_cost
    True

    Raises:
        PlanError: another layout, placement ``local``, ``sync="step"``, or a bad limit.
    """
    request = plan.request
    if request.layout in ("fixed", "tree") or request.placement == "local" or request.sync == "step":
        raise PlanError(
            f"refine_plan improves global padded or packed plans with sync='micro_batch', found layout "
            f"{request.layout!r}, placement {request.placement!r}, sync {request.sync!r}; use the plan as it is"
        )
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise PlanError(f"time_limit_s must be a positive number of seconds, found {time_limit_s!r}")
    lengths_R = read_lengths(lengths)
    plan.check(lengths_R)
    problem = problem_of(
        request, np.array(plan.rows, dtype=np.int64), lengths_R, _order_of_cells(plan, lengths_R), None
    )
    placed = placed_as(plan, problem)
    cell_of_R = placed.k_R * problem.num_ranks + placed.rank_R
    deadline = time.monotonic() + time_limit_s
    turn = 0
    best = plan
    while True:
        cell_of_R = _search_on(problem, cell_of_R, placed.num_microbatches, turn)
        found = deal_found(problem, cell_of_R, placed.num_microbatches)
        candidate = build_plan(request, problem, found, plan.overlong, window=plan.window)
        if candidate.stats.step_cost < best.stats.step_cost:
            best = candidate
        turn += 1
        if time.monotonic() >= deadline:
            best.check(lengths_R)
            return best


def _order_of_cells(plan: StepPlan, lengths_R: Int64Array) -> Int64Array:
    """[R] Tie-break that keeps rows of equal length in the order of their cells, so that padded cells are runs."""
    cells = [cell for rank in plan.cells for cell in rank if cell]
    cells.sort(key=lambda cell: (-int(lengths_R[list(cell)].max()), -int(lengths_R[list(cell)].min())))
    ties = np.zeros(lengths_R.size, dtype=np.int64)
    ties[[row for cell in cells for row in cell]] = np.arange(sum(map(len, cells)))
    return ties


def _search_on(problem: Problem, cell_of_R: Int64Array, num_microbatches: int, turn: int) -> Int64Array:
    if problem.room.layout == "packed":
        first = turn * _ROUNDS
        return exchange_rows(problem, cell_of_R, num_microbatches, rounds=_ROUNDS, width=16, first_turn=first)
    first_rows = np.flatnonzero(np.diff(cell_of_R, prepend=-1) != 0)
    starts = move_cuts(runs_of(problem, 1), first_rows.tolist(), moves=_MOVES, seed=turn)
    return cells_of_runs(starts, problem.num_rows)
