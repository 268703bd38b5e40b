"""What is locked here:

1. A run folder's windows are those that were trained: groups as each collection closed with them, carried ones too,
   dropped ones not, every epoch, failed rollouts without calls, truncated ones without a vote where the run says so.
2. A file's groups are taken in their order, whole collections of them; what is left over is counted.
3. Half a group, a folder without a run, and too little for a window are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenstep.config import Config, load_config
from evenstep.errors import CollectionError, EvenstepError, FileFormatError
from evenstep.files import write_rollouts
from evenstep.replay.recorded import read_recording
from evenstep.types import Call, Rollout, Status

CONFIG = """
run = {dir = "unused", num_collections = 2}
model = {path = "evenstep:ledger", max_context_tokens = 64}
environment = {name = "ledger"}
rollout = {num_prompts = 2, num_generations = 2, max_tokens_per_call = 4, truncated = "mask"}
plan = {max_tokens_per_gpu = 64}
train = {rollouts_per_window = 2, windows_per_collection = 2, epochs = 2, lr = 1e-3}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.toml").write_text(CONFIG)
    return load_config([tmp_path / "config.toml"])


def group(name: str, statuses: tuple[Status, ...] = ("ok", "ok")) -> list[Rollout]:
    call = Call(order=0, prompt_ids=(1,), output_ids=(2,), logprobs=(-1.0,))
    return [
        Rollout(
            rollout_id=f"{name}/g{i}",
            group_id=name,
            prompt_id=name,
            reward=float(i),
            status=status,
            calls=(call,),
        )
        for i, status in enumerate(statuses)
    ]


def run_folder(folder: Path) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    write_rollouts(
        folder / "rollouts" / "collection_000000.jsonl.gz",
        [*group("a"), *group("dropped"), *group("b", ("ok", "failed")), *group("left over")],
    )
    write_rollouts(folder / "rollouts" / "collection_000001.jsonl.gz", group("c", ("truncated", "ok")))
    lines = [
        {"collection": 0, "file": "collection_000000.jsonl.gz", "groups": ["a", "b"]},
        {"collection": 1, "file": "collection_000001.jsonl.gz", "groups": ["left over", "c"]},
    ]
    (folder / "collections.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run(config: Config, tmp_path: Path) -> None:
    windows = read_recording(run_folder(tmp_path / "run"), config).windows
    assert [(w.window, w.collection, w.epoch, w.groups[0].group_id) for w in windows] == [
        (0, 0, 0, "a"),
        (1, 0, 0, "b"),
        (2, 0, 1, "a"),
        (3, 0, 1, "b"),
        (4, 1, 0, "left over"),
        (5, 1, 0, "c"),
        (6, 1, 1, "left over"),
        (7, 1, 1, "c"),
    ]
    failed, truncated = windows[1].rollouts[1], windows[5].rollouts[0]
    assert (failed.calls, failed.reward, failed.is_voter) == ((), None, False)
    assert (len(truncated.calls), truncated.is_voter) == (1, False)
    assert windows[5].rollouts[1].is_voter
    later = read_recording(tmp_path / "run", config, first_collection=1, num_windows=3).windows
    assert [w.window for w in later] == [4, 5, 6]


def test_a_file(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [r for name in "abcde" for r in group(name)])
    found = read_recording(path, config)
    assert [w.groups[0].group_id for w in found.windows] == ["a", "b", "a", "b", "c", "d", "c", "d"]
    assert found.num_unused_rollouts == 2


@pytest.mark.parametrize(
    "rollouts, error, expected",
    [
        (group("a")[:1], CollectionError, "group a must have rollout.num_generations = 2 rollouts, found 1"),
        (group("a"), FileFormatError, "at least one whole window of 2 rollouts was promised"),
        ([], FileFormatError, "found 0 rollouts"),
    ],
)
def test_refused(
    config: Config, tmp_path: Path, rollouts: list[Rollout], error: type[EvenstepError], expected: str
) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, rollouts)
    with pytest.raises(error, match=expected):
        read_recording(path, config)


def test_no_run(config: Config, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"found no collections.jsonl"):
        read_recording(tmp_path, config)
