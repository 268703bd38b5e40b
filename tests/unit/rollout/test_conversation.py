"""Behaviours locked here:

1. An environment that asks the policy itself makes calls of the rollout: a sub-agent declares itself, its next turns
   continue it, a fork continues where it began, the agent goes on where it was; each sampled token is trained once,
   what forks share is trained once, answers that were taken back are not trained.
2. It may ask before the agent's first call, in a step, and while scoring; questions at the same time are asked one
   after the other; each call has the seed of its order number.
3. The time that the model takes counts towards no limit of the environment; the environment's own still does.
4. Limits: on calls, segments and context; the rollout is then truncated. An engine's error ends the run, even where the
   environment swallows it. A question from outside of reset, step and score is refused.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenstep.errors import EngineError
from evenstep.files import read_rollouts, write_rollouts
from evenstep.rollout.environment import Score, Start
from evenstep.rollout.segments import segmentation_of
from evenstep.types import Rollout
from scripted import ScriptedBatchEngine, ScriptedEngine, play, played, says


class Asking:
    """One turn; what it asks the policy is the test's."""

    def __init__(self, in_step: Any = None, in_reset: Any = None, in_score: Any = None) -> None:
        self.hooks = {"step": in_step, "reset": in_reset, "score": in_score}
        self.said: list[str] = []
        self.num_segments: int | None = None
        self.visible: tuple[int, ...] | None = None

    def use_model(self, converse: Any) -> None:
        self.converse = converse

    async def _run(self, name: str) -> None:
        if self.hooks[name] is not None:
            await self.hooks[name](self)

    async def reset(self) -> Start:
        await self._run("reset")
        return Start(task="go", observation="a")

    async def step(self, action: str) -> str | None:
        self.said.append(action)
        await self._run("step")
        return "b" if len(self.said) == 1 else None

    async def score(self, episode: Any) -> Score:
        self.num_segments, self.visible = episode.num_segments, episode.visible_observations
        await self._run("score")
        return Score(reward=0.5)


def rows(rollout: Rollout) -> list[str]:
    """Each segment as text, trained tokens in capitals: the engine speaks in capitals, everybody else does not."""
    found = segmentation_of(rollout)
    assert found.report.num_trained_tokens == rollout.num_sampled_tokens
    shown: list[str] = []
    for segment in found.segments:
        text = "".join(
            (chr(token) if mask else chr(token).lower()).replace("\x01", "|")
            for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True)
        )
        shown.append(text)
    return shown


def test_sub_agent_and_its_next_turn() -> None:
    async def once(env: Asking) -> None:
        if env.said == ["A"]:
            env.answer = await (talk := env.converse()).ask("x")
            env.answer += await talk.ask("y")

    env = Asking(in_step=once)
    rollout = played(env, "A", "P", "Q", "B")
    assert env.answer == "PQ"
    assert env.said == ["A", "B"]
    assert rows(rollout) == ["<go\na|<A|<b|<B|", "<x|<P|<y|<Q|"]
    assert env.num_segments == rollout.info["num_segments"] == 2
    assert [c.parent for c in rollout.calls] == [None, None, 1, 0]
    assert [c.sampling.seed for c in rollout.calls] == [0, 1, 2, 3]


def test_forks_and_answers_taken_back() -> None:
    async def drafts(env: Asking) -> None:
        if env.said != ["A"]:
            return
        talk = env.converse()
        await talk.ask("x")
        other = talk.fork()
        await talk.ask("y")
        await other.ask("z")
        await other.ask("w")
        other.take_back()
        await other.ask("v")

    env = Asking(in_step=drafts)
    rollout = played(env, "A", "P", "Q", "R", "NO", "S", "B")
    assert [c.is_rejected for c in rollout.calls] == [False, False, False, False, True, False, False]
    assert rows(rollout) == ["<go\na|<A|<b|<B|", "<x|<P|<y|<Q|", "<x|<p|<z|<R|<v|<S|"]
    assert env.num_segments == 3


@pytest.mark.parametrize("asked", [2.5, 2.0, float("nan"), "2", True, np.float32(2), 0, -1])
def test_a_number_of_tokens_that_is_none_costs_the_rollout(asked: Any) -> None:
    rollout = played(Asking(in_step=lambda env: env.converse().ask("x", max_tokens=asked)), "A", "B")
    assert (rollout.status, len(rollout.calls)) == ("failed", 1)
    assert "max_tokens must be" in (rollout.status_reason or "")


def test_a_number_of_tokens_may_be_numpy_s(tmp_path: Any) -> None:
    rollout = played(Asking(in_reset=lambda env: env.converse().ask("x", max_tokens=np.int64(3))), "A", "B")
    assert rollout.calls[0].sampling.max_tokens == 3
    write_rollouts(tmp_path / "a.jsonl", [rollout])
    assert list(read_rollouts(tmp_path / "a.jsonl")) == [rollout]


def test_first_answer_taken_back() -> None:
    async def retry(env: Asking) -> None:
        if env.said == ["A"]:
            talk = env.converse()
            with pytest.raises(RuntimeError, match="ask\\(\\) first"):
                talk.take_back()
            await talk.ask("x")
            talk.take_back()
            await talk.ask("x")

    rollout = played(Asking(in_step=retry), "A", "NO", "P", "B")
    assert rows(rollout) == ["<go\na|<A|<b|<B|", "<x|<P|"]


def test_before_the_agent_and_while_scoring() -> None:
    async def ask(env: Asking) -> None:
        await env.converse().ask("x")

    env = Asking(in_reset=ask, in_score=ask)
    rollout = played(env, "P", "A", "B", "J")
    assert rows(rollout) == ["<x|<P|", "<go\na|<A|<b|<B|", "<x|<J|"]
    assert rollout.status == "ok"
    assert rollout.info["num_segments"] == 3


def test_at_the_same_time_one_after_the_other() -> None:
    class Slow(ScriptedEngine):
        num_running = most = 0

        async def generate(self, request: Any) -> Any:
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            await asyncio.sleep(0.01)
            self.num_running -= 1
            return await super().generate(request)

    async def both(env: Asking) -> None:
        if env.said == ["A"]:
            await asyncio.gather(*(env.converse().ask(text) for text in "xyz"))

    engine = Slow("A", "P", "Q", "R", "B")
    rollout = asyncio.run(play(Asking(in_step=both), engine))
    assert engine.most == 1
    assert rows(rollout) == ["<go\na|<A|<b|<B|", "<x|<P|", "<y|<Q|", "<z|<R|"]


def test_only_the_environments_own_time_counts() -> None:
    class Slow(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            await asyncio.sleep(0.2)
            return await super().generate(request)

    async def ask(env: Asking) -> None:
        await env.converse().ask("x")

    rollout = asyncio.run(play(Asking(in_step=ask), Slow("A"), step_timeout_s=0.1, timeout_s=0.15))
    assert rollout.status == "ok"

    async def ask_and_hang(env: Asking) -> None:
        await env.converse().ask("x")
        await asyncio.sleep(60)

    started = time.monotonic()
    rollout = asyncio.run(play(Asking(in_step=ask_and_hang), Slow("A"), step_timeout_s=0.1))
    assert rollout.status == "failed"
    assert "step_timeout_s = 0.1" in str(rollout.status_reason)
    assert time.monotonic() - started < 10

    async def ask_at_once_and_hang(env: Asking) -> None:
        await asyncio.gather(*(env.converse().ask(text) for text in "xyz"))
        await asyncio.sleep(60)

    # a busy machine is late by more than a tenth of a short limit; a wait for the model that counts is also of this one
    for limit_s in (0.1, 0.5, 2.5):
        started = time.monotonic()
        rollout = asyncio.run(play(Asking(in_step=ask_at_once_and_hang), Slow("A"), step_timeout_s=limit_s))
        assert rollout.status == "failed"
        assert time.monotonic() - started < 10
        if " late: " not in str(rollout.status_reason):
            break
    assert f"step_timeout_s = {limit_s} seconds; it was stopped" in str(rollout.status_reason)

    async def ask_and_block(env: Asking) -> None:
        await env.converse().ask("x")
        time.sleep(0.15)

    rollout = asyncio.run(play(Asking(in_step=ask_and_block), Slow("A"), step_timeout_s=0.1))
    assert "it blocked" in str(rollout.status_reason) or "step_timeout_s" in str(rollout.status_reason)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"max_calls": 4}, "max_calls = 4"),
        ({"max_segments": 3}, "max_segments = 3"),
        ({"max_context_tokens": 40, "max_tokens_per_call": 10}, "a conversation of the environment is full"),
    ],
)
def test_limits(options: dict[str, int], reason: str) -> None:
    async def forever(env: Asking) -> None:
        message = "x"
        while True:
            await env.converse().ask(message)
            message += message

    env = Asking(in_step=forever)
    rollout = played(env, "A", "P", **options)
    assert rollout.status == "truncated"
    assert reason in str(rollout.status_reason)
    assert rollout.reward == 0.5
    assert env.visible == (0,)
    rows(rollout)


def test_engine_errors_end_the_run() -> None:
    async def swallow(env: Asking) -> None:
        try:
            await env.converse().ask("x")
        except Exception:  # noqa: BLE001 -- what a careless environment does
            return

    with pytest.raises(EngineError, match="one log-prob for each"):
        played(Asking(in_step=swallow), "A", replace(says("P"), logprobs=(-1.0,)))


def test_a_question_from_outside_is_refused() -> None:
    found: list[BaseException] = []

    async def late(env: Asking) -> None:
        async def ask() -> None:
            await asyncio.sleep(0.05)
            try:
                await env.converse().ask("x")
            except RuntimeError as error:
                found.append(error)

        env.task = asyncio.create_task(ask())

    class Slow(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            await asyncio.sleep(0.1)
            return await super().generate(request)

    rollout = asyncio.run(play(Asking(in_reset=late), Slow("A")))
    assert len(rollout.calls) == 2
    assert "within reset, step or score" in str(found[0])


def test_in_a_generation_batch() -> None:
    """Rollouts that ask more often than others: nobody waits for ever, and each has its own answers."""
    from evenstep.rollout.engine import Barrier

    class Echo(ScriptedBatchEngine):
        def generate_batch(self, requests: Any) -> Any:
            return [says(f"K{request.rollout_key[0]}") for request in requests]

    async def ask(env: Asking) -> None:
        for _ in range(env.count):
            assert await env.converse().ask("x") == f"K{env.count}"

    async def run() -> list[Rollout]:
        barrier = Barrier(Echo(), [(index,) for index in range(4)])

        async def one(index: int) -> Rollout:
            env = Asking(in_step=ask)
            env.count = index
            try:
                return await play(env, barrier, index=index)
            finally:
                barrier.leave((index,))

        return await asyncio.gather(*(one(index) for index in range(4)))

    assert [len(r.calls) for r in asyncio.run(run())] == [2, 4, 6, 8]
