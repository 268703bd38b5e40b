"""A server of a vision model takes text alone. What is locked here:

1. An image in a message is refused, and the refusal says what may stand there.
2. The name of a placeholder in a message or a text is text: no prompt holds the placeholder, and the rollout goes on.
3. A prompt that holds a placeholder, because an answer did or because the agent sent ids, truncates the rollout, which
   keeps its vote: all its rows can be trained, whatever forks and breaks the agent made.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from evenstep.errors import RowError
from evenstep.rollout.chat import ChatRenderer
from evenstep.serve.capture import random_identity
from evenstep.serve.captured import CapturedRollout
from evenstep.serve.refusals import RefusedError
from evenstep.serve.schemas import ChatBody, CompletionBody
from evenstep.types import Rollout
from serving_fakes import ADMIN, AsyncEngine, http, make_capture, served
from vision_text import END, MARKS, Spelling

NAMES = f"{MARKS[1]} and {MARKS[0]}{MARKS[3]}"


@pytest.fixture(scope="module")
def spelling() -> Spelling:
    return Spelling()


def captured(spelling: Spelling, *answers: tuple[int, ...]) -> tuple[CapturedRollout, AsyncEngine]:
    engine = AsyncEngine(*answers)
    capture = make_capture(engine, tokenizer=spelling.tokenizer, vision=spelling.spec)
    return CapturedRollout(random_identity("r", group_id="g", prompt_id="p"), capture), engine


async def chat(rollout: CapturedRollout, *said: tuple[str, str], reason: Any = None) -> str:
    messages = [{"role": role, "content": content} for role, content in said]
    (answer,) = await rollout.chat(ChatBody.model_validate({"messages": messages}), reason)
    return answer.text


async def complete(rollout: CapturedRollout, prompt: Any) -> None:
    await rollout.complete(CompletionBody.model_validate({"prompt": prompt}), None)


def test_an_image_in_a_message_is_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    async def script() -> None:
        async with served() as (url, _):
            key = (await http(url, "POST", "/rollouts", {}, key=ADMIN))[1]["key"]
            body = {"model": "policy", "messages": [{"role": "user", "content": [image]}]}
            status, answer, _ = await http(url, "POST", "/v1/chat/completions", body, key=key)
            assert status == 422
            words = "messages[0].content must be text, or parts of type 'text': images and other media are not served"
            assert answer["error"]["message"].startswith(words)

    asyncio.run(script())


@pytest.mark.parametrize("way", ["user", "system", "answer", "tool", "text"])
def test_the_name_of_a_placeholder_is_text(spelling: Spelling, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script() -> tuple[Rollout, tuple[int, ...]]:
        rollout, engine = captured(spelling, spelling.ids(NAMES, END))
        if way == "text":
            await complete(rollout, f"a {NAMES}")
        elif way == "answer":  # repeated by the agent, and rendered anew
            said = await chat(rollout, ("user", "a"))
            await chat(rollout, ("user", "z"), ("assistant", said), ("user", said), reason="template")
        else:
            await chat(rollout, (way, NAMES), ("user", "a"))
        return rollout.end("ok", 1.0), engine.requests[-1].prompt_ids

    rollout, last = asyncio.run(script())
    assert rollout.status == "ok"
    assert spelling.tokenizer.decode(list(last)).count(NAMES) == 1 + (way == "answer")
    assert not {spelling.spec.image_token_id, spelling.spec.video_token_id} & set(last)
    spelling.check(rollout)
    monkeypatch.setattr(ChatRenderer, "literal", lambda self, text: text)
    with pytest.raises(RefusedError, match="the placeholder of an image or video"):
        asyncio.run(script())


@pytest.mark.parametrize("marks", [(MARKS[1],), (MARKS[0], MARKS[3])], ids=["image", "video"])
@pytest.mark.parametrize("way", ["turn", "fork", "compaction", "ids"])
def test_a_placeholder_in_a_prompt_truncates(
    spelling: Spelling, marks: tuple[str, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script() -> Rollout:
        rollout, _ = captured(spelling, spelling.ids("x", *marks, END), spelling.ids("x", END))
        with suppress(RefusedError):
            if way == "ids":
                await complete(rollout, list(spelling.ids("a", *marks, "b")))
                return rollout.end("ok", 1.0)
            first = await chat(rollout, ("user", "a"))
            assert first == "x"  # marks are no text
            if way == "compaction":
                await chat(rollout, ("user", "z"), ("assistant", first), ("user", "b"), reason="compaction")
            else:
                await chat(rollout, ("user", "a"), ("assistant", first), ("user", "b"))
            if way == "fork":
                await chat(rollout, ("user", "a"), ("assistant", first), ("user", "c"))
        return rollout.end("ok", 1.0)

    rollout = asyncio.run(script())
    assert rollout.status == "truncated"
    assert f"token {spelling.ids(marks[-1])[0]}, the placeholder of an image or video" in str(rollout.status_reason)
    assert rollout.is_voter
    assert sum(row.num_trained_tokens for row in spelling.check(rollout)) == rollout.num_sampled_tokens
    # the wrong way: it goes on, and where a row holds what another one trains, nobody can train it
    monkeypatch.setattr(ChatRenderer, "placeholder_among", lambda self, ids: None)
    if way == "turn":
        spelling.check(asyncio.run(script()))
        return
    with pytest.raises(RowError, match=r"is an image placeholder|begins a video"):
        spelling.check(asyncio.run(script()))
