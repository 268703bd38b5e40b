"""Scripted fakes for rollouts: a tokenizer of characters, an engine that says what it is told, a rollout of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from evenstep.rollout.agent import AgentOptions, RolloutIdentity, run_rollout
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import NoCompaction
from evenstep.rollout.engine import Completion, Request
from evenstep.types import Rollout

END = 1  # the id that ends a turn


class CharacterTokenizer:
    """One id per character; turns are written between brackets."""

    eos_token_id = END

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        text = "".join(f"<{message['content']}\x01" for message in conversation)
        return text + ("<" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token != END)


def says(text: str) -> Completion:
    ids = (*(ord(character) for character in text), END)
    return Completion(output_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop", weight_version=0)


class ScriptedEngine:
    """Answers one after the other; the last one again and again."""

    max_context_tokens, weight_version = 10_000, 0

    def __init__(self, *answers: Any) -> None:
        self.answers = [says(answer) if isinstance(answer, str) else answer for answer in answers or ("ok",)]
        self.prompts: list[str] = []

    async def generate(self, request: Request) -> Any:
        self.prompts.append("".join(map(chr, request.prompt_ids)))
        return self.answers[min(len(self.prompts), len(self.answers)) - 1]


class ScriptedBatchEngine(ScriptedEngine):
    def generate_batch(self, requests: Sequence[Request]) -> list[Any]:
        return [self.answers[0] for _ in requests]


async def play(environment: Any, engine: Any, *, index: int = 0, **options: Any) -> Rollout:
    return await run_rollout(
        identity=RolloutIdentity(
            rollout_id=f"r{index}", group_id="g", prompt_id="p", key=(index,), seed_of_call=lambda order: order
        ),
        environment=environment,
        engine=engine,
        renderer=ChatRenderer(CharacterTokenizer()),
        compaction=NoCompaction(),
        options=AgentOptions(**({"max_context_tokens": 10_000, "max_tokens_per_call": 100} | options)),
    )


def played(environment: Any, *answers: Any, **options: Any) -> Rollout:
    return asyncio.run(play(environment, ScriptedEngine(*answers), **options))
