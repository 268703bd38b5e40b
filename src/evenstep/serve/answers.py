"""Answers in the shapes of the OpenAI API, whole or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from evenstep.serve.capture import Capture
from evenstep.serve.history import Answer
from evenstep.serve.schemas import ChatBody, CompletionBody, SamplingBody

__all__ = ["chat_events", "chat_response", "completion_events", "completion_response"]

_PIECE = 48  # characters of a streamed piece


def chat_response(answers: Sequence[Answer], body: ChatBody, capture: Capture) -> dict[str, Any]:
    """A ``chat.completion``; with ``return_token_ids`` also exact ids, under vLLM's names."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": _content(answer), **_tool_calls(answer)},
            "finish_reason": answer.finish_reason,
            "logprobs": _chat_logprobs(answer, capture) if body.logprobs else None,
            **_token_ids(answer, body),
        }
        for index, answer in enumerate(answers)
    ]
    return _head("chat.completion", "chatcmpl", answers, body, capture) | {"choices": choices, "usage": _usage(answers)}


def chat_events(answers: Sequence[Answer], body: ChatBody, capture: Capture) -> Iterator[bytes]:
    """The same as ``chat.completion.chunk`` events: text in pieces, then tool calls, then why it ended."""
    head = _head("chat.completion.chunk", "chatcmpl", answers, body, capture)

    def event(index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **fields}
        return _event(head | {"choices": [choice]})

    for index, answer in enumerate(answers):
        yield event(index, {"role": "assistant", "content": ""})
        content = _content(answer) or ""
        for start in range(0, len(content), _PIECE):
            yield event(index, {"content": content[start : start + _PIECE]})
        for number, call in enumerate(_tool_calls(answer).get("tool_calls", ())):
            yield event(index, {"tool_calls": [{"index": number, **call}]})
        logprobs = _chat_logprobs(answer, capture) if body.logprobs else None
        yield event(index, {}, finish_reason=answer.finish_reason, logprobs=logprobs, **_token_ids(answer, body))
    yield from _last_events(head, answers, body)


def completion_response(answers: Sequence[Answer], body: CompletionBody, capture: Capture) -> dict[str, Any]:
    """A ``text_completion``."""
    choices = [_text_choice(index, answer, body, capture) for index, answer in enumerate(answers)]
    return _head("text_completion", "cmpl", answers, body, capture) | {"choices": choices, "usage": _usage(answers)}


def completion_events(answers: Sequence[Answer], body: CompletionBody, capture: Capture) -> Iterator[bytes]:
    """The same as events: text in pieces, then why it ended."""
    head = _head("text_completion", "cmpl", answers, body, capture)
    for index, answer in enumerate(answers):
        for start in range(0, len(answer.text), _PIECE):
            piece = {"index": index, "text": answer.text[start : start + _PIECE], "finish_reason": None}
            yield _event(head | {"choices": [piece | {"logprobs": None}]})
        yield _event(head | {"choices": [_text_choice(index, answer, body, capture) | {"text": ""}]})
    yield from _last_events(head, answers, body)


def _head(kind: str, prefix: str, answers: Sequence[Answer], body: SamplingBody, capture: Capture) -> dict[str, Any]:
    head: dict[str, Any] = {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": capture.model_name,
        # by which the agent may name a call that it rejects or chooses
        "evenstep": {"calls": [answer.call.order for answer in answers]},
    }
    if body.return_token_ids:
        head["prompt_token_ids"] = list(answers[0].call.prompt_ids)
    return head


def _last_events(head: dict[str, Any], answers: Sequence[Answer], body: SamplingBody) -> Iterator[bytes]:
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event(head | {"choices": [], "usage": _usage(answers)})
    yield b"data: [DONE]\n\n"


def _event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def _content(answer: Answer) -> str | None:
    message = answer.message
    return None if message.tool_calls and not message.content else message.content


def _tool_calls(answer: Answer) -> dict[str, Any]:
    if not answer.message.tool_calls:
        return {}
    return {
        "tool_calls": [
            {
                "id": f"call_{answer.call.order}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(answer.message.tool_calls)
        ]
    }


def _token_ids(answer: Answer, body: SamplingBody) -> dict[str, Any]:
    return {"token_ids": list(answer.call.output_ids)} if body.return_token_ids else {}


def _text_choice(index: int, answer: Answer, body: CompletionBody, capture: Capture) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if body.logprobs is not None:
        tokens = [_token_text(token, capture) for token in answer.call.output_ids]
        offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
        logprobs = {"tokens": tokens, "token_logprobs": list(answer.call.logprobs), "text_offset": offsets}
        logprobs["top_logprobs"] = None
    return {
        "index": index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": logprobs,
        **_token_ids(answer, body),
    }


def _chat_logprobs(answer: Answer, capture: Capture) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for token, logprob in zip(answer.call.output_ids, answer.call.logprobs, strict=True)
        for text in (_token_text(token, capture),)
    ]
    return {"content": content, "refusal": None}


def _token_text(token: int, capture: Capture) -> str:
    return capture.tokenizer.decode([token], skip_special_tokens=False)


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    num_prompt = len(answers[0].call.prompt_ids)
    num_output = sum(len(answer.call.output_ids) for answer in answers)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
