"""Generation beside training: a coroutine in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

__all__ = ["Ahead"]

T = TypeVar("T")


class Ahead(Generic[T]):
    """Runs a coroutine in an event loop of its own, beside whatever the caller does meanwhile.

    The thread ends with the process: a run that is stopped waits for no environment.

    >>> async def answer():
    ...     return 42
    >>> Ahead(answer()).result()
    42
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, args=(work,), name="generation", daemon=True).start()

    def result(self) -> T:
        """Wait for the coroutine's result, or raise what it raised."""
        return self._future.result()

    def _run(self, work: Coroutine[Any, Any, T]) -> None:
        try:
            self._future.set_result(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is asked for
            self._future.set_exception(error)
