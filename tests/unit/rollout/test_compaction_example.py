"""Behaviours locked here:

1. A policy in a user's file keeps what it says, marks what it dropped, and its options are checked like others.
2. A configuration that names it by a path survives its own resolved text.
3. `evenstep train` runs the example as its docstring says.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenstep.config import load_config
from evenstep.errors import ConfigError
from evenstep.files import read_rollouts
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import Context, Guard, compaction_named
from evenstep.rollout.segments import segments_of

ROOT = Path(__file__).parents[3]
POLICY = "examples/custom_compaction.py:EveryNth"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


class Characters:
    eos_token_id = None

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(f"<{message['content']}|" for message in conversation) + ">"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def test_it_keeps_every_nth_turn_that_fits() -> None:
    context = Context(task="task")
    for index in range(7):
        context = context.with_turn(f"o{index}", (ord("a"), ord("|")))
    renderer = ChatRenderer(Characters())

    async def write_note(request: str, max_tokens: int) -> str:
        raise AssertionError("the policy writes no notes")

    def kept(max_context_tokens: int, n: int) -> tuple[list[int], str]:
        guard = Guard(
            renderer=renderer,
            observation="o7",
            max_context_tokens=max_context_tokens,
            num_reserved_tokens=4,
            is_full=True,
            is_recompaction=False,
            write_note=write_note,
        )
        shorter = asyncio.run(compaction_named(POLICY, n=n).compact(context, guard))
        assert shorter is not None
        return [turn.index for turn in shorter.turns], "".join(map(chr, shorter.prompt_ids(renderer, "o7")))

    assert kept(100, 2)[0] == [0, 2, 4, 6]
    indices, text = kept(100, 3)
    assert indices == [0, 3, 6]
    assert text == "<task\no0|>a|<...\no3|>a|<...\no6|>a|<o7|>"
    assert kept(len(text) + 4, 3)[0] == [0, 3, 6]
    assert kept(len(text) + 3, 3)[0] == [3, 6]
    assert kept(1, 2)[0] == []


def test_its_options_are_those_of_the_configuration(tmp_path: Path) -> None:
    config = load_config(
        [ROOT / "examples" / "ledger.toml"],
        [f"compaction.policy={POLICY}", "compaction.n=3", "compaction.schedule=chunked", "compaction.chunk_actions=2"],
    )
    policy = compaction_named(config.compaction.policy, **config.compaction.options)
    assert (policy.name, config.compaction.options["n"], config.compaction.options["marker"]) == ("every_nth", 3, "...")
    (tmp_path / "resolved.toml").write_text(config.resolved())
    assert load_config([tmp_path / "resolved.toml"]) == config


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([f"compaction.policy={POLICY}", "compaction.m=3"], "unknown key `compaction.m`"),
        ([f"compaction.policy={POLICY}", "compaction.n=x"], "`compaction.n` must be an integer"),
        ([f"compaction.policy={POLICY}", "compaction.schedule=sometimes"], "`compaction.schedule` must be"),
        ([f"compaction.policy={POLICY}", "compaction.schedule=chunked"], r"\[compaction\]: compaction.chunk_actions"),
        ([f"compaction.policy={POLICY}s"], "--set compaction.policy=.*: .* found no EveryNths in .*; it has: EveryNth"),
        (["compaction.policy=examples/absent.py:A"], "found no file .*absent.py"),
        (["compaction.policy=pathlib:Path"], "extends evenstep.rollout.compaction.CompactionPolicy, found Path"),
    ],
)
def test_what_a_policy_does_not_take_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([ROOT / "examples" / "ledger.toml"], overrides)


@pytest.mark.long
@pytest.mark.timeout(330)
def test_train_as_its_docstring_says(tmp_path: Path) -> None:
    overrides = [
        f"compaction.policy={POLICY}",
        "run.num_collections=1",
        "rollout.num_prompts=4",
        "rollout.num_generations=2",
        "train.rollouts_per_window=8",
        "evaluation.num_tasks=0",
        "checkpoint.export=false",
    ]
    command = [sys.executable, "-m", "evenstep", "train", "examples/ledger.toml", "--run-dir", str(tmp_path / "run")]
    for override in overrides:
        command += ["--set", override]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rollouts = [
        rollout for file in sorted((tmp_path / "run" / "rollouts").iterdir()) for rollout in read_rollouts(file)
    ]
    assert record["num_rollouts"] == len(rollouts) == 8
    assert record["num_rows"] == sum(len(segments_of(rollout)) for rollout in rollouts) > 8
    assert record["num_trained_tokens"] == sum(rollout.num_sampled_tokens for rollout in rollouts)
    assert all(len(call.prompt_ids) + len(call.output_ids) <= 64 for rollout in rollouts for call in rollout.calls)
