"""What a run leaves on disk, and what is taken back when it goes on from a checkpoint:

1. groups left over for a collection are replaced whole, and gone when a repeated collection leaves none
2. going back drops the lines of windows and collections that are done again, and keeps the evaluation made before them
3. a last line that a crash cut short is left out; a broken one before it is an error with its number
4. an infinite metric is null, so that every line is JSON
5. only one process trains in a folder; one that was killed leaves it free
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evenstep.errors import ConfigError, FileFormatError
from evenstep.train import run_folder
from evenstep.train.run_folder import RunFolder
from evenstep.types import Rollout


def opened(path: Path, window: int = 0, collection: int = 0) -> tuple[RunFolder, list[int]]:
    files = RunFolder(path)
    return files, [record["window"] for record in files.open("", window=window, collection=collection)]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_carried(tmp_path: Path) -> None:
    files, _ = opened(tmp_path)
    assert files.read_carried(1) == []
    first, second = (
        [Rollout(rollout_id=f"c0/p{p}/g0", group_id=f"c0/p{p}", prompt_id="t", reward=0.7)] for p in (4, 5)
    )
    for rollouts in (first, second, []):
        files.write_carried(1, rollouts)
        assert files.read_carried(1) == rollouts
    assert list(files.rollouts.iterdir()) == []


def test_going_back(tmp_path: Path) -> None:
    files, _ = opened(tmp_path)
    for window in range(4):
        files.append_metrics({"window": window, "eval_reward_mean": 0.1})
        files.append_metrics({"window": window})
        files.append_index({"collection": window // 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"window": 4, "los')
    _, evaluations = opened(tmp_path, window=2, collection=1)
    assert evaluations == [0, 1, 2]
    assert [record["window"] for record in lines(tmp_path / "metrics.jsonl")] == [0, 0, 1, 1, 2]
    assert lines(tmp_path / "collections.jsonl") == [{"collection": 0}, {"collection": 0}]
    _, evaluations = opened(tmp_path)  # from the start: the first evaluation is made again, too
    assert evaluations == lines(tmp_path / "metrics.jsonl") == []


def test_lines_are_json_whatever_the_metrics(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    files, _ = opened(tmp_path)
    infinite = {"kl": float("inf"), "loss": np.float64("nan"), "engine_trainer_kl": -float("inf"), "reward_mean": 0.5}
    files.append_metrics({"window": 0, "kl": None} | infinite)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"window": 1, "kl": Infinity}\n')  # of an earlier version
    opened(tmp_path, window=2)
    found = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found == [
        {"window": 0, "kl": None, "loss": None, "engine_trainer_kl": None, "reward_mean": 0.5},
        {"window": 1, "kl": None},
    ]


def test_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"window": 0}\nnonsense\n{"window": 1}\n')
    with pytest.raises(FileFormatError, match=r"metrics.jsonl, line 2: a JSON object was expected, found 'nonsense'"):
        opened(tmp_path, window=2)


def test_a_folder_is_one_process_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "HELD_WAIT_S", 0.3)
    holder = (
        "import pathlib, sys, time\n"
        "from evenstep.train.run_folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).held():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="no other process trains in"), RunFolder(tmp_path).held():
            pass
    finally:
        process.kill()
        process.communicate()
    with RunFolder(tmp_path).held():  # free again once that process is gone
        pass
    with RunFolder(tmp_path).held():
        pass
