"""evenstep's planner against public ones: ``python benchmarks/plan_compare.py [--full] [--tree] [--json FILE]``.

Prints one Markdown table per layout, size and budget: step cost over the bound, K over its bound, worst rank imbalance,
least padding efficiency, over-budget cells, rows lost and inputs refused, mean over seeds for workloads a / b / c / d.

With ``--tree`` instead one table per size and budget for rows that begin alike: step cost over the tree plan's own
bound, tokens computed over distinct tokens, K over its bound, for workloads groups / compacted / branches.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from workloads import TREE_WORKLOADS, WORKLOADS, SharingRows, Verdict, judge, row_cost, sharing_workload, workload

from evenstep.plan import PlanStats, StepPlan, plan_step
from evenstep.plan.foreign import measure_cells
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


def groups_first_fit(rows: SharingRows, num_ranks: int, budget: int) -> Cells:
    """Groups stay together in order and go to the first micro-batch with room; one over the budget is cut into runs.

    Micro-batches are dealt to the ranks the most tokens first.
    """
    lengths = np.array(rows.lengths)
    place_of = np.argsort(rows.prefixes.order_R)

    def num_nodes(members: Sequence[int]) -> int:
        places = np.sort(place_of[list(members)])
        between = np.stack([places[:-1] + 1, places[1:] + 1], axis=1).ravel()
        shared = np.minimum.reduceat(np.append(rows.prefixes.shared_R, 0), between)[::2] if places.size > 1 else 0
        return int(lengths[list(members)].sum() - np.sum(shared))

    runs: list[list[int]] = []
    for row, group in enumerate(rows.groups):
        if runs and rows.groups[runs[-1][-1]] == group and num_nodes([*runs[-1], row]) <= budget:
            runs[-1].append(row)
        else:
            runs.append([row])
    cells: list[list[int]] = []
    for run in runs:
        home = next((cell for cell in cells if num_nodes([*cell, *run]) <= budget), None)
        if home is None:
            cells.append(run)
        else:
            home += run
    cells.sort(key=num_nodes, reverse=True)
    cells += [[] for _ in range(-len(cells) % num_ranks)]
    return [cells[rank::num_ranks] for rank in range(num_ranks)]


def tree_table(size: tuple[int, int], budget: int, seeds: int) -> list[dict[str, Any]]:
    """Print one table of layout ``tree`` and return its records."""
    num_rows, num_ranks = size
    options: dict[str, Any] = {"num_ranks": num_ranks, "max_tokens_per_gpu": budget}
    found: dict[str, list[list[tuple[PlanStats, float]]]] = {}
    bounds: list[list[tuple[float, int]]] = []  # of each workload and seed: the tree's lower bound, distinct tokens
    for name in TREE_WORKLOADS:
        bounds.append([])
        here: dict[str, list[tuple[PlanStats, float]]] = {}
        for seed in range(seeds):
            rows = sharing_workload(name, num_rows, seed)
            lengths, prefixes = rows.lengths, rows.prefixes
            plans: dict[str, StepPlan] = {}
            for planner, more in {
                "tree, default": {"layout": "tree", "prefixes": prefixes},
                "tree, high": {"layout": "tree", "prefixes": prefixes, "effort": "high"},
                "packed": {"layout": "packed"},
            }.items():
                began = time.process_time()
                plans[planner] = plan_step(lengths, windows=None, **options, **more)
                here.setdefault(planner, []).append((plans[planner].stats, time.process_time() - began))
            request = plans["tree, default"].request
            for planner, cells in (
                ("packed, its micro-batches as tries", plans["packed"].cells),
                ("groups together, first fit", groups_first_fit(rows, num_ranks, budget)),
            ):
                stats = measure_cells(request, lengths, cells, prefixes=prefixes).stats
                here.setdefault(planner, []).append((stats, 0.0))
            bounds[-1].append((plans["tree, default"].stats.lower_bound, prefixes.num_nodes(np.array(lengths))))
        for planner, results in here.items():
            found.setdefault(planner, []).append(results)
    print(f"\n### tree, {num_rows:,} rows on {num_ranks} ranks, budget {budget:,}\n")
    print("| planner | step over the bound | tokens computed / distinct | K over its bound | most processor s |")
    print("|---|---|---|---|---|")
    records: list[dict[str, Any]] = []
    for planner, workloads in found.items():
        by_workload = []
        for name, results, known in zip(TREE_WORKLOADS, workloads, bounds, strict=True):
            pairs = list(zip(results, known, strict=True))
            by_workload.append(
                {
                    "workload": name,
                    "step": statistics.fmean(stats.step_cost / bound for (stats, _), (bound, _) in pairs),
                    "tokens": statistics.fmean(stats.footprint / distinct for (stats, _), (_, distinct) in pairs),
                    "extra_k": statistics.fmean(
                        stats.num_microbatches - best.num_microbatches_lower_bound
                        for (stats, _), (best, _) in zip(results, found["tree, default"][len(by_workload)], strict=True)
                    ),
                    "seconds": statistics.median(seconds for _, seconds in results),
                }
            )
        most = max(record["seconds"] for record in by_workload)
        print(
            f"| {planner} | {_join(by_workload, 'step', '.4f')} | {_join(by_workload, 'tokens', '.3f')} "
            f"| {_join(by_workload, 'extra_k', '.1f')} | {f'{most:.3f}' if most else ''} |",
            flush=True,
        )
        records.append({"planner": planner, "size": size, "budget": budget, "workloads": by_workload})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all sizes and budgets, seeds 0-4 (minutes)")
    parser.add_argument("--tree", action="store_true", help="layout tree on rows that begin alike, instead")
    parser.add_argument("--json", help="also write the records to this file")
    options = parser.parse_args()
    sizes, budgets, seeds = (SIZES, BUDGETS, 5) if options.full else (SIZES[:2], (32768,), 2)
    logging.getLogger("evenstep.plan").setLevel(logging.ERROR)  # over-long rows are many at the smallest budget
    found = []
    for size in sizes if options.tree else ():
        for budget in budgets:
            found += tree_table(size, budget, seeds)
    for layout in () if options.tree else ("packed", "padded"):
        for size in sizes:
            for budget in budgets:
                found += table(layout, size, budget, seeds)
        step_sync_table(layout, sizes, seeds)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
