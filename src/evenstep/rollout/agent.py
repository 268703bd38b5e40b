"""The agent loop: one environment episode through an engine, as a rollout of exact calls."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from evenstep.errors import ConfigError, EngineError, EvenstepError, StateError
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import Compaction, Context, Guard
from evenstep.rollout.engine import Engine, Request, RolloutKey
from evenstep.rollout.environment import Environment, Episode, Score
from evenstep.types import BreakReason, Call, Rollout, Sampling, Status

__all__ = ["AgentOptions", "RolloutIdentity", "run_rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """How an agent samples, and where it stops.

    Raises:
        ConfigError: a limit below 1, or a temperature below 0.
    """

    max_context_tokens: int  # guard: prompt + reserved generation of every call stay within it
    max_tokens_per_call: int = 4
    temperature: float = 1.0  # 0: greedy
    max_calls: int = 64
    max_segments: int = 16

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_tokens_per_call", "max_calls", "max_segments"):
            value: int = getattr(self, name)
            if value < 1:
                raise ConfigError(f"rollout.{name} must be at least 1, found {value}")
        if self.temperature < 0:
            raise ConfigError(f"rollout.temperature must be at least 0, found {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIdentity:
    """Who a rollout is: its ids, its place in a generation batch, and the seed of each of its calls."""

    rollout_id: str
    group_id: str
    prompt_id: str
    key: RolloutKey
    seed_of_call: Callable[[int], int]  # order of the call -> sampling seed


class _TruncatedError(Exception):
    """The episode cannot go on; the message is the rollout's status_reason."""


@dataclass(slots=True, kw_only=True)
class _Recorder:
    """Makes calls and keeps them in order."""

    engine: Engine
    renderer: ChatRenderer
    options: AgentOptions
    identity: RolloutIdentity
    calls: list[Call] = field(default_factory=list[Call])
    break_reason: BreakReason | None = None  # of the next call

    @property
    def num_segments(self) -> int:
        """Segments that calls were made in: one, and one more for every call that declares a break."""
        return 1 + sum(call.break_reason is not None for call in self.calls)

    def is_continued_by(self, prompt_ids: tuple[int, ...]) -> bool:
        """Whether a prompt only appends to the last call's prompt and output; so does any first prompt."""
        if not self.calls:
            return True
        view = self.calls[-1].prompt_ids + self.calls[-1].output_ids
        return prompt_ids[: len(view)] == view

    def start_segment(self) -> None:
        if self.num_segments == self.options.max_segments:
            raise _TruncatedError(
                f"max_segments = {self.options.max_segments} segments are full and the episode goes on"
            )
        self.break_reason = "compaction"

    async def call(self, prompt_ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        order = len(self.calls)
        if order == self.options.max_calls:
            raise _TruncatedError(f"max_calls = {self.options.max_calls} calls are made and the episode goes on")
        sampling = Sampling(
            temperature=self.options.temperature, max_tokens=max_tokens, seed=self.identity.seed_of_call(order)
        )
        request = Request(prompt_ids=prompt_ids, sampling=sampling, rollout_key=self.identity.key)
        try:
            completion = await self.engine.generate(request)
        except EvenstepError:
            raise
        except Exception as error:  # an engine's failure must never pass for the environment's
            raise EngineError(
                f"rollout {self.identity.rollout_id}, call {order}: the engine failed with {type(error).__name__}: "
                f"{error}; what is finished is on disk, go on with --resume once the cause is gone"
            ) from error
        self.calls.append(
            Call(
                order=order,
                prompt_ids=prompt_ids,
                output_ids=completion.output_ids,
                logprobs=completion.logprobs,
                parent=order - 1 if order else None,
                weight_version=completion.weight_version,
                sampling=sampling,
                break_reason=self.break_reason,
                finish_reason=completion.finish_reason,
            )
        )
        self.break_reason = None
        return completion.output_ids


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
    once was not enough. The
    rollout is ``truncated`` when it still does not fit, or when ``max_calls`` or ``max_segments`` is reached; it is
    then scored as it stands. An exception inside the environment makes the rollout ``failed``, with the traceback as
    its ``status_reason``.

    Raises:
        EvenstepError: the engine cannot serve a call, or a promise of ours is broken; that is not the policy's doing
            and must not become a reward.
    """
    recorder = _Recorder(engine=engine, renderer=renderer, options=options, identity=identity)
    status: Status = "ok"
    status_reason: str | None = None
    score: Score | None = None
    try:
        visible: tuple[int, ...] = ()
        try:
            visible = await _play(environment, recorder, compaction)
        except _TruncatedError as reason:
            status, status_reason = "truncated", str(reason)
        episode = Episode(num_segments=recorder.num_segments, visible_observations=visible)
        score = _checked(await environment.score(episode))
    except EvenstepError:
        raise
    except Exception:  # noqa: BLE001 -- an environment is foreign code: whatever it raises costs this rollout, not the run
        status, status_reason = "failed", traceback.format_exc()
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


def _checked(score: Score) -> Score:
    """The score, in types that a rollout file holds."""
    if isinstance(score.reward, bool) or not math.isfinite(score.reward):
        raise TypeError(f"a reward must be a finite number, found {score.reward!r}")
    info = json.loads(json.dumps(dict(score.info), allow_nan=False))
    return Score(reward=float(score.reward), info=info)


async def _play(environment: Environment, recorder: _Recorder, compaction: Compaction) -> tuple[int, ...]:
    """Run the episode to its end; the indices of the observations in the last call's context."""
    start = await environment.reset()
    context = Context(task=start.task)
    observation: str | None = start.observation
    while True:
        context = await _fitting(context, observation, recorder, compaction)
        prompt_ids = context.prompt_ids(recorder.renderer, observation)
        output_ids = await recorder.call(prompt_ids, recorder.options.max_tokens_per_call)
        context = context.with_turn(observation, output_ids)
        observation = await environment.step(recorder.renderer.text(output_ids))
        if observation is None:
            return tuple(turn.index for turn in context.turns)


async def _fitting(context: Context, observation: str, recorder: _Recorder, compaction: Compaction) -> Context:
    """The context itself, or a compacted one, in which the answer to ``observation`` fits."""
    renderer, options = recorder.renderer, recorder.options

    async def write_note(request: str, max_tokens: int) -> str:
        prompt_ids = context.prompt_ids(renderer, request)
        if len(prompt_ids) + max_tokens > options.max_context_tokens:
            raise _TruncatedError(
                f"the context is full: a note's prompt and generation take {len(prompt_ids) + max_tokens} tokens, "
                f"max_context_tokens is {options.max_context_tokens}; let num_reserved_tokens of compaction "
                f"{compaction.name!r} keep room for the note"
            )
        return renderer.text(await recorder.call(prompt_ids, max_tokens))

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
            if not recorder.is_continued_by(context.prompt_ids(renderer, observation)):
                recorder.start_segment()
        if guard.fits(context):
            return replace(context, num_base_turns=len(context.turns))
        if is_exhausted:
            break
    raise _TruncatedError(
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
