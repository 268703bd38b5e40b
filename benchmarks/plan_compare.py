"""evenstep's planner against public ones: ``python benchmarks/plan_compare.py [--full] [--json FILE]``.

Prints one Markdown table per layout, size and budget: step cost over the bound, K over its bound, worst rank imbalance,
least padding efficiency, over-budget cells, rows lost and inputs refused, mean over seeds for workloads a / b / c / d.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

from workloads import WORKLOADS, Verdict, judge, row_cost, workload

from evenstep.plan import plan_step
from evenstep.plan.public import PACKED, PADDED, Cells, PublicPlanner, RefusedError

SIZES = ((128, 8), (1024, 8), (8192, 64))
BUDGETS = (8192, 32768, 65536)


def evenstep_planner(layout: str, effort: str) -> PublicPlanner:
    def plan(lengths: Sequence[int], _costs: object, num_ranks: int, budget: int) -> Cells:
        found = plan_step(lengths, num_ranks=num_ranks, max_tokens_per_gpu=budget, layout=layout, effort=effort)
        return [[list(cell) for cell in rank] for rank in found.cells]

    return plan


def proved_bound(lengths: Sequence[int], num_ranks: int, budget: int, layout: str) -> float:
    """evenstep's own lower bound over the yardstick's: no plan can be below it."""
    plan = plan_step(lengths, num_ranks=num_ranks, max_tokens_per_gpu=budget, layout=layout)
    cells = [[list(cell) for cell in rank] for rank in plan.cells]
    return judge(lengths, cells, budget=budget, layout=layout).step_over_bound * plan.stats.lockstep_efficiency


def run(planner: PublicPlanner, size: tuple[int, int], budget: int, layout: str, seeds: int) -> list[dict[str, Any]]:
    """One record per workload, mean over seeds; ``step`` None when every seed was refused."""
    records = []
    for name in WORKLOADS:
        verdicts: list[Verdict] = []
        seconds: list[float] = []
        refused = 0
        for seed in range(seeds):
            lengths, _ = workload(name, size[0], seed)
            costs = row_cost(lengths)
            began = time.perf_counter()
            try:
                cells = planner(lengths, costs, size[1], budget)
            except RefusedError:
                refused += 1
                continue
            seconds.append(time.perf_counter() - began)
            verdicts.append(judge(lengths, cells, budget=budget, layout=layout))
        records.append(
            {
                "workload": name,
                "refused": refused,
                "step": statistics.fmean(v.step_over_bound for v in verdicts) if verdicts else None,
                "extra_k": statistics.fmean(v.num_microbatches - v.num_microbatches_lower for v in verdicts)
                if verdicts
                else None,
                "rank": max((v.rank_imbalance for v in verdicts), default=None),
                "padding": min((v.padding_efficiency for v in verdicts), default=None),
                "over": sum(v.num_over_budget for v in verdicts),
                "lost": sum(v.num_lost + v.num_twice for v in verdicts),
                "seconds": statistics.median(seconds) if seconds else None,
            }
        )
    return records


def _join(records: list[dict[str, Any]], key: str, form: str) -> str:
    return " / ".join("–" if record[key] is None else format(record[key], form) for record in records)


def table(layout: str, size: tuple[int, int], budget: int, seeds: int) -> list[dict[str, Any]]:
    """Print one table and return its records."""
    planners = {f"evenstep, {effort}": evenstep_planner(layout, effort) for effort in ("default", "high")}
    planners |= PACKED if layout == "packed" else PADDED
    print(f"\n### {layout}, {size[0]:,} rows on {size[1]} ranks, budget {budget:,}\n")
    print("| planner | step over the bound | K over its bound | rank | padding | over / lost / refused | median s |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for name, planner in planners.items():
        records = run(planner, size, budget, layout, seeds)
        ranks = [r["rank"] for r in records if r["rank"] is not None]
        paddings = [r["padding"] for r in records if r["padding"] is not None]
        times = [r["seconds"] for r in records if r["seconds"] is not None]
        print(
            f"| {name} | {_join(records, 'step', '.4f')} | {_join(records, 'extra_k', '.1f')} "
            f"| {max(ranks, default=float('nan')):.3f} | {min(paddings, default=float('nan')):.3f} "
            f"| {sum(r['over'] for r in records)} / {sum(r['lost'] for r in records)} "
            f"/ {sum(r['refused'] for r in records)} | {max(times, default=float('nan')):.3f} |",
            flush=True,
        )
        found.append({"planner": name, "layout": layout, "size": size, "budget": budget, "workloads": records})
    bounds = []
    for name in WORKLOADS:
        parts = [proved_bound(workload(name, size[0], s)[0], size[1], budget, layout) for s in range(seeds)]
        bounds.append(statistics.fmean(parts))
    print("| *no plan is below* | " + " / ".join(f"{b:.4f}" for b in bounds) + " | | | | | |", flush=True)
    found.append({"planner": "proved bound", "layout": layout, "size": size, "budget": budget, "bounds": bounds})
    return found


def step_sync_table(layout: str, sizes: Sequence[tuple[int, int]], seeds: int) -> None:
    """Print the rank objective of plans for ranks that meet once a step, over the plan's own lower bound."""
    print(f"\n### {layout}, ranks that meet once a step, budget 32,768\n")
    print("| rows x ranks | most expensive rank over the proved bound | over the mean rank (worst) |")
    print("|---|---|---|")
    for num_rows, num_ranks in sizes:
        ratios, worst = [], 0.0
        for name in WORKLOADS:
            stats = [
                plan_step(
                    workload(name, num_rows, seed)[0],
                    num_ranks=num_ranks,
                    max_tokens_per_gpu=32768,
                    layout=layout,
                    sync="step",
                ).stats
                for seed in range(seeds)
            ]
            ratios.append(statistics.fmean(1 / s.lockstep_efficiency for s in stats))
            worst = max(worst, *(s.rank_imbalance for s in stats))
        joined = " / ".join(f"{ratio:.4f}" for ratio in ratios)
        print(f"| {num_rows:,} x {num_ranks} | {joined} | {worst:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all sizes and budgets, seeds 0-4 (minutes)")
    parser.add_argument("--json", help="also write the records to this file")
    options = parser.parse_args()
    sizes, budgets, seeds = (SIZES, BUDGETS, 5) if options.full else (SIZES[:2], (32768,), 2)
    logging.getLogger("evenstep.plan").setLevel(logging.ERROR)  # over-long rows are many at the smallest budget
    found = []
    for layout in ("packed", "padded"):
        for size in sizes:
            for budget in budgets:
                found += table(layout, size, budget, seeds)
        step_sync_table(layout, sizes, seeds)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
