"""What is locked here, with the real command:

1. Mistakes are short messages with exit code 2, before torch is loaded.
2. A replay of a file prints its table and writes its figures; an arm that passes gives exit code 0, one that fails 1.
3. A rank that the system kills is a line of the result.
4. Ctrl-C ends all ranks, leaves no file behind, and gives exit code 130.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evenstep.cli import app
from evenstep.files import write_rollouts
from evenstep.types import Call, Rollout

CONFIG = """
run = {dir = "unused", num_collections = 2}
model = {path = "evenstep:ledger", max_context_tokens = 64}
environment = {name = "ledger"}
rollout = {num_prompts = 2, num_generations = 2, max_tokens_per_call = 8}
plan = {max_tokens_per_gpu = 64}
train = {rollouts_per_window = 4, lr = 1e-3}
"""
TESTS = Path(__file__).parents[1]
# ends rank 1 of one arm as the system does when memory runs out
KILLER = """
import os, sys
folder = next((a for a in sys.orig_argv if "launch_" in a), "")
if folder and os.environ.get("RANK") == "1" and '"name": "packed"' in open(folder + "/launch.json").read():
    sys.path.append({tests!r})
    from replay_faults import Fault, install
    install(Fault(arm="packed", rank=1, kind="kill"))
"""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    calls = tuple(
        Call(order=i, prompt_ids=(5, 6, 7), output_ids=(8 + i,) * 5, logprobs=(-1.0,) * 5, break_reason=reason)
        for i, reason in enumerate((None, "compaction"))
    )
    rollouts = [
        Rollout(rollout_id=f"{g}/{r}", group_id=g, prompt_id=g, reward=float(r), calls=calls[: 1 + r])
        for g in "abcd"
        for r in range(2)
    ]
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "scratch").mkdir()
    return tmp_path


def start(recording: Path, *arguments: str, path: str = "") -> subprocess.Popen[str]:
    paths = [path, os.environ.get("PYTHONPATH", "")]
    files = [str(recording / "rollouts.jsonl"), "--config", str(recording / "config.toml")]
    places = ["--scratch", str(recording / "scratch"), "--json", str(recording / "out.json")]
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", "replay", *files, "--ranks", "2", *arguments, *places],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in paths if part), "OMP_NUM_THREADS": "1"},
    )


def result_of(recording: Path) -> dict[str, Any]:
    assert list((recording / "scratch").iterdir()) == []
    return json.loads((recording / "out.json").read_text())


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["absent"], "found neither a run's folder nor a file"),
        (["."], "a run folder has a config.toml, found none"),
        (["rollouts.jsonl"], "is a file of rollouts"),
        (["rollouts.jsonl", "--config", "config.toml", "--ranks", "0"], "--ranks must be at least 1"),
        (["rollouts.jsonl", "--config", "config.toml", "--checkpoint", "x"], "found no state.json in 'x'"),
        (["rollouts.jsonl", "--config", "config.toml", "--model", "x"], "found no folder 'x'"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts.jsonl").write_text("")
    # beside a folder of a run its own configuration counts
    if arguments != ["."]:
        (tmp_path / "config.toml").write_text(CONFIG)
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_exit_codes_and_a_killed_rank(recording: Path) -> None:
    site = recording / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(KILLER.format(tests=str(TESTS)))
    arms = ["--arm", "padded", "--arm", "fixed", "--arm", "packed", "--max-rel", "1e-5", "--repeats", "2"]
    process = start(recording, *arms, path=str(site))
    output, messages = process.communicate(timeout=500)
    assert process.returncode == 1, messages
    result = result_of(recording)
    assert [arm["status"] for arm in result["arms"].values()] == ["ok", "ok", "crashed"]
    assert result["arms"]["fixed"]["passed"]
    assert result["arms"]["fixed"]["rows_consumed"] == 12
    killed = result["arms"]["packed"]
    assert killed["steps_completed"] == 1
    assert "rank 1 was ended by signal 9, as the system does when memory runs out" in killed["reason"]
    assert "packed failed: crashed: in step 1" in output
    assert "Traceback" not in messages
    assert "\x1b" not in output + messages


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sharded_arms_and_float64(recording: Path) -> None:
    arms = ["--arm", "fixed", "--arm", "packed,train.sharding=fsdp2", "--max-rel", "1e-10", "--dtype", "float64"]
    process = start(recording, *arms, "--own-weights")
    output, messages = process.communicate(timeout=280)
    assert process.returncode == 0, output + messages
    sharded = result_of(recording)["arms"]["packed,train.sharding=fsdp2"]
    assert 0 < sharded["gradient_relative_difference_max"] < 1e-10
    assert sharded["update_cosine_min"] > 1 - 1e-9


@pytest.mark.long
@pytest.mark.timeout(200)
def test_interrupted(recording: Path) -> None:
    process = start(recording, "--arm", "fixed")
    try:
        deadline = time.monotonic() + 120
        while not list((recording / "scratch").glob("*/launch_0/stack.0")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, messages
    assert "nothing is left behind" in messages
    assert "Traceback" not in messages
    assert list((recording / "scratch").iterdir()) == []
    assert not (recording / "out.json").exists()
