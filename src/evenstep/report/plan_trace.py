"""A step plan as a trace that Perfetto and Chrome show: a lane for each rank, a slice for each micro-batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from evenstep.plan import StepPlan
from evenstep.plan.foreign import measure_cells
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.types import Int64Array

__all__ = ["plan_trace"]


def plan_trace(
    plan: StepPlan,
    lengths: Sequence[int] | Int64Array,
    *,
    prefixes: SharedPrefixes | None = None,
    seconds_per_cost: float | None,
) -> str:
    """The plan's step as trace events (JSON); a rank that has nothing to do until the others are ready waits.

    Args:
        plan: of rows 0 to R - 1.
        lengths: [R] tokens.
        prefixes: what the rows share, for layout ``tree``.
        seconds_per_cost: an estimate of the seconds of one unit of cost; None: a unit is shown as a microsecond.

    A slice lasts as long as its cell costs, c0 included. With ``sync="micro_batch"`` all ranks begin a micro-batch
    together, with ``sync="step"`` each goes on by itself.
    """
    lengths_R = np.asarray(lengths)
    unit = 1.0 if seconds_per_cost is None else seconds_per_cost * 1e6  # microseconds
    measured = measure_cells(plan.request, lengths_R, plan.cells, prefixes=prefixes)
    costs, footprints = measured.costs_WK * unit, measured.footprints_WK
    is_lockstep = plan.request.sync == "micro_batch"
    starts = np.zeros_like(costs)
    if is_lockstep:
        starts[:, 1:] = np.cumsum(costs.max(axis=0))[:-1]
    else:
        starts[:, 1:] = np.cumsum(costs, axis=1)[:, :-1]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"step plan, layout {plan.layout}"}}
    ]
    for rank, cells in enumerate(plan.cells):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for k, cell in enumerate(cells):
            start, duration = float(starts[rank, k]), float(costs[rank, k])
            place = {"pid": 0, "tid": rank}
            events.append(
                {
                    "ph": "X",
                    "name": f"micro-batch {k}" if cell else f"filler {k}",
                    "cat": "cell" if cell else "filler",
                    "ts": start,
                    "dur": duration,
                    **place,
                    "args": {
                        "num_rows": len(cell),
                        "num_tokens": int(lengths_R[list(cell)].sum()) if cell else 0,
                        "footprint": int(footprints[rank, k]),
                        "rows": list(cell[:64]),
                    },
                }
            )
            waits = float(costs[:, k].max()) - duration if is_lockstep else 0.0
            if waits > 0:
                events.append({"ph": "X", "name": "wait", "cat": "wait", "ts": start + duration, "dur": waits, **place})
    meaning = (
        "a microsecond is one token's worth of linear work"
        if seconds_per_cost is None
        else "times are estimates from counted FLOPs, not measurements"
    )
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"times": meaning}, "traceEvents": events})
