"""What a request must pass before anything of it is read: a key, then limits on its body's size, time and nesting."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from evenstep.serve.captured import CapturedRollout
from evenstep.serve.refusals import RefusedError
from evenstep.serve.registry import Registry

__all__ = ["Caller", "Gate", "checked_json", "is_loopback"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC = ("/health", "/openapi.json")
BODY_TIMEOUT_S = 30.0
MAX_DEPTH = 64  # of JSON
# a string without an end reaches to the end of the body, else each quote in it would be tried anew
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)


def is_loopback(host: str) -> bool:
    """Whether only this machine itself can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_from_here(headers: dict[bytes, bytes]) -> bool:
    """Whether a request names this machine and was not made by another site's page in this machine's browser."""
    host = headers.get(b"host", b"localhost").decode("latin-1")
    origin = headers.get(b"origin", b"http://" + host.encode("latin-1")).decode("latin-1")
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return False
    try:
        names = urlsplit(f"//{host}").hostname, urlsplit(origin).hostname
    except ValueError:
        return False
    return all(name is not None and is_loopback(name) for name in names)


class Caller:
    """Who makes a request: an administrator, the owner of one rollout, or anybody where no keys are used."""

    def __init__(self, *, key: str | None, is_admin: bool, owned: tuple[str, CapturedRollout] | None) -> None:
        self.key = key
        self.is_admin = is_admin
        self.owned = owned


class Gate:
    """An ASGI middleware.

    Without a right key nothing is read and nothing told, not even which paths there are: 401. A body above
    ``max_body_bytes`` is 413, one that takes longer than half a minute 408, one that is no JSON 400. A call that still
    runs when a server that stops gives it no more time is 503.
    """

    def __init__(self, app: App, registry: Registry, *, max_body_bytes: int) -> None:
        self._app = app
        self._registry = registry
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC:
            await self._app(scope, receive, send)
            return
        is_answered = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        try:
            await self._pass(scope, receive, watched)
        except RefusedError as refused:
            await _refuse(send, refused)
        except asyncio.CancelledError:  # nobody but a server that stops ends what it runs
            if is_answered:
                raise
            await _refuse(send, RefusedError(503, "the server was stopped before the answer", code="server_stopped"))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value for name, value in reversed(scope["headers"])}
        scope.setdefault("state", {})["caller"] = self._caller(headers)
        body = await self._body(headers, receive)
        if body:
            checked_json(body)
        is_given = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal is_given
            if is_given:
                return await receive()  # the client's leaving
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _caller(self, headers: dict[bytes, bytes]) -> Caller:
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if self._registry.is_open:
            # a page in a browser may be made to call this machine under a name of its own
            if not _is_from_here(headers):
                raise RefusedError(403, "without keys only this machine itself is served", code="not_loopback")
            return Caller(key=key or None, is_admin=True, owned=None)
        is_admin = self._registry.is_admin(key)
        owned = self._registry.owned_by(key)
        if not key or not (is_admin or owned):
            raise RefusedError(401, "a key is needed: Authorization: Bearer <key>", code="invalid_api_key")
        return Caller(key=key, is_admin=is_admin, owned=owned)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        too_large = RefusedError(413, f"a body may have at most {self._max_body_bytes} bytes", code="body_too_large")
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced[:20]) > self._max_body_bytes:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RefusedError(400, "the body ended early", code="body_incomplete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._max_body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RefusedError(408, "the body took too long", code="body_timeout") from None


async def _refuse(send: Send, refused: RefusedError) -> None:
    body = json.dumps(refused.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers()}
    if refused.status in (408, 413, 503):
        headers["connection"] = "close"  # the rest of the body is not read, or nothing more answered
    start = {"type": "http.response.start", "status": refused.status}
    await send(start | {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]})
    await send({"type": "http.response.body", "body": body})


def checked_json(body: bytes) -> Any:
    """The JSON of a body.

    Raises:
        RefusedError: not UTF-8 or JSON, nested too deep, a number too long, or a text with half a character.
    """

    def refuse(why: str) -> RefusedError:
        return RefusedError(400, f"the body must be JSON: {why}", code="invalid_json")

    depth = 0
    for found in _STRING_OR_BRACKET.finditer(body):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found.group(), 0)
        if depth > MAX_DEPTH:
            raise refuse(f"nested at most {MAX_DEPTH} deep, found more")
    try:
        values = json.loads(body.decode("utf-8"))
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise refuse("in UTF-8, found other bytes") from None
    except UnicodeEncodeError:
        raise refuse("found half of a surrogate pair") from None
    except RecursionError:
        raise refuse(f"nested at most {MAX_DEPTH} deep, found more") from None
    except ValueError as error:
        raise refuse(str(error)[:200]) from None
    return values
