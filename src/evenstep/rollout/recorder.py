"""Model calls of one rollout: one at a time, within its limits, kept in order and in their place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from evenstep.errors import ConfigError, EvenstepError
from evenstep.rollout.calls import recorded_call
from evenstep.rollout.chat import ChatRenderer, Prompt
from evenstep.rollout.engine import Engine, RolloutKey
from evenstep.types import BreakReason, Call, Sampling

__all__ = ["AgentOptions", "Recorder", "RolloutIdentity", "TruncatedError"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """How an agent samples, and where it stops.

    Raises:
        ConfigError: a limit below 1, a temperature below 0, or a time that is not above 0.
    """

    max_context_tokens: int  # guard: prompt + reserved generation of every call stay within it
    max_tokens_per_call: int = 4
    temperature: float = 1.0  # 0: greedy
    max_calls: int = 64
    max_segments: int = 16
    is_cut_off_truncated: bool = False  # whether an episode that ends with an output cut off by a limit is truncated
    step_timeout_s: float = 60.0  # most seconds of one call of the environment
    timeout_s: float | None = None  # most seconds of all of them in a rollout together; None: any
    vocab_size: int | None = None  # of the model that is trained; an output id at or above it is refused

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_tokens_per_call", "max_calls", "max_segments"):
            value: int = getattr(self, name)
            if value < 1:
                raise ConfigError(f"rollout.{name} must be at least 1, found {value}")
        if self.temperature < 0:
            raise ConfigError(f"rollout.temperature must be at least 0, found {self.temperature}")
        for name in ("step_timeout_s", "timeout_s"):
            seconds: float | None = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"rollout.{name} must be above 0 seconds, found {seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIdentity:
    """Who a rollout is: its ids, its place in a generation batch, and the seed of each of its calls."""

    rollout_id: str
    group_id: str
    prompt_id: str
    key: RolloutKey
    seed_of_call: Callable[[int], int]  # order of the call -> sampling seed


class TruncatedError(Exception):
    """The episode cannot go on; the message is the rollout's status_reason."""


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Makes calls, one at a time, and keeps them in order.

    The agent's own calls form a chain (``next_output``). Beside it an environment may make calls of its own (``call``):
    sub-agents, forks, outputs that it throws away.
    """

    engine: Engine
    renderer: ChatRenderer
    options: AgentOptions
    identity: RolloutIdentity
    calls: list[Call] = field(default_factory=list[Call])
    # once set, the rollout ends with it, even where an environment that asked for a call swallowed it
    failure: EvenstepError | None = None
    _last: Call | None = None  # of the agent's own
    _break_reason: BreakReason | None = None  # of the agent's next call
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_segments(self) -> int:
        """Segments that calls were made in: chains of calls, those of forks and sub-agents too, rejected ones not."""
        kept = [call for call in self.calls if not call.is_rejected]
        continued = {call.parent for call in kept if call.break_reason is None}
        return max(1, sum(call.order not in continued for call in kept))

    def is_continued_by(self, prompt: Prompt) -> bool:
        """Whether a prompt only appends to the agent's last prompt and output; so does any first prompt."""
        if self._last is None:
            return True
        return prompt.continues(self._last.prompt_ids + self._last.output_ids, self._last.media)

    def end(self) -> None:
        """The episode is over.

        Raises:
            TruncatedError: with an output that was cut off, where that counts.
        """
        last = self._last
        if self.options.is_cut_off_truncated and last is not None and last.finish_reason == "length":
            raise TruncatedError(
                f"the episode ended with an output that was cut off after {len(last.output_ids)} tokens "
                f"(max_tokens_per_call = {self.options.max_tokens_per_call}, max_context_tokens = "
                f"{self.options.max_context_tokens})"
            )

    def start_segment(self) -> None:
        """Let the agent's next call begin a segment, because its context was compacted."""
        self._refuse_one_more_segment()
        self._break_reason = "compaction"

    async def next_output(self, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        """The agent's next call."""
        parent = None if self._last is None else self._last.order
        self._last = await self.call(prompt, max_tokens, parent=parent, break_reason=self._break_reason)
        self._break_reason = None
        return self._last.output_ids

    async def call(
        self, prompt: Prompt, max_tokens: int, *, parent: int | None, break_reason: BreakReason | None
    ) -> Call:
        """Any call.

        Raises:
            TruncatedError: the limit on calls or segments is reached, or the output holds the placeholder of an image
                or video, which it has not: no prompt could repeat it.
            EvenstepError: the engine failed, or answered with what no engine may.
        """
        async with self._one_at_a_time:
            try:
                call = await self._called(prompt, max_tokens, parent, break_reason)
            except EvenstepError as error:
                self.failure = error
                raise
            self.calls.append(call)
            placeholder = self.renderer.placeholder_among(call.output_ids)
            if placeholder is not None:
                raise TruncatedError(
                    f"the output of call {call.order} holds the placeholder of an image or video (token "
                    f"{placeholder}) and neither of them"
                )
            return call

    def reject(self, call: Call) -> None:
        """Say that the output of a call was thrown away: it is never trained."""
        self.calls[call.order] = replace(call, is_rejected=True)

    async def _called(
        self, prompt: Prompt, max_tokens: int, parent: int | None, break_reason: BreakReason | None
    ) -> Call:
        order = len(self.calls)
        if order == self.options.max_calls:
            raise TruncatedError(f"max_calls = {self.options.max_calls} calls are made and the episode goes on")
        kept = [call for call in self.calls if not call.is_rejected]
        if break_reason is not None or any(call.parent == parent and call.break_reason is None for call in kept):
            self._refuse_one_more_segment()
        sampling = Sampling(
            temperature=self.options.temperature, max_tokens=max_tokens, seed=self.identity.seed_of_call(order)
        )
        return await recorded_call(
            self.engine,
            order=order,
            prompt_ids=prompt.ids,
            media=prompt.media,
            sampling=sampling,
            rollout_id=self.identity.rollout_id,
            rollout_key=self.identity.key,
            group_id=self.identity.group_id,
            vocab_size=self.options.vocab_size,
            parent=parent,
            break_reason=break_reason,
            before=None if parent is None else self.calls[parent],
        )

    def _refuse_one_more_segment(self) -> None:
        if self.calls and self.num_segments >= self.options.max_segments:
            raise TruncatedError(
                f"max_segments = {self.options.max_segments} segments are full and the episode goes on; raise "
                f"rollout.max_segments, or let compaction break the context less often"
            )
