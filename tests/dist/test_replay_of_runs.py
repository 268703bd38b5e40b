"""A replay takes the steps that its run took: of whole models, of adapters and with a critic, from the start and from a
checkpoint.

Locks:

1. the first arm of a replay finds the loss and gradient norm that the run wrote for each window, from the first one on
   and from a checkpoint's window on, with the checkpoint's moments, learning rate and scores
2. arms of other layouts, also ``auto``, find the first arm's gradient, and every row once
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
run = {num_collections = 3}
model = {path = "evenstep:ledger", max_context_tokens = 64}
environment = {name = "ledger", max_pages = 5}
compaction = {policy = "summary"}
plan = {max_tokens_per_gpu = 256}
checkpoint = {every = 1, keep = 3, export = false}
evaluation = {num_tasks = 0}
[train]
rollouts_per_window = 4
windows_per_collection = 2
lr = 1e-3
max_grad_norm = 1.0
schedule = "cosine"
[rollout]
num_prompts = 2
num_generations = 4
max_tokens_per_call = 4
generation_batch_rollouts = 8
"""
WINDOWS_PER_COLLECTION, NUM_WINDOWS = 2, 6
SPREAD = ("rollout.drop_zero_spread=true", "rollout.max_replacements=100", "train.kl_coef=0.1")  # every window steps
KINDS = {
    "whole": SPREAD,
    "adapters": (*SPREAD, "lora.rank=4"),
    # advantages follow from the values of a critic that learns: a replay's has to learn alike
    "critic": (*SPREAD, "credit.estimator=gae", "credit.lam=0.95", "credit.truncated_value=bootstrap", "critic.lr=1e-2"),
}


def evenstep(*arguments: str) -> None:
    command = [sys.executable, "-m", "evenstep", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def replayed(run: Path, out: Path, *arguments: str) -> dict[str, Any]:
    arms = ["--arm", "padded", "--arm", "packed", "--arm", "auto"]
    evenstep("replay", str(run), "--ranks", "2", "--max-rel", "1e-5", *arms, *arguments, "--json", str(out))
    return json.loads(out.read_text())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_steps_of_the_run(tmp_path: Path, kind: str) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    run = tmp_path / "run"
    settings = [word for setting in KINDS[kind] for word in ("--set", setting)]
    evenstep("train", str(tmp_path / "run.toml"), "--run-dir", str(run), "--ranks", "2", *settings)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if "grad_norm" in line]
    assert len(taken) == NUM_WINDOWS
    assert len({line["grad_norm"] for line in taken}) == NUM_WINDOWS

    checkpoint = run / "checkpoints" / f"window_{WINDOWS_PER_COLLECTION:06d}"
    for first, arguments in ((0, ()), (WINDOWS_PER_COLLECTION, ("--checkpoint", str(checkpoint)))):
        result = replayed(run, tmp_path / "out.json", *arguments)
        assert result["passed"]
        again = result["arms"]["padded"]["steps"]
        assert [step["window"] for step in again] == [line["window"] for line in taken[first:]]
        for step, line in zip(again, taken[first:], strict=True):
            found = [step["loss"], step["grad_norm"], step["lr"]]
            assert found == pytest.approx([line["loss"], line["grad_norm"], line["lr"]], rel=1e-5, abs=1e-9), step
        for name, arm in result["arms"].items():
            assert arm["rows_consumed"] == sum(line["num_rows"] for line in taken[first:]), name
            assert arm["steps_completed"] == NUM_WINDOWS - first, name
