"""Layout ``fixed``: every cell has the same number of rows, and a scope is filled up to a multiple of Q.

``Q = W * lcm(train rows, log-prob rows)``: then training and log-prob passes both run whole cells on every rank. The
scope is a group or the whole window; the larger scope needs fewer fillers.
"""

from __future__ import annotations

import math

import numpy as np

from evenstep.plan.deal import Placed
from evenstep.plan.problem import Problem
from evenstep.types import Int64Array

__all__ = ["columns_of_scope", "place_fixed"]


def columns_of_scope(num_rows_W: Int64Array, cell_rows: int, logprob_rows: int) -> int:
    """Columns a scope takes when rank r holds ``num_rows_W[r]`` of its rows."""
    step = math.lcm(cell_rows, logprob_rows)
    return -(-int(num_rows_W.max()) // step) * (step // cell_rows)


def place_fixed(problem: Problem, scope_R: Int64Array, rank_of_R: Int64Array | None, *, logprob_rows: int) -> Placed:
    """Place each scope's rows, longest first, in its own columns; then order the columns by cost."""
    rows, num_ranks = problem.room.cell_rows, problem.num_ranks
    rank_R = np.zeros(problem.num_rows, dtype=np.int64)
    column_R = np.zeros(problem.num_rows, dtype=np.int64)
    num_columns = 0
    for scope in _in_order_of_first(scope_R):
        positions = np.flatnonzero(scope_R == scope)
        if rank_of_R is None:
            rank_R[positions], column_R[positions] = _evenly(positions.size, num_ranks, rows)
        else:
            rank_R[positions] = rank_of_R[positions]
            for rank in range(num_ranks):
                own = positions[rank_of_R[positions] == rank]
                column_R[own] = np.arange(own.size) // rows
        column_R[positions] += num_columns
        counts = np.bincount(rank_R[positions], minlength=num_ranks)
        num_columns += columns_of_scope(counts, rows, logprob_rows)
    most = np.zeros(num_columns, dtype=np.int64)
    np.maximum.at(most, column_R, problem.costs_R)
    place = np.empty(num_columns, dtype=np.int64)
    place[np.argsort(-most, kind="stable")] = np.arange(num_columns)
    return Placed(rank_R=rank_R, k_R=place[column_R], num_microbatches=problem.round_k(num_columns))


def _in_order_of_first(scope_R: Int64Array) -> list[int]:
    """Scopes by their longest row, so that the order does not depend on the order of the input."""
    values, first = np.unique(scope_R, return_index=True)
    return values[np.argsort(first)].tolist()


def _evenly(num_rows: int, num_ranks: int, cell_rows: int) -> tuple[Int64Array, Int64Array]:
    """Rank and column of each of a scope's rows: full columns of neighbours, the last column dealt in turn."""
    per_column = num_ranks * cell_rows
    index = np.arange(num_rows)
    column, inside = index // per_column, index % per_column
    rank = inside // cell_rows
    last = num_rows // per_column * per_column
    rank[last:] = inside[last:] % num_ranks
    return rank, column
