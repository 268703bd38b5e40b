"""The page that a run leaves behind:

1. a run ends with report.html, about all of its windows and evaluations
2. a page that cannot be written is said, and the run is done all the same
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evenstep.config import Config, load_config
from evenstep.report.html_page import run_page
from evenstep.train.run import run_training
from report_runs import page_data

# one process saves its checkpoint alone, which is meant
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

CONFIG = """
run = {dir = "unused", num_collections = 1}
model = {path = "evenstep:ledger", max_context_tokens = 64}
environment = {name = "ledger"}
rollout = {num_prompts = 1, num_generations = 2, max_tokens_per_call = 4}
compaction = {policy = "summary"}
plan = {max_tokens_per_gpu = 128}
train = {rollouts_per_window = 2, lr = 1e-3}
evaluation = {num_tasks = 2}
"""


class Listener:
    """What rank 0 says."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.is_finished = False

    def start(self, info: Mapping[str, Any]) -> None: ...
    def phase(self, name: str) -> None: ...
    def window(self, metrics: Mapping[str, Any]) -> None: ...
    def evaluation(self, result: Mapping[str, Any]) -> None: ...

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.is_finished = True


def config_of(folder: Path) -> Config:
    path = folder / "config.toml"
    path.write_text(CONFIG)
    return load_config([path], [f"run.dir={str(folder / 'run')!r}"])


def test_a_run_leaves_its_page(tmp_path: Path) -> None:
    listener = Listener()
    run_training(config_of(tmp_path), reporter=listener)
    assert listener.notices == []
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert html == run_page(tmp_path / "run").html
    data = page_data(html)
    assert data["curves"]["first"] == [0]
    assert data["evaluations"]["first"] == [0, 1]
    [plan] = data["plans"]
    assert plan["stats"]["num_rows"] == len(plan["n"]) > 0
    assert sum(plan["n"]) == plan["stats"]["num_tokens"]
    assert data["rollouts"][0]["segments"][0]["runs"][0][1].startswith("<|user|>find ")


def test_a_page_that_fails_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "report.html" / "taken").mkdir(parents=True)
    listener = Listener()
    run_training(config_of(tmp_path), reporter=listener)
    assert listener.is_finished
    [notice] = listener.notices
    assert "no report.html was written (FileFormatError: " in notice
    assert "Is a directory" in notice
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
