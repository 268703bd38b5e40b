"""``plan_step``: from row lengths to a step plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from evenstep.errors import PlanError
from evenstep.plan.build import build_plan, name_overlong
from evenstep.plan.cost import CostModel
from evenstep.plan.fixed import place_fixed
from evenstep.plan.footprint import Layout
from evenstep.plan.local import place_local
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.request import (
    Effort,
    Placement,
    Request,
    Sync,
    id_ranks,
    problem_of,
    read_groups_of_rows,
    read_lengths,
    require_prefixes,
    whole,
)
from evenstep.plan.spread import place_global
from evenstep.plan.step_plan import StepPlan
from evenstep.types import Int64Array

__all__ = ["Lengths", "plan_step"]

Lengths = Sequence[int] | npt.NDArray[np.integer[Any]]


@overload
def plan_step(
    lengths: Lengths,
    *,
    num_ranks: int,
    max_tokens_per_gpu: int | None = None,
    layout: Layout = "padded",
    placement: Placement = "global",
    rank_rows: Sequence[Sequence[int]] | None = None,
    windows: None = None,
    row_ids: Sequence[Hashable] | None = None,
    rollout_ids: Sequence[Hashable] | None = None,
    group_ids: Sequence[Hashable] | None = None,
    micro_batch_rows: int = 1,
    logprob_micro_batch_rows: int = 1,
    pad_scope: Literal["window", "group"] = "window",
    pad_to_multiple: int = 1,
    bucket: float | None = None,
    cp: int = 1,
    tp: int = 1,
    sync: Sync = "micro_batch",
    cost: CostModel | None = None,
    effort: Effort = "default",
    min_microbatches: int = 1,
    num_microbatches_multiple: int = 1,
    max_rows_per_microbatch: int | None = None,
    overlong: Literal["alone", "error"] = "alone",
    prefixes: SharedPrefixes | None = None,
) -> StepPlan: ...


@overload
def plan_step(
    lengths: Lengths,
    *,
    num_ranks: int,
    windows: Sequence[Sequence[int]],
    max_tokens_per_gpu: int | None = None,
    layout: Layout = "padded",
    placement: Placement = "global",
    rank_rows: Sequence[Sequence[int]] | None = None,
    row_ids: Sequence[Hashable] | None = None,
    rollout_ids: Sequence[Hashable] | None = None,
    group_ids: Sequence[Hashable] | None = None,
    micro_batch_rows: int = 1,
    logprob_micro_batch_rows: int = 1,
    pad_scope: Literal["window", "group"] = "window",
    pad_to_multiple: int = 1,
    bucket: float | None = None,
    cp: int = 1,
    tp: int = 1,
    sync: Sync = "micro_batch",
    cost: CostModel | None = None,
    effort: Effort = "default",
    min_microbatches: int = 1,
    num_microbatches_multiple: int = 1,
    max_rows_per_microbatch: int | None = None,
    overlong: Literal["alone", "error"] = "alone",
    prefixes: SharedPrefixes | None = None,
) -> list[StepPlan]: ...


def plan_step(
    lengths: Lengths,
    *,
    num_ranks: int,
    max_tokens_per_gpu: int | None = None,
    layout: Layout = "padded",
    placement: Placement = "global",
    rank_rows: Sequence[Sequence[int]] | None = None,
    windows: Sequence[Sequence[int]] | None = None,
    row_ids: Sequence[Hashable] | None = None,
    rollout_ids: Sequence[Hashable] | None = None,
    group_ids: Sequence[Hashable] | None = None,
    micro_batch_rows: int = 1,
    logprob_micro_batch_rows: int = 1,
    pad_scope: Literal["window", "group"] = "window",
    pad_to_multiple: int = 1,
    bucket: float | None = None,
    cp: int = 1,
    tp: int = 1,
    sync: Sync = "micro_batch",
    cost: CostModel | None = None,
    effort: Effort = "default",
    min_microbatches: int = 1,
    num_microbatches_multiple: int = 1,
    max_rows_per_microbatch: int | None = None,
    overlong: Literal["alone", "error"] = "alone",
    prefixes: SharedPrefixes | None = None,
) -> StepPlan | list[StepPlan]:
    """Plan one optimizer step: which rows each rank runs in each of its micro-batches.

    Minimises ``sum_k max_r cost(k, r)`` (``sync="micro_batch"``: ranks meet in every micro-batch) or
    ``max_r sum_k cost(k, r)`` (``sync="step"``: they meet once), with
    ``cost = c0 + c1 * footprint + c2 * pairs``, under ``footprint <= max_tokens_per_gpu * cp * tp`` in every cell.

    Args:
        lengths: [R] tokens of each row.
        num_ranks: data-parallel ranks W.
        max_tokens_per_gpu: the budget; None: no limit, K is the least allowed.
        layout: ``padded`` (footprint: rows x longest), ``packed`` (sum of the rows), ``tree`` (tokens that rows of a
            cell begin with alike count once) or ``fixed`` (``micro_batch_rows`` rows in every cell; the executor adds
            the missing fillers).
        placement: ``global`` (rows may go anywhere) or ``local`` (rows stay on the rank that ``rank_rows`` names; with
            one rank it may be left out). Layout ``fixed`` and placement ``local`` follow fixed rules, so ``effort`` has
            nothing to search there.
        rank_rows: for each rank, the indices of its rows.
        windows: index lists that name each row once; the result is then a list with one plan each.
        row_ids: unique ids; with them permuting the input permutes the plan, also among rows of equal length.
        rollout_ids, group_ids: with ``windows``, rows of one rollout or group must share a window.
        micro_batch_rows, logprob_micro_batch_rows: rows of a cell in training and scoring (layout ``fixed``).
        pad_scope: what is filled up to a multiple of Q (layout ``fixed``): each ``group`` or the ``window``.
        pad_to_multiple: widths are multiples of it, and of ``2 * cp`` when ``cp > 1``.
        bucket: largest share of a width that a geometric ladder of widths may waste, e.g. 0.125; None: no ladder.
        cost: what a cell costs; None: ``CostModel()``.
        effort: ``default`` or ``high``: how much work the search may do, counted in moves and never in seconds.
        min_microbatches, num_microbatches_multiple: K is at least the one and a multiple of the other.
        max_rows_per_microbatch: most rows in a cell.
        overlong: a row over the budget stands ``alone`` and is named in ``plan.overlong``, or is an ``error``.
        prefixes: what the rows share, for layout ``tree``: ``shared_prefixes(keys)`` of their tokens.

    >>> plan = plan_step([100, 1, 1, 1, 1], num_ranks=1, max_tokens_per_gpu=104)
    >>> plan.cells                                        # padded: 5 rows of width 100 would not fit
    (((0,), (1, 2, 3, 4)),)
    >>> plan_step([100, 1, 1, 1, 1], num_ranks=1, max_tokens_per_gpu=104, layout="packed").cells
    (((0, 1, 2, 3, 4),),)
    >>> plan.stats.num_microbatches, plan.stats.num_fillers, plan.stats.padding_efficiency
    (2, 0, 1.0)
    >>> from evenstep.plan import shared_prefixes
    >>> keys = [[7, 7, 7, 1], [7, 7, 7, 2], [8, 1], [8, 2]]
    >>> plan_step([4, 4, 2, 2], num_ranks=1, max_tokens_per_gpu=5, layout="tree", prefixes=shared_prefixes(keys)).cells
    (((0, 1), (2, 3)),)

    Raises:
        PlanError: an argument is out of range or contradicts another, or no plan keeps the promises.
    """
    lengths_R = read_lengths(lengths)
    request = Request(
        num_ranks=whole("num_ranks", num_ranks),
        max_tokens_per_gpu=None if max_tokens_per_gpu is None else whole("max_tokens_per_gpu", max_tokens_per_gpu),
        layout=layout,
        placement=placement,
        micro_batch_rows=whole("micro_batch_rows", micro_batch_rows),
        logprob_micro_batch_rows=whole("logprob_micro_batch_rows", logprob_micro_batch_rows),
        pad_scope=pad_scope,
        pad_to_multiple=whole("pad_to_multiple", pad_to_multiple),
        bucket=bucket,
        cp=whole("cp", cp),
        tp=whole("tp", tp),
        sync=sync,
        cost=CostModel() if cost is None else cost,
        effort=effort,
        min_microbatches=whole("min_microbatches", min_microbatches),
        num_microbatches_multiple=whole("num_microbatches_multiple", num_microbatches_multiple),
        max_rows_per_microbatch=None
        if max_rows_per_microbatch is None
        else whole("max_rows_per_microbatch", max_rows_per_microbatch),
        overlong_policy=overlong,
    )
    request.validate()
    num_rows = lengths_R.size
    ties = id_ranks("row_ids", row_ids, num_rows, unique=True)
    rollouts = id_ranks("rollout_ids", rollout_ids, num_rows, unique=False)
    groups = id_ranks("group_ids", group_ids, num_rows, unique=False)
    require_prefixes(request.layout, prefixes, lengths_R)
    rank_of = _read_rank_rows(request, rank_rows, num_rows)
    if rollouts is not None and groups is not None:
        _require_whole("rollout_ids", rollout_ids, rollouts, groups, "groups (group_ids)")
    if pad_scope == "group" and groups is None:
        raise PlanError("pad_scope='group' fills each group by itself and needs group_ids, found None; give them")
    parts = None if windows is None else _read_windows(windows, num_rows)
    if parts is not None:
        window_of = np.zeros(num_rows, dtype=np.int64)
        for i, part in enumerate(parts):
            window_of[part] = i
        for name, ids, ranks in (("rollout_ids", rollout_ids, rollouts), ("group_ids", group_ids, groups)):
            if ranks is not None:
                _require_whole(name, ids, ranks, window_of, "windows")
    plans: list[StepPlan] = []
    for part in [None] if parts is None else parts:
        rows = np.arange(num_rows) if part is None else np.sort(part)
        plan = _plan_window(request, lengths_R, rows, ties, groups, rank_of, prefixes, window=part is not None)
        plan.check(lengths_R, rollout_ids=rollout_ids, group_ids=group_ids, prefixes=prefixes)
        plans.append(plan)
    return plans[0] if parts is None else plans


def _read_rank_rows(request: Request, rank_rows: Sequence[Sequence[int]] | None, num_rows: int) -> Int64Array | None:
    """[R] Rank of each row when rows are already placed, else None."""
    if request.placement == "global":
        if rank_rows is not None:
            raise PlanError("rank_rows says where rows already are and needs placement='local', found 'global'")
        return None
    rank_of = np.zeros(num_rows, dtype=np.int64)
    if rank_rows is None:
        if request.num_ranks > 1:
            raise PlanError(
                f"placement='local' with {request.num_ranks} ranks needs rank_rows, found None; "
                f"give each rank's row indices"
            )
        return rank_of
    parts = read_groups_of_rows("rank_rows", rank_rows, num_rows, may_be_empty=True)
    if len(parts) != request.num_ranks:
        raise PlanError(f"rank_rows must have one list for each of {request.num_ranks} ranks, found {len(parts)}")
    for rank, part in enumerate(parts):
        rank_of[part] = rank
    return rank_of


def _read_windows(windows: Sequence[Sequence[int]], num_rows: int) -> list[Int64Array]:
    parts = read_groups_of_rows("windows", windows, num_rows, may_be_empty=False)
    assert parts, "an empty list of windows leaves row 0 out"
    return parts


def _require_whole(name: str, ids: Sequence[Hashable] | None, inner: Int64Array, outer: Int64Array, of: str) -> None:
    """Raise when rows that share an inner id have different outer ids."""
    order = np.lexsort((outer, inner))
    torn = np.flatnonzero((np.diff(inner[order]) == 0) & (np.diff(outer[order]) != 0))
    if torn.size and ids is not None:
        one, other = int(order[torn[0]]), int(order[torn[0] + 1])
        raise PlanError(
            f"rows with one of {name} share one of the {of}, found {ids[one]!r} at rows {one} and {other} in different "
            f"ones; keep its rows together"
        )


def _plan_window(
    request: Request,
    lengths_R: Int64Array,
    rows: Int64Array,
    ties: Int64Array | None,
    groups: Int64Array | None,
    rank_of: Int64Array | None,
    prefixes: SharedPrefixes | None,
    *,
    window: bool,
) -> StepPlan:
    problem = problem_of(request, rows, lengths_R, ties, prefixes)
    overlong = name_overlong(request, problem)
    rank_of_R = None if rank_of is None else rank_of[problem.order_R]
    if request.layout == "fixed":
        scope_R = np.zeros(problem.num_rows, dtype=np.int64)
        if request.pad_scope == "group":
            assert groups is not None
            scope_R = groups[problem.order_R]
        placed = place_fixed(problem, scope_R, rank_of_R, logprob_rows=request.logprob_micro_batch_rows)
    elif rank_of_R is not None:
        placed = place_local(problem.without_idle_trie, rank_of_R)
    else:
        placed = place_global(problem.without_idle_trie, sync=request.sync, effort=request.effort)
    return build_plan(request, problem, placed, overlong, window=tuple(rows.tolist()) if window else None)
