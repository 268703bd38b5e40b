"""Scripted parts of a capture server: a tokenizer whose template knows tools, engines, and the server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.engine import Completion, Request
from evenstep.serve.app import make_app
from evenstep.serve.capture import Capture, CaptureLimits
from evenstep.serve.registry import Registry
from evenstep.serve.running import bound_socket, serving
from evenstep.serve.tool_calls import tool_family

END = 1
ADMIN = "the-admin's-key"
MERGED = {"ab": 1000, "ba": 1001}  # two characters as one id, so that a text has several spellings in ids
PIECES = {token: text for text, token in MERGED.items()}


class ToolTokenizer:
    """One id per character, or per pair of letters; ids of an answer are not those that its text encodes to."""

    eos_token_id = END
    chat_template = "scripted: <tool_call>{json}</tool_call>"

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None
    ) -> str:
        text = "" if tools is None else f"[tools {json.dumps(tools)}]"
        for message in conversation:
            text += f"<{message['role']}:{message['content'] or ''}"
            for call in message.get("tool_calls") or ():
                text += f"<tool_call>{json.dumps(call['function'])}</tool_call>"
            text += "\x01"
        return text + ("<assistant:" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        while text:
            pair = MERGED.get(text[:2])
            ids.append(ord(text[0]) if pair is None else pair)
            text = text[1 if pair is None else 2 :]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        shown = [token for token in token_ids if token != END or not skip_special_tokens]
        return "".join(PIECES.get(token) or chr(token) for token in shown)


def spelled(text: str) -> tuple[int, ...]:
    """Ids of an answer character by character, as the tokenizer would not spell it, with its end."""
    return (*(ord(character) for character in text), END)


class AsyncEngine:
    """Answers one after the other, the last one again and again; ``delay_s`` before each."""

    weight_version = 3

    def __init__(self, *answers: Any, delay_s: float = 0.0, max_context_tokens: int = 10_000) -> None:
        self.answers = list(answers) or ["ok"]
        self.delay_s = delay_s
        self.max_context_tokens = max_context_tokens
        self.requests: list[Request] = []
        self.completions: list[Completion] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if isinstance(answer, BaseException):
            raise answer
        ids = spelled(answer) if isinstance(answer, str) else tuple(answer)
        most = request.sampling.max_tokens or len(ids)
        completion = Completion(
            output_ids=ids[:most],
            logprobs=tuple(-0.25 - index / 100 for index in range(len(ids)))[:most],
            finish_reason="stop" if len(ids) <= most else "length",
            weight_version=self.weight_version,
        )
        self.completions.append(completion)
        return completion


def make_capture(engine: Any, **options: Any) -> Capture:
    tokenizer = options.pop("tokenizer", None) or ToolTokenizer()
    limits = CaptureLimits(**({"max_tokens_per_call": 200} | options.pop("limits", {})))
    return Capture(
        engine=engine,
        tokenizer=tokenizer,
        renderer=ChatRenderer(tokenizer, options.pop("vision", None)),
        limits=limits,
        tool_family=tool_family(tokenizer.chat_template),
        **({"vocab_size": 2000} | options),
    )


@asynccontextmanager
async def served(
    engine: Any = None, *, sink: Any = None, is_open: bool = False, max_body_bytes: int = 2**20, **options: Any
) -> AsyncIterator[tuple[str, Registry]]:
    """A server on loopback; its URL and registry."""
    engine = AsyncEngine() if engine is None else engine
    registry = Registry(make_capture(engine, **options), sink=sink, admin_key=ADMIN, is_open=is_open)
    app = make_app(registry, max_body_bytes=max_body_bytes)
    async with serving(app, bound_socket("127.0.0.1", 0)) as url:
        yield url, registry


async def http(
    url: str, method: str, path: str, body: Any = None, *, key: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """One request as written, its path not cleaned up: status, JSON (or text), headers."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Host": f"{host}:{port}", "Connection": "close", "Content-Length": str(len(data))}
    given |= {"Content-Type": "application/json"} if data else {}
    given |= {} if key is None else {"Authorization": f"Bearer {key}"}
    given |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + data)
        with contextlib.suppress(ConnectionError):  # answered before all of the body was sent
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
    head, _, text = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode("latin-1").split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    try:
        return int(status.split()[1]), json.loads(text), found
    except ValueError:
        return int(status.split()[1]), text.decode("utf-8", "replace"), found
