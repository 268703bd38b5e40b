"""Frozen plans: the planner's output may change only on purpose.

1. For each frozen request the hash, K and the figures are those of the file; small plans are compared cell by cell.
2. Rows with ids may come in any order and give the same frozen plan.

The lengths come from an integer recurrence, so nothing depends on a library's random numbers. To freeze new plans run
``python tests/golden/test_plan_frozen.py`` and look at the difference before you commit it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenstep.plan import plan_step

FILE = Path(__file__).parent / "plans.json"


def lengths_of(kind: str, num_rows: int) -> list[int]:
    """Row lengths: ``uniform``, ``heavy`` (a few rows are long) or ``mixed`` (short rows and long ones)."""
    state, found = 12345, []
    for _ in range(num_rows):
        state = (1103515245 * state + 12345) % 2**31
        share = state / 2**31
        if kind == "uniform":
            found.append(1 + int(share * 4096))
        elif kind == "heavy":
            found.append(32 + int(share**6 * 16000))
        else:
            found.append(100 + int(share * 900) if share < 0.7 else 4000 + int((share - 0.7) * 13000))
    return found


def requests() -> dict[str, dict[str, Any]]:
    """Name -> arguments; ``kind`` and ``num_rows`` describe the lengths."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ("uniform", "heavy", "mixed"):
        for layout in ("padded", "packed"):
            for num_rows, num_ranks in ((12, 2), (200, 8)):
                base = {"kind": kind, "num_rows": num_rows, "num_ranks": num_ranks, "layout": layout}
                base["max_tokens_per_gpu"] = 8192
                name = f"{kind}-{layout}-{num_rows}x{num_ranks}"
                found[name] = base
                found[f"{name}-step"] = {**base, "sync": "step"}
                found[f"{name}-high"] = {**base, "effort": "high"}
                found[f"{name}-options"] = {
                    **base, "pad_to_multiple": 64, "cp": 2, "bucket": 0.125, "num_microbatches_multiple": 2,
                    "max_rows_per_microbatch": 9,
                }  # fmt: skip
    for rows in (1, 2):
        found[f"fixed-{rows}"] = {
            "kind": "heavy", "num_rows": 25, "num_ranks": 3, "layout": "fixed", "micro_batch_rows": rows,
        }  # fmt: skip
    return found


def _plan(request: dict[str, Any], order: list[int] | None = None):
    arguments = dict(request)
    lengths = lengths_of(arguments.pop("kind"), arguments.pop("num_rows"))
    if order is None:
        return plan_step(lengths, **arguments)
    return plan_step([lengths[i] for i in order], row_ids=order, **arguments)


def _frozen(request: dict[str, Any]) -> dict[str, Any]:
    plan = _plan(request)
    return {
        "hash": plan.hash,
        "num_microbatches": plan.num_microbatches,
        "step_cost": round(plan.stats.step_cost, 3),
        "lower_bound": round(plan.stats.lower_bound, 3),
        "cells": [[list(cell) for cell in rank] for rank in plan.cells] if request["num_rows"] <= 25 else None,
    }


@pytest.mark.parametrize("name", requests())
def test_frozen_plans(name: str) -> None:
    assert _frozen(requests()[name]) == json.loads(FILE.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("name", [name for name in requests() if name.endswith("200x8")])
def test_frozen_plans_in_another_order(name: str) -> None:
    request = requests()[name]
    order = [(i * 77 + 5) % 200 for i in range(200)]
    plan, permuted = _plan(request, list(range(200))), _plan(request, order)
    assert tuple(tuple(tuple(order[i] for i in cell) for cell in rank) for rank in permuted.cells) == plan.cells


if __name__ == "__main__":
    text = json.dumps({name: _frozen(request) for name, request in requests().items()}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")
