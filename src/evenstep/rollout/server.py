"""An engine of servers: vLLM or SGLang over HTTP, several at once, which may die and come back.

All requests run in one event loop of the engine's own, in a thread beside the caller's, so that connections outlive
the collection that opened them, and a server that comes back gets its weights also while nobody asks it for tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from evenstep.errors import EngineError
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.server_connection import UnavailableError
from evenstep.rollout.server_options import Expected, Probe, ServerOptions
from evenstep.rollout.server_pool import FIRST_DELAY_S, MAX_DELAY_S, PROBE_TOKENS, ServerPool, probe_length

__all__ = ["PROBE_TOKENS", "Expected", "Probe", "ServerEngine", "ServerOptions", "probe_length"]

T = TypeVar("T")
MAX_TIMEOUTS = 3  # of one call


class ServerEngine:
    """Completes token ids on servers: the least busy one, siblings of a group on the same one.

    Args:
        options: see ``ServerOptions``.
        is_owner: this process gives servers their weights, also to one that was started again; the others wait for it.
        notice: shows a line to the user, from any thread.
        restart: called with a server's address when it does not answer; starts it again if this process started it.

    Raises:
        EngineError: a server is not what the policy needs.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        is_owner: bool = True,
        run: str = "",
        notice: Callable[[str], None] | None = None,
        restart: Callable[[str], None] | None = None,
    ) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()

        async def pool() -> ServerPool:
            return ServerPool(options, is_owner=is_owner, run=run, notice=notice, restart=restart)

        self._slots = asyncio.Semaphore(options.max_concurrent)
        self._pool = self._wait_for(pool())

    # --- what a rollout sees --------------------------------------------------------------------------------------

    @property
    def max_context_tokens(self) -> int:
        return self._options.expected.max_context_tokens

    @property
    def weight_version(self) -> int:
        return self._pool.version

    @property
    def served_tokens(self) -> int | None:
        """Most tokens of a prompt and its output that every server takes; None where none says."""
        found = [server.facts.max_context_tokens for server in self._pool.servers if server.facts is not None]
        return min((most for most in found if most is not None), default=None)

    async def generate(self, request: Request) -> Completion:
        """Complete a request on one of the servers.

        A call is sent again only while nothing of its answer was accepted.

        Raises:
            EngineError: an empty or over-long prompt, one with images, an answer that may not be trained on, or no
                server in time.
        """
        if request.media:
            raise EngineError(
                f"servers are asked with token ids alone, found a prompt of rollout key {request.rollout_key} with "
                f"{len(request.media)} images; let the training ranks generate (engine.kind = 'in_process')"
            )
        task = asyncio.run_coroutine_threadsafe(self._generate(request), self._loop)
        return await asyncio.wrap_future(task)

    # --- weights --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Wait until each server answers, and compare what it says with what is needed.

        Raises:
            EngineError: one does not answer within the limit, or is not what is needed.
        """
        self._wait_for(self._pool.connect())

    def hold(self) -> None:
        """Let calls in flight end, and keep others waiting until ``release``."""
        self._wait_for(self._pool.hold())

    def update(self, folder: Path, version: int, *, prompt_ids: Sequence[int]) -> list[Probe]:
        """Give every server the weights of a folder and sample after ``prompt_ids``; calls are held.

        Servers that do not come back within the limit are left out as long as another one is there.

        Raises:
            EngineError: a server refuses them, or none is left.
        """
        return self._wait_for(self._pool.update(folder, version, tuple(prompt_ids)))

    def accept(self, probes: Sequence[Probe]) -> None:
        """Remember what was found right, to compare a server that comes back with."""
        self._pool.accept(probes)

    def stamps(self) -> dict[str, str]:
        """The stamp of each server that has the present weights, by address."""
        return {server.connection.url: server.stamp for server in self._pool.servers if server.problem is None}

    def release(self, version: int, stamps: Mapping[str, str]) -> None:
        """Go on, with the weights that these stamps stand for; servers without one are left out."""
        self._wait_for(self._pool.release(version, dict(stamps)))

    def adopt(self) -> None:
        """Serve the weights that the servers have, as they are; after ``connect``, in place of ``update``.

        A server that comes back must have the same ones. One that stays away is waited for without end; meanwhile calls
        fail after the limit.

        Raises:
            EngineError: a server does not say what it has.
        """
        self._wait_for(self._pool.adopt())

    def close(self) -> None:
        """End the connections and the thread; the servers stay as they are."""
        if self._thread.is_alive():
            self._wait_for(self._pool.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # --- in the loop ----------------------------------------------------------------------------------------------

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _generate(self, request: Request) -> Completion:
        max_tokens = self._max_tokens(request)
        async with self._slots:
            failures, num_timeouts = 0, 0
            first_failure: float | None = None
            tried: set[str] = set()  # without an answer
            while True:
                server = await self._pool.chosen(request.group_id, tried)
                try:
                    return await self._pool.answered(server, request, max_tokens)
                except UnavailableError as error:
                    reason, is_timeout = str(error), error.is_timeout
                self._pool.lost(server, reason)
                # one that hangs may call itself healthy at once: as long as others are up, it is their turn
                tried.add(server.connection.url)
                self._pool.forget_server_of(request.group_id)
                failures += 1
                num_timeouts += is_timeout
                now = time.monotonic() - self._pool.held_s
                first_failure = now if first_failure is None else first_failure
                seconds = now - first_failure
                if num_timeouts >= MAX_TIMEOUTS or seconds > self._options.reconnect_limit_s:
                    raise EngineError(
                        f"a call must be answered within engine.request_timeout_s = "
                        f"{self._options.request_timeout_s:g} seconds, or {self._options.reconnect_limit_s:g} "
                        f"(engine.reconnect_limit_s) with tries; found {failures} failures in {seconds:.3g} seconds, "
                        f"the last at {server.connection.url}: {reason}; look into its log. What is finished is on "
                        f"disk, go on with --resume"
                    )
                await asyncio.sleep(min(FIRST_DELAY_S * 2**failures, MAX_DELAY_S))

    def _max_tokens(self, request: Request) -> int:
        num_prompt_tokens, most = len(request.prompt_ids), self.max_context_tokens
        if not 0 < num_prompt_tokens < most:
            raise EngineError(
                f"request (rollout key {request.rollout_key}): prompt and output must fit {most} tokens, found a "
                f"prompt of {num_prompt_tokens}; give the model some context, or compact it earlier"
            )
        room, asked = most - num_prompt_tokens, request.sampling.max_tokens
        if asked is not None and asked < 1:
            raise EngineError(
                f"request (rollout key {request.rollout_key}): max_tokens must be at least 1, found {asked}"
            )
        return room if asked is None else min(asked, room)
