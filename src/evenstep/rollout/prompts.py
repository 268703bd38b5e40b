"""Prompts from a JSONL file, one answer each, and a scorer that is a Python function of the user's.

A line is an object with ``prompt`` (a text, or chat messages) and anything else that the scorer wants to know:

    {"prompt": "What is 3 + 4?", "answer": "7"}
    {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 4?"}]}

The scorer is named ``path/to/file.py:function`` and gets the line's object and the completion's text:

    def score(record, completion):  # or: async def
        return float(completion.strip() == record["answer"])
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

from evenstep.errors import ConfigError, FileFormatError
from evenstep.plugins import own_function
from evenstep.rollout.environment import Episode, Score, Split, Start
from evenstep.validation import find_unwritable, shown

__all__ = ["PromptRecord", "Prompts", "PromptsOptions"]

_ROLES = (["user"], ["system", "user"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsOptions:
    """Which prompts, and what scores them.

    Every ``heldout_every``-th line of ``path`` (the last of each so many) is held out and never trained; with
    ``heldout_path`` all lines of ``path`` are trained and all of the other file are held out.

    Raises:
        ConfigError: a file or the scorer is not there, or no prompt is left to train on.
        FileFormatError: a line is no prompt, or one prompt is in both splits; names file and line.
    """

    path: str  # JSONL
    scorer: str  # path/to/file.py:function or package.module:function
    heldout_path: str | None = None  # JSONL
    heldout_every: int = 10  # 0: no line of path is held out

    def __post_init__(self) -> None:
        if self.heldout_every < 0 or self.heldout_every == 1:
            raise ConfigError(f"heldout_every must be 0 (none) or at least 2, found {self.heldout_every}")
        own_function(self.scorer)
        _records(self, "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One line of a file of prompts."""

    where: str  # file and line
    text: str  # what the model is asked
    values: Mapping[str, Any]  # the whole object, for the scorer


def _read(path: str) -> tuple[PromptRecord, ...]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give a JSONL file, relative to where the command is started"
        ) from None
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: must be UTF-8 text, found byte {error.object[error.start]:#x}") from None
    # split at "\n" alone: a JSON text may hold other line separators as they are
    lines = enumerate(text.split("\n"), start=1)
    return tuple(_record(line, f"{path}, line {number}") for number, line in lines if line.strip())


def _record(line: str, where: str) -> PromptRecord:
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise FileFormatError(f"{where}: must be one JSON object, found {shown(line)} ({error}); correct it") from None
    if not isinstance(values, dict):
        raise FileFormatError(f"{where}: must be a JSON object, found {shown(values)}; write one object on each line")
    if "prompt" not in values:
        raise FileFormatError(f"{where}, field `prompt`: is required, found {', '.join(values) or 'no field'}; add it")
    return PromptRecord(where=where, text=_prompt_text(values["prompt"], f"{where}, field `prompt`"), values=values)


def _prompt_text(prompt: Any, where: str) -> str:
    """The one user message that a prompt is; a system message in front of it becomes its first paragraph."""
    unwritable = find_unwritable(prompt)
    if unwritable is not None:  # no tokenizer takes it
        raise FileFormatError(f"{where}: {unwritable[1]}; write whole characters")
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    messages: list[Any] = prompt if isinstance(prompt, list) else []
    if [message.get("role") if isinstance(message, dict) else None for message in messages] in _ROLES:
        contents: list[Any] = [message.get("content") for message in messages]
        if all(isinstance(content, str) and content.strip() for content in contents):
            return "\n\n".join(contents)
    raise FileFormatError(
        f"{where}: must be a text that is not empty, or chat messages with such texts as content, one of role user and "
        f"before it at most one of role system, found {shown(prompt)}; for a longer conversation write an environment "
        f"of your own"
    )


@lru_cache(maxsize=8)
def _splits(path: str, heldout_path: str | None, every: int) -> dict[Split, tuple[PromptRecord, ...]]:
    """The records of both splits, checked once."""
    if heldout_path is not None:
        train, heldout = _read(path), _read(heldout_path)
    else:
        records = _read(path)
        is_heldout = [every > 0 and index % every == every - 1 for index in range(len(records))]
        train = tuple(record for record, held in zip(records, is_heldout, strict=True) if not held)
        heldout = tuple(record for record, held in zip(records, is_heldout, strict=True) if held)
    if not train:
        raise ConfigError(f"path must have a prompt to train on, found none in {path!r}; add lines to it")
    trained = {record.text: record.where for record in train}
    for record in heldout:
        if record.text in trained:
            raise FileFormatError(
                f"{record.where}, field `prompt`: a held-out prompt must not be trained on, found the same text in "
                f"{trained[record.text]}; remove one of the two"
            )
    return {"train": train, "heldout": heldout}


def _records(options: PromptsOptions, split: Split) -> tuple[PromptRecord, ...]:
    splits = _splits(options.path, options.heldout_path, options.heldout_every)
    if split not in splits:
        raise ConfigError(f"environment 'prompts' has the splits train and heldout, found {split!r}; use one of them")
    return splits[split]


class Prompts:
    """One prompt and one answer to it; tasks are the lines in the file's order, and come again after the last.

    Reward: what the scorer returns, a finite number. A scorer that is no ``async def`` blocks the other rollouts while
    it runs, and nothing can stop it: it is not put into a thread, because not all checkers may run side by side.
    ``answer``, where a line has one, is the task's right answer in the rollout's ``info``.

    Evaluation plays each held-out prompt once, at most ``evaluation.num_tasks`` of them.
    """

    Options: ClassVar[type[PromptsOptions]] = PromptsOptions

    def __init__(self, record: PromptRecord, scorer: FunctionType) -> None:
        self._record = record
        self._scorer = scorer
        self._completion = ""

    @classmethod
    def num_tasks(cls, options: PromptsOptions, *, split: Split) -> int:
        return len(_records(options, split))

    @classmethod
    def for_task(cls, options: PromptsOptions, *, seed: int, split: Split, index: int) -> Prompts:
        return cls(_records(options, split)[index], own_function(options.scorer))

    async def reset(self) -> Start:
        self._completion = ""
        return Start(task=self._record.text, metadata=copy.deepcopy(dict(self._record.values)))

    async def step(self, action: str) -> str | None:
        """Nothing more: the first answer is the last."""
        self._completion = action
        return None

    async def score(self, episode: Episode) -> Score:
        # a copy, so that a scorer that changes its record does not change the next rollout's
        reward = self._scorer(copy.deepcopy(dict(self._record.values)), self._completion)
        if inspect.isawaitable(reward):
            reward = await reward
        answer = self._record.values.get("answer")
        info = {"prompt": self._record.where} | ({} if answer is None else {"answer": str(answer)})
        return Score(reward=reward, info=info)
