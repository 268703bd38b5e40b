"""Check what a short demo run left behind: python .ci/check_demo.py RUN_FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from evenstep.config import load_config
from evenstep.files import read_rollouts


def check(folder: Path) -> str:
    config = load_config([folder / "config.toml"])
    train, rollout = config.train, config.rollout
    num_collections = config.run.num_collections
    num_windows = num_collections * train.windows_per_collection * train.epochs
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    windows = [record for record in records if "eval_reward_mean" not in record]
    evaluations = [record for record in records if "eval_reward_mean" in record]

    assert [window["window"] for window in windows] == list(range(num_windows))
    assert {window["num_rollouts"] for window in windows} == {train.rollouts_per_window}
    assert len({window["num_rows"] for window in windows}) > 1, "rows vary from step to step"
    assert all(window["num_rows"] > window["num_rollouts"] for window in windows), "contexts were compacted"
    assert max(window["segments_per_rollout_max"] for window in windows) >= 5
    assert any(window["stepped"] for window in windows)
    for window in windows:
        assert window["stepped"] == (window["skip_reason"] is None)
        assert 0 < window["padding_efficiency"] <= 1
        assert 0 < window["lockstep_efficiency"] <= 1
        assert window["num_trained_tokens"] > 0
        assert window["grad_norm"] > 0 or not window["stepped"]
    assert [evaluation["window"] for evaluation in evaluations] == [0, num_windows]
    check_files(folder, num_collections, rollout.num_prompts * rollout.num_generations, num_windows)
    return f"{num_windows} windows, held-out {evaluations[0]['eval_reward_mean']:.3f} before any step"


def check_files(folder: Path, num_collections: int, num_rollouts: int, num_windows: int) -> None:
    files = sorted((folder / "rollouts").iterdir())
    assert len(files) == num_collections
    for file in files:
        rollouts = list(read_rollouts(file))
        assert len(rollouts) == num_rollouts
        assert any(call.break_reason == "compaction" for rollout in rollouts for call in rollout.calls)
    plans: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted((folder / "plans").iterdir())]
    assert len(plans) >= num_collections
    assert len(plans) <= num_windows
    for plan in plans:
        assert plan["num_ranks"] == 2
        assert len({len(cells) for cells in plan["cells"]}) == 1, "every rank has the same number of micro-batches"
    assert any((folder / "checkpoints").iterdir())
    assert (folder / "model" / "model.safetensors").stat().st_size > 0


if __name__ == "__main__":
    sys.stdout.write(f"The demo's run folder holds what it should: {check(Path(sys.argv[1]))}\n")
