"""An engine that generates in blocking batches, for callers that come and go: batches run in a thread, beside them."""

from __future__ import annotations

import asyncio

from evenstep.errors import ConfigError
from evenstep.rollout.engine import BatchEngine, Completion, Engine, Request, served

__all__ = ["BackgroundBatches", "in_background"]


class BackgroundBatches:
    """Serves whatever waits when the engine becomes free, as one batch, and never blocks the event loop.

    Who shares a batch depends on when requests come. So a call's tokens are those of its seed up to rounding, and a run
    is not bit-repeatable; where it has to be, see `evenstep.rollout.engine.Barrier`.

    Raises:
        ConfigError: ``max_rows`` below 1.
    """

    def __init__(self, engine: BatchEngine, *, max_rows: int) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows must be at least 1, found {max_rows}")
        self._engine = engine
        self._max_rows = max_rows
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._runner: asyncio.Task[None] | None = None

    @property
    def max_context_tokens(self) -> int:
        return self._engine.max_context_tokens

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    async def generate(self, request: Request) -> Completion:
        """Wait for a batch with room, and for its end."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())
        return await future

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.001)  # whatever comes at the same moment shares the batch
            self._waiting = [entry for entry in self._waiting if not entry[1].done()]  # of callers that left
            batch, self._waiting = self._waiting[: self._max_rows], self._waiting[self._max_rows :]
            if not batch:
                return
            await self._serve(batch)

    async def _serve(self, batch: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        requests = [request for request, _ in batch]
        try:
            completions = await asyncio.to_thread(served, self._engine, requests)
        except Exception as error:  # noqa: BLE001 -- every waiting caller must hear of it, whatever it is
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), completion in zip(batch, completions, strict=True):
            if not future.done():
                future.set_result(completion)


def in_background(engine: Engine, *, max_rows: int) -> Engine:
    """The engine itself when it is asynchronous; a batch engine behind `BackgroundBatches`."""
    return BackgroundBatches(engine, max_rows=max_rows) if isinstance(engine, BatchEngine) else engine
