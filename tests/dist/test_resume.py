"""Locks:

1. a run that was killed (SIGKILL) between two steps and resumed ends with bit-equal weights, the same metrics and the
   same rollouts as one that was not
2. rollouts that were generated and not yet trained are taken from disk, not generated again
3. a run killed before its first checkpoint can be resumed too, and one whose last metrics line was cut short
4. the same holds with a critic (its weights and moments too), with adapters, and with KL in the reward, replicated and
   with FSDP2
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from evenstep.files import read_rollouts
from evenstep.train.run_folder import RunFolder

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
{train}
[checkpoint]
every = {every}
[evaluation]
num_tasks = 0
{sections}
"""
GAE = """
[credit]
estimator = "gae"
lam = 0.95
truncated_value = "bootstrap"
"""
LORA = """
[lora]
rank = 4
"""
KL = """
kl_coef = 0.05
kl_in = "reward"
kl_estimator = "k1"
"""
FSDP2 = 'sharding = "fsdp2"\n'
# name -> (what is added to [train], sections that are added)
KINDS = {"plain": ("", ""), "gae": (KL + FSDP2, GAE), "lora": (KL, LORA), "lora-gae": (FSDP2, LORA + GAE)}
TIMINGS = ("tokens_per_second", "peak_memory_bytes", "seconds_generate", "seconds_score", "seconds_train")


def start(folder: Path, *flags: str, every: int = 1, kind: str = "plain") -> subprocess.Popen[str]:
    config = folder.with_suffix(".toml")
    train, sections = KINDS[kind]
    config.write_text(CONFIG.format(folder=str(folder), every=every, train=train, sections=sections))
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
    os.killpg(process.pid, signal.SIGKILL)  # the launcher; its ranks end by themselves
    with RunFolder(folder).held():  # once they have
        pass
    process.communicate()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    finish(start(folder))
    return folder


def assert_equal_runs(folder: Path, reference: Path) -> None:
    assert windows(folder) == windows(reference)
    exported = sorted(path.relative_to(reference) for path in reference.glob("*/*.safetensors"))
    assert exported
    for path in exported:
        ours, theirs = (load_file(f / path) for f in (folder, reference))
        assert ours.keys() == theirs.keys()
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs), path
    ours, theirs = (saved_state(f) for f in (folder, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for path in sorted((reference / "rollouts").iterdir()):
        assert list(read_rollouts(folder / "rollouts" / path.name)) == list(read_rollouts(path))


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the newest checkpoint, by name; the optimizers' numbers that are no tensors left out."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    reader = FileSystemReader(newest / "dcp")
    found: dict[str, torch.Tensor] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gae", marks=pytest.mark.long),
        pytest.param("lora", marks=pytest.mark.long),
        pytest.param("lora-gae", marks=pytest.mark.long),
    ],
)
def test_other_models_go_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole, kind=kind))
    kill_after(start(killed, kind=kind), killed, 3)
    finish(start(killed, "--resume", kind=kind))
    assert_equal_runs(killed, whole)
    saved = saved_state(whole)
    moments = {name.split(".")[0] for name in saved if name.endswith(".exp_avg")}
    assert moments == {"policy", "critic"} if "gae" in kind else {"policy"}
    assert all(float(value.abs().max()) > 0 for name, value in saved.items() if name.endswith("exp_avg_sq"))
    if "gae" in kind:
        assert any(name.startswith("critic.") and "score" in name for name in saved)
        assert (whole / "critic" / "model.safetensors").exists()
    if "lora" in kind:
        assert (whole / "adapter" / "adapter_model.safetensors").exists()


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
