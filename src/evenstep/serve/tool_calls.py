"""Tool calls in a model's own text, found by the family of its chat template.

A text that is not exactly what its family writes stays text: nothing that a model wrote is lost or guessed at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

__all__ = ["ToolCall", "ToolFamily", "canonical_arguments", "found_tool_calls", "is_sendable", "tool_family"]

ToolFamily = Literal["hermes", "llama3_json"]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a function, as the model wrote it."""

    name: str
    arguments: str  # JSON of an object

    @cached_property
    def canonical(self) -> str:
        """The arguments in one spelling; found once, for a history is compared with each call before it."""
        return canonical_arguments(self.arguments)


def tool_family(chat_template: str) -> ToolFamily | None:
    """How models with this chat template write tool calls; None: not known.

    >>> tool_family("... return a json object within <tool_call></tool_call> ..."), tool_family("{{ messages }}")
    ('hermes', None)
    """
    if "<function=" in chat_template:
        return None  # <tool_call> around XML, not JSON
    if _OPEN in chat_template:
        return "hermes"
    if '"parameters"' in chat_template and "<|python_tag|>" in chat_template:
        return "llama3_json"
    return None


def found_tool_calls(text: str, family: ToolFamily) -> tuple[str, tuple[ToolCall, ...]]:
    """What a model said beside its tool calls, and the calls.

    - ``hermes`` (Hermes, Qwen 2.5 and 3): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number.
    - ``llama3_json`` (Llama 3.1 and later): the whole text is ``{"name": ..., "parameters": {...}}``.

    >>> said = 'Let me see. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    >>> text, calls = found_tool_calls(said, "hermes")
    >>> text, calls[0].name, calls[0].arguments
    ('Let me see.', 'f', '{"x": 1}')
    >>> found_tool_calls('<tool_call>{"name": f}</tool_call>', "hermes")
    ('<tool_call>{"name": f}</tool_call>', ())
    """
    return _PARSERS[family](text)


def canonical_arguments(arguments: str) -> str:
    """Arguments in one spelling, so that a client may write the same JSON in another.

    >>> canonical_arguments('{"b":2, "a": 1}') == canonical_arguments('{"a": 1, "b": 2}')
    True
    """
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def is_sendable(value: Any) -> bool:
    """Whether JSON values hold no half of a surrogate pair, which no response and no tokenizer takes.

    >>> is_sendable({"a": ["ä"]}), is_sendable(json.loads('"\\\\ud83d"'))
    (True, False)
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    said, *blocks = text.split(_OPEN)
    calls: list[ToolCall] = []
    parts = [said]
    for block in blocks:
        inside, closed, after = block.partition(_CLOSE)
        call = _read(inside, "arguments") if closed else None
        if call is None:
            return text, ()
        calls.append(call)
        parts.append(after)
    return ("".join(parts).strip(), tuple(calls)) if calls else (text, ())


def _llama3_json(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    call = _read(text.strip().removeprefix("<|python_tag|>"), "parameters")
    return (text, ()) if call is None else ("", (call,))


def _read(text: str, arguments_key: str) -> ToolCall | None:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get(arguments_key, {})
    if not isinstance(arguments, dict) or not is_sendable(found["name"]):
        return None
    return ToolCall(name=found["name"], arguments=json.dumps(arguments))


_PARSERS: dict[ToolFamily, Callable[[str], tuple[str, tuple[ToolCall, ...]]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
}
