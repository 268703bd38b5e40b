"""Locks:

1. a run that was killed (SIGKILL) between two steps and resumed ends with bit-equal weights, the same metrics and the
   same rollouts as one that was not
2. rollouts that were generated and not yet trained are taken from disk, not generated again
3. a run killed before its first checkpoint can be resumed too, and one whose last metrics line was cut short
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from evenstep.files import read_rollouts

CONFIG = """
[run]
dir = {folder!r}
num_collections = 4
[model]
path = "evenstep:ledger"
max_context_tokens = 64
[environment]
name = "ledger"
max_pages = 5
[rollout]
num_prompts = 4
num_generations = 4
max_tokens_per_call = 4
generation_batch_rollouts = 8
[compaction]
policy = "summary"
[plan]
max_tokens_per_gpu = 512
[train]
rollouts_per_window = 8
windows_per_collection = 2
lr = 1e-3
max_grad_norm = 1.0
schedule = "cosine"
[checkpoint]
every = {every}
[evaluation]
num_tasks = 0
"""
TIMINGS = ("tokens_per_second", "peak_memory_bytes", "seconds_generate", "seconds_score", "seconds_train")


def start(folder: Path, *flags: str, every: int = 1) -> subprocess.Popen[str]:
    config = folder.with_suffix(".toml")
    config.write_text(CONFIG.format(folder=str(folder), every=every))
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", "train", str(config), "--ranks", "2", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def windows(folder: Path) -> list[dict[str, object]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


def kill_after(process: subprocess.Popen[str], folder: Path, num_windows: int) -> None:
    deadline = time.monotonic() + 100
    while len(windows(folder)) < num_windows:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    finish(start(folder))
    return folder


def assert_equal_runs(folder: Path, reference: Path) -> None:
    assert windows(folder) == windows(reference)
    ours, theirs = (load_file(f / "model" / "model.safetensors") for f in (folder, reference))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    for path in sorted((reference / "rollouts").iterdir()):
        assert list(read_rollouts(folder / "rollouts" / path.name)) == list(read_rollouts(path))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_windows", "every"),
    [
        pytest.param(3, 1, id="after_a_checkpoint"),
        pytest.param(2, 4, id="before_the_first", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(uninterrupted: Path, tmp_path: Path, num_windows: int, every: int) -> None:
    folder = tmp_path / "killed"
    kill_after(start(folder, every=every), folder, num_windows)
    stored = {path.name: path.stat().st_mtime_ns for path in (folder / "rollouts").iterdir()}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"window": 3, "opt')  # what a crash in the middle of a line leaves
    finish(start(folder, "--resume", every=every))
    assert_equal_runs(folder, uninterrupted)
    assert all((folder / "rollouts" / name).stat().st_mtime_ns == at for name, at in stored.items())
