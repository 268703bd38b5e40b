"""What is locked here, with the real command on two real ranks:

1. Ctrl-C during a run ends all ranks, with code 130 and the command that goes on.
2. That command goes on where the run stopped, and finishes it: every window once, every collection's rollouts once.
3. Piped output is plain lines; the run folder holds what it promises.
4. An error inside a rank, or on one rank alone, reaches the user as one message, with exit code 2.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from character_models import save_character_model
from evenstep.files import read_rollouts

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUM_COLLECTIONS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer of characters."""
    return save_character_model(
        tmp_path_factory.mktemp("model"),
        characters="abcdefghijklmnopqrstuvwxyz0123456789 .:>?-\n",
        roles=["<system>", "<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        max_position_embeddings=128,
    )


def write_config(path: Path, model: Path) -> Path:
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(path.parent / "run"), "num_collections": NUM_COLLECTIONS},
        "model": {"path": str(model), "max_context_tokens": 72},
        "environment": {"name": "ledger", "max_pages": 6},
        "rollout": {"num_prompts": 4, "num_generations": 2, "max_tokens_per_call": 4},
        "compaction": {"policy": "summary"},
        "plan": {"max_tokens_per_gpu": 256},
        "train": {"rollouts_per_window": 8, "lr": 1e-4},
        "evaluation": {"num_tasks": 0},
    }
    path.write_text(tomli_w.dumps(values))
    return path


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process group of its own, as a shell would start it."""
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_line(path: Path, process: subprocess.Popen[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and path.read_text().endswith("\n")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no window was trained in time"
        time.sleep(0.02)


@pytest.mark.timeout(400)
def test_interrupted_and_continued(model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.toml", model)
    run = tmp_path / "run"
    process = start(str(config), "--ranks", "2")
    try:
        wait_for_line(run / "metrics.jsonl", process, timeout_s=180)
        os.killpg(process.pid, signal.SIGINT)
        output, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, messages
    assert "Traceback" not in messages
    go_on = re.search(r"Stopped\. Go on with: evenstep train (.*)", messages)
    assert go_on is not None, messages
    assert "\x1b" not in output
    assert len((run / "metrics.jsonl").read_text().splitlines()) < NUM_COLLECTIONS

    again = start(*go_on.group(1).split())
    output, messages = again.communicate(timeout=180)
    assert again.returncode == 0, messages
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["window"] for record in records] == list(range(NUM_COLLECTIONS))
    assert {record["num_rollouts"] for record in records} == {8}
    names = [rollout.rollout_id for file in sorted((run / "rollouts").iterdir()) for rollout in read_rollouts(file)]
    assert len(names) == len(set(names)) == 8 * NUM_COLLECTIONS
    for name in ("config.toml", "plans", "checkpoints", "model/model.safetensors", "report.html"):
        assert (run / name).exists(), name
        assert f"{run / name.split('/')[0]}: " in output
    rows = [line for line in output.splitlines() if re.match(r" *\d+\*? ", line)]
    assert len({len(row) for row in rows}) == 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_error_inside_a_rank(model: Path, tmp_path: Path) -> None:
    # a template that changes answers: only the agent can find that, after the model was loaded
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("message['content']", "message['content'][::-1]"))
    process = start(str(write_config(tmp_path / "config.toml", broken)), "--ranks", "2")
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 2, messages
    assert "error: a chat template must show an assistant's answer as it is" in messages
    assert "Traceback" not in messages


@pytest.mark.long
@pytest.mark.timeout(330)
def test_an_error_on_rank_0_alone(model: Path, tmp_path: Path) -> None:
    # only rank 0 sees that nothing can be trained; the other rank waits for its rows
    config = write_config(tmp_path / "config.toml", model)
    process = start(str(config), "--ranks", "2", "--set", "model.max_context_tokens=8")
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 2, messages
    assert "rollouts made a call that can be trained" in messages
    assert "Traceback" not in messages
