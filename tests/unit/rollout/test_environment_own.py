"""What is locked here:

1. A class of the user's own is an environment: by file or module, its options checked like those of built-in ones, and
   the same in the resolved configuration.
2. A class that is none is refused with everything that it lacks, and a field that no TOML value fits by its type.
3. The example plays, its tasks are pure and its splits disjoint.
4. ``evenstep train`` runs with it, as its docstring says; an environment that fails now and then does not end the run.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from evenstep.config import load_config
from evenstep.errors import ConfigError
from evenstep.files import read_rollouts
from evenstep.rollout.environment import SPLITS, TaskSource, environment_named
from scripted import played

ROOT = Path(__file__).parents[3]
EXAMPLE = "examples/custom_env.py:GuessNumber"
BASE: dict[str, dict[str, Any]] = {
    "run": {"dir": "run", "num_collections": 1},
    "model": {"path": "folder", "max_context_tokens": 64},
    "environment": {"name": EXAMPLE},
    "rollout": {"num_prompts": 4, "num_generations": 8, "max_tokens_per_call": 4},
    "plan": {"max_tokens_per_gpu": 256},
    "train": {"rollouts_per_window": 32, "lr": 1e-4},
}


def refusal(path: Path, **environment: Any) -> str:
    path.write_text(tomli_w.dumps(BASE | {"environment": environment}))
    with pytest.raises(ConfigError) as error:
        load_config([path])
    return str(error.value)


def test_its_options_are_checked_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(BASE | {"environment": {"name": EXAMPLE, "max_number": 50}}))
    config = load_config([path])
    assert config.environment.options == {"max_number": 50, "max_guesses": 5}
    assert isinstance(config.environment_options, environment_named(EXAMPLE).Options)
    (tmp_path / "again.toml").write_text(config.resolved())
    assert load_config([tmp_path / "again.toml"]) == config
    assert "did you mean `environment.max_guesses`?" in refusal(path, name=EXAMPLE, max_guess=3)
    assert "`environment.max_guesses` must be an integer, found true" in refusal(path, name=EXAMPLE, max_guesses=True)
    assert "max_number ≥ 20 and max_guesses ≥ 1, found 19 and 5" in refusal(path, name=EXAMPLE, max_number=19)
    assert "found no Guess in examples/custom_env.py; it has:" in refusal(path, name="examples/custom_env.py:Guess")
    assert "found no file" in refusal(path, name="custom_env.py:GuessNumber")
    assert "No module named 'no_such_module'" in refusal(path, name="no_such_module:GuessNumber")


INCOMPLETE = """
import asyncio
from dataclasses import dataclass
from pathlib import PurePath
from evenstep.rollout.environment import Score, Start

class Nothing:
    pass

class Blocking:
    @dataclass(frozen=True)
    class Options:
        pass

    def for_task(self, options, *, seed, split, index):
        return self

    async def reset(self):
        return Start(task="t")

    def step(self, action):
        return None

    async def score(self, episode):
        return Score(reward=1.0)

class Flaky(Blocking):
    @classmethod
    def for_task(cls, options, *, seed, split, index):
        if index % 4 == 1:
            raise LookupError(f"no task {index}")
        environment = cls()
        environment.index = index
        return environment

    async def step(self, action):
        if self.index == 2:
            await asyncio.sleep(100)
        return None

class Picky(Flaky):
    @dataclass(frozen=True)
    class Options:
        size: int = 0

        def __post_init__(self):
            if self.size < 3:
                raise ValueError("size is too small")

class Untyped(Flaky):
    @dataclass(frozen=True)
    class Options:
        number: object()
"""


def test_a_class_that_is_no_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "incomplete_environments.py").write_text(INCOMPLETE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "run.toml"
    nothing = refusal(path, name="incomplete_environments:Nothing")
    assert "must name an environment, found no Options, a frozen dataclass" in nothing
    for lacking in ("for_task(options, *, seed, split, index)", "async def reset", "async def step", "async def score"):
        assert lacking in nothing
    assert "see examples/custom_env.py" in nothing
    blocking = refusal(path, name="incomplete_environments:Blocking")
    assert "found no classmethod for_task(options, *, seed, split, index), no `async def step`;" in blocking
    assert "must have fields of types that TOML has" in refusal(path, name="incomplete_environments:Untyped", number=3)
    assert "[environment]: size is too small" in refusal(path, name="incomplete_environments:Picky", size=2)
    assert environment_named("incomplete_environments:Flaky").__name__ == "Flaky"


# ------------------------------------------------------------------------------------------------ the example


def guessing(monkeypatch: pytest.MonkeyPatch, split: str, index: int) -> Any:
    monkeypatch.chdir(ROOT)
    options = environment_named(EXAMPLE).Options()
    return TaskSource(name=EXAMPLE, options=options, seed=0, split=split).environment(index)


def test_the_example_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(*answers: str) -> Any:
        environment = guessing(monkeypatch, "train", 0)
        return played(environment, *(answer.format(environment._number) for answer in answers))

    first = guess("{}")
    assert (first.reward, len(first.calls)) == (1.0, 1)
    third = guess("x", "1000", "{}")
    assert (third.reward, len(third.calls)) == (pytest.approx(0.6), 3)
    said = "".join(map(chr, third.calls[-1].prompt_ids))
    assert "<a number\x01" in said
    assert "<lower\x01" in said
    never = guess("-")
    assert (never.reward, len(never.calls), never.status) == (0.0, 5, "ok")
    assert never.info["guesses"] == ["-"] * 5


def test_the_examples_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {split: [guessing(monkeypatch, split, index)._number for index in range(60)] for split in SPLITS}
    assert numbers["train"] == [guessing(monkeypatch, "train", index)._number for index in range(60)]
    assert not set(numbers["train"]) & set(numbers["heldout"])
    assert len(set(numbers["train"])) > 20


# ------------------------------------------------------------------------------------------------ as a new user


def train(folder: Path, *arguments: str, **variables: str) -> str:
    """``evenstep train`` with a configuration made small, in one process."""
    small = {
        "run.num_collections": 2,
        "rollout.num_prompts": 4,
        "rollout.num_generations": 2,
        "train.rollouts_per_window": 8,
        "evaluation.num_tasks": 4,
        "checkpoint.export": "false",
    }
    settings = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    result = subprocess.run(
        [sys.executable, "-m", "evenstep", "train", *settings, *arguments, "--run-dir", str(folder), "--ranks", "1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stored(folder: Path) -> list[Any]:
    return [rollout for path in sorted((folder / "rollouts").iterdir()) for rollout in read_rollouts(path)]


@pytest.mark.timeout(200)
def test_training_with_the_example(tmp_path: Path) -> None:
    text = ast.get_docstring(ast.parse((ROOT / EXAMPLE.partition(":")[0]).read_text())) or ""
    (command,) = re.findall(r"evenstep train ((?:.*\\\n)*.*)", text)
    words = shlex.split(command.replace("\\\n", " "))
    train(tmp_path / "run", *words, "--set", "environment.max_guesses=2")
    rollouts = stored(tmp_path / "run")
    assert len(rollouts) == 16
    assert {rollout.status for rollout in rollouts} == {"ok"}
    assert {len(rollout.calls) for rollout in rollouts} <= {1, 2}
    assert rollouts[0].prompt_id == f"{EXAMPLE}/train/0/0"
    assert all(set(rollout.info) == {"number", "guesses", "num_segments"} for rollout in rollouts)
    assert [record["num_rollouts"] for record in metrics(tmp_path / "run") if "num_rollouts" in record] == [8, 8]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_training_with_an_environment_that_fails_now_and_then(tmp_path: Path) -> None:
    (tmp_path / "incomplete_environments.py").write_text(INCOMPLETE)
    output = train(
        tmp_path / "run",
        "examples/ledger.toml",
        *("--set", "environment.name=incomplete_environments:Flaky", "--set", "evaluation.num_tasks=0"),
        *("--set", "rollout.step_timeout_s=0.5"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )
    assert "LookupError: no task 1" in output
    failed = [rollout for rollout in stored(tmp_path / "run") if rollout.status == "failed"]
    reasons = "".join(rollout.status_reason or "" for rollout in failed)
    assert "environment.step must end within rollout.step_timeout_s = 0.5 seconds" in reasons
    assert all("Traceback" in (rollout.status_reason or "") for rollout in failed)
    # fresh prompts took the place of the groups that failed as a whole
    assert [record["num_voters"] for record in metrics(tmp_path / "run")] == [8, 8]
