"""The arms of a dry run: each plans the same windows in its own way, and their figures are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from evenstep.dry_run.windows import PlanWindow
from evenstep.errors import PlanError
from evenstep.plan import CostModel, PlanStats, Request, StepPlan, plan_step
from evenstep.plan.footprint import Layout
from evenstep.plan.foreign import measure_cells
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.public import PACKED, PADDED, PublicPlanner
from evenstep.types import Int64Array

__all__ = ["EVENSTEP", "RECORDED", "Arm", "ArmResult", "Rules", "default_budgets", "make_arms", "plan_of", "run_arm"]

EVENSTEP, RECORDED = "evenstep", "as recorded"
MAX_PUBLIC_ROWS = 2048  # rows of a window beyond which the public planners are not tried: they are plain Python
NUM_DEFAULT_BUDGETS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What all arms share."""

    cost: CostModel
    sync: Literal["micro_batch", "step"] = "micro_batch"
    pad_to_multiple: int = 1
    effort: Literal["default", "high"] = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to plan."""

    planner: str  # "evenstep", a public planner's name, or "as recorded"
    layout: Layout
    num_ranks: int
    max_tokens_per_gpu: int | None
    micro_batch_rows: int = 1  # layout "fixed": as many of the longest row as the budget holds


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """Figures of an arm over all planned windows; counts are totals unless they say otherwise."""

    arm: Arm
    refused: str | None = None  # why there are no figures
    num_windows: int = 0
    padding_efficiency: float = 0.0  # Σ real tokens / Σ footprint
    fill: float | None = None  # Σ footprint / Σ budgets of all cells; None without a budget
    num_microbatches_mean: float = 0.0
    num_microbatches_max: int = 0
    num_microbatches_lower_bound_mean: float = 0.0
    num_fillers: int = 0
    num_overlong: int = 0  # rows that alone exceed the budget
    num_over_budget: int = 0  # cells of several rows above the budget
    step_cost_mean: float = 0.0  # of a step, in tokens' worth of linear work
    lockstep_efficiency: float = 0.0  # Σ lower bounds / Σ costs
    rank_imbalance_max: float = 0.0
    max_footprint: int = 0  # tokens of the largest cell
    windows: tuple[PlanStats, ...] = ()  # the figures of each window


def default_budgets(lengths_R: Int64Array, windows: Sequence[PlanWindow], num_ranks: int) -> list[int]:
    """Powers of two from the first that holds the longest row, while a larger one can still save a micro-batch.

    >>> window = PlanWindow(name="all", rows=np.arange(4))
    >>> default_budgets(np.array([900, 700, 600, 500]), [window], num_ranks=2)
    [1024, 2048]
    """
    longest = max(int(lengths_R[window.rows].max()) for window in windows)
    tokens = max(int(lengths_R[window.rows].sum()) for window in windows)
    budgets = [1 << max(8, (longest - 1).bit_length())]
    while len(budgets) < NUM_DEFAULT_BUDGETS and tokens > num_ranks * budgets[-1]:
        budgets.append(2 * budgets[-1])
    return budgets


def make_arms(
    *,
    layouts: Sequence[Layout],
    ranks: Sequence[int],
    budgets: Callable[[int], Sequence[int]],
    longest: int,
    has_public: bool,
) -> Iterator[Arm]:
    """Every combination, evenstep's layouts first; the public planners of each layout after it."""
    for num_ranks in ranks:
        for budget in budgets(num_ranks):
            for layout in layouts:
                rows = max(1, budget // longest) if layout == "fixed" else 1
                arm = Arm(
                    planner=EVENSTEP,
                    layout=layout,
                    num_ranks=num_ranks,
                    max_tokens_per_gpu=budget,
                    micro_batch_rows=rows,
                )
                yield arm
                if has_public:
                    for name in public_planners(layout):
                        yield replace(arm, planner=name, micro_batch_rows=1)


def public_planners(layout: Layout) -> Mapping[str, PublicPlanner]:
    return {"packed": PACKED, "padded": PADDED}.get(layout, {})


def plan_of(arm: Arm, rules: Rules, lengths_R: Int64Array, prefixes: SharedPrefixes | None) -> StepPlan:
    """evenstep's plan of one window; ``prefixes`` are used by layout ``tree`` alone."""
    if arm.layout == "tree" and prefixes is None:
        raise PlanError(
            "layout 'tree' needs the rows' token ids, found lengths alone, or images, whose tokens it does not share; "
            "leave it out, or dump the ids"
        )
    return plan_step(
        lengths_R,
        num_ranks=arm.num_ranks,
        max_tokens_per_gpu=arm.max_tokens_per_gpu,
        layout=arm.layout,
        micro_batch_rows=arm.micro_batch_rows,
        logprob_micro_batch_rows=arm.micro_batch_rows,
        pad_to_multiple=rules.pad_to_multiple,
        sync=rules.sync,
        cost=rules.cost,
        effort=rules.effort,
        prefixes=prefixes if arm.layout == "tree" else None,
    )


def run_arm(arm: Arm, rules: Rules, lengths_R: Int64Array, windows: Sequence[PlanWindow]) -> ArmResult:
    """Plan every window; the first that the planner refuses ends the arm."""
    found: list[PlanStats] = []
    num_overlong = num_over_budget = 0
    for window in windows:
        lengths = lengths_R[window.rows]
        try:
            if arm.planner == EVENSTEP:
                plan = plan_of(arm, rules, lengths, window.prefixes)
                stats, num_overlong = plan.stats, num_overlong + len(plan.overlong)
            else:
                stats, num_over = _run_public(arm, rules, lengths)
                num_over_budget += num_over
                num_overlong += int((lengths > (arm.max_tokens_per_gpu or lengths.max())).sum())
        except PlanError as error:
            return ArmResult(arm=arm, refused=str(error))
        found.append(stats)
    return summed(arm, found, num_overlong=num_overlong, num_over_budget=num_over_budget)


def _run_public(arm: Arm, rules: Rules, lengths_R: Int64Array) -> tuple[PlanStats, int]:
    if lengths_R.size > MAX_PUBLIC_ROWS:
        raise PlanError(
            f"public planners are tried on windows of up to {MAX_PUBLIC_ROWS:,} rows, found {lengths_R.size:,}; cut "
            f"windows with --windows"
        )
    assert arm.max_tokens_per_gpu is not None
    lengths = lengths_R.tolist()
    planner = public_planners(arm.layout)[arm.planner]
    cells = planner(lengths, rules.cost.row_costs(lengths_R), arm.num_ranks, arm.max_tokens_per_gpu)
    measured = measure_cells(_request_of(arm, rules), lengths, cells)
    return measured.stats, measured.num_over_budget


def _request_of(arm: Arm, rules: Rules) -> Request:
    """The rules that a public planner's cells are measured by."""
    return Request(
        num_ranks=arm.num_ranks,
        max_tokens_per_gpu=arm.max_tokens_per_gpu,
        layout=arm.layout,
        placement="global",
        micro_batch_rows=1,
        logprob_micro_batch_rows=1,
        pad_scope="window",
        pad_to_multiple=rules.pad_to_multiple,
        bucket=None,
        cp=1,
        tp=1,
        sync=rules.sync,
        cost=rules.cost,
        effort=rules.effort,
        min_microbatches=1,
        num_microbatches_multiple=1,
        max_rows_per_microbatch=None,
        overlong_policy="alone",
    )


def summed(arm: Arm, found: Sequence[PlanStats], *, num_overlong: int, num_over_budget: int) -> ArmResult:
    """Figures over several windows: sums of numerators over sums of denominators."""
    footprint = sum(stats.footprint for stats in found)
    capacity = (
        None
        if arm.max_tokens_per_gpu is None
        else sum(stats.num_microbatches for stats in found) * arm.num_ranks * arm.max_tokens_per_gpu
    )
    costs = sum(stats.step_cost for stats in found)
    return ArmResult(
        arm=arm,
        num_windows=len(found),
        padding_efficiency=sum(stats.num_tokens for stats in found) / footprint,
        fill=None if capacity is None else footprint / capacity,
        num_microbatches_mean=float(np.mean([stats.num_microbatches for stats in found])),
        num_microbatches_max=max(stats.num_microbatches for stats in found),
        num_microbatches_lower_bound_mean=float(np.mean([stats.num_microbatches_lower_bound for stats in found])),
        num_fillers=sum(stats.num_fillers for stats in found),
        num_overlong=num_overlong,
        num_over_budget=num_over_budget,
        step_cost_mean=costs / len(found),
        lockstep_efficiency=sum(stats.lower_bound for stats in found) / costs,
        rank_imbalance_max=max(stats.rank_imbalance for stats in found),
        max_footprint=max(stats.max_footprint for stats in found),
        windows=tuple(found),
    )


def recorded_result(
    plans: Sequence[StepPlan],
    rules: Rules,
    lengths_R: Int64Array,
    windows: Sequence[PlanWindow],
    recorded_lengths: Mapping[int, Sequence[int]],
) -> ArmResult:
    """Figures of the plans that a run has written, under the same cost model as the other arms.

    ``recorded_lengths``: by step, what a plan took for the lengths of its rows, where some have images.

    Raises:
        PlanError: a plan is not of these rows.
    """
    first = plans[0]
    arm = Arm(
        planner=RECORDED,
        layout=first.layout,
        num_ranks=first.num_ranks,
        max_tokens_per_gpu=first.max_tokens_per_gpu,
        micro_batch_rows=first.micro_batch_rows,
    )
    found: list[PlanStats] = []
    for plan, window in zip(plans, windows, strict=True):
        prefixes = window.prefixes if plan.layout == "tree" else None
        taken = recorded_lengths.get(window.step) if window.step is not None else None
        lengths = lengths_R[window.rows] if taken is None else np.array(taken, dtype=np.int64)
        plan.check(lengths, prefixes=prefixes)
        request = replace(plan.request, cost=rules.cost, sync=rules.sync)
        found.append(measure_cells(request, lengths, plan.cells, prefixes=prefixes).stats)
    num_overlong = sum(len(plan.overlong) for plan in plans)
    return summed(arm, found, num_overlong=num_overlong, num_over_budget=0)


def to_record(result: ArmResult, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The result as a JSON object with the keys that ``docs/plan_command.md`` lists."""
    arm = result.arm
    record: dict[str, Any] = {
        "planner": arm.planner,
        "layout": arm.layout,
        "num_ranks": arm.num_ranks,
        "max_tokens_per_gpu": arm.max_tokens_per_gpu,
        "micro_batch_rows": arm.micro_batch_rows,
        "refused": result.refused,
    }
    names = [name for name in ArmResult.__slots__ if name not in ("arm", "refused", "windows")]
    is_refused = result.refused is not None
    record |= {name: None if is_refused else getattr(result, name) for name in names}
    record |= {name: None if is_refused else value for name, value in extra.items()}
    return record | {"windows": [stats.to_dict() for stats in result.windows]}
