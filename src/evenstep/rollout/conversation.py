"""What an environment asks the policy itself: sub-agents, drafts of one answer, answers that are thrown away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Integral

from evenstep.rollout.compaction import Context
from evenstep.rollout.recorder import Recorder, TruncatedError
from evenstep.types import Call

__all__ = ["Conversation"]


class Conversation:
    """One conversation of an environment with the policy, beside the agent's own.

    Its calls are calls of the rollout, and trained with the rollout's reward: the first one declares ``subagent``, the
    later ones continue it. A ``fork`` begins with all that was said so far and then goes its own way; what was said
    before is trained once. ``take_back`` throws the last answer away: it is not trained.
    """

    def __init__(self, recorder: Recorder, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._recorder = recorder
        self._waiting = waiting  # entered while the model is waited for
        self._states: list[tuple[Context, Call | None]] = [(Context(task=""), None)]  # after each answer; its call

    async def ask(self, message: str, *, max_tokens: int | None = None) -> str:
        """The policy's answer.

        Args:
            message: what the user says.
            max_tokens: most tokens of the answer; None: ``rollout.max_tokens_per_call``.

        Raises:
            Exception: the rollout's limit on calls, segments or context is reached, or the engine failed. Let it pass:
                the rollout is then ``truncated``, or the run ends.
            TypeError: ``max_tokens`` is no integer.
            ValueError: ``max_tokens`` below 1.
        """
        options = self._recorder.options
        if max_tokens is None:
            max_tokens = options.max_tokens_per_call
        if not isinstance(max_tokens, Integral) or isinstance(max_tokens, bool):
            raise TypeError(f"max_tokens must be an integer, found {max_tokens!r:.60}")
        max_tokens = int(max_tokens)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {max_tokens}")
        context, before = self._states[-1]
        prompt = context.prompt(self._recorder.renderer, message)
        if len(prompt.ids) + max_tokens > options.max_context_tokens:
            raise TruncatedError(
                f"a conversation of the environment is full: prompt and reserved generation take "
                f"{len(prompt.ids) + max_tokens} tokens, max_context_tokens is {options.max_context_tokens}"
            )
        with self._waiting():
            call = await self._recorder.call(
                prompt,
                max_tokens,
                parent=None if before is None else before.order,
                break_reason="subagent" if before is None else None,
            )
        self._states.append((context.with_turn(message, call.output_ids), call))
        return self._recorder.renderer.text(call.output_ids)

    def fork(self) -> Conversation:
        """Another conversation in which the same was said so far."""
        forked = Conversation(self._recorder, self._waiting)
        forked._states = list(self._states)
        return forked

    def take_back(self) -> None:
        """Throw the last answer away, with the message before it; ask again, or another way.

        It is not trained where a fork holds it, either.

        Raises:
            RuntimeError: nothing was said yet.
        """
        _, call = self._states[-1]
        if call is None:
            raise RuntimeError("take_back() throws the last answer away, found none; ask() first")
        self._recorder.reject(call)
        self._states.pop()
