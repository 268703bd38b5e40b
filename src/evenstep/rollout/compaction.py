"""What an agent does when its context is full.

A context is the task, a lead (what compaction left in place of what it dropped), and turns; a turn is an observation
and the model's exact answer to it. Compaction maps a context to a shorter one, and thereby starts a new segment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from evenstep.errors import ConfigError
from evenstep.rollout.chat import ChatRenderer

__all__ = ["COMPACTIONS", "Compaction", "Context", "NoCompaction", "Recency", "Summary", "Turn", "compaction_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One observation and the answer to it."""

    index: int  # of the observation in the episode, from 0
    observation: str
    output_ids: tuple[int, ...]  # exactly as sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the model will be given, but for the observation it has not answered yet."""

    task: str
    lead: str = ""  # a note, or a marker for dropped turns; empty before the first compaction
    turns: tuple[Turn, ...] = ()

    def prompt_ids(self, renderer: ChatRenderer, message: str) -> tuple[int, ...]:
        """Ids up to the model's answer to ``message``: every earlier output stands there as it was sampled."""
        observations = [*(turn.observation for turn in self.turns), message]
        first = "\n".join(part for part in (self.task, self.lead, observations[0]) if part)
        ids = renderer.head(first)
        for turn, observation in zip(self.turns, observations[1:], strict=True):
            ids += turn.output_ids + renderer.interstitial(observation, after=turn.output_ids)
        return ids


WriteNote = Callable[[str, int], Awaitable[str]]  # (request, max_tokens) -> what the model wrote, in a recorded call


class Compaction(Protocol):
    """A policy; ``attempt`` is 0, then 1 when the first result did not make enough room."""

    name: ClassVar[str]

    def num_reserved_tokens(self, renderer: ChatRenderer) -> int:
        """Tokens that must stay free behind every answer so that compaction itself fits."""
        ...

    async def compact(self, context: Context, *, attempt: int, write_note: WriteNote) -> Context | None:
        """A shorter context, or None when the policy can drop nothing more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCompaction:
    """Never drops anything: a rollout whose context is full is truncated."""

    name: ClassVar[str] = "none"

    def num_reserved_tokens(self, renderer: ChatRenderer) -> int:
        return 0

    async def compact(self, context: Context, *, attempt: int, write_note: WriteNote) -> Context | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recency:
    """Keeps the task and the last ``keep_last`` turns; one marker stands for all that was dropped.

    Raises:
        ConfigError: ``keep_last`` below 0.
    """

    name: ClassVar[str] = "recency"
    keep_last: int = 1
    marker: str = "..."

    def __post_init__(self) -> None:
        if self.keep_last < 0:
            raise ConfigError(f"compaction.keep_last must be at least 0, found {self.keep_last}")

    def num_reserved_tokens(self, renderer: ChatRenderer) -> int:
        return 0

    async def compact(self, context: Context, *, attempt: int, write_note: WriteNote) -> Context | None:
        num_kept = self.keep_last if attempt == 0 else 0
        if len(context.turns) <= num_kept:
            # Too few turns to keep that many: the room must come from one of them all the same.
            num_kept = len(context.turns) - 1
        if num_kept < 0:
            return None
        kept = context.turns[len(context.turns) - num_kept :]
        return Context(task=context.task, lead=self.marker, turns=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
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
        if self.max_note_tokens < 1:
            raise ConfigError(f"compaction.max_note_tokens must be at least 1, found {self.max_note_tokens}")
        if not self.request:
            raise ConfigError("compaction.request must be the message that asks for a note, found an empty text")

    def num_reserved_tokens(self, renderer: ChatRenderer) -> int:
        return len(renderer.interstitial(self.request, after=())) + self.max_note_tokens

    async def compact(self, context: Context, *, attempt: int, write_note: WriteNote) -> Context | None:
        if not context.turns:
            return None
        note = await write_note(self.request, self.max_note_tokens)
        return Context(task=context.task, lead=self.lead + ("" if self.blank_notes else note))


COMPACTIONS: dict[str, type[Any]] = {policy.name: policy for policy in (NoCompaction, Recency, Summary)}


def compaction_named(name: str, **options: Any) -> Compaction:
    """The compaction policy that a configuration names, with its options.

    >>> compaction_named("recency", keep_last=2)
    Recency(keep_last=2, marker='...')

    Raises:
        ConfigError: an unknown name or option, or a wrong value.
    """
    if name not in COMPACTIONS:
        raise ConfigError(f"compaction.name {name!r} is not known; known: {', '.join(sorted(COMPACTIONS))}")
    policy = COMPACTIONS[name]
    known = [option.name for option in fields(policy)]
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(
            f"compaction {name!r} has no option {', '.join(map(repr, unknown))}; it has: {', '.join(known) or 'none'}"
        )
    return policy(**options)
