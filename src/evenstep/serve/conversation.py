"""From chat messages to prompt ids, in which what the model wrote keeps the ids it was sampled with.

A conversation in ids is text + output + text + output + …: outputs are the engine's ids as they are, and the text
between two of them is what the chat template writes there, found by rendering the conversation with a stand-in for
each known answer and cutting the text behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evenstep.rollout.chat import STAND_IN, ChatRenderer, ChatTokenizer
from evenstep.serve.refusals import RefusedError
from evenstep.serve.tool_calls import ToolCall, is_sendable

__all__ = ["Conversations", "Message", "ToolTokenizer"]


class ToolTokenizer(ChatTokenizer, Protocol):
    """A tokenizer whose chat template may know tools."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None
    ) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a history, in the one spelling by which messages are compared.

    White space around an answer does not count, nor does the spelling of a tool call's JSON or its id: many clients
    change them, and the model's own ids are used whatever the client made of them.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def is_answer(self) -> bool:
        return self.role == "assistant"

    @property
    def num_characters(self) -> int:
        return len(self.content) + sum(len(call.arguments) for call in self.tool_calls)

    @property
    def num_name_characters(self) -> int:
        """Of what some templates show and others do not."""
        names = (self.name or "", self.tool_call_id or "", *(call.name for call in self.tool_calls))
        return sum(map(len, names))

    def is_same(self, other: Message) -> bool:
        """Whether both say the same."""
        if self.role != other.role or not self.is_answer:
            return self == other
        if self.content.strip() != other.content.strip():
            return False
        ours, theirs = self.tool_calls, other.tool_calls
        if [call.name for call in ours] != [call.name for call in theirs]:
            return False
        return all(one.canonical == two.canonical for one, two in zip(ours, theirs, strict=True))

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: arguments of tool calls as objects."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": _object(call.arguments)}}
                for call in self.tool_calls
            ]
        for key, value in (("tool_call_id", self.tool_call_id), ("name", self.name)):
            if value is not None:
                message[key] = value
        return message


def _object(arguments: str) -> Any:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if is_sendable(found) else arguments


class Conversations:
    """Prompt ids of conversations."""

    def __init__(self, tokenizer: ToolTokenizer, renderer: ChatRenderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, outputs: Mapping[int, tuple[int, ...]]
    ) -> tuple[int, ...]:
        """[T] A whole conversation up to where the model answers; ``outputs`` has the ids of answers that are known.

        Where the template does not show each stand-in once and in order, all of it is its own rendering, tokenised.

        Raises:
            RefusedError: the template refuses the conversation.
        """
        spliced = self._spliced(messages, tools, outputs) if outputs else None
        if spliced is not None:
            return spliced
        return self._renderer.encoded(self._rendered([message.for_template() for message in messages], tools))

    def ids_after(
        self, messages: Sequence[Message], index: int, tools: Sequence[Any] | None, output_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """[T] Ids between ``output_ids``, the answer ``messages[index]``, and the model's next answer.

        Raises:
            RefusedError: the template refuses the conversation, or shows no answers as they are.
        """
        asked = [message.for_template() for message in messages]
        stand_in = _stand_in(messages)
        replaced = [*asked[:index], {"role": "assistant", "content": stand_in}, *asked[index + 1 :]]
        try:
            text = self._rendered(replaced, tools)
        except RefusedError:  # some templates want a tool's answer behind a tool's call
            text = None
        if text is not None and text.count(stand_in) == 1:
            return self._renderer.after_output(text.partition(stand_in)[2], after=output_ids)
        closed = self._rendered(replaced[: index + 1], tools, is_open=False)
        before, whole = self._rendered(asked[: index + 1], tools, is_open=False), self._rendered(asked, tools)
        if closed.count(stand_in) != 1 or not whole.startswith(before):
            raise RefusedError(
                400,
                "the chat template must keep an earlier answer where it was, found one that it changes when the "
                "conversation goes on; declare the break (x-evenstep-break: template) to render each turn anew",
                code="chat_template",
                param="messages",
            )
        end_of_turn = closed.partition(stand_in)[2]
        return self._renderer.after_output(end_of_turn + whole[len(before) :], after=output_ids)

    def check_tools(self, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """Refuse tools that the model would never see.

        Raises:
            RefusedError: the template renders the same with and without them.
        """
        asked = [message.for_template() for message in messages]
        if self._rendered(asked, tools) == self._rendered(asked, None):
            raise RefusedError(
                400,
                "tools need a chat template that shows them, found that this model's renders the same without them; "
                "describe them in a message, or serve a model that was trained on tools",
                code="tools_not_supported",
                param="tools",
            )

    def _spliced(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, outputs: Mapping[int, tuple[int, ...]]
    ) -> tuple[int, ...] | None:
        stand_in = _stand_in(messages)
        # digits as letters, and one at the end, so that no stand-in begins with another
        names = {index: stand_in + "".join("abcdefghij"[int(d)] for d in str(index)) + "z" for index in outputs}
        replaced = [
            {"role": "assistant", "content": names[index]} if index in names else message.for_template()
            for index, message in enumerate(messages)
        ]
        try:
            text = self._rendered(replaced, tools)
        except RefusedError:
            return None
        ids: list[int] = []
        before: tuple[int, ...] | None = None
        for index in sorted(names):
            if text.count(names[index]) != 1:
                return None
            piece, _, text = text.partition(names[index])
            ids += self._piece(piece, before) + outputs[index]
            before = outputs[index]
        return (*ids, *self._piece(text, before))

    def _piece(self, text: str, before: tuple[int, ...] | None) -> tuple[int, ...]:
        return self._renderer.encoded(text) if before is None else self._renderer.after_output(text, after=before)

    def _rendered(self, messages: Sequence[Any], tools: Sequence[Any] | None, *, is_open: bool = True) -> str:
        given = {} if tools is None else {"tools": list(tools)}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=is_open, **given
            )
        except Exception as error:  # noqa: BLE001 -- a template is a program: it raises what it likes
            raise RefusedError(
                400,
                f"the model's chat template refuses these messages: {str(error)[:300]}",
                code="chat_template",
                param="messages",
            ) from None
        return self._renderer.literal(text)  # messages are text alone, whatever they spell


def _stand_in(messages: Sequence[Message]) -> str:
    """A text that no message has."""
    texts = "\0".join(message.content for message in messages)
    stand_in = STAND_IN
    while stand_in in texts:
        stand_in += "q"
    return stand_in
