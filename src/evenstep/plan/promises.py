"""The promises of a plan as named predicates; they run on every plan, also in production."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from evenstep.errors import PlanError
from evenstep.plan.fixed import columns_of_scope
from evenstep.plan.measure import CellTable, measure, tabulate
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.problem import Problem
from evenstep.plan.request import Request, id_ranks, problem_of, read_lengths, require_prefixes
from evenstep.types import Int64Array

if TYPE_CHECKING:
    from evenstep.plan.step_plan import StepPlan

__all__ = ["check_promises"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """A plan as flat arrays; C = W * K cells, rank-major."""

    plan: StepPlan
    request: Request
    lengths: Int64Array  # of all rows the caller has
    rows_R: Int64Array  # row indices in the order of the cells
    cell_R: Int64Array  # and the cell each is in
    problem: Problem
    table: CellTable
    cell_of_R: Int64Array  # by canonical position

    def where(self, cell: int) -> str:
        num_microbatches = self.plan.num_microbatches
        rank, k = divmod(int(cell), num_microbatches)
        return f"rank {rank}, micro-batch {k}, rows {list(self.plan.cells[rank][k])[:20]}"


def check_promises(
    plan: StepPlan,
    lengths: Sequence[int] | Int64Array,
    *,
    rollout_ids: Sequence[Hashable] | None,
    group_ids: Sequence[Hashable] | None,
    prefixes: SharedPrefixes | None,
) -> None:
    """Verify every promise; raises ``PlanError`` at the first that does not hold."""
    lengths_R = read_lengths(lengths)
    _check_counts(plan)
    rows, cell = _flatten(plan)
    _check_coverage(plan, lengths_R, rows, cell)
    if rollout_ids is not None:
        _check_rollouts(plan, lengths_R.size, rollout_ids)
    request = plan.request
    require_prefixes(request.layout, prefixes, lengths_R)
    problem = problem_of(request, np.sort(rows), lengths_R, None, prefixes)
    cell_by_index = np.zeros(lengths_R.size, dtype=np.int64)
    cell_by_index[rows] = cell
    cell_of_R = cell_by_index[problem.order_R]
    evidence = _Evidence(
        plan=plan,
        request=request,
        lengths=lengths_R,
        rows_R=rows,
        cell_R=cell,
        problem=problem,
        table=tabulate(problem, cell_of_R, plan.num_ranks * plan.num_microbatches),
        cell_of_R=cell_of_R,
    )
    _check_budget(evidence)
    _check_fillers(evidence, group_ids)
    _check_order(evidence)
    _check_stats(evidence)


def _flatten(plan: StepPlan) -> tuple[Int64Array, Int64Array]:
    cells = [cell for rank in plan.cells for cell in rank]
    sizes = np.array([len(cell) for cell in cells], dtype=np.int64)
    rows = np.array([row for cell in cells for row in cell], dtype=np.int64)
    return rows, np.repeat(np.arange(len(cells)), sizes)


def _check_counts(plan: StepPlan) -> None:
    counts = [len(rank) for rank in plan.cells]
    multiple, least = plan.request.num_microbatches_multiple, plan.request.min_microbatches
    if len(counts) != plan.num_ranks or len(set(counts)) != 1:
        raise PlanError(
            f"promise 'equal counts': {plan.num_ranks} ranks run the same number of micro-batches, found {counts}; "
            f"unequal counts block in the first collective, make the plan again"
        )
    if counts[0] % multiple or counts[0] < least:
        raise PlanError(
            f"promise 'equal counts': the number of micro-batches is a multiple of {multiple} and at least {least}, "
            f"found {counts[0]}; make the plan again"
        )


def _check_coverage(plan: StepPlan, lengths: Int64Array, rows: Int64Array, cell: Int64Array) -> None:
    fix = "plan these lengths again; a plan serves only the rows it was made for"
    outside = rows[(rows < 0) | (rows >= lengths.size)]
    if outside.size:
        raise PlanError(
            f"promise 'coverage': cells hold rows 0 to {lengths.size - 1}, found rows {outside[:10].tolist()}; {fix}"
        )
    expected = np.ones(lengths.size, dtype=np.int64)
    if plan.window is not None:
        expected[:] = 0
        inside = np.array(plan.window, dtype=np.int64)
        if inside.size and (int(inside.min()) < 0 or int(inside.max()) >= lengths.size):
            raise PlanError(
                f"promise 'coverage': the window names rows {inside.min()} to {inside.max()}, found only "
                f"{lengths.size} lengths; {fix}"
            )
        expected[inside] = 1
    seen = np.bincount(rows, minlength=lengths.size)
    wrong = np.flatnonzero(seen != expected)
    if wrong.size:
        first = int(wrong[0])
        places = [divmod(int(c), plan.num_microbatches) for c in cell[rows == first]][:5]
        raise PlanError(
            f"promise 'coverage': every row of the window is in exactly one cell and no other row is in any, found row "
            f"{first} in {seen[first]} cells (rank, micro-batch: {places}), {wrong.size} rows wrong in all; {fix}"
        )


def _check_rollouts(plan: StepPlan, num_rows: int, rollout_ids: Sequence[Hashable]) -> None:
    ids = id_ranks("rollout_ids", rollout_ids, num_rows, unique=False)
    assert ids is not None
    inside = np.zeros(num_rows, dtype=bool)
    inside[list(plan.rows)] = True
    torn = np.intersect1d(ids[inside], ids[~inside])
    if torn.size:
        rows = np.flatnonzero(ids == torn[0])
        raise PlanError(
            f"promise 'whole rollouts': all rows of a rollout are in one window, found rollout "
            f"{rollout_ids[int(rows[0])]!r} with rows {rows[inside[rows]][:10].tolist()} inside and "
            f"{rows[~inside[rows]][:10].tolist()} outside; put whole rollouts into windows"
        )


def _check_budget(e: _Evidence) -> None:
    room = e.request.room
    max_rows = e.request.max_rows_per_microbatch if room.layout != "fixed" else room.cell_rows
    if max_rows is not None and int(e.table.num_rows_C.max()) > max_rows:
        worst = int(e.table.num_rows_C.argmax())
        raise PlanError(
            f"promise 'budget': a micro-batch holds at most {max_rows} rows, found {e.table.num_rows_C[worst]} at "
            f"{e.where(worst)}; make the plan again"
        )
    named = {(item.row, item.length, item.budget) for item in e.plan.overlong}
    found: set[tuple[int, int, int]] = set()
    if room.budget is not None:
        for cell in np.flatnonzero(e.table.footprints_C > room.budget).tolist():
            if e.table.num_rows_C[cell] > 1 or (room.layout == "fixed" and room.cell_rows > 1):
                raise PlanError(
                    f"promise 'budget': a micro-batch occupies at most {room.budget} tokens, found "
                    f"{e.table.footprints_C[cell]} at {e.where(cell)}; make the plan again with these lengths"
                )
            row = int(e.rows_R[e.cell_R == cell][0])
            found.add((row, int(e.lengths[row]), room.budget))
    if found != named or len(named) != len(e.plan.overlong):
        raise PlanError(
            f"promise 'budget': rows over the budget are named in the plan as (row, length, budget), found "
            f"{sorted(found)[:10]} over it and {sorted(named)[:10]} named; make the plan again"
        )


def _check_fillers(e: _Evidence, group_ids: Sequence[Hashable] | None) -> None:
    room, counts = e.request.room, e.table.num_rows_C
    empty = counts == 0
    if empty.any() and room.budget is not None and room.filler_footprint > room.budget:
        raise PlanError(
            f"promise 'no empty cell': a cell without rows runs a filler of {room.filler_footprint} tokens, found "
            f"{int(empty.sum())} such cells under a budget of {room.budget}; raise max_tokens_per_gpu"
        )
    if room.layout == "fixed":
        _check_fixed_fillers(e, group_ids)
        return
    counts_WK, empty_WK = counts.reshape(e.plan.num_ranks, -1), empty.reshape(e.plan.num_ranks, -1)
    if e.request.placement == "global":
        counts_WK, empty_WK = counts_WK.reshape(1, -1), empty_WK.reshape(1, -1)
    wasteful = empty_WK.any(axis=1) & (counts_WK > 1).any(axis=1)
    if wasteful.any():
        raise PlanError(
            f"promise 'few fillers': no cell stays empty while another could give it a row, found "
            f"{int(empty.sum())} empty cells and one of {counts.max()} rows; make the plan again"
        )


def _check_fixed_fillers(e: _Evidence, group_ids: Sequence[Hashable] | None) -> None:
    request = e.request
    if request.pad_scope == "group" and group_ids is None:
        return  # without the groups the scopes are not known
    scopes = np.zeros(e.lengths.size, dtype=np.int64)
    if request.pad_scope == "group":
        ids = id_ranks("group_ids", group_ids, e.lengths.size, unique=False)
        assert ids is not None
        scopes = ids
    num_ranks = e.plan.num_ranks
    rank_R = e.cell_R // e.plan.num_microbatches
    needed = 0
    for scope in np.unique(scopes[e.rows_R]).tolist():
        members = scopes[e.rows_R] == scope
        if request.placement == "local":
            per_rank = np.bincount(rank_R[members], minlength=num_ranks)
        else:
            per_rank = np.array([-(-int(members.sum()) // num_ranks)])
        needed += columns_of_scope(per_rank, request.micro_batch_rows, request.logprob_micro_batch_rows)
    needed = e.problem.round_k(needed)
    if e.plan.num_microbatches != needed:
        raise PlanError(
            f"promise 'few fillers': layout 'fixed' with pad_scope {request.pad_scope!r} needs {needed} micro-batches "
            f"per rank, found {e.plan.num_microbatches}; make the plan again"
        )


def _check_order(e: _Evidence) -> None:
    columns = e.table.costs_WK.max(axis=0)
    rising = np.flatnonzero(np.diff(columns) > 0)
    if rising.size:
        k = int(rising[0])
        raise PlanError(
            f"promise 'largest first': columns run in order of their most expensive cell, found micro-batch {k + 1} "
            f"costing {columns[k + 1] / e.problem.scale:.6g} after {columns[k] / e.problem.scale:.6g}; sort the columns"
        )


def _check_stats(e: _Evidence) -> None:
    rank_of_R = e.cell_of_R // e.plan.num_microbatches if e.request.placement == "local" else None
    stats = measure(e.problem, e.table, is_step_sync=e.request.sync == "step", rank_of_R=rank_of_R)
    if stats != e.plan.stats:
        ours, theirs = stats.to_dict(), e.plan.stats.to_dict()
        differing = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
        raise PlanError(
            f"promise 'own figures': the plan's stats are those of its cells and lengths, found (recomputed, stored) "
            f"{differing}; make the plan again"
        )
    if stats.lower_bound > stats.step_cost:
        raise PlanError(
            f"promise 'lower bound': no plan costs less than its bound, found cost {stats.step_cost} under "
            f"bound {stats.lower_bound}; this is a fault of evenstep, please report the lengths"
        )
