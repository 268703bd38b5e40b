"""Behaviours locked here:

1. A batch runs only when every live rollout waits, with rows ordered by rollout key, whoever came first.
2. A rollout that leaves is no longer waited for; the last ones are served alone.
3. Membership does not depend on scheduling: delays of any kind give the same batches.
4. A request of a stranger, or after leave(), is refused.
5. An engine's error reaches the caller and runs nothing for tasks that it cancels.
"""

import asyncio
import random

import pytest

from evenstep.errors import EngineError
from evenstep.rollout.engine import Barrier, BatchEngine, Completion, Request


class RecordingEngine:
    """Echoes the prompt's first id and keeps what it was asked."""

    max_context_tokens = 100
    weight_version = 3

    def __init__(self, fails_at: int | None = None) -> None:
        self.batches: list[list[tuple[int, ...]]] = []
        self._fails_at = fails_at

    async def generate(self, request):
        return self.generate_batch([request])[0]

    def generate_batch(self, requests):
        self.batches.append([request.rollout_key for request in requests])
        if len(self.batches) == self._fails_at:
            raise EngineError("no")
        return [
            Completion(output_ids=r.prompt_ids[:1], logprobs=(0.0,), finish_reason="stop", weight_version=3)
            for r in requests
        ]


def play(num_calls: dict[int, int], engine: RecordingEngine, seed: int | None = None) -> dict[int, list[int]]:
    rng = random.Random(seed)
    barrier = Barrier(engine, [(key,) for key in num_calls])
    answers: dict[int, list[int]] = {key: [] for key in num_calls}

    async def rollout(key):
        try:
            for _ in range(num_calls[key]):
                if seed is not None:
                    await asyncio.sleep(rng.random() / 200)
                completion = await barrier.generate(Request(prompt_ids=(key,), rollout_key=(key,)))
                answers[key].append(completion.output_ids[0])
        finally:
            barrier.leave((key,))

    async def run():
        keys = list(num_calls)
        rng.shuffle(keys)
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(rollout(key))

    asyncio.run(run())
    return answers


def test_batches_hold_all_live_rollouts_in_key_order():
    engine = RecordingEngine()
    answers = play({2: 1, 0: 3, 1: 2}, engine)
    assert engine.batches == [[(0,), (1,), (2,)], [(0,), (1,)], [(0,)]]
    assert answers == {2: [2], 0: [0, 0, 0], 1: [1, 1]}


@pytest.mark.parametrize("seed", range(5))
def test_timing_does_not_change_the_batches(seed):
    num_calls = {0: 2, 1: 4, 2: 0, 3: 3, 4: 1}
    calm, hurried = RecordingEngine(), RecordingEngine()
    assert play(num_calls, calm) == play(num_calls, hurried, seed=seed)
    assert calm.batches == hurried.batches
    assert [len(batch) for batch in calm.batches] == [4, 3, 2, 1]


def test_strangers_and_leavers_are_refused():
    barrier = Barrier(RecordingEngine(), [(0,), (1,)])
    with pytest.raises(EngineError, match=r"rollout key \(7,\); live keys: \[\(0,\), \(1,\)\]"):
        asyncio.run(barrier.generate(Request(prompt_ids=(1,), rollout_key=(7,))))
    barrier.leave((1,))
    with pytest.raises(EngineError, match="leave"):
        asyncio.run(barrier.generate(Request(prompt_ids=(1,), rollout_key=(1,))))


def test_an_engine_error_ends_all_and_runs_nothing_more():
    engine = RecordingEngine(fails_at=2)
    with pytest.raises(ExceptionGroup) as caught:
        play({0: 5, 1: 5, 2: 5}, engine)
    assert all(isinstance(error, EngineError) for error in caught.value.exceptions)
    assert len(engine.batches) == 2


def test_it_speaks_for_its_engine():
    barrier = Barrier(RecordingEngine(), [(0,)])
    assert (barrier.max_context_tokens, barrier.weight_version) == (100, 3)
    assert isinstance(RecordingEngine(), BatchEngine)
    assert not isinstance(barrier, BatchEngine)
