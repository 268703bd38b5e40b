"""The agent loop: one environment episode through an engine, as a rollout of exact calls."""

from __future__ import annotations

import asyncio
import json
import math
import numbers
import time
import traceback
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from evenstep.errors import EvenstepError, StateError
from evenstep.rollout.calls import is_asked_to_stop
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import Compaction, Context, Guard
from evenstep.rollout.conversation import Conversation
from evenstep.rollout.engine import Engine
from evenstep.rollout.environment import AsksModel, Environment, Episode, Observation, Score, Start
from evenstep.rollout.recorder import AgentOptions, Recorder, RolloutIdentity, TruncatedError
from evenstep.types import Rollout, Status
from evenstep.validation import dotted, find_unwritable, whole_text

__all__ = ["AgentOptions", "RolloutIdentity", "Supervised", "run_rollout"]

ResultT = TypeVar("ResultT")


@dataclass(slots=True, kw_only=True)
class Supervised:
    """Calls an environment: within the limits on time, and with results of the promised types."""

    environment: Environment
    options: AgentOptions
    seconds: float = 0.0  # that its calls have taken so far, without what they waited for the model
    _limit: asyncio.Timeout | None = None  # of the call that runs
    _num_waiting: int = 0  # questions to the model that it waits for
    _waits_since: float = 0.0  # the first of them was asked
    _left_s: float | None = None  # of the limit at that time
    _waited_s: float = 0.0

    @contextmanager
    def waiting_for_model(self) -> Iterator[None]:
        """The time that the engine takes counts towards no limit of the environment.

        Raises:
            RuntimeError: no call of the environment runs, so nobody waits.
        """
        limit, loop = self._limit, asyncio.get_running_loop()
        if limit is None:
            raise RuntimeError("a model is asked within reset, step or score, found a question from outside of them")
        if self._num_waiting == 0:
            when = limit.when()
            self._left_s = None if when is None else when - loop.time()
            self._waits_since = time.monotonic()
            limit.reschedule(None)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._waited_s += time.monotonic() - self._waits_since
            if self._num_waiting == 0 and self._limit is limit and self._left_s is not None:
                limit.reschedule(loop.time() + self._left_s)

    async def reset(self) -> Start:
        start = await self._within_limits("reset", self.environment.reset())
        if not isinstance(start, Start):
            raise TypeError(f"environment.reset must return a Start, found {start!r:.60}")
        if isinstance(start.task, Observation) and start.task.images:
            raise TypeError("images belong in Start.observation, found some in Start.task; the task is text")
        return start

    async def step(self, action: str) -> str | None:
        observation = await self._within_limits("step", self.environment.step(action))
        if observation is not None and not isinstance(observation, str):
            raise TypeError(f"environment.step must return a text, or None at the end, found {observation!r:.60}")
        return observation

    async def score(self, episode: Episode) -> Score:
        return _checked(await self._within_limits("score", self.environment.score(episode)))

    async def _within_limits(self, name: str, call: Awaitable[ResultT]) -> ResultT:
        """The call's result; what ends it is always an ``Exception``, but for the user's own Ctrl-C and our stop."""
        key, limit_s = "step_timeout_s", self.options.step_timeout_s
        if self.options.timeout_s is not None and self.options.timeout_s - self.seconds < limit_s:
            key, limit_s = "timeout_s", self.options.timeout_s - self.seconds
        promise = f"environment.{name} must end within rollout.{key} = {getattr(self.options, key)} seconds"
        if key == "timeout_s":
            promise += f", of which {self.seconds:.3g} were spent before"
        limit, started, waited_s = asyncio.timeout(limit_s), time.monotonic(), self._waited_s
        try:
            async with limit:
                self._limit = limit
                result = await call
        except TimeoutError as error:
            if not limit.expired():
                raise  # the environment's own
            late_s = time.monotonic() - started - (self._waited_s - waited_s) - limit_s
            if late_s > limit_s / 10:  # the clock of the event loop stood still: this call may have done nothing wrong
                promise += f" (stopped {late_s:.3g} late: another environment blocks, or this one's clean-up is slow)"
            raise TimeoutError(f"{promise}; it was stopped, the lines above say where it waited") from error
        except BaseException as error:
            if isinstance(error, Exception | KeyboardInterrupt | GeneratorExit) or is_asked_to_stop(error):
                raise
            raise RuntimeError(f"environment.{name} raised {type(error).__name__}: {error}") from error
        finally:
            self._limit = None
            spent_s = time.monotonic() - started - (self._waited_s - waited_s)
            self.seconds += spent_s
        if spent_s > limit_s:
            # It ended by itself, so nothing could stop it: it never gave the event loop back in all that time.
            raise TimeoutError(
                f"{promise}, found {spent_s:.3g}; it blocked, and every other rollout with it: await, or use "
                f"asyncio.to_thread"
            )
        return result


async def run_rollout(
    *,
    identity: RolloutIdentity,
    environment: Environment,
    engine: Engine,
    renderer: ChatRenderer,
    compaction: Compaction,
    options: AgentOptions,
) -> Rollout:
    """Play one episode and return it as a rollout.

    Before every call the guard compares prompt tokens + ``max_tokens_per_call`` + what compaction itself needs with
    ``max_context_tokens``. When they do not fit, or when compaction is due, the context is compacted, a second time if
    once was not enough. The rollout is ``truncated`` when it still does not fit, when ``max_calls`` or ``max_segments``
    is reached, or by choice when the episode ends with an output that was cut off; it is then scored as it stands. An
    exception inside the environment, a call of it that takes longer than ``step_timeout_s``, or a reward that is no
    finite number makes the rollout ``failed``, with the traceback as its ``status_reason``.

    Raises:
        EvenstepError: the engine cannot serve a call or answers with what no engine may, or a promise of ours is
            broken; that is not the policy's doing and must not become a reward.
    """
    recorder = Recorder(engine=engine, renderer=renderer, options=options, identity=identity)
    supervised = Supervised(environment=environment, options=options)
    played = _Played()
    status: Status = "ok"
    status_reason: str | None = None
    score: Score | None = None
    try:
        if isinstance(environment, AsksModel):
            environment.use_model(lambda: Conversation(recorder, supervised.waiting_for_model))
        try:
            await _play(supervised, recorder, compaction, played)
            recorder.end()
        except TruncatedError as reason:
            status, status_reason = "truncated", str(reason)
        episode = Episode(num_segments=recorder.num_segments, visible_observations=played.visible)
        score = await supervised.score(episode)
    except EvenstepError:
        raise
    except Exception:  # noqa: BLE001 -- an environment is foreign code: whatever it raises costs this rollout, not the run
        status, status_reason = "failed", whole_text(traceback.format_exc())
    if recorder.failure is not None:  # an environment that asked for the call may have swallowed it
        raise recorder.failure
    info: dict[str, Any] = {} if score is None else dict(score.info)
    return Rollout(
        rollout_id=identity.rollout_id,
        group_id=identity.group_id,
        prompt_id=identity.prompt_id,
        calls=tuple(recorder.calls),
        reward=None if score is None else score.reward,
        status=status,
        status_reason=status_reason,
        info=info | {"num_segments": recorder.num_segments},
    )


def _checked(score: Any) -> Score:
    """The score, in types that a rollout file holds."""
    if not isinstance(score, Score):
        raise TypeError(f"environment.score must return a Score, found {score!r:.60}")
    # NumPy's floats and integers are Real, its booleans, arrays and other libraries' tensors are not
    if not isinstance(score.reward, numbers.Real) or isinstance(score.reward, bool):
        raise TypeError(f"a reward must be a number, found {score.reward!r:.60} ({type(score.reward).__name__})")
    if not math.isfinite(score.reward):
        raise ValueError(f"a reward must be finite, found {score.reward!r}")
    try:
        # what a model wrote may be in it, and half a surrogate pair of that is no reason to lose a reward
        text = whole_text(json.dumps(dict(score.info), allow_nan=False, ensure_ascii=False))
        info = json.loads(text)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Score.info must hold JSON values only: {error}") from error
    problem = find_unwritable(info)
    if problem is not None:
        raise ValueError(f"Score.info must hold what a rollout file can: {dotted(problem[0])} {problem[1]}")
    return Score(reward=float(score.reward), info=info)


@dataclass(slots=True)
class _Played:
    """How far an episode came, also one that is cut short."""

    visible: tuple[int, ...] = ()  # indices of the observations in the context of the agent's last call


async def _play(environment: Supervised, recorder: Recorder, compaction: Compaction, played: _Played) -> None:
    """Run the episode to its end."""
    start = await environment.reset()
    context = Context(task=start.task)
    observation: str | None = start.observation
    while True:
        context = await _fitting(context, observation, recorder, compaction)
        prompt = context.prompt(recorder.renderer, observation)
        output_ids = await recorder.next_output(prompt, recorder.options.max_tokens_per_call)
        context = context.with_turn(observation, output_ids)
        played.visible = tuple(turn.index for turn in context.turns)
        observation = await environment.step(recorder.renderer.text(output_ids))
        if observation is None:
            return


async def _fitting(context: Context, observation: str, recorder: Recorder, compaction: Compaction) -> Context:
    """The context itself, or a compacted one, in which the answer to ``observation`` fits."""
    renderer, options = recorder.renderer, recorder.options

    async def write_note(request: str, max_tokens: int) -> str:
        prompt = context.prompt(renderer, request)
        if len(prompt.ids) + max_tokens > options.max_context_tokens:
            raise TruncatedError(
                f"the context is full: a note's prompt and generation take {len(prompt.ids) + max_tokens} tokens, "
                f"max_context_tokens is {options.max_context_tokens}; let num_reserved_tokens of compaction "
                f"{compaction.name!r} keep room for the note"
            )
        return renderer.text(await recorder.next_output(prompt, max_tokens))

    guard = Guard(
        renderer=renderer,
        observation=observation,
        max_context_tokens=options.max_context_tokens,
        num_reserved_tokens=options.max_tokens_per_call + compaction.num_reserved_tokens(renderer),
        is_full=False,
        is_recompaction=False,
        write_note=write_note,
    )
    if guard.fits(context) and not compaction.is_due(context, guard.num_prompt_tokens(context)):
        return context
    is_exhausted = False
    for is_recompaction in (False, True):
        guard = replace(guard, is_full=not guard.fits(context), is_recompaction=is_recompaction)
        planned = await compaction.compact(context, guard)
        is_exhausted = planned is None
        if planned is not None:
            context = _checked_plan(planned, context, compaction)
            if not recorder.is_continued_by(context.prompt(renderer, observation)):
                recorder.start_segment()
        if guard.fits(context):
            return replace(context, num_base_turns=len(context.turns))
        if is_exhausted:
            break
    raise TruncatedError(
        f"the context is full: prompt and reserved generation take {guard.num_tokens(context)} tokens, "
        f"max_context_tokens is {options.max_context_tokens}, and compaction {compaction.name!r} "
        f"{'can drop nothing more' if is_exhausted else 'made too little room in two attempts'}"
    )


def _checked_plan(planned: Context, before: Context, compaction: Compaction) -> Context:
    """What a policy left, with what it may never drop.

    Raises:
        StateError: another task, or turns that were not there or are out of order.
    """
    indices = [turn.index for turn in planned.turns]
    is_ordered = indices == sorted(set(indices)) and set(indices) <= set(range(before.num_turns))
    if planned.task != before.task or not is_ordered:
        raise StateError(
            f"compaction {compaction.name!r} must keep the task and the order of turns, found the task "
            f"{planned.task!r} for {before.task!r} and turns {indices} of {before.num_turns}; use dataclasses.replace "
            f"on the context that it is given"
        )
    return replace(planned, num_turns=before.num_turns)
