"""An engine of servers: vLLM or SGLang over HTTP, several at once, which may die and come back.

All requests run in one event loop of the engine's own, in a thread beside the caller's, so that connections outlive
the collection that opened them, and a server that comes back gets its weights also while nobody asks it for tokens.

Every call's weight version is known. While weights change, no call is in flight: ``hold()`` lets those under way end
and keeps new ones waiting. Each update leaves a stamp of its own in the server, and an answer counts only if the server
has the same stamp after it as before: one that was started again in between cannot slip in answers of other weights.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx2 as httpx

from evenstep.errors import EngineError
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.server_api import (
    APIS,
    RAW_MODES,
    SAMPLED_MODES,
    TOKENIZER_TEXT,
    Answer,
    Connection,
    ServerApi,
    ServerFacts,
    UnavailableError,
)
from evenstep.types import Sampling

__all__ = ["PROBE_TOKENS", "Expected", "Probe", "ServerEngine", "ServerOptions"]

T = TypeVar("T")
PREFIX = "evenstep"  # of a stamp: evenstep:run:version:nonce
MAX_TIMEOUTS = 3  # of one call
CLOSE_S = 5.0  # that the end of a run waits for what is under way
WATCH_S = 1.0  # between looks at servers that nobody asks
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0  # of the back-off
MAX_GROUPS = 4096  # whose server is remembered
PROBE_TOKENS = 16  # that a probe samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a server must be, to be the policy's engine."""

    max_context_tokens: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    temperature: float  # that rollouts are sampled at
    dtype: str | None  # None: any
    probe_tolerance: float = 1e-3  # nats
    tokenizer_ids: tuple[int, ...] | None = None  # the policy's ids of TOKENIZER_TEXT; None is not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where servers are, and how long they may take."""

    kind: str
    urls: tuple[str, ...]
    expected: Expected
    max_concurrent: int  # calls of this process at once
    request_timeout_s: float = 600.0
    update_timeout_s: float = 600.0
    reconnect_limit_s: float = 300.0  # how long an unreachable server is waited for
    api_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a server sampled after a long fixed prompt."""

    url: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class _Server:
    connection: Connection
    facts: ServerFacts | None = None
    stamp: str = ""
    num_in_flight: int = 0
    is_up: bool = False
    problem: str | None = None  # why it is given up
    recovery: asyncio.Task[None] | None = None
    probe: Probe | None = None  # accepted at the present weights
    check: asyncio.Task[str] | None = None  # of the stamp, asked already
    next_check: asyncio.Task[str] | None = None  # not asked yet


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
        self._options, self._is_owner, self._notice, self._restart = options, is_owner, notice, restart
        self._run = run or uuid4().hex[:12]
        self._api: ServerApi = APIS[options.kind]()
        self._version, self._folder = 0, Path()
        self._groups: dict[str, _Server] = {}
        self._is_held, self._num_in_flight = True, 0
        self._is_adopted = False  # the servers' weights are their own and stay
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        self._wait_for(self._open())

    # --- what a rollout sees --------------------------------------------------------------------------------------

    @property
    def max_context_tokens(self) -> int:
        return self._options.expected.max_context_tokens

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def served_tokens(self) -> int | None:
        """Most tokens of a prompt and its output that every server takes; None where none says."""
        found = [server.facts.max_context_tokens for server in self._servers if server.facts is not None]
        return min((most for most in found if most is not None), default=None)

    async def generate(self, request: Request) -> Completion:
        """Complete a request on one of the servers.

        A call is sent again only while nothing of its answer was accepted.

        Raises:
            EngineError: an empty or over-long prompt, an answer that may not be trained on, or no server in time.
        """
        task = asyncio.run_coroutine_threadsafe(self._generate(request), self._loop)
        return await asyncio.wrap_future(task)

    # --- weights --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Wait until each server answers, and compare what it says with what is needed.

        Raises:
            EngineError: one does not answer within the limit, or is not what is needed.
        """
        self._wait_for(self._connect())

    def hold(self) -> None:
        """Let calls in flight end, and keep others waiting until ``release``."""
        self._wait_for(self._hold())

    def update(self, folder: Path, version: int, *, prompt_ids: Sequence[int]) -> list[Probe]:
        """Give every server the weights of a folder and sample after ``prompt_ids``; calls are held.

        Servers that do not come back within the limit are left out as long as another one is there.

        Raises:
            EngineError: a server refuses them, or none is left.
        """
        return self._wait_for(self._update(folder, version, tuple(prompt_ids)))

    def accept(self, probes: Sequence[Probe]) -> None:
        """Remember what was found right, to compare a server that comes back with."""
        for probe in probes:
            self._server_at(probe.url).probe = probe

    def stamps(self) -> dict[str, str]:
        """The stamp of each server that has the present weights, by address."""
        return {server.connection.url: server.stamp for server in self._servers if server.problem is None}

    def release(self, version: int, stamps: Mapping[str, str]) -> None:
        """Go on, with the weights that these stamps stand for; servers without one are left out."""
        self._wait_for(self._release(version, dict(stamps)))

    def adopt(self) -> None:
        """Serve the weights that the servers have, as they are; after ``connect``, in place of ``update``.

        A server that comes back must have the same ones. One that stays away is waited for without end; meanwhile calls
        fail after the limit.

        Raises:
            EngineError: a server does not say what it has.
        """
        self._wait_for(self._adopt())

    def close(self) -> None:
        """End the connections and the thread; the servers stay as they are."""
        if self._thread.is_alive():
            self._wait_for(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # --- in the loop ----------------------------------------------------------------------------------------------

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        options = self._options
        headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.max_concurrent + 8)
        # addresses of servers are meant as they stand, whatever proxy the environment names
        self._client = httpx.AsyncClient(headers=headers, limits=limits, trust_env=False)
        self._servers = [_Server(Connection(self._client, url)) for url in options.urls]
        self._slots = asyncio.Semaphore(options.max_concurrent)
        self._changed = asyncio.Condition()
        self._watcher = asyncio.create_task(self._watch()) if self._is_owner else None

    async def _close(self) -> None:
        tasks = [server.recovery for server in self._servers if server.recovery is not None]
        tasks += [self._watcher] if self._watcher is not None else []
        tasks += [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task not in tasks]
        for task in tasks:
            task.cancel()
        if tasks:  # one may be telling a server that hangs to go on
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await self._client.aclose()

    def _server_at(self, url: str) -> _Server:
        return next(server for server in self._servers if server.connection.url == url)

    async def _connect(self) -> None:
        async def connect(server: _Server) -> None:
            try:
                await self._recovered(server, self._inspect)
            except UnavailableError as error:
                raise EngineError(
                    f"the server at {server.connection.url} must answer within engine.reconnect_limit_s = "
                    f"{self._options.reconnect_limit_s:g} seconds, found {error}; start it, or correct engine.urls"
                ) from error

        await asyncio.gather(*map(connect, self._servers))

    async def _inspect(self, server: _Server) -> None:
        """Ask a server what it is, and refuse another than the one that is needed."""
        connection, expected = server.connection, self._options.expected
        await connection.check_health()
        facts = await self._api.facts(connection)
        _check_facts(connection.url, facts, expected)
        await self._api.check_ids(connection, facts, vocab_size=expected.vocab_size)
        if expected.tokenizer_ids is not None:
            found = await self._api.tokenize(connection, facts, TOKENIZER_TEXT)
            if found is not None and tuple(found) != expected.tokenizer_ids:
                raise EngineError(
                    f"the server at {connection.url} must have the tokenizer of model.path, found that it makes "
                    f"{len(found)} tokens of {TOKENIZER_TEXT!r}, {found[:8]} …, and model.path "
                    f"{len(expected.tokenizer_ids)}, {list(expected.tokenizer_ids[:8])} …; start it with the files of "
                    f"model.path"
                )
        server.facts = facts

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Completion:
        max_tokens = self._max_tokens(request)
        async with self._slots:
            failures, num_timeouts, first_failure = 0, 0, 0.0
            tried: set[str] = set()  # without an answer
            while True:
                server = await self._chosen(request.group_id, tried)
                # nothing is awaited between here and there, so the version is the one that answers
                version, stamp = self._version, server.stamp
                self._num_in_flight += 1
                server.num_in_flight += 1
                try:
                    answer = await self._answer(server, request.prompt_ids, request.sampling, max_tokens)
                    if await self._stamp_after(server) != stamp:
                        raise UnavailableError("its weights are not those that it was given: it was started again")
                except UnavailableError as error:
                    reason, is_timeout = str(error), error.is_timeout
                else:
                    return Completion(
                        output_ids=answer.output_ids,
                        logprobs=answer.logprobs,
                        finish_reason=answer.finish_reason,
                        weight_version=version,
                    )
                finally:
                    self._num_in_flight -= 1
                    server.num_in_flight -= 1
                    await self._tell()
                self._lost(server, reason)
                # one that hangs may call itself healthy at once: as long as others are up, it is their turn
                tried.add(server.connection.url)
                self._groups.pop(request.group_id, None)
                failures += 1
                num_timeouts += is_timeout
                first_failure = first_failure or time.monotonic()
                seconds = time.monotonic() - first_failure
                if num_timeouts >= MAX_TIMEOUTS or seconds > self._options.reconnect_limit_s:
                    raise EngineError(
                        f"a call must be answered within engine.request_timeout_s = "
                        f"{self._options.request_timeout_s:g} seconds, or {self._options.reconnect_limit_s:g} "
                        f"(engine.reconnect_limit_s) with tries; found {failures} failures in {seconds:.3g} seconds, "
                        f"the last at {server.connection.url}: {reason}; look into its log. What is finished is on "
                        f"disk, go on with --resume"
                    )
                await asyncio.sleep(min(FIRST_DELAY_S * 2**failures, MAX_DELAY_S))

    async def _stamp_after(self, server: _Server) -> str:
        """A server's stamp, asked for after this moment; one question is for all calls that end before it."""
        if server.next_check is None:
            server.next_check = asyncio.create_task(self._asked_stamp(server, server.check))
            # those who wait for it may all be gone
            server.next_check.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(server.next_check)

    async def _asked_stamp(self, server: _Server, before: asyncio.Task[str] | None) -> str:
        if before is not None:
            await asyncio.wait([before])
        server.check, server.next_check = server.next_check, None
        return await self._api.stamp(server.connection)

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

    async def _answer(
        self, server: _Server, prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int, *, stops: bool = True
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

    async def _chosen(self, group_id: str, tried: Set[str]) -> _Server:
        """A server that answers: that of the group, else the least busy one; waits until there is one.

        Those that this call was ``tried`` on come last.
        """
        while True:
            if not self._is_held:
                up = [server for server in self._servers if server.is_up]
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
        problems = [server.problem for server in self._servers if server.problem is not None]
        if len(problems) == len(self._servers):
            raise EngineError(
                f"{'; '.join(problems)}. What is finished is on disk: start the servers again and go on with --resume"
            )

    # --- weights --------------------------------------------------------------------------------------------------

    async def _hold(self) -> None:
        self._is_held = True
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_in_flight == 0)
        # nobody may come back with the old weights from here on
        recoveries = [server.recovery for server in self._servers if server.recovery is not None]
        for task in recoveries:
            task.cancel()
        await asyncio.gather(*recoveries, return_exceptions=True)

    async def _update(self, folder: Path, version: int, prompt_ids: tuple[int, ...]) -> list[Probe]:
        self._folder, self._version = folder, version
        # one that was waited for in vain is not waited for at every step from then on
        given_up = {server.connection.url for server in self._servers if server.problem is not None}
        for server in self._servers:
            server.problem = server.probe = None

        async def load(server: _Server) -> None:
            if server.facts is None:
                await self._inspect(server)
            if server.stamp:  # a cache that is kept by mistake must have the probe's prompt to be found out
                await self._answer(server, prompt_ids, Sampling(temperature=0.0), 1, stops=False)
            await self._load(server)
            found.append(await self._probed(server, prompt_ids))

        found: list[Probe] = []
        works = (self._recovered(one, load, is_once=one.connection.url in given_up) for one in self._servers)
        errors = await asyncio.gather(*works, return_exceptions=True)
        for error in errors:
            if error is not None and not isinstance(error, UnavailableError):
                raise error
        for server, error in zip(self._servers, errors, strict=True):
            if error is not None:
                server.problem = f"the server at {server.connection.url} is not there: {error}"
                self._say(f"{server.connection.url} gets no weights of version {version}: {error}")
        self._refuse_without_servers()
        await self._refuse_one_server_twice()
        return found

    async def _refuse_one_server_twice(self) -> None:
        """Two addresses of one server would take its weights for those of another run, each after the other."""
        for server in self._servers:
            if server.problem is not None:
                continue
            try:
                stamp = await self._api.stamp(server.connection)
            except UnavailableError:
                continue  # a call will find out
            others = [one.connection.url for one in self._servers if one is not server and one.stamp == stamp]
            if others:
                raise EngineError(
                    f"engine.urls must name each server once, found that {server.connection.url} and {others[0]} lead "
                    f"to the same one; remove one of them"
                )

    async def _load(self, server: _Server) -> None:
        stamp = f"{PREFIX}:{self._run}:{self._version}:{uuid4().hex[:8]}"
        await self._api.load(server.connection, self._folder, stamp, timeout_s=self._options.update_timeout_s)
        server.stamp = stamp

    async def _probed(self, server: _Server, prompt_ids: tuple[int, ...]) -> Probe:
        sampling = Sampling(temperature=self._options.expected.temperature, seed=0)
        answer = await self._answer(server, prompt_ids, sampling, PROBE_TOKENS, stops=False)
        return Probe(
            url=server.connection.url,
            prompt_ids=prompt_ids,
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
        )

    async def _release(self, version: int, stamps: dict[str, str]) -> None:
        self._version = version
        for server in self._servers:
            url = server.connection.url
            server.is_up = url in stamps
            server.stamp = stamps.get(url, "")
            if server.is_up:
                server.problem = None
            elif server.problem is None:
                server.problem = f"the server at {url} has no weights of version {version}"
        self._is_held = False
        await self._tell()

    async def _adopt(self) -> None:
        self._is_adopted = True

        async def look(server: _Server) -> None:
            server.stamp = await self._api.stamp(server.connection)

        for server in self._servers:
            try:
                await self._recovered(server, look)
            except UnavailableError as error:
                raise EngineError(
                    f"the server at {server.connection.url} must say what weights it has, found {error}"
                ) from error
        await self._release(self._version, {server.connection.url: server.stamp for server in self._servers})

    # --- servers that come and go ---------------------------------------------------------------------------------

    def _lost(self, server: _Server, reason: str) -> None:
        """Take a server out until it answers again, with the present weights."""
        if server.is_up and not self._is_held:
            server.is_up = False
            server.recovery = asyncio.create_task(self._recover(server, reason))

    async def _recover(self, server: _Server, reason: str) -> None:
        url = server.connection.url
        started, stamp = time.monotonic(), server.stamp
        is_said = False

        async def restored(server: _Server) -> None:
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
                self._say(f"{url} is back after {time.monotonic() - started:.1f} s, with weights {self._version}")
        except EngineError as error:
            server.problem = str(error)
        except Exception as error:  # noqa: BLE001 -- calls wait for it: whatever it is, they must hear of it
            server.problem = f"the server at {url} cannot be brought back: {type(error).__name__}: {error}"
        finally:
            server.recovery = None
            await self._tell()

    async def _restored(self, server: _Server) -> None:
        """Find a server with the weights that it was given, or give them to it again."""
        await server.connection.check_health()
        found = await self._api.stamp(server.connection)
        if self._is_adopted:
            if found != server.stamp:
                raise EngineError(
                    f"the server at {server.connection.url} must keep the weights that it had, {server.stamp!r}, found "
                    f"{found!r}; start what stands before it again"
                )
            await self._inspect(server)  # it may have been started on another model
            return
        if found == server.stamp:
            return
        is_ours = found.startswith(f"{PREFIX}:{self._run}:{self._version}:")
        if not self._is_owner:
            if not is_ours:
                raise UnavailableError(f"it has the weights {found!r}, and rank 0 gives it those of {self._version}")
            server.stamp = found
            return
        if found.startswith(f"{PREFIX}:") and not found.startswith(f"{PREFIX}:{self._run}:"):
            raise EngineError(
                f"the server at {server.connection.url} must serve one run, found the weights {found!r} of another; "
                f"give each run servers of its own"
            )
        await self._inspect(server)
        await self._load(server)
        if server.probe is not None:
            again = await self._probed(server, server.probe.prompt_ids)
            _compare_probes(server.probe, again, tolerance=self._options.expected.probe_tolerance)

    async def _recovered(
        self, server: _Server, work: Callable[[_Server], Coroutine[Any, Any, None]], *, is_once: bool = False
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
            for server in self._servers:
                if server.is_up and not self._is_held:
                    stamp = server.stamp
                    try:
                        if await self._api.stamp(server.connection) != stamp and server.stamp == stamp:
                            self._lost(server, "it was started again")
                    except UnavailableError as error:
                        if not error.is_timeout:  # a busy one may be slow to say so
                            self._lost(server, str(error))
                    except EngineError as error:
                        self._lost(server, str(error))

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _say(self, text: str) -> None:
        if self._notice is not None:
            self._notice(text)


def _check_facts(url: str, facts: ServerFacts, expected: Expected) -> None:
    most = facts.max_context_tokens
    if most is not None and most < expected.max_context_tokens:
        raise EngineError(
            f"the server at {url} must take model.max_context_tokens = {expected.max_context_tokens} tokens, found a "
            f"context of {most}, where it clamps outputs without an error; start it with --max-model-len "
            f"{expected.max_context_tokens}, or lower model.max_context_tokens"
        )
    mode = facts.logprobs_mode
    is_right = mode is None or mode in SAMPLED_MODES or (mode in RAW_MODES and expected.temperature == 1.0)
    if not is_right:
        raise EngineError(
            f"the server at {url} must give log-probs of the distribution that it samples from, at rollout.temperature "
            f"= {expected.temperature:g}, found --logprobs-mode {mode}; start it with --logprobs-mode "
            f"processed_logprobs"
        )
    if facts.dtype is not None and expected.dtype is not None and facts.dtype != expected.dtype:
        raise EngineError(
            f"the server at {url} must compute in engine.dtype = {expected.dtype!r}, found {facts.dtype!r}; start it "
            f"with --dtype {expected.dtype}, or set engine.dtype (and a wider engine.probe_tolerance)"
        )


def _compare_probes(before: Probe, after: Probe, *, tolerance: float) -> None:
    """A server that came back must sample what it sampled before with the same weights and seed.

    Raises:
        EngineError: it does not.
    """
    ids = zip(before.output_ids, after.output_ids, strict=True)
    # from the first different id on, the log-probs are of different contexts
    num_equal = next((at for at, (a, b) in enumerate(ids) if a != b), len(before.output_ids))
    pairs = zip(before.logprobs[:num_equal], after.logprobs, strict=False)
    # a NaN is no number that agrees, and max() may pass it over
    worst = max((abs(a - b) if isfinite(b) else inf for a, b in pairs), default=inf)
    if not worst <= tolerance:
        raise EngineError(
            f"the server at {after.url} was started again and must answer the probe as before with the same weights, "
            f"found {num_equal} equal ids of {len(before.output_ids)} and log-probs that differ by {worst:.3g}; start "
            f"it as it was started at first"
        )
