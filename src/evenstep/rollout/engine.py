"""What an engine is: token ids in, sampled token ids and their log-probs out.

``Barrier`` turns an engine that generates in batches into one that many concurrent rollouts can await, with batches
whose membership does not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from evenstep.errors import EngineError
from evenstep.experts import RoutedExperts
from evenstep.media import Media
from evenstep.types import Sampling

__all__ = ["Barrier", "BatchEngine", "Completion", "Engine", "FinishReason", "Request", "RolloutKey", "served"]

FinishReason = Literal["stop", "length"]
RolloutKey = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model call as the engine sees it."""

    prompt_ids: tuple[int, ...]  # [T_prompt] exact ids, at least one
    sampling: Sampling = field(default_factory=Sampling)
    rollout_key: RolloutKey = ()  # whose call this is; orders the rows of a batch
    group_id: str = ""  # siblings of one group share their prompt, and so a server's cached prefix
    media: tuple[Media, ...] = ()  # images of the prompt, each on its placeholders


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled."""

    output_ids: tuple[int, ...]  # [T_output] the stop id included when it was sampled
    logprobs: tuple[float, ...]  # [T_output] of the distribution sampled from; greedy: at temperature 1
    finish_reason: FinishReason
    weight_version: int  # optimizer steps behind the weights that sampled this
    # of the last tokens of prompt and output together, as many as the engine recorded; None: it records none
    routed_experts: RoutedExperts | None = None


class Engine(Protocol):
    """Anything that completes token ids: in this process, or a server."""

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of a prompt and its output together."""
        ...

    @property
    def weight_version(self) -> int:
        """Optimizer steps behind the weights in use."""
        ...

    async def generate(self, request: Request) -> Completion: ...


@runtime_checkable
class BatchEngine(Engine, Protocol):
    """An engine that serves a whole batch in one blocking call, rows in the order given."""

    def generate_batch(self, requests: Sequence[Request]) -> list[Completion]: ...


def served(engine: BatchEngine, requests: Sequence[Request]) -> list[Completion]:
    """What an engine answers to a batch.

    Raises:
        EngineError: not one completion for each request.
    """
    completions = engine.generate_batch(requests)
    if len(completions) != len(requests):
        raise EngineError(
            f"an engine must answer each request of a batch, in order, found {len(completions)} completions for "
            f"{len(requests)} requests; correct its generate_batch()"
        )
    return completions


class Barrier:
    """One generation batch: rollouts of a fixed membership whose calls run together.

    A batch runs as soon as every live rollout waits for a completion, with its rows ordered by rollout key. So who
    shares a forward depends on the rollouts alone, never on the order in which tasks happen to be scheduled, and equal
    seeds give equal tokens.

    >>> class Echo:
    ...     max_context_tokens, weight_version = 8, 0
    ...     async def generate(self, request): return self.generate_batch([request])[0]
    ...     def generate_batch(self, requests):
    ...         print([request.rollout_key for request in requests])
    ...         return [Completion(output_ids=r.prompt_ids, logprobs=(0.0,), finish_reason="stop", weight_version=0)
    ...                 for r in requests]
    >>> async def rollout(barrier, key, num_calls):
    ...     for _ in range(num_calls):
    ...         await barrier.generate(Request(prompt_ids=(5,), rollout_key=key))
    ...     barrier.leave(key)
    >>> async def run(barrier):
    ...     await asyncio.gather(rollout(barrier, (1,), 1), rollout(barrier, (0,), 2))
    >>> asyncio.run(run(Barrier(Echo(), [(0,), (1,)])))
    [(0,), (1,)]
    [(0,)]
    """

    def __init__(self, engine: BatchEngine, rollout_keys: Iterable[RolloutKey]) -> None:
        self._engine = engine
        self._live = set(rollout_keys)
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []

    @property
    def max_context_tokens(self) -> int:
        return self._engine.max_context_tokens

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    async def generate(self, request: Request) -> Completion:
        """Wait until every live rollout waits, then be served with them.

        Raises:
            EngineError: the request's rollout key is not a live member of this generation batch.
        """
        if request.rollout_key not in self._live:
            raise EngineError(
                f"a generation batch serves its live rollouts only, found a request of rollout key "
                f"{request.rollout_key}; live keys: {sorted(self._live)[:8]}. Open the batch with all of its keys, and "
                f"call leave() only after a rollout's last call"
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._run_when_all_wait()
        return await future

    def leave(self, rollout_key: RolloutKey) -> None:
        """Say that a rollout will not call again; the others no longer wait for it."""
        self._live.discard(rollout_key)
        self._run_when_all_wait()

    def _run_when_all_wait(self) -> None:
        # Waiters of a task group that another rollout's error has ended are cancelled: nothing runs for them.
        self._waiting = [entry for entry in self._waiting if not entry[1].cancelled()]
        if not self._waiting or self._live - {request.rollout_key for request, _ in self._waiting}:
            return
        batch = sorted(self._waiting, key=lambda entry: entry[0].rollout_key)
        self._waiting = []
        try:
            completions = served(self._engine, [request for request, _ in batch])
        except Exception as error:  # noqa: BLE001 -- every waiting rollout must hear of it, whatever it is
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), completion in zip(batch, completions, strict=True):
            future.set_result(completion)
