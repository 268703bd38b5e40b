"""Rows that may go anywhere: choose K, fill the cells, deal them into columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.plan.balance import place_for_ranks
from evenstep.plan.blocks import even_runs, make_blocks, put_into_cells
from evenstep.plan.bounds import TreeBound, lower_bounds
from evenstep.plan.deal import Placed, deal, lockstep_cost
from evenstep.plan.exchange import exchange_rows
from evenstep.plan.local import group_rows, split_to_count
from evenstep.plan.pack import pack_to_targets
from evenstep.plan.pad import cut_rows
from evenstep.plan.problem import Problem
from evenstep.plan.profile import heads_and_level
from evenstep.plan.request import Effort, Sync
from evenstep.plan.trade import trade_rows
from evenstep.types import Int64Array

__all__ = ["deal_found", "place_global"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """How much the search may do."""

    extra_microbatches: int  # K is tried up to this many above its bound
    levels: tuple[int, ...]  # per mille of the level that the bound implies
    starts: int  # partitions that are improved by exchanges
    shares: tuple[int, ...]  # tree: largest block, per cent of the mean cell
    ratios: tuple[int, ...]  # tree: most tokens of a block over those that it repeats where it is split off
    affinities: tuple[int, ...]  # tree: how much blocks look for cells that have their prefix
    most_put: int  # tree: blocks of each kind that are put into cells, for each K
    exchanges: int  # cells times rounds of exchanges, for each of these partitions
    most_rounds: int  # rounds of exchanges at most
    width: int  # rows of a cell that an exchange looks at
    cuts: int  # padded: cells that trial cuts may make
    caps: int  # padded: caps besides the level's
    moves: int  # padded: moves of cuts, for a thousand cells


_LEAST_ROUNDS = 4
_WORK: dict[Effort, _Work] = {
    "default": _Work(
        extra_microbatches=1,
        levels=(950, 1000),
        starts=1,
        shares=(100, 25, 12),
        ratios=(32, 16),
        affinities=(1, 3),
        most_put=3_000,
        exchanges=4_000,
        most_rounds=40,
        width=8,
        cuts=20_000,
        caps=4,
        moves=2_000,
    ),
    "high": _Work(
        extra_microbatches=2,
        levels=(930, 950, 980, 1000, 1010, 1030),
        starts=3,
        shares=(120, 100, 80, 50, 33, 25, 12),
        ratios=(64, 32, 16, 8, 4),
        affinities=(0, 1, 3),
        most_put=60_000,
        exchanges=33_000,
        most_rounds=200,
        width=16,
        cuts=300_000,
        caps=4,
        moves=40_000,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    cost: int
    num_microbatches: int
    cell_of_R: Int64Array


def place_global(problem: Problem, *, sync: Sync, effort: Effort) -> Placed:
    """Cells under the budget for rows that may go anywhere."""
    search = {"packed": _packed, "padded": _padded, "tree": _tree}[problem.room.layout]
    found = search(problem, _WORK[effort])
    if sync == "step":
        return place_for_ranks(
            problem, [(item.cell_of_R, item.num_microbatches) for item in (found, *_fewest(problem))]
        )
    return deal_found(problem, found.cell_of_R, found.num_microbatches)


def deal_found(problem: Problem, cell_of_R: Int64Array, num_microbatches: int) -> Placed:
    """Columns of these cells for ranks that meet in every micro-batch."""
    costs = problem.cell_costs(cell_of_R, num_microbatches * problem.num_ranks)
    return deal(cell_of_R, costs, problem.num_ranks, num_microbatches)


def _fewest(problem: Problem) -> list[_Found]:
    """Cells as large as the budget allows: the least padding per launch where no rank waits inside the step."""
    cells = group_rows(problem, np.arange(problem.num_rows))
    k = problem.round_k(-(-len(cells) // problem.num_ranks))
    least = lower_bounds(problem).num_microbatches
    if problem.room.capacity is None and k > least:
        return []
    cell_of_R = np.empty(problem.num_rows, dtype=np.int64)
    for i, cell in enumerate(cells):
        cell_of_R[cell] = i
    return [_judge(problem, _fill_empty(problem, cell_of_R, k), k)]


def _judge(problem: Problem, cell_of_R: Int64Array, num_microbatches: int) -> _Found:
    costs = problem.cell_costs(cell_of_R, num_microbatches * problem.num_ranks)
    cost = lockstep_cost(costs, problem.num_ranks, num_microbatches, problem.c0)
    return _Found(cost=cost, num_microbatches=num_microbatches, cell_of_R=cell_of_R)


def _fill_empty(problem: Problem, cell_of_R: Int64Array, num_microbatches: int) -> Int64Array:
    """Give empty cells a row while some cell has two: a filler would run there for nothing."""
    num_cells = num_microbatches * problem.num_ranks
    counts = np.bincount(cell_of_R, minlength=num_cells)
    if counts.all() or int(counts.max()) < 2:
        return cell_of_R
    ends = np.cumsum(counts).tolist()
    listed = np.argsort(cell_of_R, kind="stable").tolist()
    cells = [listed[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True) if b > a]
    filled = np.empty_like(cell_of_R)
    for i, cell in enumerate(split_to_count(problem, cells, num_cells)):
        filled[cell] = i
    return filled


def _padded(problem: Problem, work: _Work) -> _Found:
    least = lower_bounds(problem).num_microbatches
    cell_of_R, k = cut_rows(problem, least, work=work.cuts, num_caps=work.caps, moves=work.moves)
    return _judge(problem, cell_of_R, k)


def _tree(problem: Problem, work: _Work) -> _Found:
    """Try blocks of several sizes in a few K; the packed plan, which ignores what rows share, is one of the tries."""
    packed = _packed(problem.as_packed, work)
    found = [_judge(problem, packed.cell_of_R, packed.num_microbatches), *_fewest(problem)]
    every, bound = np.arange(problem.num_rows), TreeBound(problem)
    least = problem.round_k(-(-bound.num_cells // problem.num_ranks))
    distinct = int(problem.cell_tokens(np.zeros_like(every), 1)[0])
    capacity = problem.room.capacity
    k = least
    while True:
        num_cells = k * problem.num_ranks
        mean = -(-distinct // num_cells)
        here = _judged(
            problem,
            k,
            [
                even_runs(problem, num_cells),
                *_put(problem, work, k, [(mean * share // 100, None) for share in work.shares]),
            ],
        )
        others = _judged(problem, k, _put(problem, work, k, [(mean, ratio) for ratio in work.ratios]))
        for start in (*here[: work.starts], *others[:1]):
            size = num_cells + problem.num_rows // 8  # a round looks at every row
            rounds = min(work.most_rounds, max(_LEAST_ROUNDS, work.exchanges // size))
            better = trade_rows(problem, start.cell_of_R, k, rounds=rounds, width=work.width)
            found += [start, _judge(problem, better, k)]
        best = min(found, key=lambda item: item.cost)
        k = problem.round_k(k + 1)
        # more micro-batches launch and repeat more: go on only where fewer had no room, or left some to gain
        if capacity is None or (here and k > least + work.extra_microbatches) or k > found[0].num_microbatches:
            return best
        if bound.lockstep(k) >= best.cost:
            return best


def _put(
    problem: Problem, work: _Work, num_microbatches: int, kinds: list[tuple[int, int | None]]
) -> list[Int64Array | None]:
    """Cells of blocks of each kind (limit, ratio), as far as the work allows."""
    capacity = problem.room.capacity
    num_cells, num_put = num_microbatches * problem.num_ranks, 0
    found: list[Int64Array | None] = []
    for limit, ratio in kinds:
        blocks = make_blocks(
            problem,
            np.arange(problem.num_rows),
            limit=limit if capacity is None else min(capacity, limit),
            max_rows=problem.room.max_rows or problem.num_rows,
            ratio=ratio,
        )
        for affinity in work.affinities:
            num_put += blocks.tokens_M.size
            if num_put <= work.most_put:
                cell_of_M = put_into_cells(problem, blocks, num_cells, affinity=affinity, capacity=capacity)
                found.append(None if cell_of_M is None else blocks.cell_of_rows(cell_of_M, problem.num_rows))
    return found


def _judged(problem: Problem, num_microbatches: int, tries: list[Int64Array | None]) -> list[_Found]:
    """The tries that the budget has room for, the cheapest first; of equals the earlier."""
    filled = [_fill_empty(problem, cells, num_microbatches) for cells in tries if cells is not None]
    return sorted((_judge(problem, cells, num_microbatches) for cells in filled), key=lambda item: item.cost)


def _packed(problem: Problem, work: _Work) -> _Found:
    """Try a few K and levels, then improve the best partitions by exchanges."""
    found: list[_Found] = []
    for k in _counts_to_try(problem, work.extra_microbatches):
        profile = heads_and_level(problem, k)
        for per_mille in work.levels:
            cell_of_R = pack_to_targets(problem, profile, k, max(1, profile.level * per_mille // 1000))
            if cell_of_R is not None:
                found.append(_judge(problem, _fill_empty(problem, cell_of_R, k), k))
    if not found:  # rows that all but fill the budget: best-fit decreasing wastes the least room
        found = _fewest(problem)
    found.sort(key=lambda item: item.cost)  # stable: the earlier of equals stays first
    best = found[0]
    for start in found[: work.starts]:
        k = start.num_microbatches
        rounds = min(work.most_rounds, max(_LEAST_ROUNDS, work.exchanges // (k * problem.num_ranks)))
        better = exchange_rows(problem, start.cell_of_R, k, rounds=rounds, width=work.width)
        best = min(best, _judge(problem, better, k), key=lambda item: item.cost)
    return best


def _counts_to_try(problem: Problem, extra: int) -> list[int]:
    """K at its bound, up to ``extra`` above, and where rows over 1/3, 1/4, 1/5 of the budget go 1, 2, 3 to a cell."""
    least = lower_bounds(problem).num_microbatches
    capacity = problem.room.capacity
    if capacity is None:
        return [least]
    counts = {problem.round_k(least + i) for i in range(extra + 1)}
    for share in (1, 2, 3):
        num_large = int(np.searchsorted(-problem.widths_R, -(capacity // (share + 2)), side="left"))
        even = problem.round_k(-(-num_large // (share * problem.num_ranks)))
        if least < even <= least + max(1, least // 4):
            counts.add(even)
    return sorted(counts)
