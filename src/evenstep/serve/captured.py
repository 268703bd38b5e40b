"""One rollout while an agent plays it: its calls, what they continue, and how it ends."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from evenstep.errors import EvenstepError, SegmentationError
from evenstep.rollout.agent import RolloutIdentity
from evenstep.rollout.seeds import mixed_seed
from evenstep.rollout.segments import segmentation_of
from evenstep.serve.capture import Capture, answers_to
from evenstep.serve.history import Answer, History, Turn
from evenstep.serve.log import log_event
from evenstep.serve.refusals import RefusedError
from evenstep.serve.schemas import (
    ChatBody,
    CompletionBody,
    RewardBody,
    SamplingBody,
    refuse_other_distributions,
)
from evenstep.types import BreakReason, Rollout, Status

__all__ = ["CapturedRollout"]

IsGone = Callable[[], Awaitable[bool]] | None


class CapturedRollout:
    """Serves the calls of one rollout and becomes a `Rollout`."""

    def __init__(self, identity: RolloutIdentity, capture: Capture, *, mixes_seeds: bool = False) -> None:
        """
        Args:
            identity: ids, and the seed of each call.
            capture: what it shares with others.
            mixes_seeds: a seed that the agent gives is mixed with the rollout's own, so that an agent with a fixed one
                does not play all rollouts of a group alike.
        """
        self.identity = identity
        self.started_s = time.monotonic()
        self.rollout: Rollout | None = None  # once it has ended
        self.engine_error: EvenstepError | None = None
        self.takes_reward = True  # from the agent; else somebody else scores it
        self._capture = capture
        self._mixes_seeds = mixes_seeds
        self._history = History()
        self._orders = itertools.count()
        self._declared: BreakReason | None = None
        self._num_breaks = 0
        self._num_running = 0  # calls that are tokenised, or that the engine is asked, now
        self._limit_reason: str | None = None
        self._summary: dict[str, Any] | None = None  # once the tokens are let go

    # --- calls ------------------------------------------------------------------------------------------------------

    async def chat(self, body: ChatBody, break_reason: BreakReason | None, is_gone: IsGone = None) -> list[Answer]:
        """The model's next message, ``n`` of them.

        Args:
            body: the request.
            break_reason: why the history may have been rewritten.
            is_gone: whether the client left meanwhile; its answer is then thrown away, for it will ask again.

        Raises:
            RefusedError: see its message; nothing was recorded then.
        """
        self._check_open(body)
        capture = self._capture
        messages = tuple(message.message() for message in body.messages)
        tools = [tool.model_dump() for tool in body.tools] if body.tools else None
        if tools is not None and capture.tool_family is None:
            raise RefusedError(
                400,
                "tools need a chat template whose way of writing tool calls is known (hermes, llama3_json), found "
                "another; describe them in a message, or serve a model of such a family",
                code="tools_not_supported",
                param="tools",
            )
        # a template that rewrites earlier turns is let do so: nothing is taken from what was recorded
        is_rendered_anew = (break_reason or self._declared) == "template"
        parent = None if is_rendered_anew else self._history.continued(messages, tools)
        known = {} if is_rendered_anew else self._history.known_outputs(messages)

        def prompt_ids() -> tuple[int, ...]:
            if tools is not None:
                capture.conversations.check_tools(messages, tools)
            if parent is None or parent.answer is None or parent.asked is None:
                return capture.conversations.prompt_ids(messages, tools, known)
            at, output_ids = len(parent.asked), parent.answer.call.output_ids
            between = capture.conversations.ids_after(messages, at, tools, output_ids)
            return parent.prompt_ids + output_ids + between

        asked = [value for value in (body.max_tokens, body.max_completion_tokens) if value is not None]
        if len(set(asked)) > 1:
            raise RefusedError(
                400,
                f"max_tokens and max_completion_tokens must be the same where both are given, found {asked[0]} and "
                f"{asked[1]}; leave one out",
                code="invalid_value",
                param="max_tokens",
            )
        num_characters = sum(message.num_characters for message in messages)
        num_beside = sum(message.num_name_characters for message in messages) + len(json.dumps(tools))
        with self._counted(body.n):
            turn = Turn(
                order=0,
                prompt_ids=await capture.tokenised(num_characters, prompt_ids, num_beside=num_beside),
                parent=None,
                num_siblings=body.n,
                asked=messages,
                tools=tools,
                parses_tools=tools is not None and body.tool_choice != "none",
            )
            return await self._called(body, turn, parent, break_reason, asked[0] if asked else None, is_gone)

    async def complete(
        self, body: CompletionBody, break_reason: BreakReason | None, is_gone: IsGone = None
    ) -> list[Answer]:
        """What the model writes behind a text or ids; as `chat`."""
        self._check_open(body)
        prompt = body.prompt
        text: str | None = None
        parent: Turn | None = None
        if isinstance(prompt, str) or isinstance(prompt[0], str):
            text = prompt if isinstance(prompt, str) else str(prompt[0])
            parent = self._history.continued_text(text)
            start = self._history.text_of(parent) if parent is not None else ""
            rest, renderer = text[len(start) :], self._capture.renderer
            with self._counted(body.n):
                behind = await self._capture.tokenised(len(rest), lambda: renderer.encoded(renderer.literal(rest)))
            prompt_ids = behind if parent is None or parent.view is None else parent.view + behind
        else:
            prompt_ids = tuple(int(token) for token in prompt)
            self._check_ids(prompt_ids)
        if not prompt_ids:
            raise RefusedError(400, "prompt must have at least one token, found none", code="empty", param="prompt")
        turn = Turn(order=0, prompt_ids=prompt_ids, parent=None, num_siblings=body.n, text=text)
        with self._counted(body.n):
            return await self._called(body, turn, parent, break_reason, body.max_tokens, is_gone)

    @contextmanager
    def _counted(self, num_calls: int) -> Iterator[None]:
        """Calls that run, those whose long text waits to be tokenised too."""
        self._capture.num_running += num_calls
        self._num_running += num_calls
        try:
            yield
        finally:
            self._capture.num_running -= num_calls
            self._num_running -= num_calls

    async def _called(
        self,
        body: SamplingBody,
        turn: Turn,
        parent: Turn | None,
        break_reason: BreakReason | None,
        asked_tokens: int | None,
        is_gone: IsGone,
    ) -> list[Answer]:
        self._check_running()  # again: others may have come while a long text was tokenised
        self._check_calls(body.n)
        parent = parent or self._history.continued_ids(turn.prompt_ids)
        if self._history.is_drifted(turn.prompt_ids, 0 if parent is None else len(parent.view or ())):
            parent = None
        placeholder = self._capture.renderer.placeholder_among(turn.prompt_ids)
        if placeholder is not None:
            raise self._over_limit(
                f"a prompt holds token {placeholder}, the placeholder of an image or video, without it"
            )
        max_tokens = self._max_tokens(len(turn.prompt_ids), asked_tokens, body.n)
        reason, is_break = self._break_reason(turn, parent, break_reason)
        if is_break and 1 + self._num_breaks >= self._capture.limits.max_segments:
            raise self._over_limit(f"max_segments = {self._capture.limits.max_segments} segments are full")
        turns = [
            replace(
                turn,
                order=next(self._orders),
                parent=None if parent is None else parent.order,
                reason=reason,
                max_tokens=max_tokens,
            )
            for _ in range(body.n)
        ]
        declared = self._declared
        self._history.turns += turns
        self._num_breaks += is_break
        if is_break:
            self._declared = None
        try:
            answers = await self._answers(body, turns, reason)
            if is_gone is not None and await is_gone():
                raise RefusedError(499, "the client did not wait for the answer", code="client_gone")
        except BaseException:
            # never recorded: nobody saw these outputs
            self._history.forget(turns)
            self._num_breaks -= is_break
            if is_break:
                self._declared = self._declared or declared
            raise
        self._check_running()
        for one, answer in zip(turns, answers, strict=True):
            one.answer = answer
        return answers

    async def _answers(self, body: SamplingBody, turns: Sequence[Turn], reason: BreakReason | None) -> list[Answer]:
        seeds = [self._seed(body.seed, turn.order, index) for index, turn in enumerate(turns)]
        try:
            return await answers_to(self._capture, turns, body, identity=self.identity, seeds=seeds, reason=reason)
        except EvenstepError as error:
            self.engine_error = error
            log_event("engine_failed", rollout=self.identity.rollout_id, error=str(error))
            if self._capture.on_engine_error is not None:
                self._capture.on_engine_error(error)
            raise RefusedError(503, "the engine failed; the server's log says how", code="engine_failed") from error

    def _seed(self, asked: int | None, order: int, index: int) -> int:
        if asked is None:
            return self.identity.seed_of_call(order)
        seed = mixed_seed("agent", self.identity.seed_of_call(0), asked) if self._mixes_seeds else asked % 2**63
        return mixed_seed("choice", seed, index) if index else seed

    def _break_reason(
        self, turn: Turn, parent: Turn | None, given: BreakReason | None
    ) -> tuple[BreakReason | None, bool]:
        """Why a prompt that continues nothing may do so, and whether it begins another segment.

        Raises:
            RefusedError: nobody declared it.
        """
        before = [one for one in self._history.turns if not one.is_rejected]
        reason = given or self._declared
        if parent is not None or not before:
            return None, False
        if reason is not None:
            return reason, True
        tries = [one for one in before if one.parent is None and one.prompt_ids == turn.prompt_ids]
        for one in tries:
            # a first turn, tried again: with its reason, for the first try may never be recorded
            if one.reason is not None or one.answer is not None or len(tries) == len(before):
                return one.reason, False
        if self._capture.on_undeclared == "error":
            raise self._history.undeclared(turn, self._capture.tokenizer)
        return None, True

    # --- limits -------------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self.rollout is not None:
            raise RefusedError(
                409,
                f"this rollout has ended ({self.rollout.status}), it takes no more calls; begin another one",
                code="rollout_ended",
            )

    def _check_open(self, body: SamplingBody) -> None:
        self._check_running()
        refuse_other_distributions(body, self._capture.temperature)
        limits = self._capture.limits
        most, mine = limits.max_concurrent_calls, limits.max_concurrent_calls_per_rollout
        if body.n > min(most, mine):
            raise RefusedError(
                400,
                f"n must be at most {min(most, mine)}, the calls that may run at a time, found {body.n}",
                code="invalid_value",
                param="n",
            )
        if self._num_running + body.n > mine:
            raise RefusedError(
                429, f"at most {mine} calls of a rollout run at a time; try again", code="too_many_calls"
            )
        if self._capture.num_running + body.n > most:
            raise RefusedError(
                429, f"at most {most} calls run at a time, all rollouts together; try again", code="too_many_calls"
            )
        self._check_calls(body.n)

    def _check_calls(self, num_calls: int) -> None:
        most = self._capture.limits.max_calls
        if len(self._history.turns) + num_calls > most:
            raise self._over_limit(f"max_calls = {most} calls are made")

    def _check_ids(self, prompt_ids: Sequence[int]) -> None:
        most = self._capture.vocab_size
        if most is not None and (largest := max(prompt_ids)) >= most:
            raise RefusedError(
                400,
                f"prompt must hold ids of the model's vocabulary, below {most}, found {largest}",
                code="invalid_value",
                param="prompt",
            )

    def _max_tokens(self, num_prompt: int, asked: int | None, num_choices: int) -> int:
        """Most tokens that each of a call's outputs may have."""
        limits, most = self._capture.limits, self._capture.context_tokens
        if asked is not None and asked > limits.max_tokens_per_call:
            raise RefusedError(
                400,
                f"max_tokens must be at most {limits.max_tokens_per_call}, found {asked}; lower it or leave it out",
                code="invalid_value",
                param="max_tokens",
            )
        room = most - num_prompt
        if room < (asked or 1):
            raise RefusedError(
                400,
                f"the context holds {most} tokens of prompt and output, found a prompt of {num_prompt} and "
                f"{asked or 'at least 1'} to sample; compact the history and declare it, or ask for fewer",
                code="context_length_exceeded",
                param="messages",
            )
        max_tokens = asked or min(limits.max_tokens_per_call, room)
        if limits.max_sampled_tokens is None:
            return max_tokens
        spent = sum(len(one.answer.call.output_ids) if one.answer else one.max_tokens for one in self._history.turns)
        left = (limits.max_sampled_tokens - spent) // num_choices
        if left < 1:
            raise self._over_limit(f"max_sampled_tokens = {limits.max_sampled_tokens} tokens are sampled")
        return min(max_tokens, left)

    def _over_limit(self, reason: str) -> RefusedError:
        self._limit_reason = self._limit_reason or f"{reason} and the agent goes on"
        return RefusedError(403, f"{reason}: this rollout is truncated, report its reward now", code="rollout_limit")

    # --- what the agent says about the rollout ------------------------------------------------------------------------

    def declare(self, reason: BreakReason) -> None:
        """The next prompt that does not continue the history breaks for this reason."""
        self._check_running()
        self._declared = reason

    def reject(self, orders: Sequence[int]) -> None:
        """The agent threw these outputs away: they are not trained."""
        self._check_running()
        known = self._known(orders, "calls")
        for turn in known:
            turn.is_rejected = True

    def _known(self, orders: Sequence[int], param: str) -> list[Turn]:
        known = {turn.order: turn for turn in self._history.turns if turn.answer is not None}
        if unknown := [order for order in orders if order not in known]:
            raise RefusedError(
                400,
                f"{param} must be orders of this rollout's calls, {sorted(known)[:64]}, found {unknown[0]}",
                code="unknown_call",
                param=param,
            )
        return [known[order] for order in orders]

    def report(self, body: RewardBody) -> Rollout:
        """End the rollout with the agent's reward."""
        self._check_running()
        if not self.takes_reward:
            raise RefusedError(
                409,
                "the environment scores what the program prints, found a reward of its own; set agent.reward = 'call'",
                code="reward_not_taken",
            )
        if (body.reward is None) == (body.status != "failed"):
            raise RefusedError(
                400,
                f"reward belongs to every rollout that did not fail and to no other, found {body.reward} with status "
                f"{body.status!r}",
                code="invalid_value",
                param="reward",
            )
        self._known(body.chosen, "chosen")
        return self.end(
            body.status, body.reward, reason=body.reason, info=body.info, chosen=body.chosen,
            group_id=body.group_id, prompt_id=body.prompt_id,
        )  # fmt: skip

    def end(
        self,
        status: Status,
        reward: float | None,
        *,
        reason: str | None = None,
        info: Mapping[str, Any] | None = None,
        chosen: Sequence[int] = (),
        group_id: str | None = None,
        prompt_id: str | None = None,
    ) -> Rollout:
        """Close the rollout; calls that still run are not part of it.

        Of several choices of one request those that no later call continues count as thrown away, but for ``chosen``.
        """
        if status == "ok" and self._limit_reason is not None:
            status, reason = "truncated", self._limit_reason
        turns = [turn for turn in self._history.turns if turn.answer is not None]
        used = {*chosen, *(turn.parent for turn in turns if not turn.is_rejected)}
        calls = tuple(
            replace(
                turn.answer.call,
                is_rejected=turn.is_rejected or (turn.num_siblings > 1 and turn.order not in used),
            )
            for turn in turns
            if turn.answer is not None
        )
        rollout = Rollout(
            rollout_id=self.identity.rollout_id,
            group_id=group_id or self.identity.group_id,
            prompt_id=prompt_id or self.identity.prompt_id,
            calls=calls,
            reward=reward,
            status=status,
            status_reason=reason,
        )
        num_segments = 1 + self._num_breaks
        try:
            num_segments = max(
                1, segmentation_of(rollout, on_undeclared=self._capture.on_undeclared).report.num_segments
            )
        except SegmentationError as error:
            rollout = replace(rollout, status="failed", reward=None, status_reason=str(error))
        self.rollout = replace(rollout, info=dict(info or {}) | {"num_segments": num_segments})
        self._history = History()
        return self.rollout

    def release(self) -> None:
        """Let go of the tokens of an ended rollout that is kept elsewhere, and of what was said about it."""
        self._summary = self.summary()
        assert self.rollout is not None, "it has ended"
        self.rollout = replace(self.rollout, calls=(), info={})

    def summary(self) -> dict[str, Any]:
        """What the agent may know about its own rollout."""
        if self._summary is not None:
            return dict(self._summary)
        rollout = self.rollout
        calls = (
            [turn.answer.call for turn in self._history.turns if turn.answer is not None]
            if rollout is None
            else rollout.calls
        )
        return {
            "rollout_id": self.identity.rollout_id,
            "status": "running" if rollout is None else rollout.status,
            "status_reason": None if rollout is None else rollout.status_reason,
            "reward": None if rollout is None else rollout.reward,
            "num_calls": len(calls),
            "num_sampled_tokens": sum(len(call.output_ids) for call in calls),
            "num_segments": 1 + self._num_breaks if rollout is None else rollout.info["num_segments"],
        }
