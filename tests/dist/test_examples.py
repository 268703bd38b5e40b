"""Locks: the examples for own loops and own plans run as their docstrings say, and the loop prints the same losses,
norms and probabilities in one process and on two sharded ranks; the demo trains in layout tree with fewer tokens computed
than its rows have, and the loss and gradient of layout padded. Long: tiny models that a script makes, gpt-oss and a hybrid, take
optimizer steps on rollouts of the agent loop on two ranks, exact in the first window, and learn."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenstep.files import read_rollouts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def output(*command: str) -> str:
    run = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        stdout, stderr = run.communicate(timeout=100)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)  # the launcher and its ranks
    assert run.returncode == 0, stdout + stderr
    return stdout


@pytest.mark.timeout(330)
def test_own_loop() -> None:
    script = str(EXAMPLES / "own_loop.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone, sharded = output(script), output(*torchrun, script, "--shard")
    assert alone.count("step ") == 5
    assert "in 3 micro-batches a rank" in alone
    assert "in 2 micro-batches a rank" in sharded
    assert len({re.sub(r"in \d micro-batches", "", text) for text in (alone, sharded)}) == 1


@pytest.mark.timeout(330)
@pytest.mark.long
def test_tree(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for name in ("ledger", "ledger_tree"):
        folder = tmp_path / name
        settings = {
            "run.dir": folder,
            "run.num_collections": 1,
            "rollout.num_prompts": 2,
            "train.rollouts_per_window": 16,
            "checkpoint.every": 1,
            "evaluation.every": 0,
        }
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        output("-m", "evenstep", "train", str(EXAMPLES / f"{name}.toml"), *given)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found += [line for line in lines if "loss" in line]  # others are evaluations
    padded, tree = found
    assert padded["padding_efficiency"] <= 1 < tree["padding_efficiency"]
    for name in ("num_rows", "num_trained_tokens", "reward_mean"):
        assert tree[name] == padded[name]
    for name in ("loss", "grad_norm"):
        assert tree[name] == pytest.approx(padded[name], rel=1e-4, abs=1e-6)


@pytest.mark.long
@pytest.mark.timeout(330)
@pytest.mark.parametrize("adapted", [{}, {"lora.rank": 2, "train.activation_checkpointing": "true"}])
def test_digits(adapted: dict[str, Any], tmp_path: Path) -> None:
    policy, folder = tmp_path / "policy", tmp_path / "run"
    output(str(EXAMPLES.parent / "scripts" / "make_vision_policy.py"), str(policy))
    settings = {
        "run.dir": folder,
        "run.num_collections": 3,
        "model.path": policy,
        "rollout.num_prompts": 4,
        "train.rollouts_per_window": 32,
        "evaluation.every": 3,
        "evaluation.num_tasks": 8,
        "checkpoint.every": 3,
    } | adapted
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    output("-m", "evenstep", "train", str(EXAMPLES / "digits.toml"), *given, "--ranks", "2")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in lines if "loss" in line]
    assert [line["num_rollouts"] for line in windows] == [32, 32, 32]
    assert all(line["stepped"] and line["grad_norm"] > 0 for line in windows)
    assert all(line["num_rows"] > 32 for line in windows)  # older pictures were dropped
    for path in sorted((folder / "rollouts").glob("collection_*")):
        rollouts = list(read_rollouts(path))
        assert {len(call.media) for rollout in rollouts for call in rollout.calls} >= {1, 2}
        assert all(len({image.digest for c in rollout.calls for image in c.media}) == 4 for rollout in rollouts if rollout.status == "ok")
    assert (folder / "adapter" / "adapter_model.safetensors").is_file() == bool(adapted)
    exported = list(folder.rglob("preprocessor_config.json"))
    assert len(exported) == 1
    assert (exported[0].parent / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("model_type", "layout", "settings"),
    [("gpt_oss", "tree", {}), ("lfm2", "padded", {"plan.layout": "auto", "train.moe_balance_coef": 0})],
)
def test_tiny_models(model_type: str, layout: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    output(str(EXAMPLES.parent / "scripts" / "make_tiny_model.py"), model_type, str(model))
    settings = {"run.dir": tmp_path / "run", "model.path": model} | settings
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    output("-m", "evenstep", "train", str(EXAMPLES / "gpt_oss.toml"), "--ranks", "2", *given)
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["stepped"] for line in found] == [True] * 8
    assert {line["layout"] for line in found} == {layout}
    assert max(line["engine_trainer_kl"] for line in found) < 1e-8
    assert found[0]["ratio_max_deviation"] == 0.0
    assert all((line["moe_balance"] is not None) == (model_type == "gpt_oss") for line in found)
    assert found[-1]["reward_mean"] > found[0]["reward_mean"] + 0.1


def test_own_plan() -> None:
    assert "micro-batch 0, rank 0: rows" in output(str(EXAMPLES / "own_plan.py"))
