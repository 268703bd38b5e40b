"""JSON calls to a server: connections that are kept, limits on time and size, and which failures may pass."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpcore2 as httpcore
import httpx2 as httpx

from evenstep.errors import EngineError

__all__ = ["Connection", "UnavailableError", "connection_pool", "shortened"]

UNAVAILABLE = (502, 503, 504)
GET_S = 30.0  # most seconds until a server says something of itself
CONNECT_S = 10.0  # most seconds until a server takes a connection
KEEP_S = 5.0  # that an idle connection is kept
MAX_ANSWER_BYTES = 128 * 2**20  # at a hundred for each token and its log-prob more than any context holds
MAX_SHOWN_BYTES = 4096  # of an answer, in a message


class UnavailableError(Exception):
    """Nothing of an answer was accepted, so the same request may be sent again."""

    def __init__(self, reason: str, *, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.is_timeout = is_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    """What came back, whole."""

    status: int
    location: str  # where a redirect leads
    content: bytes

    @property
    def text(self) -> str:
        return self.content[:MAX_SHOWN_BYTES].decode("utf-8", "replace")


def connection_pool(urls: Iterable[str], *, max_idle: int) -> httpcore.AsyncConnectionPool:
    """Connections to the servers at these addresses, as many as calls want, of which ``max_idle`` are kept.

    The layer below httpx's client: what that adds, redirects, cookies and the environment's proxies, must not happen
    here, and takes as long as the rest of a call.
    """
    is_secure = any(url.startswith("https:") for url in urls)
    return httpcore.AsyncConnectionPool(
        ssl_context=httpx.create_ssl_context(trust_env=False) if is_secure else None,
        max_connections=None,
        max_keepalive_connections=max_idle,
        keepalive_expiry=KEEP_S,
    )


class Connection:
    """JSON calls to one server; says which failures may pass and which do not."""

    def __init__(self, pool: httpcore.AsyncConnectionPool, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._pool = pool
        # compressed, a short answer could be one without end
        self._headers = [(b"accept", b"application/json"), (b"accept-encoding", b"identity")]
        if api_key is not None:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None, GET_S)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        return await self._call("POST", path, body, timeout_s)

    async def has(self, path: str) -> bool:
        """Whether a GET of this path finds anything."""
        return await self._status("GET", path, None) != 404

    async def takes_posts(self, path: str) -> bool:
        """Whether a POST to this path is served, whatever it says of an empty body."""
        return await self._status("POST", path, {}) not in (403, 404, 405)

    async def _status(self, method: str, path: str, body: Mapping[str, Any] | None) -> int:
        status = (await self._send(method, path, body, GET_S)).status
        if status in UNAVAILABLE:  # says nothing of what is there once it is up
            raise UnavailableError(f"{method} {path} answered {status}")
        return status

    async def check_health(self) -> None:
        """Raise an UnavailableError, or what the server has against being asked."""
        status = (await self._send("GET", "/health", None, 10.0)).status
        # the others are refused by the next call, with the reason
        if status != 200 and status not in (401, 403, 404) and not 300 <= status < 400:
            raise UnavailableError(f"GET /health answered {status}")

    async def is_healthy(self) -> bool:
        try:
            await self.check_health()
        except UnavailableError:
            return False
        return True

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        response = await self._send(method, path, body, timeout_s)
        status = response.status
        if 300 <= status < 400:  # followed, it would take ids and the key to a place that nobody named
            raise EngineError(
                f"the server at {self.url} must answer {method} {path} itself, found status {status} to "
                f"{response.location or 'another place'}; put the address that serves into engine.urls"
            )
        said = shortened(response.text)
        if status in UNAVAILABLE:
            raise UnavailableError(f"{method} {path} answered {status}: {said}")
        if status >= 500 and not await self.is_healthy():
            raise UnavailableError(f"{method} {path} answered {status} and it is not healthy: {said}")
        if status >= 400:
            raise EngineError(
                f"the server at {self.url} must serve {method} {path}, found status {status}: {said}; "
                f"{_advice(status, path)}"
            )
        if not response.content:
            return None
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"the server at {self.url} must answer {method} {path} with JSON, found {said!r} "
                f"({error}); is another kind of server behind this address?"
            ) from error

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> _Response:
        headers, content, connect_s = self._headers, None, min(timeout_s, CONNECT_S)
        if body is not None:
            headers = [*headers, (b"content-type", b"application/json")]
            content = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        # these count from byte to byte, and an answer that drips would never end
        timeouts = {"connect": connect_s, "read": timeout_s, "write": timeout_s, "pool": timeout_s}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._pool.stream(
                    method, self.url + path, headers=headers, content=content, extensions={"timeout": timeouts}
                ) as response,
            ):
                fields = {name.lower(): value for name, value in response.headers}
                return _Response(
                    status=response.status,
                    location=fields.get(b"location", b"").decode("latin-1"),
                    content=await self._content(response, f"{method} {path}"),
                )
        except httpcore.ConnectTimeout as error:
            # nothing was asked: a machine that is off, not a call that is too long
            raise UnavailableError(f"{method} {path}: no connection within {connect_s:g} seconds") from error
        except (httpcore.TimeoutException, TimeoutError) as error:
            reason = f"{method} {path}: no answer within {timeout_s:g} seconds"
            raise UnavailableError(reason, is_timeout=True) from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise UnavailableError(f"{method} {path}: {type(error).__name__} {error}".rstrip()) from error

    async def _content(self, response: httpcore.Response, what: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_stream():
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise EngineError(
                    f"the server at {self.url} must answer {what} with at most {MAX_ANSWER_BYTES} bytes, found more "
                    f"(status {response.status}); no context holds so many tokens, so look into what it sends"
                )
        return b"".join(parts)


def _advice(status: int, path: str) -> str:
    if status in (401, 403):
        return "name the environment variable that holds its key in engine.api_key_variable"
    if status == 404 and not path.startswith("/v1"):
        return (
            "vLLM serves the routes for weights with the environment variable VLLM_SERVER_DEV_MODE=1 only, from 0.32 on"
        )
    return "its own log says more"


def shortened(text: str) -> str:
    """A text's beginning, for a message."""
    return " ".join(text.split())[:300]
