"""Behaviours locked here:

1. Slots: group by group, ids from occurrence and generation; a task that recurs is another group with other seeds.
2. Generation: membership of a generation batch is a function of the slot alone; 1, 2 and 3 ranks give the same
   rollouts; equal seeds give equal rollouts, two generations of a group differ.
3. A collection closes with exactly P x G rollouts in a fixed order; one more, one fewer, a duplicate, half a group, a
   stranger, another group's id, mixed weights and mixed prompts are refused with the ids.
4. A failed rollout keeps its slot without calls and reward.
5. Windows are whole groups, counted in rollouts whatever their calls (P11, P22); each epoch is a pass of its own.
6. A context larger than the engine's, or an engine's error, ends the generation with that error itself.
"""

import asyncio
from dataclasses import replace

import pytest

from evenstep.errors import CollectionError, ConfigError, EngineError
from evenstep.model_files import model_folder
from evenstep.rollout.agent import AgentOptions
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.collector import close_collection, generate_rollouts, slots_of, windows_of
from evenstep.rollout.compaction import Summary
from evenstep.rollout.engine import Completion
from evenstep.rollout.environment import TaskSource
from evenstep.rollout.ledger import LedgerOptions
from evenstep.types import Call, Rollout, Sampling


class SeedEngine:
    """Writes a letter that is a function of the request's seed; keeps the keys of its batches."""

    max_context_tokens = 64
    weight_version = 0

    def __init__(self, tokenizer, fails_at: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._fails_at = fails_at
        self.batches: list[tuple[int, ...]] = []

    async def generate(self, request):
        return self.generate_batch([request])[0]

    def generate_batch(self, requests):
        self.batches.append(tuple(key for request in requests for key in request.rollout_key))
        if len(self.batches) == self._fails_at:
            raise EngineError("the engine is out of paper")
        completions = []
        for request in requests:
            text = "abcdefghijklmnopqrstuvwxyz"[request.sampling.seed % 26] + "<|end|>"
            ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
            completions.append(
                Completion(output_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop", weight_version=0)
            )
        return completions


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder("evenstep:ledger"))


def generate(tokenizer, *, rank=0, num_ranks=1, engine=None, num_tasks=None, run_seed=1, **changes):
    engine = engine or SeedEngine(tokenizer)
    settings = {"options": AgentOptions(max_context_tokens=64), "batch_rollouts": 5} | changes
    return engine, asyncio.run(
        generate_rollouts(
            slots_of(collection=2, num_prompts=4, num_generations=3, num_tasks=num_tasks),
            tasks=TaskSource(name="ledger", options=LedgerOptions(max_pages=4), seed=0, split="train"),
            engine=engine,
            renderer=ChatRenderer(tokenizer),
            compaction=Summary(),
            run_seed=run_seed,
            rank=rank,
            num_ranks=num_ranks,
            **settings,
        )
    )


def test_slots_are_group_by_group():
    slots = slots_of(collection=3, num_prompts=2, num_generations=2, num_tasks=7)
    assert [(slot.index, slot.occurrence, slot.generation, slot.task_index) for slot in slots] == [
        (0, 0, 0, 6), (1, 0, 1, 6), (2, 1, 0, 0), (3, 1, 1, 0),
    ]  # fmt: skip


def test_ranks_share_whole_batches_and_change_nothing(tokenizer):
    engine, everything = generate(tokenizer)
    assert [rollout.rollout_id for rollout in everything] == [f"c2/p{p}/g{g}" for p in range(4) for g in range(3)]
    assert {tuple(sorted(batch)) for batch in engine.batches} >= {(0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (10, 11)}
    for num_ranks in (2, 3):
        batches: list[tuple[int, ...]] = []
        shares = []
        for rank in range(num_ranks):
            own, rollouts = generate(tokenizer, rank=rank, num_ranks=num_ranks)
            batches += own.batches
            shares += rollouts
        assert sorted(shares, key=lambda r: r.rollout_id) == sorted(everything, key=lambda r: r.rollout_id)
        assert sorted(batches) == sorted(engine.batches)


def test_seeds_decide_and_generations_differ(tokenizer):
    _, first = generate(tokenizer)
    _, again = generate(tokenizer)
    _, other = generate(tokenizer, run_seed=2)
    assert first == again
    seeds = [call.sampling.seed for rollout in first for call in rollout.calls]
    assert len(set(seeds)) == len(seeds)
    assert not set(seeds) & {call.sampling.seed for rollout in other for call in rollout.calls}
    group = [tuple(call.output_ids for call in rollout.calls) for rollout in first[:3]]
    assert len(set(group)) == 3


def test_one_task_twice_is_two_groups(tokenizer):
    _, rollouts = generate(tokenizer, num_tasks=2)
    assert rollouts[0].prompt_id == rollouts[6].prompt_id != rollouts[3].prompt_id
    assert rollouts[0].group_id != rollouts[6].group_id
    seeds = [call.sampling.seed for rollout in rollouts for call in rollout.calls]
    assert len(set(seeds)) == len(seeds)


def test_generation_refuses_what_cannot_work(tokenizer):
    with pytest.raises(ConfigError, match=r"max_context_tokens = 65 is more than the engine's 64"):
        generate(tokenizer, options=AgentOptions(max_context_tokens=65))
    with pytest.raises(ConfigError, match="batch_rollouts must be at least 1, found 0"):
        generate(tokenizer, batch_rollouts=0)
    engine = SeedEngine(tokenizer, fails_at=3)
    with pytest.raises(EngineError, match="out of paper"):
        generate(tokenizer, engine=engine)
    assert len(engine.batches) == 3


def rollout_of(occurrence, generation, *, collection=0, version=0, num_calls=1, status="ok", **changes):
    calls = tuple(
        Call(order=i, prompt_ids=(5,), output_ids=(6,), logprobs=(-1.0,), weight_version=version, sampling=Sampling())
        for i in range(num_calls)
    )
    fields = {"group_id": f"c{collection}/p{occurrence}", "prompt_id": f"task {occurrence}", "reward": 1.0} | changes
    return Rollout(rollout_id=f"c{collection}/p{occurrence}/g{generation}", calls=calls, status=status, **fields)


FULL = [rollout_of(p, g) for p in range(3) for g in range(2)]


def close(rollouts, **more):
    return close_collection(rollouts, collection=0, num_prompts=3, num_generations=2, **more)


def test_a_collection_closes_in_a_fixed_order():
    collection = close(FULL[::-1])
    assert [group.group_id for group in collection.groups] == ["c0/p0", "c0/p1", "c0/p2"]
    assert list(collection.rollouts) == FULL


@pytest.mark.parametrize(
    "rollouts, message",
    [
        (FULL[:-1], r"exactly 3 × 2 = 6 rollouts; 5 were given, and these slots have none: c0/p2/g1"),
        ([*FULL, rollout_of(2, 2)], r"7 were given, and these are not of its slots: c0/p2/g2"),
        ([*FULL, FULL[3]], r"found some more than once: c0/p1/g1"),
        ([*FULL[:5], FULL[0]], r"more than once: c0/p0/g0"),
        ([*FULL[:5], rollout_of(2, 1, collection=1)], r"slots have none: c0/p2/g1"),
        ([*FULL[:4]], r"4 were given, and these slots have none: c0/p2/g0, c0/p2/g1"),
        ([*FULL[:5], rollout_of(2, 1, group_id="c0/p1")], r"it is another in: c0/p2/g1"),
        ([*FULL[:5], rollout_of(2, 1, prompt_id="else")], r"group c0/p2 must answer one prompt, found else, task 2"),
        ([], r"0 were given, and these slots have none: c0/p0/g0, .*"),
    ],
)
def test_a_collection_that_is_not_exact_is_refused(rollouts, message):
    with pytest.raises(CollectionError, match=message):
        close(rollouts)


def test_stale_and_mixed_weights_are_refused():
    assert close(FULL, weight_versions=range(1)) == close(FULL)
    with pytest.raises(
        CollectionError, match=r"must come from weight version 1; others are in: c0/p0/g0 \(versions \[0\]"
    ):
        close(FULL, weight_versions=range(1, 2))
    mixed = replace(FULL[5], calls=(*FULL[5].calls, replace(FULL[5].calls[0], order=1, weight_version=1)))
    with pytest.raises(CollectionError, match=r"others are in: c0/p2/g1 \(versions \[0, 1\]\)"):
        close([*FULL[:5], mixed], weight_versions=range(1))


def test_a_failed_rollout_keeps_its_slot_without_calls():
    failed = rollout_of(1, 0, status="failed", status_reason="fire", num_calls=3, version=9)
    collection = close([*FULL[:2], failed, *FULL[3:]], weight_versions=None)
    (kept,) = [rollout for rollout in collection.rollouts if rollout.rollout_id == "c0/p1/g0"]
    assert (kept.status, kept.status_reason, kept.calls, kept.reward) == ("failed", "fire", (), None)
    assert len(collection.rollouts) == 6


def test_a_failed_rollout_is_not_stale():
    failed = rollout_of(1, 0, status="failed", num_calls=3, version=9)
    assert len(close([*FULL[:2], failed, *FULL[3:]], weight_versions=range(1)).rollouts) == 6


def collection_of(num_prompts, num_generations, num_calls=lambda p, g: 1):
    rollouts = [rollout_of(p, g, num_calls=num_calls(p, g)) for p in range(num_prompts) for g in range(num_generations)]
    return close_collection(rollouts, collection=0, num_prompts=num_prompts, num_generations=num_generations)


@pytest.mark.parametrize("num_calls", [lambda p, g: 1, lambda p, g: 1 + 4 * p, lambda p, g: (p * 3 + g) % 5])
def test_windows_count_rollouts_never_calls(num_calls):
    windows = windows_of(collection_of(6, 2, num_calls), rollouts_per_window=4, epochs=2, first_window=10)
    assert [(w.window, w.epoch, len(w.rollouts)) for w in windows] == [
        (10, 0, 4), (11, 0, 4), (12, 0, 4), (13, 1, 4), (14, 1, 4), (15, 1, 4),
    ]  # fmt: skip
    for epoch in range(2):
        ids = [r.rollout_id for w in windows if w.epoch == epoch for r in w.rollouts]
        assert ids == [f"c0/p{p}/g{g}" for p in range(6) for g in range(2)]


@pytest.mark.parametrize("rollouts_per_window", [0, -4, 1, 3, 5, 8, 24])
def test_windows_that_would_cut_a_group_or_leave_rollouts_are_refused(rollouts_per_window):
    with pytest.raises(CollectionError, match=f"rollouts_per_window = {rollouts_per_window} for collection 0 of 12"):
        windows_of(collection_of(6, 2), rollouts_per_window=rollouts_per_window)


def test_at_least_one_epoch():
    with pytest.raises(CollectionError, match="epochs must be at least 1, found 0"):
        windows_of(collection_of(2, 2), rollouts_per_window=4, epochs=0)
