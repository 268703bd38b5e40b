"""What the rollouts of a capture server share, and how its engine is asked for an answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from evenstep.errors import ConfigError, EvenstepError
from evenstep.rollout.agent import RolloutIdentity
from evenstep.rollout.call_tree import OnUndeclared
from evenstep.rollout.calls import recorded_call
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.engine import Engine
from evenstep.serve.conversation import Conversations, Message, ToolTokenizer
from evenstep.serve.history import Answer, Turn
from evenstep.serve.refusals import RefusedError
from evenstep.serve.schemas import SamplingBody, stop_strings
from evenstep.serve.tool_calls import ToolFamily, found_tool_calls
from evenstep.types import BreakReason, Call, Sampling

__all__ = ["Capture", "CaptureLimits", "answers_to", "random_identity"]

T = TypeVar("T")
LONG_CHARACTERS = 16_384  # of a text that may keep others waiting while it is tokenised


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLimits:
    """How much a rollout may ask for, and all of them together.

    Raises:
        ConfigError: a limit below 1.
    """

    max_tokens_per_call: int  # most that a call may sample, and what it may where it does not say
    max_calls: int = 64  # of a rollout; with more it is truncated
    max_segments: int = 16  # of a rollout; with more it is truncated
    max_sampled_tokens: int | None = None  # of a rollout; at so many it is truncated
    max_concurrent_calls: int = 64  # of all rollouts together
    max_concurrent_calls_per_rollout: int = 16
    timeout_s: float = 3600.0  # from a rollout's first moment to its reward

    def __post_init__(self) -> None:
        for name in (
            "max_tokens_per_call", "max_calls", "max_segments", "max_sampled_tokens", "max_concurrent_calls",
            "max_concurrent_calls_per_rollout",
        ):  # fmt: skip
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, found {value}")
        if not self.timeout_s > 0:
            raise ConfigError(f"a rollout's time limit must be above 0 seconds, found {self.timeout_s}")


@dataclass(slots=True, kw_only=True)
class Capture:
    """What all rollouts of a server share."""

    engine: Engine
    tokenizer: ToolTokenizer
    limits: CaptureLimits
    renderer: ChatRenderer
    model_name: str = "policy"
    temperature: float = 1.0  # trained at, and so the only one that may be asked for
    is_greedy: bool = False  # sample greedily whatever is asked for, as an evaluation does
    max_context_tokens: int | None = None  # of a prompt and its output; None: the engine's
    vocab_size: int | None = None
    longest_token: int | None = None  # characters of the vocabulary's longest one; None: no text is too long to look at
    on_undeclared: OnUndeclared = "error"
    tool_family: ToolFamily | None = None
    on_engine_error: Callable[[EvenstepError], None] | None = None
    num_running: int = 0  # calls that are tokenised, or that the engine is asked, now
    conversations: Conversations = field(init=False)
    _long_texts: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.tokenizer, self.renderer)

    @property
    def context_tokens(self) -> int:
        most = self.engine.max_context_tokens
        return most if self.max_context_tokens is None else min(most, self.max_context_tokens)

    async def tokenised(self, num_characters: int, work: Callable[[], T], *, num_beside: int = 0) -> T:
        """Do what makes ids of a text: of a long one beside the event loop, one after the other.

        Args:
            num_characters: of the text.
            work: makes the ids.
            num_beside: characters that may be in the text too, as those of tools.

        Raises:
            RefusedError: so many characters cannot fit the context, whatever they are.
        """
        if self.longest_token is not None and num_characters > self.context_tokens * self.longest_token:
            raise RefusedError(
                400,
                f"the context holds {self.context_tokens} tokens of at most {self.longest_token} characters each, "
                f"found {num_characters} characters; compact the history and declare it",
                code="context_length_exceeded",
                param="messages",
            )
        if num_characters + num_beside <= LONG_CHARACTERS:
            return work()
        async with self._long_texts:
            return await asyncio.to_thread(work)


def random_identity(rollout_id: str, *, group_id: str, prompt_id: str) -> RolloutIdentity:
    """Of a rollout that no run knows: calls without a seed draw a random one."""
    return RolloutIdentity(
        rollout_id=rollout_id,
        group_id=group_id,
        prompt_id=prompt_id,
        key=(),
        seed_of_call=lambda _: secrets.randbits(63),
    )


async def answers_to(
    capture: Capture,
    turns: Sequence[Turn],
    body: SamplingBody,
    *,
    identity: RolloutIdentity,
    seeds: Sequence[int],
    reason: BreakReason | None,
) -> list[Answer]:
    """One answer for each turn, asked for at the same time.

    Raises:
        EvenstepError: the engine failed.
    """

    async def answer(turn: Turn, seed: int) -> Answer:
        call = await recorded_call(
            capture.engine,
            order=turn.order,
            prompt_ids=turn.prompt_ids,
            sampling=Sampling(
                temperature=0.0 if capture.is_greedy else capture.temperature, max_tokens=turn.max_tokens, seed=seed
            ),
            rollout_id=identity.rollout_id,
            rollout_key=identity.key,
            group_id=identity.group_id,
            vocab_size=capture.vocab_size,
            parent=turn.parent,
            break_reason=reason,
        )
        return _answer(capture, call, stop_strings(body), parses_tools=turn.parses_tools)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(answer(turn, seed)) for turn, seed in zip(turns, seeds, strict=True)]
    except* EvenstepError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


def _answer(capture: Capture, call: Call, stops: Sequence[str], *, parses_tools: bool) -> Answer:
    text = capture.renderer.text(call.output_ids)
    if any(stop in text for stop in stops):
        call, text = _cut(capture.renderer, call, text, stops)
    said, found = text, ()
    if parses_tools and capture.tool_family is not None:
        said, found = found_tool_calls(text, capture.tool_family)
    return Answer(
        call=call,
        text=text,
        message=Message(role="assistant", content=said, tool_calls=found),
        finish_reason="tool_calls" if found else str(call.finish_reason),
    )


def _cut(renderer: ChatRenderer, call: Call, text: str, stops: Sequence[str]) -> tuple[Call, str]:
    """The call up to the token with which a stop string is complete, and the text before that string.

    What is left is distributed as if sampling had stopped there: no token depends on a later one.
    """
    low, high = 1, len(call.output_ids)
    while low < high:
        middle = (low + high) // 2
        text = renderer.text(call.output_ids[:middle])
        low, high = (low, middle) if any(stop in text for stop in stops) else (middle + 1, high)
    text = renderer.text(call.output_ids[:high])
    cut = replace(call, output_ids=call.output_ids[:high], logprobs=call.logprobs[:high], finish_reason="stop")
    if (experts := call.routed_experts) is not None:
        num_left = max(experts.num_tokens - (len(call.output_ids) - high), 0)
        cut = replace(cut, routed_experts=experts.part(0, num_left))
    return cut, text[: min(text.index(stop) for stop in stops if stop in text)]
