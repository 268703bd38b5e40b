"""[P23] A run that stops at any point between two steps loses no rollout and trains none twice:

1. collections of 6 rollouts, windows of 3, and over-generation that leaves 2 rollouts in the store for the next
   collection: after a stop behind any window and a resume, the rollouts that were trained, the metrics and the final
   weights are those of a run that was not stopped
2. what was left over is trained in the next collection, first, and each rollout once over the whole run
3. a resume after the last window trains nothing
4. another run is not begun in its folder: it would train on these rollouts
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.config import load_config
from evenstep.errors import ConfigError
from evenstep.train.run import run_training

CONFIG = """
run = {{dir = {folder!r}, num_collections = 3}}
model = {{path = "evenstep:ledger", max_context_tokens = 64}}
environment = {{name = "ledger", max_pages = 3}}
compaction = {{policy = "summary"}}
plan = {{max_tokens_per_gpu = 256}}
credit = {{estimator = "reinforce_pp"}}
checkpoint = {{every = {every}}}
evaluation = {{num_tasks = 0}}
[rollout]
num_prompts = 6
num_generations = 1
num_extra_prompts = 2
max_staleness = 2
max_tokens_per_call = 4
[train]
rollouts_per_window = 3
windows_per_collection = 2
lr = 1e-3
"""
NUM_WINDOWS = 6
TIMINGS = ("tokens_per_second", "peak_memory_bytes", "seconds_generate", "seconds_score", "seconds_train")


class StoppedError(Exception):
    pass


class StopsAfter:
    """A reporter that ends the run behind a window, when everything of it is on disk."""

    def __init__(self, window: int | None) -> None:
        self._window = window

    def window(self, metrics: dict[str, Any]) -> None:
        if metrics["window"] == self._window:
            raise StoppedError

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def train(folder: Path, *, every: int, stop_after: int | None = None, resume: bool = False) -> None:
    config = folder.with_suffix(".toml")
    config.write_text(CONFIG.format(folder=str(folder), every=every))
    run_training(load_config([config]), resume=resume, reporter=StopsAfter(stop_after))  # type: ignore[arg-type]


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in found]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, every=1)
    return folder


def test_leftovers_are_trained_next_and_all_once(whole: Path) -> None:
    index = lines(whole, "collections.jsonl")
    assert [len(line["groups"]) for line in index] == [6, 6, 6]
    assert [line["num_carried"] for line in index] == [2, 2, 2]
    assert [line["groups"][:2] for line in index[1:]] == [["c0/p6", "c0/p7"], ["c1/p4", "c1/p5"]]
    assert not any(line["dropped"] for line in index)
    trained = Counter(group for line in index for group in line["groups"])
    assert len(trained) == 18
    assert set(trained.values()) == {1}
    assert [line["num_rollouts"] for line in lines(whole, "metrics.jsonl")] == [3] * NUM_WINDOWS


@pytest.mark.parametrize(
    "stop_after, every",
    [
        pytest.param(stop, every, marks=() if (stop, every) in ((2, 1), (3, 2)) else pytest.mark.long)
        for every in (1, 2)
        for stop in range(NUM_WINDOWS)
    ],
)
def test_stopped_anywhere(whole: Path, tmp_path: Path, stop_after: int, every: int) -> None:
    folder = tmp_path / "run"
    with pytest.raises(StoppedError):
        train(folder, every=every, stop_after=stop_after)
    train(folder, every=every, resume=True)
    assert lines(folder, "collections.jsonl") == lines(whole, "collections.jsonl")
    assert lines(folder, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    expected, found = weights(whole), weights(folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if stop_after == NUM_WINDOWS - 1:
        train(folder, every=every, resume=True)  # behind the last window
        assert lines(folder, "metrics.jsonl") == lines(whole, "metrics.jsonl")


def test_no_other_run_begins_in_its_folder(whole: Path) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"run\.dir must be a new folder, found a run in .*--resume"):
        train(whole, every=1)
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before
