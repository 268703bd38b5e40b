"""A dry run from beginning to end, and its JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.dry_run.arms import (
    EVENSTEP,
    ArmResult,
    Rules,
    default_budgets,
    make_arms,
    recorded_result,
    run_arm,
    to_record,
)
from evenstep.dry_run.estimate import Assumptions
from evenstep.dry_run.windows import PlanWindow, cut_windows, evenly_spaced, with_prefixes
from evenstep.errors import PlanError
from evenstep.imports import ImportedRows
from evenstep.imports.own import recorded_lengths, recorded_plans
from evenstep.plan import StepPlan
from evenstep.plan.footprint import LAYOUTS, Layout
from evenstep.plan.shape import ModelShape

__all__ = ["DryRun", "Question", "dry_run"]

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a dry run is asked."""

    layouts: tuple[Layout, ...]  # empty: all, `tree` where the file has token ids
    ranks: tuple[int, ...]  # empty: those of the run's own plans, else 8
    budgets: tuple[int, ...]  # empty: see `default_budgets`
    rollouts_per_window: int | None
    max_windows: int  # planned ones, evenly spaced; 0: all
    has_public: bool
    rules: Rules
    asked: frozenset[str]  # rules that were asked for by name; a run's own plans decide the others
    model: tuple[str, ModelShape] | None
    assumptions: Assumptions

    def as_recorded(self, plan: StepPlan) -> Question:
        """The same question under the rules that a run was planned by, where nothing else was asked for."""
        request = plan.request
        theirs = {"sync": request.sync, "pad_to_multiple": request.pad_to_multiple, "effort": request.effort}
        if self.model is None:
            theirs["cost"] = request.cost
        rules = replace(self.rules, **{name: value for name, value in theirs.items() if name not in self.asked})
        assumptions = replace(self.assumptions, is_sharded=rules.sync == "micro_batch")
        return replace(self, rules=rules, assumptions=assumptions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DryRun:
    """What came of it."""

    source: str
    rows: ImportedRows
    question: Question  # as it was answered
    num_windows: int
    windows: tuple[PlanWindow, ...]  # those that were planned
    results: tuple[ArmResult, ...]

    def estimates(self, result: ArmResult) -> dict[str, float | None]:
        """Seconds and bytes of an arm; None without a model."""
        names = ("estimated_step_seconds", "estimated_memory_bytes", "estimated_to_fit")
        if self.question.model is None or result.refused is not None:
            return dict.fromkeys(names)
        shape, given = self.question.model[1], self.question.assumptions
        memory = given.memory_bytes(shape, result.max_footprint, result.arm.num_ranks)
        values = (given.step_seconds(shape, result.step_cost_mean), memory, memory <= given.device.memory_bytes)
        return dict(zip(names, values, strict=True))

    def best(self, num_ranks: int | None = None) -> ArmResult | None:
        """evenstep's cheapest arm on so many ranks (None: the first planned for), of those that fit if any does."""
        planned = [r for r in self.results if r.refused is None and r.arm.planner == EVENSTEP]
        ranks = planned[0].arm.num_ranks if num_ranks is None and planned else num_ranks
        candidates = [result for result in planned if result.arm.num_ranks == ranks]
        fitting = [result for result in candidates if self.estimates(result)["estimated_to_fit"] is not False]
        return min(fitting or candidates, key=lambda result: result.step_cost_mean, default=None)

    def cost_to_best(self, result: ArmResult) -> float | None:
        """Step cost over that of the best arm on as many ranks."""
        best = self.best(result.arm.num_ranks)
        return None if best is None or result.refused is not None else result.step_cost_mean / best.step_cost_mean

    def to_dict(self) -> dict[str, Any]:
        """The object that ``evenstep plan --json`` prints."""
        rows, question = self.rows, self.question
        best = self.best()
        lengths = rows.lengths_R
        return {
            "format_version": FORMAT_VERSION,
            "source": self.source,
            "format": rows.format,
            "num_rows": rows.num_rows,
            "num_rollouts": len(set(rows.rollout_ids)),
            "num_groups": None if rows.group_ids is None else len(set(rows.group_ids)),
            "num_tokens": int(lengths.sum()),
            "lengths": {
                "min": int(lengths.min()),
                "median": float(np.median(lengths)),
                "mean": float(lengths.mean()),
                "p90": float(np.quantile(lengths, 0.9)),
                "p99": float(np.quantile(lengths, 0.99)),
                "max": int(lengths.max()),
            },
            "num_approximate": rows.num_approximate,
            "num_with_experts": rows.num_with_experts,
            "num_skipped": len(rows.skipped),
            "skipped": [{"where": line.where, "problem": line.problem} for line in rows.skipped],
            "notes": list(rows.notes),
            "num_windows": self.num_windows,
            "num_windows_planned": len(self.windows),
            "windows": [{"name": window.name, "num_rows": int(window.rows.size)} for window in self.windows],
            "model": None if question.model is None else question.model[0],
            "num_parameters": None if question.model is None else question.model[1].num_parameters,
            "assumptions": None if question.model is None else question.assumptions.to_dict(),
            "cost_model": question.rules.cost.to_dict(),
            "best": None if best is None else self.results.index(best),
            "arms": [
                to_record(result, {"step_cost_to_best": self.cost_to_best(result), **self.estimates(result)})
                for result in self.results
            ],
        }


def dry_run(source: str, rows: ImportedRows, question: Question, *, run: Path | None = None) -> DryRun:
    """Plan the windows of imported rows under every arm of the question.

    Args:
        run: the folder of the run that the rows come from; its own plans are the first arm, and without other wishes
            its ranks and its budget are what is planned for.

    Raises:
        PlanError: an argument is out of range.
    """
    windows = cut_windows(rows, question.rollouts_per_window)
    chosen = [with_prefixes(window, rows) for window in evenly_spaced(windows, question.max_windows)]
    results: list[ArmResult] = []
    ranks, budgets = question.ranks, question.budgets
    recorded = {} if run is None or question.rollouts_per_window is not None else recorded_plans(run)
    plans = [recorded[window.step] for window in chosen if window.step in recorded]
    if plans and len(plans) == len(chosen):
        question = question.as_recorded(plans[0])
        lengths = {} if run is None else recorded_lengths(run)
        own = recorded_result(plans, question.rules, rows.lengths_R, chosen, lengths)
        results.append(own)
        ranks = ranks or (own.arm.num_ranks,)
        if not budgets and own.arm.max_tokens_per_gpu is not None:
            budget = own.arm.max_tokens_per_gpu
            budgets = tuple(sorted({max(2, budget // 2), budget, 2 * budget}))
    for count in ranks:
        if count < 1:
            raise PlanError(f"--ranks must be at least 1, found {count}; name the data-parallel ranks")
    for budget in budgets:
        if budget < 2:
            raise PlanError(f"--sweep must name budgets of at least 2 tokens, found {budget}; raise it")
    arms = make_arms(
        layouts=question.layouts or tuple(name for name in LAYOUTS if name != "tree" or not rows.num_without_ids),
        ranks=ranks or (8,),
        budgets=lambda count: budgets or default_budgets(rows.lengths_R, chosen, count),
        longest=max(int(rows.lengths_R[window.rows].max()) for window in chosen),
        has_public=question.has_public,
    )
    results += [run_arm(arm, question.rules, rows.lengths_R, chosen) for arm in arms]
    return DryRun(
        source=source,
        rows=rows,
        question=question,
        num_windows=len(windows),
        windows=tuple(chosen),
        results=tuple(results),
    )


def plan_window(run: DryRun, index: int) -> tuple[PlanWindow, ArmResult]:
    """The window and the arm that a plan file or picture is made of.

    Raises:
        PlanError: no such window, or no arm that could be planned.
    """
    if not 0 <= index < len(run.windows):
        raise PlanError(
            f"--window must be within 0 and {len(run.windows) - 1}, the windows that were planned, found {index}"
        )
    best = run.best()
    if best is None:
        raise PlanError(
            "--out, --picture and --trace need an arm that could be planned, found none; the table says why not"
        )
    return run.windows[index], best


def labels_of(rows: ImportedRows, indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(group, rollout in the group, segment in the rollout) of rows, numbered as they come.

    Groups are numbered within these rows; without groups, each rollout is one.
    """
    groups: dict[str, dict[str, int]] = {}
    labels: list[tuple[int, int, int]] = []
    numbers: dict[str, int] = {}
    for index in indices:
        rollout = rows.rollout_ids[index]
        group = rollout if rows.group_ids is None else rows.group_ids[index]
        numbers.setdefault(group, len(numbers))
        members = groups.setdefault(group, {})
        first = rollout not in members
        members[rollout] = 0 if first else members[rollout] + 1
        labels.append((numbers[group], list(members).index(rollout), members[rollout]))
    return labels
