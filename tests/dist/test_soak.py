"""A run whose environment fails, hangs, forks and fills the context at random, and that is killed now and then:

1. every collection closes with exactly its groups, each rollout in it is trained once per epoch and none is lost; the
   counts that are printed add up; ahead of training or not (``max_staleness``), with groups carried over
2. a rollout taken out of a file, put in twice, or another's in its place is found; so are a window with other counts or
   another mean reward, a window logged twice, an index that names other groups, and memory that grows

``EVENSTEP_SOAK_MINUTES`` says how long it trains; `benchmarks/soak.py` is the same by hand.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evenstep.files import read_rollouts, write_rollouts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
MINUTES = float(os.environ.get("EVENSTEP_SOAK_MINUTES", "0.5"))

pytestmark = [pytest.mark.long, pytest.mark.timeout(600 + 120 * MINUTES)]


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The run folders, and what was printed about each of them."""
    folder = tmp_path_factory.mktemp("soak")
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--minutes", str(MINUTES), "--folder", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    decoder, text, results = json.JSONDecoder(), found.stdout.strip(), list[dict[str, Any]]()
    while text:
        result, end = decoder.raw_decode(text)
        results.append(result)
        text = text[end:].strip()
    return folder, results


def test_nothing_is_lost(soaked: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = soaked
    assert [result["max_staleness"] for result in results] == [0, 4]
    for result in results:
        counts = result["counts"]
        assert counts["stored"] == counts["trained"] + counts["dropped"] + counts["left over"]
        assert counts["trained"] == 16 * counts["collections"]
        assert counts["trained tokens"] == counts["sampled tokens"] > 0
        for name in ("compaction", "fork", "subagent"):
            assert counts[f"{name} segments"] > 0
        for name in ("failed", "rejected calls", "groups dropped", "kills"):
            assert counts[name] > 0
        assert len(result["memory"]) == 3
        for name in ("process 1", "process 2"):
            assert 0 < result["memory"][name]["mib"][-1] < result["memory"][name]["resident_mib"][-1]


def without_one(folder: Path) -> None:
    path = sorted((folder / "rollouts").glob("collection_*"))[-1]
    write_rollouts(path, list(read_rollouts(path))[:-1])


def with_another(folder: Path) -> None:
    path = sorted((folder / "rollouts").glob("collection_*"))[-1]
    first, *others = read_rollouts(path)
    write_rollouts(path, [replace(first, rollout_id="c99/p0/g0", group_id="c99/p0"), *others])


def swapped_rewards(folder: Path) -> None:
    path = sorted((folder / "rollouts").glob("collection_*"))[0]
    write_rollouts(path, [replace(r, reward=None if r.reward is None else r.reward + 0.01) for r in read_rollouts(path)])


def _change(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def window_twice(folder: Path) -> None:
    _change(folder / "metrics.jsonl", lambda records: records.insert(3, records[2]))


def one_token_fewer(folder: Path) -> None:
    def change(records: list[dict[str, Any]]) -> None:
        next(r for r in records if r["num_trained_tokens"])["num_trained_tokens"] -= 1

    _change(folder / "metrics.jsonl", change)


def other_groups(folder: Path) -> None:
    def change(records: list[dict[str, Any]]) -> None:
        records[0]["groups"] = records[0]["groups"][::-1]

    _change(folder / "collections.jsonl", change)


@pytest.mark.parametrize(
    "damage, message",
    [
        (without_one, "are not in its file|rollouts in its file"),
        (with_another, "it asked for once|takes each rollout"),
        (swapped_rewards, "other rewards|closed with other groups|dropped"),
        (window_twice, "windows are logged once each"),
        (one_token_fewer, "num_trained_tokens"),
        (other_groups, "closed with other groups"),
    ],
)
def test_what_is_wrong_is_found(
    soaked: tuple[Path, list[dict[str, Any]]],
    soak: ModuleType,
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    shutil.copytree(soaked[0] / "synchronous" / "run", tmp_path / "run", ignore=shutil.ignore_patterns("check*"))
    soak.check(tmp_path / "run", 0)
    damage(tmp_path / "run")
    with pytest.raises(Exception, match=message):
        soak.check(tmp_path / "run", 0)


def test_memory_that_grows_is_found(soak: ModuleType, tmp_path: Path) -> None:
    arm = soak.Arm(name="ahead", folder=tmp_path, seed=0)
    seconds = [float(second) for second in range(900)]
    buffer = 4 * 2**20  # of rank 0 towards the end, but for a moment now and then
    cases = ((0, 0, False), (500, 0, False), (500, buffer, False), (50_000, 0, True), (50_000, buffer, True))
    for growth, passing, is_found in cases:
        # resident memory stands still and is not what is judged; a launcher without notes is judged by it
        flat = [10**8] * 900
        sizes = [10**8 + growth * t + passing * (t > 600 and t % 20 > 0) for t in range(900)]
        arm.memory_folder.mkdir(exist_ok=True)
        notes = "".join(f"{t} {size}\n" for t, size in zip(seconds, sizes, strict=True))
        (arm.memory_folder / "77").write_text("-9.5 5\n" + notes + "1000.0 5\n")  # before and after the stretch
        arm.memory = {"process 1": soak.Memory(pid=77, seconds=seconds, sizes=flat)}
        found = soak.memory_of(arm, num_collections=900, bytes_per_collection=100_000)
        if is_found:
            with pytest.raises(soak.SoakError, match="process 1: memory grows by"):
                soak.check_memory(found)
        else:
            soak.check_memory(found)
        assert abs(found["process 1"]["bytes_per_collection"] - growth) <= 1 + growth / 500
        assert found["process 1"]["resident_bytes_per_collection"] == 0
    arm.memory = {"launcher": soak.Memory(pid=78, seconds=seconds, sizes=sizes)}
    with pytest.raises(soak.SoakError, match="launcher: memory grows by"):
        soak.check_memory(soak.memory_of(arm, num_collections=900, bytes_per_collection=100_000))
