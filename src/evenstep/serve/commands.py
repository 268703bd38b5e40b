"""Rollouts that a user's own program plays: it is started once per rollout and calls the model through the server."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from evenstep.errors import ConfigError, EvenstepError
from evenstep.rollout.agent import AgentOptions, RolloutIdentity, Supervised
from evenstep.rollout.call_tree import OnUndeclared
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.engine import Engine
from evenstep.rollout.environment import AsksModel, Environment, Episode, Observation, Score, Start
from evenstep.serve import guard
from evenstep.serve.app import make_app
from evenstep.serve.batches import in_background
from evenstep.serve.capture import Capture, CaptureLimits
from evenstep.serve.captured import CapturedRollout
from evenstep.serve.conversation import ToolTokenizer
from evenstep.serve.registry import Registry
from evenstep.serve.running import bound_socket, serving
from evenstep.serve.tool_calls import tool_family
from evenstep.types import Rollout
from evenstep.validation import whole_text

__all__ = ["CommandAgent", "CommandPlayer"]

MAX_STDOUT_BYTES = 2**20
STDERR_TAIL_BYTES = 4096
GRACE_S = 2.0  # between being asked to end and being ended
RewardFrom = Literal["environment", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """A program that plays a rollout.

    Raises:
        ConfigError: no program, or a time that is not above 0.
    """

    command: tuple[str, ...]  # program and arguments; no shell reads it
    timeout_s: float = 600.0  # of a rollout from start to exit
    reward: RewardFrom = "environment"  # who says it: the environment, about what was printed, or the program's call
    on_undeclared: OnUndeclared = "error"

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("agent.command must name a program, found none")
        if not self.timeout_s > 0:
            raise ConfigError(f"agent.rollout_timeout_s must be above 0 seconds, found {self.timeout_s}")


class _FailedError(Exception):
    """The rollout failed; the message is its status_reason."""


@dataclass(slots=True, kw_only=True)
class CommandPlayer:
    """Plays rollouts with programs, side by side, behind one capture server on loopback.

    A program gets the task as one JSON object on standard input and the server in ``OPENAI_BASE_URL`` and
    ``OPENAI_API_KEY``. Its rollout is

    - ``failed`` when it ends with an exit code other than 0, is not done in ``timeout_s``, or gives no reward; the
      reason has the end of what it wrote to standard error;
    - else scored: ``reward="call"`` takes what it reported with ``POST $EVENSTEP_ROLLOUT_URL/reward``;
      ``reward="environment"`` gives what it printed, without white space at both ends, to the environment as its one
      answer.

    Programs of one engine share batches as they come, so a run with them is not bit-repeatable.
    """

    agent: CommandAgent
    tokenizer: ToolTokenizer
    renderer: ChatRenderer
    trained_temperature: float  # the one that programs may ask for, also where sampling is greedy
    max_side_by_side: int

    async def play(
        self,
        rollouts: Sequence[tuple[RolloutIdentity, Environment]],
        engine: Engine,
        options: AgentOptions,
        *,
        on_done: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """One rollout for each identity, in this order; ``on_done`` is called with each as it ends.

        Raises:
            ConfigError: an environment asks the policy itself.
            EvenstepError: the engine cannot serve a call, or a promise of ours is broken.
        """
        if not rollouts:
            return []
        if any(isinstance(environment, AsksModel) for _, environment in rollouts):
            raise ConfigError(
                f"agent.kind = 'command' lets a program play, found environment {type(rollouts[0][1]).__name__}, which "
                f"asks the policy itself; set agent.kind = 'loop', or use another environment"
            )
        capture = Capture(
            engine=in_background(engine, max_rows=self.max_side_by_side),
            tokenizer=self.tokenizer,
            renderer=self.renderer,
            limits=CaptureLimits(
                max_tokens_per_call=options.max_tokens_per_call,
                max_calls=options.max_calls,
                max_segments=options.max_segments,
                max_concurrent_calls=1024,  # all of them are this user's own
                max_concurrent_calls_per_rollout=1024,
                timeout_s=2 * self.agent.timeout_s,  # a program is stopped before
            ),
            temperature=self.trained_temperature,
            is_greedy=options.temperature == 0,
            max_context_tokens=options.max_context_tokens,
            vocab_size=options.vocab_size,
            on_undeclared=self.agent.on_undeclared,
            tool_family=tool_family(str(getattr(self.tokenizer, "chat_template", None) or "")),
        )
        registry = Registry(capture)
        room = asyncio.Semaphore(self.max_side_by_side)
        async with serving(make_app(registry), bound_socket("127.0.0.1", 0)) as url:

            async def one(identity: RolloutIdentity, environment: Environment) -> Rollout:
                async with room:
                    supervised = Supervised(environment=environment, options=options)
                    rollout = await self._played(identity, supervised, registry, url)
                if on_done is not None:
                    on_done(rollout)
                return rollout

            try:
                async with asyncio.TaskGroup() as group:
                    capture.on_engine_error = _stopping(group)
                    running = [group.create_task(one(*rollout)) for rollout in rollouts]
            except* EvenstepError as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in running]

    async def _played(
        self, identity: RolloutIdentity, environment: Supervised, registry: Registry, url: str
    ) -> Rollout:
        name = identity.rollout_id.replace("/", "-")
        captured, key = registry.add(identity, name, mixes_seeds=True)
        captured.takes_reward = self.agent.reward == "call"
        try:
            await self._play(captured, environment, name, key, url)
        except _FailedError as reason:
            _end_failed(captured, str(reason))
        finally:
            registry.remove(name, key)
        assert captured.rollout is not None, "every way through _play ends it"
        return captured.rollout

    async def _play(self, captured: CapturedRollout, environment: Supervised, name: str, key: str, url: str) -> None:
        identity = captured.identity
        start: Start = await _of_environment(environment.reset())
        if isinstance(start.observation, Observation) and start.observation.images:
            raise _FailedError("a program is given text, found images in Start.observation; use agent.kind = 'loop'")
        task = {
            "task": start.task,
            "observation": start.observation,
            "metadata": dict(start.metadata),
            "rollout_id": identity.rollout_id,
            "group_id": identity.group_id,
            "prompt_id": identity.prompt_id,
        }
        environ = _environ(f"{url}/r/{name}", key)
        try:
            given = json.dumps(task, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise _FailedError(f"Start.metadata must hold JSON values only: {error}") from None
        printed, errors, code = await self._run(given, environ)
        if captured.engine_error is not None:
            raise captured.engine_error
        shown = shlex.join(self.agent.command)
        if code != 0:
            raise _FailedError(f"{shown} must exit with 0, found {_exit_text(code)}; it wrote to stderr:\n{errors}")
        if self.agent.reward == "call":
            if captured.rollout is None:
                raise _FailedError(f"{shown} must report a reward, found none when it exited; it wrote:\n{errors}")
            return
        if await _of_environment(environment.step(printed.strip())) is not None:
            raise _FailedError(
                "agent.reward = 'environment' scores one answer, found an environment that goes on after it; set "
                "agent.reward = 'call', or use an environment of one answer, such as prompts"
            )
        num_segments = int(captured.summary()["num_segments"])
        score: Score = await _of_environment(
            environment.score(Episode(num_segments=num_segments, visible_observations=(0,)))
        )
        captured.end("ok", score.reward, info=score.info)

    async def _run(self, task: bytes, environ: Mapping[str, str]) -> tuple[str, str, int]:
        """Standard output, the end of standard error, and the exit code of a program in a process group of its own."""
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(Path(guard.__file__)), str(reading)),
                *self.agent.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environ,
                pass_fds=(reading,),
                start_new_session=True,
            )
        finally:
            os.close(reading)
        try:
            async with asyncio.timeout(self.agent.timeout_s):
                return await _communicated(process, task)
        except TimeoutError:
            raise _FailedError(
                f"{shlex.join(self.agent.command)} must end within agent.rollout_timeout_s = {self.agent.timeout_s:g} "
                f"seconds; it was stopped"
            ) from None
        finally:
            await _ended(process)
            os.close(writing)


def _stopping(group: asyncio.TaskGroup) -> Any:
    """What to do when the engine fails for the first time: the run ends, whatever the programs make of it."""
    failed: list[asyncio.Task[None]] = []

    async def fail(error: EvenstepError) -> None:
        raise error

    def stop(error: EvenstepError) -> None:
        if not failed:
            failed.append(group.create_task(fail(error)))

    return stop


async def _communicated(process: asyncio.subprocess.Process, task: bytes) -> tuple[str, str, int]:
    assert process.stdin is not None, "asked for"
    assert process.stdout is not None, "asked for"
    assert process.stderr is not None, "asked for"
    reading = asyncio.gather(_first(process.stdout), _tail(process.stderr))
    with suppress(ConnectionError):  # a program that reads no task
        process.stdin.write(task)
        await process.stdin.drain()
    process.stdin.close()
    try:
        # not process.wait(): in some versions it waits for the pipes too, which a process left behind may hold open
        while process.returncode is None:
            await asyncio.sleep(0.01)
        _kill(process)
        async with asyncio.timeout(GRACE_S):
            printed, errors = await reading
    except TimeoutError:
        if process.returncode is None:
            raise  # the rollout's own limit
        raise _FailedError("a program must leave nothing behind, found a process that holds its output open") from None
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    code = process.returncode
    if printed is None:
        raise _FailedError(f"a program may print at most {MAX_STDOUT_BYTES} bytes as its answer, found more")
    return printed, errors, code


async def _first(stream: asyncio.StreamReader) -> str | None:
    """All of it, or None when it is too much; it is read to its end all the same, so that nobody waits."""
    parts: list[bytes] = []
    size = 0
    while data := await stream.read(1 << 16):
        size += len(data)
        if size <= MAX_STDOUT_BYTES:
            parts.append(data)
    return None if size > MAX_STDOUT_BYTES else b"".join(parts).decode("utf-8", "replace")


async def _tail(stream: asyncio.StreamReader) -> str:
    tail = b""
    while data := await stream.read(1 << 16):
        tail = (tail + data)[-STDERR_TAIL_BYTES:]
    return tail.decode("utf-8", "replace")


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Ask a program to end, then end whatever is left of its process group."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while process.returncode is None:
                    await asyncio.sleep(0.01)
    _kill(process)
    while process.returncode is None:
        await asyncio.sleep(0.01)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)


def _end_failed(captured: CapturedRollout, reason: str) -> None:
    if captured.rollout is None:
        captured.end("failed", None, reason=reason)
    else:  # it had reported a reward, and then went wrong
        captured.rollout = replace(captured.rollout, status="failed", reward=None, status_reason=reason)


async def _of_environment(call: Any) -> Any:
    """What an environment answers; whatever it raises fails the rollout."""
    try:
        return await call
    except EvenstepError:
        raise
    except Exception as error:
        raise _FailedError(whole_text(traceback.format_exc())) from error


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _environ(rollout_url: str, key: str) -> dict[str, str]:
    own = "127.0.0.1,localhost"
    environ = dict(os.environ)
    for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach this machine's loopback
        environ[name] = f"{environ[name]},{own}" if environ.get(name) else own
    return environ | {
        "OPENAI_BASE_URL": f"{rollout_url}/v1",
        "OPENAI_API_KEY": key,
        "EVENSTEP_ROLLOUT_URL": rollout_url,
    }
