"""What an agent's context is, and what is done before it is full.

A context is the task, a lead (a note, where a policy lets one be written), and turns; a turn is an observation and the
model's exact answer to it. A policy maps a context to a shorter one, which starts a new segment: *what* goes is the
policy's, *when* it is asked is the schedule's, and whether the result fits is measured in the engine's own ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, cast

from evenstep.errors import ConfigError
from evenstep.plugins import is_own_class, own_class
from evenstep.rollout.chat import ChatRenderer, Prompt

__all__ = [
    "COMPACTIONS",
    "Compaction",
    "CompactionPolicy",
    "Context",
    "Guard",
    "NoCompaction",
    "Recency",
    "Schedule",
    "SlidingWindow",
    "Summary",
    "Turn",
    "compaction_named",
    "compaction_type",
]

Schedule = Literal["when_full", "rolling", "chunked"]
_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One observation and the answer to it."""

    index: int  # of the observation in the episode, from 0
    observation: str  # with images: an `Observation`
    output_ids: tuple[int, ...]  # exactly as sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the model will be given, but for the observation it has not answered yet.

    Where turns were dropped, one ``marker`` stands for each run of them, before the observation that follows.
    """

    task: str
    lead: str = ""  # a note; empty before the first
    turns: tuple[Turn, ...] = ()  # by increasing index
    marker: str = ""  # empty: nothing shows that turns were dropped
    num_turns: int = 0  # played so far, dropped ones included
    num_base_turns: int = 0  # of ``turns``, those that the last plan left; the others came since

    def prompt_ids(self, renderer: ChatRenderer, message: str) -> tuple[int, ...]:
        """Ids up to the model's answer to ``message``: every earlier output stands there as it was sampled."""
        return self.prompt(renderer, message).ids

    def prompt(self, renderer: ChatRenderer, message: str) -> Prompt:
        """These ids, and the images of the observations among them."""
        indices = [turn.index for turn in self.turns] + [self.num_turns]
        seen = [turn.observation for turn in self.turns] + [message]
        observations = [renderer.shown(observation) for observation in seen]
        for place, (before, index) in enumerate(zip([-1, *indices[:-1]], indices, strict=True)):
            if index > before + 1:
                observations[place] = _joined(renderer.literal(self.marker), observations[place])
        task, lead = renderer.literal(self.task), renderer.literal(self.lead)
        ids = list(renderer.head(_joined(task, lead, observations[0])))
        for turn, observation in zip(self.turns, observations[1:], strict=True):
            ids += turn.output_ids
            ids += renderer.interstitial(observation, after=turn.output_ids)
        return renderer.prompt(ids, seen)

    def with_turn(self, observation: str, output_ids: tuple[int, ...]) -> Context:
        """The context after an answer."""
        turn = Turn(index=self.num_turns, observation=observation, output_ids=output_ids)
        return replace(self, turns=(*self.turns, turn), num_turns=self.num_turns + 1)


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The limit that a call must keep to, and what a policy may ask before one.

    prompt tokens + ``num_reserved_tokens`` ≤ ``max_context_tokens``
    """

    renderer: ChatRenderer
    observation: str  # the newest one, which is in every prompt: the next action answers it
    max_context_tokens: int
    num_reserved_tokens: int  # of the answer, and of what the policy itself asked to keep free
    is_full: bool  # the context as it stands does not fit: something must go
    is_recompaction: bool  # the policy's first result did not fit; there is no third attempt
    write_note: Callable[[str, int], Awaitable[str]]  # (request, max_tokens) -> text of a recorded call, trained

    def num_prompt_tokens(self, context: Context) -> int:
        """Tokens of the next call's prompt, counted in the ids that the engine will get."""
        return len(context.prompt_ids(self.renderer, self.observation))

    def num_tokens(self, context: Context) -> int:
        """Tokens of that prompt and of the generation that is reserved behind it."""
        return self.num_prompt_tokens(context) + self.num_reserved_tokens

    def fits(self, context: Context) -> bool:
        """Whether the next call keeps to the limit."""
        return self.num_tokens(context) <= self.max_context_tokens


class Compaction(Protocol):
    """What the agent loop asks of a policy."""

    name: ClassVar[str]

    def num_reserved_tokens(self, renderer: ChatRenderer) -> int:
        """Tokens that must stay free behind every answer so that compaction itself fits."""
        ...

    def is_due(self, context: Context, num_prompt_tokens: int) -> bool:
        """Whether the policy wants to be asked although the context still fits."""
        ...

    async def compact(self, context: Context, guard: Guard) -> Context | None:
        """A shorter context with the same task, or None when nothing is to be dropped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCompaction:
    """Never drops anything: a rollout whose context is full is truncated."""

    name: ClassVar[str] = "none"

    def num_reserved_tokens(self, renderer: ChatRenderer) -> int:
        return 0

    def is_due(self, context: Context, num_prompt_tokens: int) -> bool:
        return False

    async def compact(self, context: Context, guard: Guard) -> Context | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy(ABC):
    """A policy with a schedule; a subclass says in ``compact`` what goes, its fields are its options.

    A policy is asked when the context is full, and with ``rolling`` before each action, with ``chunked`` once
    ``chunk_actions`` actions were taken on what the last plan left, with ``threshold_tokens`` from that many prompt
    tokens on. It may drop turns (``dataclasses.replace`` on the context), never the task or the newest observation.
    When its result does not fit it is asked once more; then the rollout is truncated.

    Raises:
        ConfigError: ``chunk_actions`` below 1 or without ``chunked``, or a threshold below 1.
    """

    name: ClassVar[str] = "own"
    schedule: Schedule = "when_full"
    chunk_actions: int | None = None
    threshold_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.schedule == "chunked") != (self.chunk_actions is not None):
            raise ConfigError(
                f"compaction.chunk_actions belongs to compaction.schedule = 'chunked', found {self.chunk_actions} with "
                f"schedule {self.schedule!r}; give both or neither"
            )
        for option in ("chunk_actions", "threshold_tokens"):
            value: int | None = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"compaction.{option} must be at least 1, found {value}")

    def num_reserved_tokens(self, renderer: ChatRenderer) -> int:
        """Tokens that must stay free behind every answer so that compaction itself fits."""
        return 0

    def is_due(self, context: Context, num_prompt_tokens: int) -> bool:
        """Whether the policy is asked although the context still fits."""
        num_actions = len(context.turns) - context.num_base_turns
        if self.schedule == "rolling" or (self.chunk_actions is not None and num_actions >= self.chunk_actions):
            return True
        return self.threshold_tokens is not None and num_prompt_tokens >= self.threshold_tokens

    @abstractmethod
    async def compact(self, context: Context, guard: Guard) -> Context | None:
        """A shorter context with the same task, or None when nothing is to be dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recency(CompactionPolicy):
    """Keeps the task and the last ``keep_last`` turns; one marker stands for all that was dropped.

    When that does not fit, these turns go too; when the context is full of no more turns than that, the oldest goes.

    Raises:
        ConfigError: ``keep_last`` below 0.
    """

    name: ClassVar[str] = "recency"
    keep_last: int = 1
    marker: str = "..."

    def __post_init__(self) -> None:
        CompactionPolicy.__post_init__(self)
        if self.keep_last < 0:
            raise ConfigError(f"compaction.keep_last must be at least 0, found {self.keep_last}")

    async def compact(self, context: Context, guard: Guard) -> Context | None:
        num_kept = 0 if guard.is_recompaction else self.keep_last
        if len(context.turns) <= num_kept:
            if not guard.is_full:
                return None
            num_kept = len(context.turns) - 1
        return _last_turns(context, num_kept, self.marker)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(CompactionPolicy):
    """Keeps the task and as many of the last turns as fit into a budget of prompt tokens.

    The budget is ``max_tokens``, or ``share`` of ``max_context_tokens``; task, marker and newest observation count.
    What is left of the context is room for the actions until the next plan.

    Raises:
        ConfigError: a budget below 1, a share outside 0..1, or both.
    """

    name: ClassVar[str] = "sliding_window"
    max_tokens: int | None = None
    share: float = _SHARE
    marker: str = "..."

    def __post_init__(self) -> None:
        CompactionPolicy.__post_init__(self)
        if not 0 < self.share <= 1:
            raise ConfigError(f"compaction.share must be above 0 and at most 1, found {self.share}")
        if self.max_tokens is not None and (self.max_tokens < 1 or self.share != _SHARE):
            raise ConfigError(
                f"compaction.max_tokens is a budget of at least 1 token in place of compaction.share, found "
                f"{self.max_tokens} with share {self.share}; give one of them"
            )

    async def compact(self, context: Context, guard: Guard) -> Context | None:
        budget = int(self.share * guard.max_context_tokens) if self.max_tokens is None else self.max_tokens
        budget = min(budget, guard.max_context_tokens - guard.num_reserved_tokens)
        if guard.num_prompt_tokens(context) <= budget:
            return None
        for num_kept in range(len(context.turns) - 1, 0, -1):
            shorter = _last_turns(context, num_kept, self.marker)
            if shorter is not None and guard.num_prompt_tokens(shorter) <= budget:
                return shorter
        return _last_turns(context, 0, self.marker)


def _last_turns(context: Context, num_kept: int, marker: str) -> Context | None:
    """The context without its older turns; None when there is none to drop."""
    num_dropped = len(context.turns) - num_kept
    if num_kept < 0 or num_dropped < 1:
        return None
    return replace(context, turns=context.turns[num_dropped:], marker=marker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(CompactionPolicy):
    """Lets the model write a note, which is a call like any other and trained; only task and note remain.

    ``blank_notes`` writes the note and then throws its text away: the control that shows what the notes carry.

    Raises:
        ConfigError: ``max_note_tokens`` below 1 or an empty request.
    """

    name: ClassVar[str] = "summary"
    request: str = "note"
    lead: str = "note "  # stands before the note in the new context
    max_note_tokens: int = 4
    blank_notes: bool = False

    def __post_init__(self) -> None:
        CompactionPolicy.__post_init__(self)
        if self.max_note_tokens < 1:
            raise ConfigError(f"compaction.max_note_tokens must be at least 1, found {self.max_note_tokens}")
        if not self.request:
            raise ConfigError("compaction.request must be the message that asks for a note, found an empty text")

    def num_reserved_tokens(self, renderer: ChatRenderer) -> int:
        return len(renderer.interstitial(self.request, after=())) + self.max_note_tokens

    async def compact(self, context: Context, guard: Guard) -> Context | None:
        if not context.turns:
            return None
        note = await guard.write_note(self.request, self.max_note_tokens)
        return replace(context, lead=self.lead + ("" if self.blank_notes else note), turns=())


COMPACTIONS: dict[str, type[Any]] = {policy.name: policy for policy in (NoCompaction, Recency, SlidingWindow, Summary)}


def compaction_type(name: str) -> type[Any]:
    """The class of a policy: one of ``COMPACTIONS``, or the user's own, ``path/to/file.py:Name`` or ``module:Name``.

    >>> compaction_type("summary").__name__
    'Summary'

    Raises:
        ConfigError: an unknown name, or a class that is no ``CompactionPolicy``.
    """
    if name in COMPACTIONS:
        return COMPACTIONS[name]
    if not is_own_class(name):
        raise ConfigError(
            f"compaction.policy {name!r} is not known; known: {', '.join(sorted(COMPACTIONS))}, or a class of your own "
            f"as path/to/file.py:ClassName"
        )
    policy = own_class(name)
    if not (issubclass(policy, CompactionPolicy) and is_dataclass(policy)):
        raise ConfigError(
            f"compaction.policy {name!r} must be a dataclass that extends "
            f"evenstep.rollout.compaction.CompactionPolicy, found {policy.__qualname__}, which does not; extend it"
        )
    return policy


def compaction_named(name: str, **options: Any) -> Compaction:
    """The compaction policy that a configuration names, with its options.

    >>> compaction_named("recency", keep_last=2, schedule="rolling").keep_last
    2

    Raises:
        ConfigError: an unknown name or option, or a wrong value.
    """
    policy = compaction_type(name)
    of_schedule = {option.name for option in fields(CompactionPolicy)}
    known = sorted((option.name for option in fields(policy)), key=lambda option: option in of_schedule)
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(
            f"compaction {name!r} has no option {', '.join(map(repr, unknown))}; it has: {', '.join(known) or 'none'}"
        )
    return cast(Compaction, policy(**options))
