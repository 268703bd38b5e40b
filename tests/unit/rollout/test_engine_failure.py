"""Locks: whatever an engine raises ends every rollout of its batch at once, as an error of the engine that is never
taken for the environment's; a reward that is no number costs its rollout alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from evenstep.errors import EngineError
from evenstep.rollout.agent import AgentOptions, RolloutIdentity, run_rollout
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import NoCompaction
from evenstep.rollout.engine import Barrier, Completion, Request
from evenstep.rollout.environment import Episode, Score, Start
from scripted import CharacterTokenizer


class Broken:
    max_context_tokens, weight_version = 1000, 0

    async def generate(self, request: Request) -> Completion:
        return self.generate_batch([request])[0]

    def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        raise MemoryError("no room for 7 GiB")


class Answering(Broken):
    def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        done = Completion(output_ids=(65, 1), logprobs=(-0.1, -0.1), finish_reason="stop", weight_version=0)
        return [done for _ in requests]


class OneTurn:
    def __init__(self, reward: Any = 1.0, info: Any = None) -> None:
        self._reward, self._info = reward, info or {}

    async def reset(self) -> Start:
        return Start(task="t", observation="o")

    async def step(self, action: str) -> str | None:
        return None

    async def score(self, episode: Episode) -> Score:
        return Score(reward=self._reward, info=self._info)


async def play(engine: Any, index: int, environment: Any) -> Any:
    identity = RolloutIdentity(
        rollout_id=f"r{index}", group_id="g", prompt_id="p", key=(index,), seed_of_call=lambda order: order
    )
    return await run_rollout(
        identity=identity,
        environment=environment,
        engine=engine,
        renderer=ChatRenderer(CharacterTokenizer()),
        compaction=NoCompaction(),
        options=AgentOptions(max_context_tokens=100),
    )


@pytest.mark.timeout(20)
def test_an_engine_failure_reaches_every_rollout_of_the_batch() -> None:
    async def run() -> list[Any]:
        barrier = Barrier(Broken(), [(i,) for i in range(4)])
        return await asyncio.gather(*(play(barrier, i, OneTurn()) for i in range(4)), return_exceptions=True)

    found = asyncio.run(run())
    assert [type(error) for error in found] == [EngineError] * 4
    assert "rollout r2, call 0: the engine failed with MemoryError: no room for 7 GiB" in str(found[2])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), True, "1", None])
def test_a_reward_that_is_no_number_costs_its_rollout(reward: Any) -> None:
    rollout = asyncio.run(play(Answering(), 0, OneTurn(reward)))
    assert (rollout.status, rollout.reward) == ("failed", None)
    assert "Error" in rollout.status_reason


def test_info_is_kept_as_json_or_costs_its_rollout() -> None:
    kept = asyncio.run(play(Answering(), 0, OneTurn(info={"pair": (1, 2)})))
    assert (kept.status, kept.info["pair"]) == ("ok", [1, 2])
    assert asyncio.run(play(Answering(), 0, OneTurn(info={"x": object()}))).status == "failed"
