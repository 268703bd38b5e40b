"""A run on an environment that fails, hangs, stops answering and gives flat rewards at random, on two ranks:

1. every collection closes with exactly its groups, each voting rollout is trained once per epoch, no rollout twice, none lost:
   what is stored is what was trained, dropped or left over
2. the counts that are printed add up: rollouts, voters, failed, truncated, replaced groups; so does the index of what is stored
3. ahead of training or not (``max_staleness``), with groups beyond the collection's carried over
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evenstep.files import read_rollouts
from evenstep.rollout.refill import CollectionBuilder, RefillOptions
from evenstep.types import Rollout

ENVIRONMENT = '''
import asyncio
import random
from dataclasses import dataclass
from evenstep.rollout.environment import Score, Start

@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    pass

class Moody:
    """What goes wrong is drawn anew in each episode: siblings of a group differ, and so do runs."""
    Options = Nothing

    def __init__(self, index):
        self.index = index
        self.left = random.Random(index).randint(1, 9)

    @classmethod
    def for_task(cls, options, *, seed, split, index):
        return cls(index)

    async def reset(self):
        return Start(task="go", observation="a1 b2 c3")

    async def step(self, action):
        fate = random.random()
        if fate < 0.03:
            raise RuntimeError("moody")
        if fate < 0.04:
            await asyncio.sleep(3600)
        await asyncio.sleep(random.random() * 0.002)
        self.left -= 1
        return "d4 e5 f6 g7" if self.left else None

    async def score(self, episode):
        if self.index % 5 == 0:
            return Score(reward=0.7)  # a group without spread
        return Score(reward=random.choice([0.1, 0.35, 0.95]))
'''
CONFIG = """
[run]
dir = {folder!r}
num_collections = 5
[model]
path = "evenstep:ledger"
max_context_tokens = 64
[environment]
name = {environment!r}
[rollout]
num_prompts = 4
num_generations = 4
max_tokens_per_call = 4
max_calls = 12
generation_batch_rollouts = 8
drop_zero_spread = true
num_extra_prompts = 1
max_staleness = {max_staleness}
max_replacements = 50
step_timeout_s = 0.3
[compaction]
policy = "recency"
[plan]
max_tokens_per_gpu = 256
layout = "packed"
[train]
rollouts_per_window = 8
windows_per_collection = 2
epochs = 2
lr = 1e-3
[checkpoint]
every = 100
export = false
[evaluation]
num_tasks = 0
"""
NUM_GENERATIONS, NUM_GROUPS, NUM_COLLECTIONS, EPOCHS = 4, 4, 5, 2


def run(folder: Path, max_staleness: int) -> list[dict[str, Any]]:
    environment, config = folder / "moody.py", folder / "config.toml"
    environment.write_text(ENVIRONMENT)
    names = {"folder": str(folder / "run"), "environment": f"{environment}:Moody", "max_staleness": max_staleness}
    config.write_text(CONFIG.format(**names))
    found = subprocess.run(
        [sys.executable, "-m", "evenstep", "train", str(config), "--ranks", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("max_staleness", [0, 4])
def test_nothing_is_lost(tmp_path: Path, max_staleness: int) -> None:
    windows = run(tmp_path, max_staleness)
    assert len(windows) == NUM_COLLECTIONS * 2 * EPOCHS
    index = [json.loads(line) for line in (tmp_path / "run" / "collections.jsonl").read_text().splitlines()]
    assert [line["collection"] for line in index] == list(range(NUM_COLLECTIONS))
    seen: Counter[str] = Counter()
    task, version, carried = 0, 0, list[Rollout]()
    for collection in range(NUM_COLLECTIONS):
        stored = list(read_rollouts(tmp_path / "run" / "rollouts" / f"collection_{collection:06d}.jsonl.gz"))
        builder = CollectionBuilder(
            collection=collection,
            num_prompts=NUM_GROUPS,
            num_generations=NUM_GENERATIONS,
            first_task=task,
            options=RefillOptions(drop_zero_spread=True, num_extra_prompts=1, max_replacements=50),
            carried=carried,
            weight_versions=range(max(0, version - max_staleness), version + 1),
        )
        builder.add(stored)
        assert builder.missing() == ()
        assert {r.rollout_id for r in stored} == {r.rollout_id for r in builder.rollouts}
        closed = builder.close()
        ids = {r.rollout_id for r in closed.rollouts}
        assert len(ids) == NUM_GROUPS * NUM_GENERATIONS
        seen.update(ids)
        assert index[collection]["groups"] == [group.group_id for group in closed.groups]
        assert index[collection]["dropped"] == builder.dropped
        assert index[collection]["num_rollouts"] == len(stored)
        left = {r.rollout_id for r in builder.leftovers}
        dropped = {r.rollout_id for r in [*stored, *carried] if r.group_id in builder.dropped}
        assert ids | left | dropped == {r.rollout_id for r in [*stored, *carried]}
        assert not (ids & left or ids & dropped or left & dropped)
        mine = [line for line in windows if line["collection"] == collection]
        assert len(mine) == 2 * EPOCHS
        for epoch in range(EPOCHS):
            lines = [line for line in mine if line["epoch"] == epoch]
            assert sum(line["num_rollouts"] for line in lines) == len(ids)
            assert sum(line["num_voters"] for line in lines) == sum(r.is_voter for r in closed.rollouts)
            assert sum(line["num_failed"] for line in lines) == sum(r.status == "failed" for r in closed.rollouts)
            assert sum(line["num_truncated"] for line in lines) == sum(r.status == "truncated" for r in closed.rollouts)
            assert sum(line["num_replaced"] for line in lines) == len(builder.replaced)
            assert sum(line["num_trained_tokens"] for line in lines) == sum(
                r.num_sampled_tokens for r in closed.rollouts if r.is_voter
            )
        if max_staleness == 0:
            assert {line["staleness_max"] for line in mine} <= {0, 1, 2, 3, None}
        task, carried = task + builder.num_tasks, builder.leftovers
        version += sum(line["stepped"] for line in mine)
    assert set(seen.values()) == {1}
    assert sum(line["num_failed"] for line in windows) > 0
    assert sum(line["num_replaced"] for line in windows) > 0
