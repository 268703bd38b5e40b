"""The servers of an engine: their weights, and what is done when one goes away or comes back.

Every call's weight version is known. While weights change, no call is in flight: ``hold()`` lets those under way end
and keeps new ones waiting. Each update leaves a stamp of its own in the server, and an answer counts only if it names
that stamp, or the server has the same one after it as before: one that was started again in between cannot slip in
answers of other weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence, Set
from pathlib import Path
from typing import Any
from uuid import uuid4

from evenstep.errors import EngineError
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.server_api import Answer, ServerApi
from evenstep.rollout.server_connection import Connection, UnavailableError, connection_pool
from evenstep.rollout.server_options import Probe, Server, ServerOptions, compare_probes, inspect
from evenstep.rollout.server_sglang import SglangApi
from evenstep.rollout.server_vllm import VllmApi
from evenstep.types import Sampling

__all__ = ["FIRST_DELAY_S", "MAX_DELAY_S", "PROBE_TOKENS", "ServerPool", "probe_length"]

PREFIX = "evenstep"  # of a stamp: evenstep:run:version:nonce
ADOPTED, UNNAMED = "evenstep-adopted", "default"  # stamps of weights that no run gave: marked, and as servers start
HALF_TOLERANCE = 0.1  # nats, between two answers of a server that computes in less than float32
CLOSE_S = 5.0  # that the end of a run waits for what is under way
WATCH_S = 1.0  # between looks at servers that nobody asks
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # of the back-off
MAX_GROUPS = 4096  # whose server is remembered
PROBE_TOKENS = 16  # that a probe samples
PROBE_PROMPT = 160  # more than a cache block of any server (128 on the CPU), so that a stale cache shows


def probe_length(most: int) -> int:
    """Prompt tokens of a probe, as many as fit beside its output into ``most``."""
    return max(1, min(PROBE_PROMPT, most - PROBE_TOKENS))


class ServerPool:
    """Servers with the weights of one version, in the event loop that it is made in.

    Args:
        options: see ``ServerOptions``.
        is_owner: this process gives servers their weights, also to one that was started again; the others wait for it.
        run: names the run in the stamps of its weights.
        notice: shows a line to the user, from any thread.
        restart: called with a server's address when it does not answer; starts it again if this process started it.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        is_owner: bool,
        run: str,
        notice: Callable[[str], None] | None,
        restart: Callable[[str], None] | None,
    ) -> None:
        self._options, self._is_owner, self._notice, self._restart = options, is_owner, notice, restart
        self._run = run or uuid4().hex[:12]
        self._api = _api_of(options)
        self.version, self._folder = 0, Path()
        self._groups: dict[str, Server] = {}
        self._is_held, self._num_in_flight = True, 0
        self._held_since, self._held_s = time.monotonic(), 0.0
        self._is_adopted = False  # the servers' weights are their own and stay
        self._connections = connection_pool(options.urls, max_idle=options.max_concurrent + 8)
        key = options.api_key
        self.servers = [Server(Connection(self._connections, url, api_key=key)) for url in options.urls]
        self._changed = asyncio.Condition()
        self._watcher = asyncio.create_task(self._watch()) if is_owner else None

    async def close(self) -> None:
        """End the connections and what is under way; the servers stay as they are."""
        tasks = [server.recovery for server in self.servers if server.recovery is not None]
        tasks += [self._watcher] if self._watcher is not None else []
        tasks += [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task not in tasks]
        for task in tasks:
            task.cancel()
        if tasks:  # one may be telling a server that hangs to go on
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await self._connections.aclose()

    def _server_at(self, url: str) -> Server:
        return next(server for server in self.servers if server.connection.url == url)

    async def connect(self) -> None:
        """Wait until each server answers, and compare what it says with what is needed."""

        async def look(server: Server) -> None:
            if self._is_owner:
                await self._api.wake(server.connection)
            await inspect(server, self._api, self._options.expected)

        async def connect(server: Server) -> None:
            try:
                await self._recovered(server, look)
            except UnavailableError as error:
                raise EngineError(
                    f"the server at {server.connection.url} must answer within engine.reconnect_limit_s = "
                    f"{self._options.reconnect_limit_s:g} seconds, found {error}; start it, or correct engine.urls"
                ) from error

        await asyncio.gather(*map(connect, self.servers))

    # --- calls ----------------------------------------------------------------------------------------------------

    async def chosen(self, group_id: str, tried: Set[str]) -> Server:
        """A server that answers: that of the group, else the least busy one; waits until there is one.

        Those that this call was ``tried`` on come last.
        """
        while True:
            if not self._is_held:
                up = [server for server in self.servers if server.is_up]
                server = self._groups.get(group_id)
                if server is not None and server.is_up and server.connection.url not in tried:
                    return server
                if up:
                    server = min(up, key=lambda one: (one.connection.url in tried, one.num_in_flight))
                    if group_id:
                        while len(self._groups) >= MAX_GROUPS:
                            del self._groups[next(iter(self._groups))]
                        self._groups[group_id] = server
                    return server
                self._refuse_without_servers()
            async with self._changed:
                await self._changed.wait()

    def _refuse_without_servers(self) -> None:
        problems = [server.problem for server in self.servers if server.problem is not None]
        if len(problems) == len(self.servers):
            raise EngineError(
                f"{'; '.join(problems)}. What is finished is on disk: start the servers again and go on with --resume"
            )

    async def _answer(
        self, server: Server, prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int, *, stops: bool = True
    ) -> Answer:
        assert server.facts is not None
        return await self._api.complete(
            server.connection,
            server.facts,
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=sorted(self._options.expected.stop_token_ids) if stops else (),
            timeout_s=self._options.request_timeout_s,
        )

    async def answered(self, server: Server, request: Request, max_tokens: int) -> Completion:
        """One try of a call on a server that was just ``chosen``: its answer, if it has the same stamp after it.

        Raises:
            UnavailableError: nothing of an answer was accepted.
            EngineError: an answer that may not be trained on.
        """
        # nothing was awaited since it was chosen, so the version is the one that answers
        version, stamp = self.version, server.stamp
        self._num_in_flight += 1
        server.num_in_flight += 1
        try:
            answer = await self._answer(server, request.prompt_ids, request.sampling, max_tokens)
            # an answer that says what sampled it needs no question
            if (answer.stamp or await self._stamp_after(server)) != stamp:
                raise UnavailableError("its weights are not those that it was given: it was started again")
        finally:
            self._num_in_flight -= 1
            server.num_in_flight -= 1
            await self._tell()
        return Completion(
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            weight_version=version,
            routed_experts=answer.routed_experts,
        )

    async def _stamp_after(self, server: Server) -> str:
        """A server's stamp, asked for after this moment; one question is for all calls that end before it is asked."""
        if server.next_check is None:
            server.next_check = asyncio.create_task(self._asked_stamp(server))
            # those who wait for it may all be gone
            server.next_check.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(server.next_check)

    async def _asked_stamp(self, server: Server) -> str:
        async with server.checks:
            server.next_check = None
            return await self._api.stamp(server.connection)

    # --- weights --------------------------------------------------------------------------------------------------

    @property
    def held_s(self) -> float:
        """Seconds so far in which calls were kept waiting for weights, which is no server's failure."""
        return self._held_s + (time.monotonic() - self._held_since if self._is_held else 0.0)

    async def hold(self) -> None:
        """Let calls in flight end, and keep others waiting until ``release``."""
        if not self._is_held:
            self._is_held, self._held_since = True, time.monotonic()
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_in_flight == 0)
        # nobody may come back with the old weights from here on
        recoveries = [server.recovery for server in self.servers if server.recovery is not None]
        for task in recoveries:
            task.cancel()
        await asyncio.gather(*recoveries, return_exceptions=True)

    async def update(self, folder: Path, version: int, prompt_ids: tuple[int, ...]) -> list[Probe]:
        """Give every server the weights of a folder and sample after ``prompt_ids``; calls are held."""
        self._folder, self.version = folder, version
        # one that was waited for in vain is not waited for at every step from then on
        given_up = {server.connection.url for server in self.servers if server.problem is not None}
        for server in self.servers:
            server.problem = server.probe = None

        async def load(server: Server) -> None:
            if server.facts is None or server.connection.url in given_up:  # started again, it may be another
                await inspect(server, self._api, self._options.expected)
            if server.stamp:  # a cache that is kept by mistake must have the probe's prompt to be found out
                await self._answer(server, prompt_ids, Sampling(temperature=0.0), 1, stops=False)
            await self._load(server)
            found.append(await self._probed(server, prompt_ids))

        found: list[Probe] = []
        works = (self._recovered(one, load, is_once=one.connection.url in given_up) for one in self.servers)
        errors = await asyncio.gather(*works, return_exceptions=True)
        for error in errors:
            if error is not None and not isinstance(error, UnavailableError):
                raise error
        for server, error in zip(self.servers, errors, strict=True):
            if error is not None:
                server.problem = f"the server at {server.connection.url} is not there: {error}"
                self._say(f"{server.connection.url} gets no weights of version {version}: {error}")
        self._refuse_without_servers()
        await self._refuse_one_server_twice()
        return found

    def accept(self, probes: Sequence[Probe]) -> None:
        """Remember what was found right, to compare a server that comes back with."""
        for server in self.servers:
            server.probe = None
        for probe in probes:
            self._server_at(probe.url).probe = probe

    async def _refuse_one_server_twice(self) -> None:
        """Two addresses of one server would take its weights for those of another run, each after the other."""
        for server in self.servers:
            if server.problem is not None:
                continue
            try:
                stamp = await self._api.stamp(server.connection)
            except UnavailableError:
                continue  # a call will find out
            other = next((one for one in self.servers if one is not server and one.stamp == stamp), None)
            if other is not None:
                first, second = (one.connection.url for one in self.servers if one is server or one is other)
                raise EngineError(
                    f"engine.urls must name each server once, found that {first} and {second} lead to the "
                    f"same one; remove one of them"
                )

    async def _load(self, server: Server) -> None:
        stamp = f"{PREFIX}:{self._run}:{self.version}:{uuid4().hex[:8]}"
        await self._api.load(server.connection, self._folder, stamp, timeout_s=self._options.update_timeout_s)
        server.stamp = stamp

    async def _probed(self, server: Server, prompt_ids: tuple[int, ...]) -> Probe:
        sampling = Sampling(temperature=self._options.expected.temperature, seed=0)
        answer = await self._answer(server, prompt_ids, sampling, PROBE_TOKENS, stops=False)
        return Probe(
            url=server.connection.url,
            prompt_ids=prompt_ids,
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            routed_experts=answer.routed_experts,
        )

    async def release(self, version: int, stamps: dict[str, str]) -> None:
        """Go on, with the weights that these stamps stand for; servers without one are left out."""
        self.version = version
        for server in self.servers:
            url = server.connection.url
            server.is_up = url in stamps
            server.stamp = stamps.get(url, "")
            if server.is_up:
                server.problem = None
            elif server.problem is None:
                server.problem = f"the server at {url} has no weights of version {version}"
        self._held_s, self._is_held = self.held_s, False
        await self._tell()

    async def adopt(self) -> None:
        """Serve the weights that the servers have, as they are."""
        self._is_adopted = True

        async def look(server: Server) -> None:
            server.stamp = await self._marked(server, await self._api.stamp(server.connection))
            expected = self._options.expected
            length = probe_length(expected.max_context_tokens)
            server.probe = await self._probed(server, tuple(at % expected.vocab_size for at in range(length)))

        for server in self.servers:
            try:
                await self._recovered(server, look)
            except UnavailableError as error:
                raise EngineError(
                    f"the server at {server.connection.url} must say what weights it has, found {error}"
                ) from error
        await self.release(self.version, {server.connection.url: server.stamp for server in self.servers})

    async def _marked(self, server: Server, found: str) -> str:
        """The stamp of a server's own weights; every server starts with the same one, which would hide a restart."""
        return await self._api.mark(server.connection, f"{ADOPTED}:{uuid4().hex[:8]}") if found == UNNAMED else found

    # --- servers that come and go ---------------------------------------------------------------------------------

    def forget_server_of(self, group_id: str) -> None:
        """The group's next call may go to any server."""
        self._groups.pop(group_id, None)

    def lost(self, server: Server, reason: str) -> None:
        """Take a server out until it answers again, with the present weights."""
        if server.is_up and not self._is_held:
            server.is_up = False
            server.recovery = asyncio.create_task(self._recover(server, reason))

    async def _recover(self, server: Server, reason: str) -> None:
        url = server.connection.url
        started, stamp = time.monotonic(), server.stamp
        is_said = False

        async def restored(server: Server) -> None:
            nonlocal is_said
            try:
                await self._restored(server)
            except UnavailableError:
                if not is_said:
                    self._say(f"{url}: {reason}; waiting for it")
                    is_said = True
                raise

        try:
            while not server.is_up:
                try:
                    await self._recovered(server, restored)
                    server.is_up, server.problem = True, None
                except UnavailableError as error:
                    server.problem = (
                        f"the server at {url} did not come back within engine.reconnect_limit_s = "
                        f"{self._options.reconnect_limit_s:g} seconds: {error} (first: {reason})"
                    )
                    if not self._is_adopted:
                        return
                    await self._tell()
            if is_said or server.stamp != stamp:
                self._say(f"{url} is back after {time.monotonic() - started:.1f} s, with weights {self.version}")
        except EngineError as error:
            server.problem = str(error)
        except Exception as error:  # noqa: BLE001 -- calls wait for it: whatever it is, they must hear of it
            server.problem = f"the server at {url} cannot be brought back: {type(error).__name__}: {error}"
        finally:
            server.recovery = None
            await self._tell()

    async def _restored(self, server: Server) -> None:
        """Find a server with the weights that it was given, or give them to it again."""
        await server.connection.check_health()
        found = await self._api.stamp(server.connection)
        if self._is_adopted:
            if found not in (server.stamp, UNNAMED) and not found.startswith(f"{ADOPTED}:"):
                raise EngineError(
                    f"the server at {server.connection.url} must keep the weights that it had, {server.stamp!r}, found "
                    f"{found!r}; start what stands before it again"
                )
            await inspect(server, self._api, self._options.expected)  # it may have been started on another model
            await self._check_answers_as_before(server)
            server.stamp = await self._marked(server, found)
            return
        if found == server.stamp:
            return
        is_ours = found.startswith(f"{PREFIX}:{self._run}:{self.version}:")
        if not self._is_owner:
            if not is_ours:
                raise UnavailableError(f"it has the weights {found!r}, and rank 0 gives it those of {self.version}")
            await inspect(server, self._api, self._options.expected)
            await self._check_answers_as_before(server)  # it has the stamp before rank 0 has compared
            server.stamp = found
            return
        if found.startswith(f"{PREFIX}:") and not found.startswith(f"{PREFIX}:{self._run}:"):
            raise EngineError(
                f"the server at {server.connection.url} must serve one run, found the weights {found!r} of another; "
                f"give each run servers of its own"
            )
        await inspect(server, self._api, self._options.expected)
        await self._load(server)
        await self._check_answers_as_before(server)

    async def _check_answers_as_before(self, server: Server) -> None:
        if server.probe is not None:
            again = await self._probed(server, server.probe.prompt_ids)
            is_half = self._is_adopted and (server.facts is None or server.facts.dtype != "float32")
            tolerance = max(self._options.expected.probe_tolerance, HALF_TOLERANCE if is_half else 0.0)
            compare_probes(server.probe, again, tolerance=tolerance)

    async def _recovered(
        self, server: Server, work: Callable[[Server], Coroutine[Any, Any, None]], *, is_once: bool = False
    ) -> None:
        """Do ``work``, again with growing pauses while the server is unavailable, up to the limit."""
        started, delay = time.monotonic(), FIRST_DELAY_S
        while True:
            try:
                await work(server)
            except UnavailableError:
                if self._restart is not None:
                    await asyncio.to_thread(self._restart, server.connection.url)
                if is_once or time.monotonic() - started > self._options.reconnect_limit_s:
                    raise
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_DELAY_S)
            else:
                return

    async def _watch(self) -> None:
        """Notice a server that was started again also when this process asks it for nothing: others may wait."""
        while True:
            await asyncio.sleep(WATCH_S)
            for server in self.servers:
                if server.is_up and not self._is_held:
                    stamp = server.stamp
                    try:
                        if await self._api.stamp(server.connection) != stamp and server.stamp == stamp:
                            self.lost(server, "it was started again")
                    except UnavailableError as error:
                        if not error.is_timeout:  # a busy one may be slow to say so
                            self.lost(server, str(error))
                    except EngineError as error:
                        self.lost(server, str(error))

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _say(self, text: str) -> None:
        if self._notice is not None:
            self._notice(text)


def _api_of(options: ServerOptions) -> ServerApi:
    if options.kind == "sglang":
        return SglangApi(options.experts_shape)
    assert options.kind == "vllm"
    assert options.experts_shape is None  # its answers have none; the configuration refuses to ask for them
    return VllmApi()
