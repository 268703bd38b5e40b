"""Behaviours locked here:

1. A generation beside training gives its result, or raises what it raised, as often as it is asked.
2. stop() cancels what waits, returns at once where all is done, and waits no longer than it was told for what blocks.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from evenstep.rollout.ahead import Ahead


def test_results_and_errors() -> None:
    async def answer() -> int:
        return 42

    async def fail() -> int:
        raise ValueError("no")

    done = Ahead(answer())
    assert (done.result(), done.result()) == (42, 42)
    done.stop(within_s=5.0)
    failed = Ahead(fail())
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            failed.result()


def test_stop() -> None:
    cleaned: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append("up")

    async def block() -> None:
        time.sleep(3.0)

    for work, expected in ((wait, ["up"]), (block, ["up"])):
        running = Ahead(work())
        time.sleep(0.1)
        started = time.monotonic()
        running.stop(within_s=0.5)
        assert time.monotonic() - started < 1.5
        assert cleaned == expected
        if work is wait:
            with pytest.raises(asyncio.CancelledError):
                running.result()
