"""What generation beside training saves where the environment is slow: ``python benchmarks/overlap.py``.

One rank, the ledger environment with a wait in every call, and the same run with ``max_staleness`` 0 and 1, in turns.
Prints seconds per optimizer step, without each run's first, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from evenstep.config import load_config
from evenstep.rollout import environment
from evenstep.rollout.ledger import Ledger

CONFIG = """
[run]
dir = "{folder}"
num_collections = {num_collections}
[model]
path = "evenstep:ledger"
max_context_tokens = 64
[environment]
name = "slow_ledger"
[rollout]
num_prompts = 16
num_generations = 8
max_tokens_per_call = 4
generation_batch_rollouts = 64
max_staleness = {max_staleness}
[compaction]
policy = "summary"
[plan]
max_tokens_per_gpu = 512
layout = "packed"
[train]
rollouts_per_window = 128
lr = 1e-4
old_logprobs = "scored"
[checkpoint]
every = 1000
export = false
[evaluation]
num_tasks = 0
"""
WAIT_S = 0.05


class SlowLedger(Ledger):
    """The ledger behind a slow service."""

    async def step(self, action: str) -> str | None:
        await asyncio.sleep(WAIT_S)
        return await super().step(action)


class Clock:
    """A reporter that keeps the time of every window."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def window(self, metrics: object) -> None:
        self.times.append(time.perf_counter())

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def seconds_per_step(max_staleness: int, num_collections: int, folder: Path) -> list[float]:
    from evenstep.train.run import run_training

    path = folder / "config.toml"
    run = folder / f"run-{time.monotonic_ns()}"
    run.mkdir()
    path.write_text(CONFIG.format(folder=run, num_collections=num_collections, max_staleness=max_staleness))
    clock = Clock()
    run_training(load_config([path]), reporter=clock)  # type: ignore[arg-type]
    return [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collections", type=int, default=12, help="optimizer steps of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind, in turns")
    options = parser.parse_args()
    environment.ENVIRONMENTS["slow_ledger"] = lambda: SlowLedger
    found: dict[int, list[float]] = {0: [], 1: []}
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for _ in range(options.repeats):
            medians = {}
            for max_staleness, seconds in found.items():
                new = seconds_per_step(max_staleness, options.collections, Path(name))
                seconds += new
                medians[max_staleness] = statistics.median(new)
            ratios.append(medians[1] / medians[0])
    result = {
        "wait_s": WAIT_S,
        "seconds_per_step_median": {str(key): round(statistics.median(values), 4) for key, values in found.items()},
        "ratio_paired_median": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
