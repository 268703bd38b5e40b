"""Which layout a window should run in: each is planned, and the cheapest by the cost model wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstep.errors import PlanError
from evenstep.plan.footprint import Layout
from evenstep.plan.planner import Lengths, plan_step
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.step_plan import StepPlan

__all__ = ["LayoutChoice", "plan_cheapest"]

# Simplest first; a layout must be cheaper than every simpler one by more than this share, which the model cannot see.
CHOICES: tuple[Layout, ...] = ("padded", "packed", "tree")
MARGIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The cheapest of some layouts, and what each would have cost."""

    plan: StepPlan
    costs: Mapping[str, float]  # layout -> step cost, attention's launches included, in the cost model's unit
    footprints: Mapping[str, int]  # layout -> tokens computed
    reason: str  # one line for a log


def plan_cheapest(
    lengths: Lengths | Mapping[str, Lengths],
    *,
    layouts: Sequence[Layout] = CHOICES,
    prefixes: SharedPrefixes | None = None,
    launch_tokens: Mapping[str, float] | None = None,
    **options: Any,
) -> LayoutChoice:
    """Plan a step in several layouts and choose the cheapest.

    Cost of a layout: ``plan.stats.step_cost``, and ``c1 * launch_tokens[layout]`` for each piece that attention is
    launched for on a rank: a row in ``packed``, a node of the trie in ``tree`` (at most two for each row). A layout is
    chosen over a simpler one only where it is cheaper by more than 1 %; ``tree`` is not tried where no two rows begin
    alike.

    Args:
        lengths: [R] tokens of each row; or layout -> [R], where rows take more room in one than in another.
        layouts: those that may be chosen, of ``padded``, ``packed`` and ``tree``.
        prefixes: what the rows share; needed by ``tree``.
        launch_tokens: layout -> tokens whose linear work takes as long as launching attention once in every layer; 0,
            as if absent, where one kernel serves all rows.
        options: of ``plan_step``, without ``layout`` and ``windows``.

    >>> from evenstep.plan import shared_prefixes
    >>> rows = [[7] * 30 + [i] * (4 + 6 * i) for i in range(4)]        # a prompt of 30 tokens, four outputs
    >>> choice = plan_cheapest([len(row) for row in rows], prefixes=shared_prefixes(rows), num_ranks=1,
    ...                        max_tokens_per_gpu=100)
    >>> choice.plan.layout, dict(choice.footprints)
    ('tree', {'padded': 178, 'packed': 172, 'tree': 82})
    >>> choice.reason
    'tree computes 82 tokens at a cost of 1,106; padded: 178 at 3,250, packed: 172 at 2,220'

    Raises:
        PlanError: as ``plan_step``; no layout, or one that cannot be chosen.
    """
    unknown = sorted(set(layouts) - set(CHOICES))
    if unknown or not layouts:
        raise PlanError(f"layouts to choose from are {', '.join(CHOICES)}, found {list(layouts)}; name one or more")
    is_shared = prefixes is not None and bool(np.any(prefixes.shared_R))
    plans: dict[str, StepPlan] = {}
    costs: dict[str, float] = {}
    best: Layout | None = None
    for layout in CHOICES:
        if layout not in layouts or (layout == "tree" and not is_shared and len(layouts) > 1):
            continue
        shared = prefixes if layout == "tree" else None
        taken = lengths[layout] if isinstance(lengths, Mapping) else lengths
        plan = plan_step(taken, windows=None, layout=layout, prefixes=shared, **options)
        pieces = (2 if layout == "tree" else 1) * plan.stats.num_rows / plan.num_ranks
        launches = plan.cost.c1 * (launch_tokens or {}).get(layout, 0.0) * pieces
        plans[layout], costs[layout] = plan, plan.stats.step_cost + launches
        if best is None or costs[layout] < (1 - MARGIN) * costs[best]:
            best = layout
    assert best is not None
    footprints = {layout: plan.stats.footprint for layout, plan in plans.items()}
    others = ", ".join(
        f"{layout}: {footprints[layout]:,} at {costs[layout]:,.0f}" for layout in plans if layout != best
    )
    reason = f"{best} computes {footprints[best]:,} tokens at a cost of {costs[best]:,.0f}"
    return LayoutChoice(
        plan=plans[best], costs=costs, footprints=footprints, reason=f"{reason}; {others}" if others else reason
    )
