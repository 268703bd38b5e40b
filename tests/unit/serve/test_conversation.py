"""What is locked here, with real Jinja templates of several families' habits:

1. What a template writes between an answer and the next one is the same, whether it is cut behind a stand-in or, where
   the template refuses one, found as the difference of two renderings.
2. Spliced prompts are the template's own rendering where outputs are what their text encodes to.
3. A message that has the stand-in's own text in it changes nothing.
4. A template that rewrites an earlier answer and refuses a stand-in is refused with the way out.
5. Tool calls by family; equal JSON in another spelling is equal.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jinja2
import pytest

from evenstep.rollout.chat import ChatRenderer
from evenstep.serve import tool_calls
from evenstep.serve.conversation import Conversations, Message
from evenstep.serve.refusals import RefusedError
from evenstep.serve.tool_calls import ToolCall, canonical_arguments, found_tool_calls, tool_family

HEAD = "{% if tools %}[tools:{% for tool in tools %}{{ tool.name }}{% endfor %}]{% endif %}"
CALLS = (
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}({{ call.function.arguments.x }})"
    "</tool_call>{% endfor %}"
)
OPEN = "{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = HEAD + "{% for message in messages %}[{{ message.role }}]{{ message.content }}" + CALLS + "|{% endfor %}" + OPEN
# a tool's answer must follow a tool's call, as some families insist
STRICT = PLAIN.replace(
    "[{{ message.role }}]",
    "{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ fail('a tool without a call') }}"
    "{% endif %}[{{ message.role }}]",
)
# thinking is stripped from every answer but the last, as others do
STRIPS = "{{ message.content.split('THOUGHT.')[-1] if not loop.last else message.content }}"
STRIPPING = PLAIN.replace("{{ message.content }}", STRIPS)


class JinjaTokenizer:
    """Characters as ids; | ends a turn."""

    eos_token_id = None

    def __init__(self, template: str) -> None:
        def fail(why: str) -> None:
            raise jinja2.TemplateError(why)

        environment = jinja2.Environment(undefined=jinja2.ChainableUndefined)
        environment.globals["fail"] = fail
        self._template = environment.from_string(template)

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None
    ) -> str:
        return self._template.render(messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def conversations(template: str) -> Conversations:
    tokenizer = JinjaTokenizer(template)
    return Conversations(tokenizer, ChatRenderer(tokenizer))


def text(ids: Any) -> str:
    return "".join(map(chr, ids))


ASKED = Message(role="user", content="two and two?")
CALLED = Message(role="assistant", content="hm", tool_calls=(ToolCall(name="add", arguments='{"x": 2}'),))
RESULT = Message(role="tool", content="4", tool_call_id="c")
OUTPUT = tuple(map(ord, "hm<tool_call>add(2)</tool_call>|"))


@pytest.mark.parametrize("template", [PLAIN, STRICT])
@pytest.mark.parametrize("is_closed", [True, False])
def test_between_an_answer_and_the_next(template: str, is_closed: bool) -> None:
    output = OUTPUT if is_closed else OUTPUT[:-1]
    ids = conversations(template).ids_after((ASKED, CALLED, RESULT), 1, [{"name": "add"}], output)
    assert text(ids) == ("" if is_closed else "|") + "[tool]4|[assistant]"
    with pytest.raises(RefusedError, match="a tool without a call"):
        conversations(STRICT).prompt_ids((ASKED, RESULT), None, {})


@pytest.mark.parametrize("content", ["go on", "evenstepturn", "evenstepturnbz evenstepturn", "[assistant]x|"])
def test_spliced_is_the_templates_own_rendering(content: str) -> None:
    made = conversations(PLAIN)
    messages = (ASKED, CALLED, RESULT, Message(role="assistant", content="4"), Message(role="user", content=content))
    plain = made.prompt_ids(messages, None, {})
    spliced = made.prompt_ids(messages, None, {1: OUTPUT, 3: tuple(map(ord, "4"))})
    assert text(spliced) == text(plain)
    other = made.prompt_ids(messages, None, {1: (7, 8, 9)})
    assert text(other) == text(plain).replace("hm<tool_call>add(2)</tool_call>", "\x07\x08\x09")
    ids = made.ids_after(messages, 3, None, tuple(map(ord, "4|")))
    assert text(ids) == f"[user]{content}|[assistant]"


def test_a_template_that_strips_thinking() -> None:
    thought = Message(role="assistant", content="let me see THOUGHT.four")
    messages = (ASKED, thought, Message(role="user", content="sure?"))
    output = tuple(map(ord, "let me see THOUGHT.four|"))
    made = conversations(STRIPPING)
    # what was thought stays where the ids go on, and goes where the template is let do it
    assert text(made.ids_after(messages, 1, None, output)) == "[user]sure?|[assistant]"
    assert "let me see" not in text(made.prompt_ids(messages, None, {}))
    strict = STRICT.replace("{{ message.content }}", STRIPS)
    called = Message(role="assistant", content="let me see THOUGHT.", tool_calls=CALLED.tool_calls)
    with pytest.raises(RefusedError, match="x-evenstep-break: template"):
        conversations(strict).ids_after((ASKED, called, RESULT), 1, None, output)


def test_tools_that_are_not_shown() -> None:
    conversations(PLAIN).check_tools((ASKED,), [{"name": "add"}])
    with pytest.raises(RefusedError, match="renders the same without them"):
        conversations(PLAIN.replace(HEAD, "")).check_tools((ASKED,), [{"name": "add"}])


@pytest.mark.parametrize(
    "written, said, calls",
    [
        ('{"name": "f", "parameters": {"a": [1]}}', "", [("f", {"a": [1]})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        ('{"name": "f", "parameters": 3}', '{"name": "f", "parameters": 3}', []),
        ("just text", "just text", []),
        ("[" * 3000, "[" * 3000, []),
    ],
)
def test_llama3_json(written: str, said: str, calls: list[Any]) -> None:
    found, made = found_tool_calls(written, "llama3_json")
    assert (found, [(call.name, json.loads(call.arguments)) for call in made]) == (said, calls)


@pytest.mark.parametrize(
    "written, said, names",
    [
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', "", ["f", "g"]),
        ('a <tool_call>{"name": "f"}</tool_call> b', "a  b", ["f"]),
        ('<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', []),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>x</tool_call>', None, []),
        ('<tool_call>{"name": 3}</tool_call>', None, []),
        ("<tool_call>" * 500, None, []),
    ],
)
def test_hermes(written: str, said: str | None, names: list[str]) -> None:
    found, made = found_tool_calls(written, "hermes")
    assert (found, [call.name for call in made]) == (written if said is None else said, names)


def test_a_tool_calls_json_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(arguments: str) -> str:
        read.append(arguments)
        return canonical_arguments(arguments)

    monkeypatch.setattr(tool_calls, "canonical_arguments", counted)
    again = Message(role="assistant", content="hm", tool_calls=(ToolCall(name="add", arguments='{ "x":2}'),))
    others = [
        Message(role="assistant", content="hm", tool_calls=(ToolCall(name=name, arguments="{}"),)) for name in "ab"
    ]
    assert not any(other.is_same(again) for other in others for _ in range(8))
    assert read == []  # of another function
    before = [replace(again, tool_calls=(ToolCall(name="add", arguments='{"x": 2}'),)) for _ in range(8)]
    assert all(one.is_same(again) for one in before)
    assert read.count('{ "x":2}') == 1


def test_families_and_comparison() -> None:
    assert tool_family("<tool_call> <function=") is None
    assert tool_family('{"parameters"} "parameters" <|python_tag|>') == "llama3_json"
    again = Message(
        role="assistant", content=" hm\n", tool_calls=(ToolCall(name="add", arguments='{ "x":2}'),), tool_call_id=None
    )
    assert CALLED.is_same(again)
    assert not CALLED.is_same(Message(role="assistant", content="hm"))
    assert not ASKED.is_same(Message(role="user", content=" two and two?"))
