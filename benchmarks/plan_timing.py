"""How long planning takes: ``python benchmarks/plan_timing.py [--large]``.

Median wall and processor seconds of five plans of workload a at budget 32,768, the peak memory of the process, and the
time ``import evenstep.plan`` takes beyond ``import numpy`` (median of five fresh processes each). On a shared machine
the processor seconds are the ones to compare.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

from workloads import workload

from evenstep.plan import plan_step

CASES = (
    ("packed", 8192, 64, "default"),
    ("packed", 8192, 64, "high"),
    ("packed", 65536, 512, "default"),
    ("padded", 8192, 64, "default"),
    ("padded", 8192, 64, "high"),
    ("padded", 65536, 512, "default"),
)
LARGE = (("packed", 1_048_576, 4096, "default"), ("padded", 1_048_576, 4096, "default"))


def import_seconds(module: str) -> float:
    """Median of five fresh processes, measured inside the process."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return statistics.median(float(run.stdout) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 1,048,576 rows on 4,096 ranks, once")
    options = parser.parse_args()
    print("| layout | rows | ranks | effort | wall s | processor s | lockstep efficiency | peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for layout, num_rows, num_ranks, effort in CASES + (LARGE if options.large else ()):
        lengths, _ = workload("a", num_rows)
        wall: list[float] = []
        processor: list[float] = []
        for _ in range(5 if num_rows < 1_000_000 else 1):
            began, began_cpu = time.perf_counter(), time.process_time()
            plan = plan_step(lengths, num_ranks=num_ranks, max_tokens_per_gpu=32768, layout=layout, effort=effort)
            wall.append(time.perf_counter() - began)
            processor.append(time.process_time() - began_cpu)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {layout} | {num_rows:,} | {num_ranks:,} | {effort} | {statistics.median(wall):.3f} "
            f"| {statistics.median(processor):.3f} | {plan.stats.lockstep_efficiency:.4f} | {peak:.0f} |",
            flush=True,
        )
    numpy_s, plan_s = import_seconds("numpy"), import_seconds("evenstep.plan")
    print(f"\nimport numpy {numpy_s:.3f} s, import evenstep.plan {plan_s:.3f} s, difference {plan_s - numpy_s:.3f} s")


if __name__ == "__main__":
    main()
