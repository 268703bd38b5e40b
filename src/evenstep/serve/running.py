"""Running the capture server inside an event loop that has other things to do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import uvicorn

from evenstep.errors import ConfigError

__all__ = ["bound_socket", "serving"]

STOP_S = 5.0  # calls that run when the server is stopped may end in this time


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program around it."""
        yield


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening address; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host and --port must be an address of this machine that is free, found {host}:{port} "
            f"({error.strerror}); choose another port, or 0 for any"
        ) from None
    return listener


@asynccontextmanager
async def serving(app: Any, listener: socket.socket) -> AsyncIterator[str]:
    """Serve an ASGI application at a bound socket as long as the block lasts; gives its URL."""
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        http="h11",
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=cast(int, STOP_S),
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if running.done():
                running.result()
                raise RuntimeError("the server ended before it began")
            await asyncio.sleep(0.005)
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        server.should_exit = True
        await asyncio.gather(running, return_exceptions=True)
        listener.close()
