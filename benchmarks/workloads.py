"""Row-length workloads and the yardstick for step plans.

Everything is seeded; lengths are in tokens. A row of L tokens costs ``L + L**2 / 27278`` token equivalents of a dense
transformer of 4 billion parameters (36 layers, hidden 2560, 32 heads of 128), the second term being causal attention.
A sharded step meets in every micro-batch and pays c0 for each, so it costs

    step = sum_k max_r cost(k, r) + c0 * K

and is judged as a ratio to ``max(total / W + c0 * K_lower, cost of the longest row + c0)``. ``K_lower`` comes from a
bin-packing bound (packed) or from the fewest groups that sorted rows allow (padded). The total counts no padding and no
row rules a column in it, so 1.0 is often out of reach; a plan's own ``stats.lower_bound`` is tighter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.plan import SharedPrefixes

__all__ = [
    "TREE_WORKLOADS",
    "WORKLOADS",
    "SharingRows",
    "Verdict",
    "judge",
    "row_cost",
    "sharing_workload",
    "workload",
]

ATTENTION_TOKENS = 27278.0  # tokens at which attention costs as much as everything linear
OVERHEAD_TOKENS = 1024.0  # c0: what a micro-batch costs besides its rows
WORKLOADS = ("a", "b", "c", "d")
TREE_WORKLOADS = ("groups", "compacted", "branches")


def row_cost(lengths):
    """[R] Cost of rows of these lengths, in token equivalents."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths + lengths * lengths / ATTENTION_TOKENS


def workload(name: str, num_rows: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Lengths and the rollout of each row.

    a: reasoning, lognormal with median 2,000 and sigma 1, within 64 and 32,768. b: uniform, 1 to 8,192. c: agents, 70 %
    short (300 to 3,000) and 30 % long (16,384 to 32,768). d: compacted rollouts of 1 to 8 segments that share a total.
    """
    draw = np.random.default_rng(seed * 1_000_003 + num_rows * 7 + ord(name))
    if name == "a":
        lengths = np.clip(np.exp(draw.normal(math.log(2000), 1.0, num_rows)), 64, 32768).astype(int)
    elif name == "b":
        lengths = draw.integers(1, 8193, num_rows)
    elif name == "c":
        is_short = draw.random(num_rows) < 0.7
        lengths = np.where(is_short, draw.integers(300, 3001, num_rows), draw.integers(16384, 32769, num_rows))
    elif name == "d":
        return _compacted(draw, num_rows)
    else:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, found {name!r}")
    return [int(x) for x in lengths], list(range(num_rows))


def _compacted(draw: np.random.Generator, num_rows: int) -> tuple[list[int], list[int]]:
    rows: list[int] = []
    rollout_of: list[int] = []
    rollout = 0
    while len(rows) < num_rows:
        num_segments = int(draw.integers(1, 9))
        total = float(np.clip(np.exp(draw.normal(math.log(12000), 0.6)), 500, 120000))
        shares = draw.dirichlet(np.full(num_segments, 1.5))
        rows += np.clip((total * shares).astype(int), 64, 32768).tolist()
        rollout_of += [rollout] * num_segments
        rollout += 1
    return [int(x) for x in rows], rollout_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRows:
    """Rows that begin alike, known by their lengths and by what they share; no tokens are made."""

    lengths: list[int]
    groups: list[int]
    prefixes: SharedPrefixes


def sharing_workload(name: str, num_rows: int, seed: int = 0) -> SharingRows:
    """Rows of whole groups, at least ``num_rows`` of them, that share beginnings.

    groups: 16 rollouts share a prompt of 64 to 16,384 tokens (lognormal, median 1,000, sigma 1.2), outputs of median
    1,500. compacted: all rows share 1,200 tokens of system text, groups of 8 rollouts a task (median 600), and each of
    a rollout's 1 to 8 segments goes on by itself (median 3,000). branches: 16 leaves of a prompt of 500 to 4,000
    tokens, split at random, with trunks of median 600 and ends of median 1,200; they come in any order.
    """
    draw = np.random.default_rng(seed * 1_000_003 + num_rows * 7 + sum(map(ord, name)))

    def tokens(median: float, sigma: float, least: int, most: int) -> int:
        return int(np.clip(np.exp(draw.normal(math.log(median), sigma)), least, most))

    lengths: list[int] = []  # in the order of tokens, and what each row shares with the one before it
    shared: list[int] = []
    groups: list[int] = []

    def split(depth: int, num_leaves: int) -> None:
        """Leaves below a depth; the caller has set what the first of them shares."""
        if num_leaves == 1:
            lengths.append(depth + tokens(1200, 0.8, 32, 8192))
            return
        depth += tokens(600, 0.8, 32, 4096)
        num_left = int(draw.integers(1, num_leaves))
        split(depth, num_left)
        shared.append(depth)
        split(depth, num_leaves - num_left)

    while len(lengths) < num_rows:
        start = len(lengths)
        if name == "groups":
            prompt = tokens(1000, 1.2, 64, 16384)
            lengths += [prompt + tokens(1500, 1.0, 32, 16384) for _ in range(16)]
            shared += [0] + [prompt] * 15
        elif name == "compacted":
            task = 1200 + tokens(600, 0.8, 64, 4096)
            num_segments = int(draw.integers(1, 9, 8).sum())
            lengths += [task + tokens(3000, 0.7, 64, 24576) for _ in range(num_segments)]
            shared += [1200 if start else 0] + [task] * (num_segments - 1)
        elif name == "branches":
            shared.append(0)
            split(int(draw.integers(500, 4001)), 16)
        else:
            raise ValueError(f"workload must be one of {', '.join(TREE_WORKLOADS)}, found {name!r}")
        groups += [len(groups)] * (len(lengths) - start)
    row_at = np.arange(len(lengths))  # row at each place in the order of tokens
    if name == "branches":
        row_at = draw.permuted(row_at.reshape(-1, 16), axis=1).ravel()
    lengths_R = np.empty(len(lengths), dtype=np.int64)
    lengths_R[row_at] = lengths
    prefixes = SharedPrefixes(row_at, np.array(shared, dtype=np.int64))
    return SharingRows(lengths=lengths_R.tolist(), groups=groups, prefixes=prefixes)


def _fewest_cells(lengths, budget: int, layout: str) -> int:
    """Lower bound on the cells of a step; rows over the budget stand alone."""
    descending = np.sort(np.asarray(lengths))[::-1]
    num_alone = int((descending > budget).sum())
    rest = descending[num_alone:]
    if layout == "padded":
        groups = start = 0
        while start < len(rest):
            start += max(1, budget // int(rest[start]))
            groups += 1
        return groups + num_alone
    groups = math.ceil(int(rest.sum()) / budget)
    small = rest[rest <= budget / 2]
    for least in np.unique(np.quantile(small, np.linspace(0, 1, 200)).astype(int)) if len(small) else [0]:
        num_big = int((rest > budget - least).sum())  # cannot share with a row of `least` tokens or more
        middle = rest[(rest <= budget - least) & (rest > budget / 2)]
        light = rest[(rest <= budget / 2) & (rest >= least)]
        room = len(middle) * budget - int(middle.sum())
        groups = max(groups, num_big + len(middle) + max(0, math.ceil((int(light.sum()) - room) / budget)))
    return groups + num_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Figures of one plan; costs over the bound are ratios."""

    step_over_bound: float  # sum over k of the column maxima + c0 * K, over the bound
    rank_imbalance: float  # most expensive rank over the mean
    num_microbatches: int  # K; for a plan with unequal counts, the largest
    num_microbatches_lower: int
    padding_efficiency: float  # real tokens / footprint
    num_over_budget: int  # cells of several rows above the budget
    num_fillers: int  # cells without rows, and missing cells of a rank with fewer than K
    num_lost: int  # rows in no cell
    num_twice: int  # rows in several cells


def judge(lengths: Sequence[int], cells: Sequence[Sequence[Sequence[int]]], *, budget: int, layout: str) -> Verdict:
    """Judge a plan given as row indices ``cells[rank][k]``; nothing of the planner's own code is used."""
    sizes = np.asarray(lengths)
    num_ranks, num_microbatches = len(cells), max(len(rank) for rank in cells)
    cost = np.zeros((num_ranks, num_microbatches))
    seen = np.zeros(len(sizes), dtype=int)
    footprint = num_over = num_fillers = 0
    for r, rank in enumerate(cells):
        num_fillers += num_microbatches - len(rank)
        for k, rows in enumerate(rank):
            if not rows:
                num_fillers += 1
                continue
            np.add.at(seen, list(rows), 1)
            part = sizes[list(rows)]
            if layout == "packed":
                size, cost[r, k] = int(part.sum()), float(row_cost(part).sum())
            else:
                size, cost[r, k] = len(rows) * int(part.max()), len(rows) * float(row_cost(part.max()))
            footprint += size
            num_over += size > budget and len(rows) > 1
    lower = max(1, math.ceil(_fewest_cells(lengths, budget, layout) / num_ranks))
    bound = max(
        float(row_cost(sizes).sum()) / num_ranks + OVERHEAD_TOKENS * lower,
        float(row_cost(sizes.max())) + OVERHEAD_TOKENS,
    )
    rank_cost = cost.sum(axis=1)
    return Verdict(
        step_over_bound=(float(cost.max(axis=0).sum()) + OVERHEAD_TOKENS * num_microbatches) / bound,
        rank_imbalance=float(rank_cost.max() / rank_cost.mean()),
        num_microbatches=num_microbatches,
        num_microbatches_lower=lower,
        padding_efficiency=float(sizes[seen > 0].sum()) / footprint,
        num_over_budget=num_over,
        num_fillers=num_fillers,
        num_lost=int((seen == 0).sum()),
        num_twice=int((seen > 1).sum()),
    )
