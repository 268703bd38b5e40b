"""Generation beside training: a coroutine in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

__all__ = ["Ahead"]

T = TypeVar("T")


class Ahead(Generic[T]):
    """Runs a coroutine in an event loop of its own, beside whatever the caller does meanwhile.

    The thread ends with the process, also where an environment blocks it; ``stop`` ends what can be ended before.

    >>> async def answer():
    ...     return 42
    >>> Ahead(answer()).result()
    42
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._future: Future[T] = Future()
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[T] | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="generation", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Wait for the coroutine's result, or raise what it raised."""
        return self._future.result()

    def stop(self, *, within_s: float) -> None:
        """Cancel the coroutine and wait for its thread, but not for one that blocks for longer than this.

        A thread that computes while the interpreter ends takes the whole process down with an abort.
        """

        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()

        with suppress(RuntimeError):  # the loop is closed: it is done
            self._loop.call_soon_threadsafe(cancel)
        self._thread.join(within_s)

    def _run(self, work: Coroutine[Any, Any, T]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                self._future.set_result(runner.run(self._kept(work)))
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is asked for
            self._future.set_exception(error)

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        return await work
