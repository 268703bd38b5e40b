"""The figures of a plan, from its cells and the rows' lengths alone: what it costs and how near its bound it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evenstep.plan.bounds import lower_bounds
from evenstep.plan.problem import Problem
from evenstep.types import Int64Array

__all__ = ["CellTable", "PlanStats", "measure", "tabulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStats:
    """Figures of one plan; costs are in the cost model's unit, counts of rows never include fillers."""

    num_rows: int  # real rows
    num_tokens: int  # real tokens
    num_microbatches: int  # K, on every rank
    num_microbatches_lower_bound: int  # no plan under these rules has fewer
    num_fillers: int  # inert filler rows the executor runs
    footprint: int  # tokens the cells with rows occupy, padding included
    filler_footprint: int  # tokens the cells without a row occupy
    max_footprint: int  # of one cell
    padding_efficiency: float  # num_tokens / footprint
    fill: float | None  # footprint / (budget of all cells); None without a budget
    lockstep_cost: float  # sum over k of the most expensive cell, c0 * K included
    rank_cost: float  # most expensive rank, c0 * K included
    step_cost: float  # the one of the two that applies
    lower_bound: float  # no plan under these rules has a smaller step_cost
    lockstep_efficiency: float  # lower_bound / step_cost
    rank_imbalance: float  # most expensive rank over the mean, c0 excluded

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTable:
    """The cells of a plan as arrays over (rank, k), C = W * K, rank-major."""

    num_rows_C: Int64Array
    footprints_C: Int64Array  # 0 for a cell without rows
    costs_C: Int64Array  # integer units, without c0; 0 for a cell without rows
    num_ranks: int

    @property
    def costs_WK(self) -> Int64Array:
        return self.costs_C.reshape(self.num_ranks, -1)


def tabulate(problem: Problem, cell_of_R: Int64Array, num_cells: int) -> CellTable:
    """Count rows, footprint and cost of each cell; ``cell_of_R`` is by canonical position."""
    counts = np.bincount(cell_of_R, minlength=num_cells)
    sums = problem.cell_tokens(cell_of_R, num_cells)
    longest = np.zeros(num_cells, dtype=np.int64)
    np.maximum.at(longest, cell_of_R, problem.widths_R)
    return CellTable(
        num_rows_C=counts,
        footprints_C=np.where(counts > 0, problem.room.footprints(sums, longest, counts), 0),
        costs_C=problem.cell_costs(cell_of_R, num_cells),
        num_ranks=problem.num_ranks,
    )


def measure(problem: Problem, table: CellTable, *, is_step_sync: bool, rank_of_R: Int64Array | None) -> PlanStats:
    """Figures of a plan; ``rank_of_R`` says that the rows were on their ranks before planning."""
    room, scale = problem.room, problem.scale
    costs_WK = table.costs_WK
    num_microbatches = costs_WK.shape[1]
    overhead = problem.c0 * num_microbatches
    lockstep = int(costs_WK.max(axis=0).sum()) + overhead
    rank_totals = costs_WK.sum(axis=1)
    rank = int(rank_totals.max()) + overhead
    bounds = lower_bounds(problem, rank_of_R)
    step, bound = (rank, bounds.rank) if is_step_sync else (lockstep, bounds.lockstep)
    num_tokens = int(problem.lengths_R.sum())
    footprint = int(table.footprints_C.sum())
    num_empty = int((table.num_rows_C == 0).sum())
    is_fixed = room.layout == "fixed"
    num_fillers = table.num_rows_C.size * room.cell_rows - problem.num_rows if is_fixed else num_empty
    total = int(rank_totals.sum())
    return PlanStats(
        num_rows=problem.num_rows,
        num_tokens=num_tokens,
        num_microbatches=num_microbatches,
        num_microbatches_lower_bound=bounds.num_microbatches,
        num_fillers=num_fillers,
        footprint=footprint,
        filler_footprint=num_empty * room.filler_footprint,
        max_footprint=int(table.footprints_C.max()),
        padding_efficiency=num_tokens / footprint,
        fill=None if room.budget is None else footprint / (room.budget * table.num_rows_C.size),
        lockstep_cost=lockstep / scale,
        rank_cost=rank / scale,
        step_cost=step / scale,
        lower_bound=bound / scale,
        lockstep_efficiency=bound / step,
        rank_imbalance=int(rank_totals.max()) * problem.num_ranks / total,
    )
