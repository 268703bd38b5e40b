"""What is locked here: nothing that a client sends makes the server fail.

1. Bodies near to right ones, drawn by Hypothesis, on every route: no answer of 500 or above, each with a JSON body.
2. What schemathesis makes of the server's own OpenAPI description, on every operation, with keys and without. (Long.)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from evenstep.serve.app import make_app
from evenstep.serve.registry import Registry
from evenstep.serve.schemas import (
    BreakBody,
    ChatBody,
    CompletionBody,
    MessageBody,
    NewRolloutBody,
    RejectBody,
    RewardBody,
    Tool,
)
from serving_fakes import ADMIN, AsyncEngine, make_capture, served

ROUTES = {
    "/v1/chat/completions": ChatBody,
    "/r/mine/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/r/mine/reward": RewardBody,
    "/v1/segment": BreakBody,
    "/r/mine/v1/reject": RejectBody,
    "/rollouts": NewRolloutBody,
}
WORDS = ["user", "assistant", "tool", "system", "function", "text", "auto", "none", "compaction", "ok", "failed", "x"]
TEXTS = st.one_of(st.sampled_from([*WORDS, "", "..", "a/b", "\x00", "é", "ab" * 300]), st.text(max_size=8))
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 64, 2**31, 2**63, -(2**63) - 1, 10**300, 0.0, 1.0, -0.5, 1e308, 5e-324]),
    st.integers(),
    st.floats(),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": st.one_of(TEXTS, st.none())},
    optional={name: VALUES for name in MessageBody.model_fields if name not in ("role", "content")},
)
TOOLS = st.fixed_dictionaries({"type": st.just("function"), "function": st.dictionaries(TEXTS, VALUES, max_size=3)})
LIKELY: dict[str, Any] = {
    "messages": st.lists(MESSAGES, min_size=1, max_size=3),
    "prompt": st.one_of(TEXTS, st.lists(st.integers(0, 2500), max_size=4)),
    "tools": st.lists(TOOLS, max_size=2),
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=2)),
    "max_tokens": NUMBERS,
    "n": st.integers(0, 4),
    "stream": st.booleans(),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 1)),
    "return_token_ids": st.booleans(),
    "reward": NUMBERS,
    "info": st.dictionaries(TEXTS, VALUES, max_size=3),
    "calls": st.lists(NUMBERS, max_size=3),
}
assert set(Tool.model_fields) == {"type", "function"}


def bodies(route: str) -> st.SearchStrategy[Any]:
    fields = ROUTES[route].model_fields
    required = {name: LIKELY.get(name, VALUES) for name, field in fields.items() if field.is_required()}
    optional = {name: LIKELY.get(name, VALUES) for name in fields if name not in required} | {"unknown": VALUES}
    return st.one_of(st.fixed_dictionaries(required, optional=optional), VALUES)


REQUESTS = st.sampled_from(list(ROUTES)).flatmap(
    lambda route: st.tuples(
        st.just(route),
        st.one_of(bodies(route).map(lambda body: json.dumps(body).encode()), st.binary(max_size=40)),
        st.sampled_from([None, "compaction", "subagent", "template", "nonsense", "\xe9"]),
    )
)


async def answer(app: Any, route: str, body: bytes, key: str, reason: str | None) -> tuple[int, bytes]:
    """One request to the application itself."""
    headers = [(b"authorization", b"Bearer " + key.encode()), (b"content-type", b"application/json")]
    headers += [] if reason is None else [(b"x-evenstep-break", reason.encode("latin-1"))]
    scope = {"type": "http", "method": "POST", "path": route, "raw_path": route.encode(), "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "client": None}
    status, parts = 0, list[bytes]()
    is_sent = False

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if is_sent:
            await asyncio.sleep(3600)
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


ENGINE = AsyncEngine("abba", '<tool_call>{"name": "f"}</tool_call>')
REGISTRY = Registry(make_capture(ENGINE), admin_key=ADMIN, max_open=10**9)
APP = make_app(REGISTRY)  # once: describing the routes takes longer than many requests


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(REQUESTS, min_size=1, max_size=6))
def test_nothing_makes_it_fail(requests: list[tuple[str, bytes, str | None]]) -> None:
    async def run() -> None:
        name, key = REGISTRY.create(NewRolloutBody())
        for route, body, reason in requests:
            path = route.replace("/mine", f"/{name}")
            status, found = await answer(APP, path, body, ADMIN if route == "/rollouts" else key, reason)
            assert 200 <= status < 500, (status, found)
            assert found.startswith(b"data: ") or json.loads(found)
        await REGISTRY.end_all("over")

    asyncio.run(run())


@contextmanager
def running(*, is_open: bool) -> Iterator[tuple[str, Registry]]:
    """A server in a thread of its own."""
    started: list[tuple[str, Registry]] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        engine = AsyncEngine("abba", '<tool_call>{"name": "f"}</tool_call>')
        async with served(engine, is_open=is_open) as found:
            started.append(found)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield started[0]
    finally:
        stop.set()
        thread.join(20)


def statuses_of(operation: Any, registry: Registry, numbers: Iterator[int]) -> set[int]:
    """What the server answers to requests that its description allows, or nearly.

    The same ones each time, and of one that fails no smaller one is looked for: that alone can take minutes.
    """
    found: set[int] = set()

    @settings(
        max_examples=60,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(), is_admin=st.booleans(), is_own=st.booleans())
    def check(case: Any, is_admin: bool, is_own: bool) -> None:
        # each example has a rollout of its own, that no earlier one has ended
        name = f"fuzz-{next(numbers)}"
        key = name if registry.is_open else registry.create(NewRolloutBody(rollout_id=name))[1]
        if is_own and "rollout" in (case.path_parameters or {}):
            case.path_parameters["rollout"] = name
        response = case.call(headers={"Authorization": f"Bearer {ADMIN if is_admin else key}"}, timeout=20)
        found.add(response.status_code)
        assert response.status_code < 500, (case.as_curl_command(), response.text)

    check()
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_schemathesis_finds_no_failure(is_open: bool) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="the extra 'dev' brings schemathesis")
    with running(is_open=is_open) as (url, registry):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        numbers = itertools.count()
        statuses = {operation.label: sorted(statuses_of(operation, registry, numbers)) for operation in operations}
    print(statuses)
    assert len(statuses) >= 16
    assert sum(200 in found for found in statuses.values()) >= 10
