"""What is locked here:

1. Whatever an environment raises or returns wrongly, at any of its calls or while it is made, makes its rollout failed
   with the traceback; a Ctrl-C and a stop of ours go through. Whatever an error or an info says, its rollout can be
   written and read back.
2. A reward is a finite number, also of NumPy; anything else fails the rollout and says what was found.
3. A call that takes longer than ``step_timeout_s``, or calls that together take longer than ``timeout_s``, fail the
   rollout, also when they block or swallow their cancellation; without a timeout no clock has a say.
4. An environment that never ends is truncated by ``max_calls``, and scored.
5. In a generation batch the others neither wait for a rollout that failed nor change by it.
6. A finite set of tasks comes again for training, and is refused where a mean would count a task twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest

from evenstep.errors import ConfigError
from evenstep.files import read_rollouts, write_rollouts
from evenstep.rollout.agent import AgentOptions
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.collector import generate_rollouts, slots_of
from evenstep.rollout.compaction import NoCompaction
from evenstep.rollout.environment import ENVIRONMENTS, Environment, Episode, Score, Split, Start, TaskSource
from evenstep.validation import MAX_DEPTH
from scripted import CharacterTokenizer, ScriptedBatchEngine, ScriptedEngine, play, played, says

Hook = Callable[[], Any]


class Scene:
    """Three turns; one of its calls does something else instead."""

    def __init__(self, where: str = "", hook: Hook | None = None, num_turns: float = 3) -> None:
        self._where, self._hook, self._num_turns = where, hook, num_turns
        self.num_steps = 0
        self.num_scores = 0

    async def _instead(self, where: str, usual: Any) -> Any:
        if where != self._where or self._hook is None:
            return usual
        found = self._hook()
        return await found if asyncio.iscoroutine(found) else found

    async def reset(self) -> Start:
        return await self._instead("reset", Start(task="t", observation="o"))

    async def step(self, action: str) -> str | None:
        self.num_steps += 1
        return await self._instead("step", "more" if self.num_steps < self._num_turns else None)

    async def score(self, episode: Episode) -> Score:
        self.num_scores += 1
        return await self._instead("score", Score(reward=0.5))


def raising(error: BaseException) -> Hook:
    def hook() -> Any:
        raise error

    return hook


class PanicError(BaseException):
    """What libraries written in other languages raise."""


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("where", ["reset", "step", "score"])
@pytest.mark.parametrize(
    "error, message",
    [
        (RuntimeError("the tool is gone"), "RuntimeError: the tool is gone"),
        (TimeoutError("of its own"), "TimeoutError: of its own"),
        (SystemExit(3), "raised SystemExit: 3"),
        (PanicError("index out of bounds"), "raised PanicError: index out of bounds"),
        (asyncio.CancelledError("by itself"), "raised CancelledError: by itself"),
        (ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "ExceptionGroup: two"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_what_an_environment_raises_fails_its_rollout(where: str, error: BaseException, message: str) -> None:
    rollout = played(Scene(where, raising(error)))
    assert (rollout.status, rollout.reward, rollout.is_voter) == ("failed", None, False)
    assert rollout.status_reason is not None
    assert "Traceback (most recent call last):" in rollout.status_reason
    assert message in rollout.status_reason
    assert "raise error" in rollout.status_reason  # the line of the environment
    assert len(rollout.calls) == {"reset": 0, "step": 1, "score": 3}[where]


@pytest.mark.parametrize("where", ["reset", "step", "score"])
def test_ctrl_c_goes_through(where: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        played(Scene(where, raising(KeyboardInterrupt())))


def test_a_stop_of_ours_goes_through() -> None:
    async def stopped() -> Any:
        task = asyncio.create_task(play(Scene("step", lambda: asyncio.sleep(100)), ScriptedEngine()))
        await asyncio.sleep(0.05)
        task.cancel()
        return await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stopped())


@pytest.mark.parametrize(
    "where, found, message",
    [
        ("reset", "a text", "environment.reset must return a Start, found 'a text'"),
        ("reset", None, "environment.reset must return a Start, found None"),
        (
            "step",
            ("o", 1.0, True),
            "environment.step must return a text, or None at the end, found ('o', 1.0, True)",
        ),
        ("score", 1.0, "environment.score must return a Score, found 1.0"),
        ("score", None, "environment.score must return a Score, found None"),
    ],
)
def test_results_of_wrong_types_fail_the_rollout(where: str, found: Any, message: str) -> None:
    rollout = played(Scene(where, lambda: found))
    assert rollout.status == "failed"
    assert message in (rollout.status_reason or "")


@pytest.mark.parametrize(
    "reward, message",
    [
        (float("nan"), "a reward must be finite, found nan"),
        (float("-inf"), "a reward must be finite, found -inf"),
        (np.float32("nan"), "a reward must be finite"),
        ("1.0", "a reward must be a number, found '1.0' (str)"),
        (None, "found None (NoneType)"),
        (True, "found True (bool)"),
        (np.True_, "(bool"),
        (np.ones(2), "(ndarray)"),
        ([0.5, 0.5], "found [0.5, 0.5] (list)"),
        (1 + 0j, "(complex)"),
        (Decimal(1), "(Decimal)"),
    ],
)
def test_a_reward_that_is_no_finite_number_fails_the_rollout(reward: Any, message: str) -> None:
    rollout = played(Scene("score", lambda: Score(reward=reward)))
    assert (rollout.status, rollout.reward) == ("failed", None)
    assert message in (rollout.status_reason or "")


@pytest.mark.parametrize("reward", [1, 0.25, np.float32(0.25), np.float64(-2), np.int64(3), Fraction(1, 4)])
def test_numbers_are_kept_as_floats(reward: Any) -> None:
    rollout = played(Scene("score", lambda: Score(reward=reward)))
    assert (rollout.status, rollout.reward, type(rollout.reward)) == ("ok", float(reward), float)


@pytest.mark.parametrize("info", [{"x": object()}, {"x": float("nan")}, {"x": np.float32(1)}])
def test_info_that_is_no_json_says_so(info: dict[str, Any]) -> None:
    rollout = played(Scene("score", lambda: Score(reward=1.0, info=info)))
    assert rollout.status == "failed"
    assert "Score.info must hold JSON values only" in (rollout.status_reason or "")


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_info_may_hold_what_a_model_wrote(tmp_path: Any) -> None:
    said = json.loads(r'{"city": "\ud83d", "\udc00": ["ok \ud83d\ude00"]}')  # halves of a pair, and a whole one
    rollout = played(Scene("score", lambda: Score(reward=1.0, info={"said": said, "deep": nested(100)})))
    assert (rollout.status, rollout.reward) == ("ok", 1.0)
    assert rollout.info["said"] == {"city": "?", "?": ["ok \U0001f600"]}
    write_rollouts(tmp_path / "a.jsonl", [rollout])
    assert list(read_rollouts(tmp_path / "a.jsonl")) == [rollout]


@pytest.mark.parametrize("depth", [MAX_DEPTH, 500, 100_000])
def test_info_that_no_file_gives_back_fails_the_rollout(tmp_path: Any, depth: int) -> None:
    rollout = played(Scene("score", lambda: Score(reward=1.0, info={"said": nested(depth)})))
    assert rollout.status == "failed"
    write_rollouts(tmp_path / "a.jsonl", [rollout])
    assert list(read_rollouts(tmp_path / "a.jsonl")) == [rollout]


@pytest.mark.parametrize("where", ["reset", "step", "score"])
def test_an_error_about_bytes_that_are_no_text_is_kept(tmp_path: Any, where: str) -> None:
    error = FileNotFoundError(2, "No such file", os.fsdecode(b"caf\xe9.txt"))
    rollout = played(Scene(where, raising(error)))
    assert rollout.status == "failed"
    assert "No such file" in (rollout.status_reason or "")
    write_rollouts(tmp_path / "a.jsonl", [rollout])
    assert list(read_rollouts(tmp_path / "a.jsonl")) == [rollout]


def test_a_failed_rollout_survives_its_file(tmp_path: Any) -> None:
    rollout = played(Scene("step", raising(RuntimeError('a "quoted"\nmessage, \u2603'))))
    write_rollouts(tmp_path / "r.jsonl", [rollout])
    assert list(read_rollouts(tmp_path / "r.jsonl")) == [rollout]


# ------------------------------------------------------------------------------------------------ time


async def stubborn() -> str:
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        return "I go on"
    return "in time"


@pytest.mark.parametrize("where", ["reset", "step", "score"])
@pytest.mark.parametrize(
    "hook, message",
    [
        (lambda: asyncio.sleep(100), "it was stopped, the lines above say where it waited"),
        (lambda: time.sleep(0.8), "it blocked, and every other rollout with it: await, or use asyncio.to_thread"),
        (stubborn, "environment"),
    ],
)
def test_a_call_that_takes_too_long_fails_the_rollout(where: str, hook: Hook, message: str) -> None:
    started = time.monotonic()
    rollout = played(Scene(where, hook), step_timeout_s=0.4)
    assert time.monotonic() - started < 10
    assert rollout.status == "failed"
    reason = rollout.status_reason or ""
    assert f"TimeoutError: environment.{where} must end within rollout.step_timeout_s = 0.4 seconds" in reason
    assert message in reason


def test_a_neighbour_that_blocks_is_named_as_a_cause() -> None:
    async def run() -> list[Any]:
        waiting = Scene("step", lambda: asyncio.sleep(0.3, "more"))
        blocking = Scene("step", lambda: time.sleep(1.0))
        return await asyncio.gather(
            *(play(scene, ScriptedEngine(), step_timeout_s=0.6) for scene in (waiting, blocking))
        )

    waiting, blocking = asyncio.run(run())
    assert "late: another environment blocks" in (waiting.status_reason or "")
    assert "it blocked" in (blocking.status_reason or "")


def test_the_time_of_all_calls_together() -> None:
    scene = Scene("step", lambda: asyncio.sleep(0.3, "more"))
    rollout = played(scene, timeout_s=0.8)
    assert rollout.status == "failed"
    assert "environment.step must end within rollout.timeout_s = 0.8 seconds, of which 0." in (
        rollout.status_reason or ""
    )
    assert 1 < scene.num_steps <= 3


class Slow(ScriptedEngine):
    async def generate(self, request: Any) -> Any:
        await asyncio.sleep(0.3)
        return await super().generate(request)


def test_the_engine_s_time_is_not_the_environment_s() -> None:
    rollout = asyncio.run(play(Scene(), Slow(), timeout_s=0.8, step_timeout_s=0.8))
    assert (rollout.status, len(rollout.calls)) == ("ok", 3)


def test_one_that_never_ends_is_truncated_and_scored() -> None:
    scene = Scene(num_turns=float("inf"))
    rollout = played(scene, max_calls=7)
    assert (rollout.status, rollout.reward, len(rollout.calls)) == ("truncated", 0.5, 7)
    assert "max_calls = 7 calls are made" in (rollout.status_reason or "")
    assert (scene.num_steps, scene.num_scores) == (7, 1)


def test_times_must_be_positive() -> None:
    for name in ("step_timeout_s", "timeout_s"):
        with pytest.raises(ConfigError, match=f"rollout.{name} must be above 0 seconds, found 0"):
            AgentOptions(max_context_tokens=10, **{name: 0})


# ------------------------------------------------------------------------------------------------ batches


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    broken: frozenset[int] = frozenset()  # indices of tasks
    num_tasks: int = 100


class Play(Scene):
    """Task i takes 1 + i turns; broken ones fail, each in another way."""

    Options: ClassVar[type[PlayOptions]] = PlayOptions

    @classmethod
    def num_tasks(cls, options: PlayOptions, *, split: Split) -> int:
        return options.num_tasks

    @classmethod
    def for_task(cls, options: PlayOptions, *, seed: int, split: Split, index: int) -> Environment:
        scene: Any = cls(num_turns=1 + index)
        if index in options.broken:
            ways: list[Hook] = [raising(KeyError(index)), lambda: asyncio.sleep(100), raising(SystemExit(index))]
            if index % 4 == 3:
                raise SystemExit("no task")
            scene = cls(("reset", "step", "score")[index % 3], ways[index % 4], num_turns=1 + index)
        return scene


class Recording(ScriptedBatchEngine):
    def __init__(self) -> None:
        super().__init__(says("ok"))
        self.batches: list[list[int]] = []

    def generate_batch(self, requests: Any) -> list[Any]:
        self.batches.append([request.rollout_key[0] for request in requests])
        return super().generate_batch(requests)


def collected(monkeypatch: pytest.MonkeyPatch, engine: Any, broken: frozenset[int], num_ranks: int = 1) -> list[Any]:
    monkeypatch.setitem(ENVIRONMENTS, "play", lambda: Play)
    tasks = TaskSource(name="play", options=PlayOptions(broken=broken), seed=0, split="train")
    parts = [
        asyncio.run(
            generate_rollouts(
                slots_of(collection=0, num_prompts=8, num_generations=1),
                tasks=tasks,
                engine=engine,
                renderer=ChatRenderer(CharacterTokenizer()),
                compaction=NoCompaction(),
                options=AgentOptions(max_context_tokens=10_000, max_tokens_per_call=100, step_timeout_s=1.0),
                run_seed=0,
                batch_rollouts=4,
                rank=rank,
                num_ranks=num_ranks,
            )
        )
        for rank in range(num_ranks)
    ]
    return sorted((rollout for part in parts for rollout in part), key=lambda rollout: rollout.rollout_id)


@pytest.mark.timeout(30)
def test_a_batch_goes_on_without_those_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = Recording(), Recording()
    fine = collected(monkeypatch, whole, frozenset())
    assert [rollout.status for rollout in fine] == ["ok"] * 8
    assert [len(batch) for batch in whole.batches] == [4, 3, 2, 1, *[4] * 5, 3, 2, 1]
    mixed = collected(monkeypatch, broken, frozenset({1, 3, 4, 6}))
    assert [rollout.status for rollout in mixed] == ["ok", "failed", "ok", "failed", "failed", "ok", "failed", "ok"]
    for before, after in zip(fine, mixed, strict=True):
        if after.status == "ok":
            assert after == before
    reasons = [(rollout.status_reason or "").strip().splitlines()[-1:] for rollout in mixed]
    assert "environment.step must end within" in reasons[1][0]
    assert "environment.reset raised SystemExit: no task" in reasons[3][0]
    assert "KeyError: 4" in reasons[4][0]
    assert "environment.reset raised SystemExit: 6" in reasons[6][0]
    assert broken.batches[0] == [0, 1, 2]  # the third could not be made, and was not waited for


@pytest.mark.timeout(30)
def test_statuses_do_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, shared = (collected(monkeypatch, Recording(), frozenset({3, 6}), num_ranks) for num_ranks in (1, 2))
    assert [(r.rollout_id, r.status, r.reward, r.calls) for r in alone] == [
        (r.rollout_id, r.status, r.reward, r.calls) for r in shared
    ]


def test_a_finite_set_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "play", lambda: Play)
    train = TaskSource(name="play", options=PlayOptions(num_tasks=5), seed=0, split="train")
    assert [train.prompt_id(index) for index in (4, 5, 12)] == ["play/train/0/4", "play/train/0/0", "play/train/0/2"]
    heldout = TaskSource(name="play", options=PlayOptions(num_tasks=5), seed=0, split="heldout")
    assert heldout.prompt_id(4) == "play/heldout/0/4"
    with pytest.raises(
        ConfigError, match=r"evaluation.num_tasks must be at most the 5 heldout tasks .* found 6 or more"
    ):
        heldout.environment(5)
    endless = TaskSource(name="ledger", options=ENVIRONMENTS["ledger"]().Options(), seed=0, split="heldout")
    assert (endless.num_tasks, endless.prompt_id(10**6)) == (None, "ledger/heldout/0/1000000")
