"""What is locked here:

1. Each line is one task with one call; the scorer, plain or async, gets the line's object and the completion's text.
2. Held-out prompts are every n-th line or a file of their own, never trained, and each is evaluated once.
3. What is wrong with a file is said with file and line; with the scorer, with its name.
4. What the scorer raises or returns wrongly costs its rollout; what it changes does not reach the next one.
5. The environment is configured like any other, and its tasks come again in order.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from evenstep.config import load_config
from evenstep.errors import ConfigError, FileFormatError
from evenstep.rollout.environment import TaskSource
from evenstep.rollout.prompts import PromptsOptions
from scripted import ScriptedEngine, play, played

SCORERS = """
import asyncio

def exact(record, completion):
    return float(completion == record["answer"])

async def slow(record, completion):
    await asyncio.sleep(0)
    return 0.5 if completion == record["answer"] else -1

def forgetful(record, completion):
    return float(record.pop("answer") == completion)

def broken(record, completion):
    return record["no such key"]

def a_text(record, completion):
    return "1.0"

def nan(record, completion):
    return float("nan")

def one_argument(record):
    return 1.0

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scorers.py").write_text(SCORERS)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "prompts.jsonl", [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(25)])
    return tmp_path


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def options(scorer: str = "exact", path: str | Path = "prompts.jsonl", **others: Any) -> PromptsOptions:
    return PromptsOptions(path=str(path), scorer=f"scorers.py:{scorer}", **others)


def source(split: str = "train", **others: Any) -> TaskSource:
    return TaskSource(name="prompts", options=options(**others), seed=0, split=split)


def asked(tasks: TaskSource, num_tasks: int) -> list[str]:
    found: list[str] = []
    for index in range(num_tasks):
        engine = ScriptedEngine("x")
        environment = tasks.environment(index)
        asyncio.run(play(environment, engine))
        found += engine.prompts
    return found


def test_one_call_and_its_score() -> None:
    rollout = played(source().environment(2), "3")
    assert (rollout.status, rollout.reward, len(rollout.calls)) == ("ok", 1.0, 1)
    assert "".join(map(chr, rollout.calls[0].prompt_ids)) == "<2 + 1?\x01<"
    assert rollout.info == {"answer": "3", "prompt": "prompts.jsonl, line 3", "num_segments": 1}
    assert played(source().environment(2), "4").reward == 0.0
    assert played(source(scorer="slow").environment(2), "3").reward == 0.5
    assert played(source(scorer="slow").environment(2), "4").reward == -1.0


def test_every_tenth_line_is_held_out() -> None:
    train, heldout = source(), source("heldout")
    assert (train.num_tasks, heldout.num_tasks) == (23, 2)
    assert asked(heldout, 2) == ["<9 + 1?\x01<", "<19 + 1?\x01<"]
    assert asked(train, 11)[8:] == ["<8 + 1?\x01<", "<10 + 1?\x01<", "<11 + 1?\x01<"]
    assert not set(asked(train, 23)) & set(asked(heldout, 2))
    assert [source(split, heldout_every=0).num_tasks for split in ("train", "heldout")] == [25, 0]
    assert [source(split, heldout_every=2).num_tasks for split in ("train", "heldout")] == [13, 12]


def test_a_file_of_held_out_prompts(folder: Path) -> None:
    write(folder / "heldout.jsonl", [{"prompt": "100?"}])
    assert [source(split, heldout_path="heldout.jsonl").num_tasks for split in ("train", "heldout")] == [25, 1]
    assert asked(source("heldout", heldout_path="heldout.jsonl"), 1) == ["<100?\x01<"]


def test_tasks_come_again_for_training_only() -> None:
    train, heldout = source(), source("heldout")
    assert train.prompt_id(0) == train.prompt_id(23) == train.prompt_id(46)
    assert asked(train, 24)[23] == asked(train, 1)[0]
    with pytest.raises(ConfigError, match=r"evaluation.num_tasks must be at most the 2 heldout tasks"):
        heldout.environment(2)
    with pytest.raises(ConfigError, match=r"at most the 0 heldout tasks"):
        source("heldout", heldout_every=0).environment(0)


def test_chat_messages(folder: Path) -> None:
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be short."}
    write(folder / "chat.jsonl", [{"prompt": [user]}, {"prompt": [system, user]}])
    tasks = source(path="chat.jsonl")
    assert asked(tasks, 2) == ["<Hi\x01<", "<Be short.\n\nHi\x01<"]
    assert "answer" not in played(tasks.environment(0), "x").info


def test_a_file_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    (folder / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "Hi"}\r\n{"prompt": "Ho"}\r\n')
    assert asked(source(path="marked.jsonl"), 2) == ["<Hi\x01<", "<Ho\x01<"]


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "must be one JSON object"),
        ('{"prompt": "a"} {"prompt": "b"}', "must be one JSON object"),
        ("[1]", r"must be a JSON object, found \[1\]"),
        ('{"question": "a", "answer": "b"}', "field `prompt`: is required, found question, answer; add it"),
        ("{}", "field `prompt`: is required, found no field"),
        ('{"prompt": 3}', "field `prompt`: must be a text .* found 3"),
        ('{"prompt": " "}', "field `prompt`: must be a text that is not empty"),
        ('{"prompt": null}', "field `prompt`: must be a text"),
        (r'{"prompt": "half \ud83d"}', "field `prompt`: must be UTF-8 text, found "),
        (r'{"prompt": [{"role": "user", "content": "\udc00"}]}', "field `prompt`: must be UTF-8 text, found "),
        ('{"prompt": []}', "field `prompt`: must be a text"),
        ('{"prompt": ["a"]}', "field `prompt`: must be a text"),
        (json.dumps({"prompt": [USER, USER]}), "one of role user and before it at most one of role system"),
        (json.dumps({"prompt": [{"role": "assistant", "content": "Hi"}]}), "write an environment of your own"),
        (json.dumps({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}), "such texts"),
        (json.dumps({"prompt": [{"role": "user"}]}), "such texts as content"),
        ('{"prompt": "0 + 1?"}', "must not be trained on, found the same text in bad.jsonl, line 1"),
    ],
)
def test_a_bad_line_is_named(folder: Path, line: str, message: str) -> None:
    good = [json.dumps({"prompt": f"{n} + 1?"}) for n in range(10)]
    (folder / "bad.jsonl").write_text("\n".join([*good[:9], "", line, *good[9:]]))  # the tenth prompt, held out
    with pytest.raises(FileFormatError, match=f"^bad.jsonl, line 11.*{message}"):
        options(path="bad.jsonl")


def test_bad_files_and_options_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.jsonl: cannot be read \(No such file"):
        options(path="absent.jsonl")
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "\xe4"}')
    with pytest.raises(FileFormatError, match=r"latin.jsonl: must be UTF-8 text, found byte 0xe4"):
        options(path="latin.jsonl")
    (folder / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"found none in 'empty.jsonl'"):
        options(path="empty.jsonl")
    for every in (-1, 1):
        with pytest.raises(ConfigError, match=f"heldout_every must be 0 .none. or at least 2, found {every}"):
            options(heldout_every=every)
    with pytest.raises(ConfigError, match=r"splits train and heldout, found 'warmstart'"):
        source("warmstart").environment(0)


@pytest.mark.parametrize(
    "scorer, message",
    [
        ("scorers.py:absent", "found no absent in scorers.py; it has: exact, slow"),
        ("scorers.py:number", "must name a function, found int"),
        ("other.py:exact", "found no file"),
        ("exact", "named path/to/file.py:name or package.module:name, found 'exact'"),
    ],
)
def test_a_scorer_that_is_not_there_is_refused(scorer: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptsOptions(path="prompts.jsonl", scorer=scorer)


@pytest.mark.parametrize(
    "scorer, message",
    [
        ("broken", "KeyError: 'no such key'"),
        ("a_text", "a reward must be a number, found '1.0'"),
        ("nan", "a reward must be finite, found nan"),
        ("one_argument", "takes 1 positional argument but 2 were given"),
    ],
)
def test_a_scorer_that_fails_costs_its_rollout(scorer: str, message: str) -> None:
    rollout = played(source(scorer=scorer).environment(0), "1")
    assert (rollout.status, rollout.reward) == ("failed", None)
    assert message in (rollout.status_reason or "")


def test_a_scorer_may_change_its_record() -> None:
    tasks = source(scorer="forgetful")
    assert [played(tasks.environment(0), "1").reward for _ in range(2)] == [1.0, 1.0]


def test_it_is_configured_like_any_other(folder: Path) -> None:
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": "run", "num_collections": 1},
        "model": {"path": "folder", "max_context_tokens": 64},
        "environment": {"name": "prompts", "path": "prompts.jsonl", "scorer": "scorers.py:exact"},
        "rollout": {"num_prompts": 4, "num_generations": 8, "max_tokens_per_call": 4},
        "plan": {"max_tokens_per_gpu": 256},
        "train": {"rollouts_per_window": 32, "lr": 1e-4},
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(values))
    config = load_config([path])
    assert config.environment_options == options()
    (folder / "again.toml").write_text(config.resolved())
    assert load_config([folder / "again.toml"]) == config
    path.write_text(tomli_w.dumps(values | {"environment": {"name": "prompts", "path": "prompts.jsonl"}}))
    with pytest.raises(ConfigError, match=r"`environment\.scorer` is required"):
        load_config([path])
