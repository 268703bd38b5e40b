"""Putting cells into columns: cells of like cost run at the same time, the most expensive first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.types import Int64Array

__all__ = ["Placed", "deal", "lockstep_cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where each row of a problem runs, by canonical position."""

    rank_R: Int64Array
    k_R: Int64Array
    num_microbatches: int  # K


def lockstep_cost(costs_C: Int64Array, num_ranks: int, num_microbatches: int, c0: int) -> int:
    """Cost of the best columns these cells allow: sort them, every W-th is the maximum of its column.

    Any other way to form columns has a k-th largest maximum at least as large, so sorting is optimal.
    """
    descending = -np.sort(-costs_C)
    return int(descending[::num_ranks].sum()) + c0 * num_microbatches


def deal(cell_of_R: Int64Array, costs_C: Int64Array, num_ranks: int, num_microbatches: int) -> Placed:
    """Deal the cells in order of cost, W to a column; inside a column the lightest rank takes the heaviest cell."""
    num_cells = costs_C.size
    order = np.argsort(-costs_C, kind="stable")
    rank_C = np.zeros(num_cells, dtype=np.int64)
    k_C = np.zeros(num_cells, dtype=np.int64)
    k_C[order] = np.arange(num_cells) // num_ranks
    load_W = np.zeros(num_ranks, dtype=np.int64)
    for start in range(0, num_cells, num_ranks):
        column = order[start : start + num_ranks]
        ranks = np.argsort(load_W, kind="stable")[: column.size]
        rank_C[column] = ranks
        load_W[ranks] += costs_C[column]
    return Placed(rank_R=rank_C[cell_of_R], k_R=k_C[cell_of_R], num_microbatches=num_microbatches)
