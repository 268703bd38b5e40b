"""Packed cells of rows that may go anywhere: fill by cost towards a target for each column, under the token budget."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from evenstep.plan.problem import Problem
from evenstep.plan.profile import Profile
from evenstep.types import BoolArray, Int64Array

__all__ = ["pack_to_targets"]


def pack_to_targets(problem: Problem, profile: Profile, num_microbatches: int, level: int) -> Int64Array | None:
    """[R] Cell of each row, K * W cells, or None when some row found no room.

    Cells ``k * W .. (k + 1) * W - 1`` aim at column k's target. Where a long row leaves less room than the target
    asks for, the room is filled with the longest rows that fit: they cost most per token. All other rows go, longest
    first, to the cell that is furthest below its target.
    """
    num_cells = num_microbatches * problem.num_ranks
    targets_C = np.repeat(profile.targets(level), problem.num_ranks)
    is_head_C = np.repeat(profile.heads_K > level, problem.num_ranks)
    cell_R = np.full(problem.num_rows, -1, dtype=np.int64)
    open_C = np.ones(num_cells, dtype=bool)
    _fill_heads(problem, targets_C, int(is_head_C.sum()), cell_R, open_C)
    rest, cells = np.flatnonzero(cell_R < 0), np.flatnonzero(open_C)
    if rest.size == 0:
        return cell_R
    found = _furthest_below_target(problem, rest, targets_C[cells], is_head_C[cells])
    if found is None:
        return None
    cell_R[rest] = cells[found]
    return cell_R


def _fill_heads(problem: Problem, targets_C: Int64Array, num_heads: int, cell_R: Int64Array, open_C: BoolArray) -> None:
    """Give each long row its cell; where tokens and not the target limit the cell, fill it now and close it."""
    capacity = problem.room.capacity
    if capacity is None:
        return
    num_heads = min(max(num_heads, problem.num_overlong), problem.num_rows, targets_C.size)
    left = np.maximum(0, capacity - problem.widths_R[:num_heads])
    is_limited = problem.costs_R[:num_heads] + problem.costs_of_widths(left) <= targets_C[:num_heads]
    is_limited |= left == 0
    max_rows = problem.room.max_rows or problem.num_rows
    if not is_limited.any():
        return
    ascending = problem.widths_R[num_heads:][::-1].tolist()
    free = list(range(len(ascending) + 1))  # free[i] == i: the i-th shortest row is unused; else look at free[i]
    for head in np.flatnonzero(is_limited).tolist():
        cell_R[head], open_C[head] = head, False
        room, rows = int(left[head]), 1
        while room > 0 and rows < max_rows:
            at = _longest_free(free, bisect_right(ascending, room))
            if at == 0:
                break
            free[at] = at - 1
            room -= ascending[at - 1]
            cell_R[problem.num_rows - at] = head
            rows += 1


def _longest_free(free: list[int], at: int) -> int:
    """Longest unused row among the ``at`` shortest, counted from 1; 0 when there is none. Shortens the links."""
    while free[at] != at:
        free[at] = free[free[at]]
        at = free[at]
    return at


def _furthest_below_target(
    problem: Problem, rows: Int64Array, targets_C: Int64Array, is_head_C: BoolArray
) -> Int64Array | None:
    """Rows longest first, each to the cell with the most left of target and room; head cells never exceed theirs.

    Works in runs: rows go to the cells in order of what they have left, as long as no cell that just received a row
    would be chosen again, which is what one row at a time would do.
    """
    num_cells = targets_C.size
    capacity = problem.room.capacity
    room_C = np.full(num_cells, int(problem.widths_R.sum()) if capacity is None else capacity, dtype=np.int64)
    room_cost_C = problem.costs_of_widths(room_C)
    left_C = targets_C.copy()
    slots_C = np.full(num_cells, problem.room.max_rows or rows.size, dtype=np.int64)
    cell_of = np.empty(rows.size, dtype=np.int64)
    widths, costs = problem.widths_R[rows], problem.costs_R[rows]
    start = 0
    while start < rows.size:
        may = (room_C >= widths[start]) & (slots_C > 0) & (~is_head_C | (left_C >= costs[start]))
        cells = np.flatnonzero(may)
        if cells.size == 0:
            return None
        key = np.minimum(left_C[cells], room_cost_C[cells])
        order = np.argsort(-key, kind="stable")[: rows.size - start]
        cells, key = cells[order], key[order]
        end = start + cells.size
        new_left = left_C[cells] - costs[start:end]
        new_room = room_C[cells] - widths[start:end]
        new_cost = problem.costs_of_widths(np.maximum(new_room, 0))
        again = np.maximum.accumulate(np.minimum(new_left, new_cost))
        stop = np.flatnonzero(key[1:] < again[:-1])
        count = int(stop[0]) + 1 if stop.size else cells.size
        cells = cells[:count]
        left_C[cells], room_C[cells], room_cost_C[cells] = new_left[:count], new_room[:count], new_cost[:count]
        slots_C[cells] -= 1
        cell_of[start : start + count] = cells
        start += count
    return cell_of
