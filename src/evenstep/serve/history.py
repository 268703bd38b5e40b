"""What a rollout's calls were asked and answered, and which of them a new prompt continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.rollout.calls import num_common
from evenstep.rollout.chat import ChatTokenizer
from evenstep.serve.conversation import Message
from evenstep.serve.refusals import RefusedError
from evenstep.types import BreakReason, Call

__all__ = ["Answer", "History", "Turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One choice of a response."""

    call: Call
    text: str  # without special tokens, cut at a stop string
    message: Message  # the same with tool calls taken out of it
    finish_reason: str  # stop, length or tool_calls


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """A call that was made, or is being made."""

    order: int
    prompt_ids: tuple[int, ...]
    parent: int | None
    num_siblings: int  # choices of one request
    reason: BreakReason | None = None  # why it may continue nothing
    max_tokens: int = 0  # of the output
    asked: tuple[Message, ...] | None = None  # None: a prompt that is no conversation
    tools: Any = None
    parses_tools: bool = False  # in the answer
    text: str | None = None  # of a prompt that was given as text
    answer: Answer | None = None  # None: not here yet
    is_rejected: bool = False

    @property
    def view(self) -> tuple[int, ...] | None:
        return None if self.answer is None else self.prompt_ids + self.answer.call.output_ids

    def is_continued_by(self, messages: Sequence[Message], tools: Any) -> bool:
        if self.answer is None or self.asked is None or self.tools != tools or len(messages) <= len(self.asked):
            return False
        history = (*self.asked, self.answer.message)
        return all(ours.is_same(theirs) for ours, theirs in zip(history, messages, strict=False))


class History:
    """The turns of one rollout by order; found by messages, by text or by ids, always continued by ids."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def forget(self, turns: Sequence[Turn]) -> None:
        """As if they had never been asked."""
        self.turns = [turn for turn in self.turns if turn not in turns]

    def continued(self, messages: Sequence[Message], tools: Any) -> Turn | None:
        """The call whose whole conversation these messages begin with, the longest one; of equal ones the first."""
        found = [turn for turn in self.turns if turn.is_continued_by(messages, tools)]
        return max(found, key=lambda turn: (len(turn.asked or ()), -turn.order), default=None)

    def continued_text(self, text: str) -> Turn | None:
        """The call whose prompt and answer a text begins with, the longest one; of equal ones the first."""
        found = [turn for turn in self.turns if turn.text is not None and turn.answer is not None]
        # a text that adds nothing to what was asked is that turn once more
        found = [turn for turn in found if text.startswith(self.text_of(turn)) and text != turn.text]
        return max(found, key=lambda turn: (len(self.text_of(turn)), -turn.order), default=None)

    def text_of(self, turn: Turn) -> str:
        """Prompt and answer of a call that was asked with a text."""
        assert turn.text is not None, "of turns that were asked for with a text"
        assert turn.answer is not None, "of turns that are answered"
        return turn.text + turn.answer.text

    def continued_ids(self, prompt_ids: tuple[int, ...]) -> Turn | None:
        """The call whose completed view a prompt begins with, the longest one; of equal ones the first."""
        views = [(len(turn.view), -turn.order, turn) for turn in self.turns if turn.view is not None]
        found = [entry for entry in views if prompt_ids[: entry[0]] == entry[2].view]
        return max(found, key=lambda entry: entry[:2])[2] if found else None

    def is_drifted(self, prompt_ids: tuple[int, ...], num_kept: int) -> bool:
        """Whether a prompt holds all of a call's prompt, beyond what it continues, and then not its output.

        The rule of `evenstep.rollout.call_tree`; a call that is not answered yet has an output that nobody can know.
        """
        return any(
            num_kept < len(turn.prompt_ids) < len(prompt_ids)
            and not turn.is_rejected
            and prompt_ids[: len(turn.prompt_ids)] == turn.prompt_ids
            for turn in self.turns
        )

    def known_outputs(self, messages: Sequence[Message]) -> dict[int, tuple[int, ...]]:
        """Ids of the answers in a history that this rollout's calls gave, by index of the message."""
        found: dict[int, tuple[int, ...]] = {}
        for index, message in enumerate(messages):
            for turn in self.turns:
                if message.is_answer and turn.answer is not None and turn.answer.message.is_same(message):
                    found[index] = turn.answer.call.output_ids
                    break
        return found

    def undeclared(self, turn: Turn, tokenizer: ChatTokenizer) -> RefusedError:
        """Where a prompt leaves the call that is closest to it, and how, for people."""
        before = [one for one in self.turns if not one.is_rejected]
        closest, at = before[0], -1
        for one in before:
            common = num_common(turn.prompt_ids, one.view or one.prompt_ids)
            if common >= at:
                closest, at = one, common
        view = closest.view
        expected = view if view is not None else closest.prompt_ids
        where = ""
        if turn.asked is not None and closest.asked is not None:
            history = closest.asked if closest.answer is None else (*closest.asked, closest.answer.message)
            pairs = zip(history, turn.asked, strict=False)
            same = next((i for i, (ours, theirs) in enumerate(pairs) if not ours.is_same(theirs)), None)
            if same is None:
                same = min(len(history), len(turn.asked))
            where = f" (message {same})"
        unknown = "an output that is not sampled yet" if view is None else "the end"
        theirs, ours = _token(tokenizer, turn.prompt_ids, at, "the end"), _token(tokenizer, expected, at, unknown)
        return RefusedError(
            409,
            f"this prompt does not continue the rollout: it differs from the {len(expected)} tokens up to call "
            f"{closest.order} at token {at}{where}: found {theirs}, expected {ours}; "
            f"send the history back as it was, or declare why it changed, in the header x-evenstep-break or with POST "
            f"/segment: compaction, template or subagent",
            code="undeclared_break",
            param="messages" if turn.asked is not None else "prompt",
        )


def _token(tokenizer: ChatTokenizer, ids: Sequence[int], at: int, end: str) -> str:
    return end if at >= len(ids) else f"{ids[at]} ({tokenizer.decode([ids[at]], skip_special_tokens=False)!r})"
