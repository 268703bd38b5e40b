"""Lock: what a capture server took call by call is a rollout at the end, and each sampled token is trained once.

Agents that branch, try again, rewrite with and without a reason, ask for several choices, talk at the same time, leave
before the answer and throw answers away; an engine that fails now and then, with few words, so that equal texts and
ids come up everywhere.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.segments import segmentation_of
from evenstep.serve.capture import random_identity
from evenstep.serve.captured import CapturedRollout
from evenstep.serve.refusals import RefusedError
from evenstep.serve.schemas import ChatBody, CompletionBody
from serving_fakes import END, AsyncEngine, ToolTokenizer, make_capture

REASONS: list[Any] = [None, None, None, "compaction", "subagent", "template"]
SEEDS = 400  # of an example; the long ones go on from there


class Babbling(AsyncEngine):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    async def generate(self, request: Request) -> Completion:
        if self._rng.random() < 0.5:
            await asyncio.sleep(0)
        if self._rng.random() < 0.05:
            raise RuntimeError("out of memory")
        text = self._rng.choice(["a", "ab", "ba", "b", "aab", "<user:b"])
        ids = [*map(ord, text)] if self._rng.random() < 0.5 else ToolTokenizer().encode(text, add_special_tokens=False)
        ids = [*ids, END][: request.sampling.max_tokens]
        return Completion(
            output_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            finish_reason="stop" if ids[-1] == END else "length",
            weight_version=0,
        )


class Agent:
    """Asks at random, and remembers what it was answered."""

    def __init__(self, rollout: CapturedRollout, rng: random.Random) -> None:
        self._rollout, self._rng = rollout, rng
        self._histories: list[list[Any]] = []
        self._prompts: list[Any] = ["ab"]  # texts and ids with the answers behind them

    def _user(self) -> dict[str, str]:
        return {"role": "user", "content": self._rng.choice(["a", "b", "ab"])}

    def _messages(self) -> list[Any]:
        rng = self._rng
        if not self._histories or rng.random() < 0.25:
            return [self._user()]
        messages = [*rng.choice(self._histories), self._user()]
        if len(messages) > 2 and rng.random() < 0.15:
            del messages[rng.randrange(len(messages) - 1)]
        return messages

    async def chat(self) -> None:
        messages, rng = self._messages(), self._rng
        body = ChatBody(
            messages=messages,
            n=rng.choice([1, 1, 2, 3]),
            stop=rng.choice([None, None, "b"]),
            max_tokens=rng.choice([None, 1, 2]),
        )
        for answer in await self._rollout.chat(body, rng.choice(REASONS), self._is_gone):
            self._histories.append([*messages, {"role": "assistant", "content": answer.message.content}])

    async def complete(self) -> None:
        rng, prompt = self._rng, self._rng.choice(self._prompts)
        prompt = prompt + (rng.choice(["a", "b", ""]) if isinstance(prompt, str) else rng.choice([[97], [98, 97], []]))
        body = CompletionBody(prompt=prompt, n=rng.choice([1, 1, 2]))
        for answer in await self._rollout.complete(body, rng.choice(REASONS), self._is_gone):
            self._prompts.append([*answer.call.prompt_ids, *answer.call.output_ids])
            self._prompts += [prompt + answer.text] if isinstance(prompt, str) else []

    async def _is_gone(self) -> bool:
        return self._rng.random() < 0.1

    async def play(self) -> None:
        rng = self._rng
        asked: list[asyncio.Task[None]] = []
        for _ in range(rng.randint(1, 10)):
            asked.append(asyncio.create_task(self.complete() if rng.random() < 0.2 else self.chat()))
            if rng.random() < 0.8:
                await asyncio.wait(asked)
            if rng.random() < 0.15:
                with suppress(RefusedError):
                    self._rollout.reject([rng.randint(0, 5)])
            if rng.random() < 0.1:
                self._rollout.declare(rng.choice(REASONS[3:]))
        for result in await asyncio.gather(*asked, return_exceptions=True):
            if result is not None and not isinstance(result, RefusedError):
                raise result


async def captured(seed: int) -> None:
    rng = random.Random(seed)
    on_undeclared = rng.choice(["error", "error", "segment", "realign"])
    capture = make_capture(Babbling(rng), on_undeclared=on_undeclared, limits={"max_calls": 64, "max_segments": 64})
    rollout = CapturedRollout(random_identity("r", group_id="g", prompt_id="p"), capture)
    await Agent(rollout, rng).play()
    ended = rollout.end("ok", 1.0)
    assert ended.status == "ok", (seed, ended.status_reason)
    report = segmentation_of(ended, on_undeclared=on_undeclared).report
    assert report.num_trained_tokens + report.num_realigned_tokens == ended.num_sampled_tokens, seed
    assert on_undeclared != "error" or report.num_undeclared_calls == report.num_realigned_tokens == 0, seed


@pytest.mark.parametrize("first", [0, *(pytest.param(n * SEEDS, marks=pytest.mark.long) for n in range(1, 40))])
def test_what_was_taken_call_by_call_is_a_rollout(first: int) -> None:
    for seed in range(first, first + SEEDS):
        asyncio.run(captured(seed))
