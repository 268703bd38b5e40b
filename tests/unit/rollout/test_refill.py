"""Replacing groups before a collection closes.

1. A group without spread is dropped and another prompt's takes its place, only where that is asked for.
2. A prompt whose rollouts all failed is tried again, with other ids, then replaced; one voter is enough to stay.
3. When the budget is spent: an error that names groups and reasons, or an exact smaller collection; never none at all.
4. Truncated rollouts vote or not, by choice; a group of masked ones alone is dropped.
5. The order in which rollouts come changes nothing, nor does an interruption: the builder asks for what is left.
6. A rollout that nobody asked for, or twice, is refused.
7. Every rollout that was given is kept for the store, dropped ones too, and no mark of ours is stored.
8. Windows of a smaller collection: the last ones are smaller or empty, and their number stays.
9. Groups generated beyond the collection's stand in for dropped ones at once; what is left over is carried to the next
   collection as whole groups, or dropped there when their weights are too old.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from evenstep.errors import CollectionError
from evenstep.files import read_rollouts, write_rollouts
from evenstep.rollout.collector import Slot, group_id_of, rollout_id_of, windows_of
from evenstep.rollout.refill import CollectionBuilder, RefillOptions
from evenstep.types import Call, Rollout


def builder(num_prompts: int = 3, num_generations: int = 2, **options: Any) -> CollectionBuilder:
    return CollectionBuilder(
        collection=4,
        num_prompts=num_prompts,
        num_generations=num_generations,
        first_task=40,
        options=RefillOptions(**options),
    )


def rollout(slot: Slot, reward: float | None, status: Any = "ok") -> Rollout:
    return Rollout(
        rollout_id=rollout_id_of(slot),
        group_id=group_id_of(slot),
        prompt_id=f"task {slot.task_index}",
        reward=reward,
        status=status,
        status_reason="Traceback\nValueError: broken" if status == "failed" else None,
    )


def answer(slots: tuple[Slot, ...], rewards: dict[str, list[float | None]]) -> list[Rollout]:
    """Rollouts with the rewards of their group; None: failed; groups that are not named have spread."""
    found = []
    for slot in slots:
        reward = rewards.get(group_id_of(slot), [0.7, 0.1])[slot.generation]
        found.append(rollout(slot, reward, "failed" if reward is None else "ok"))
    return found


def kept(built: CollectionBuilder) -> list[str]:
    return [group.group_id for group in built.close().groups]


@pytest.mark.parametrize("is_filtered", [True, False])
def test_zero_spread(is_filtered: bool) -> None:
    built = builder(drop_zero_spread=is_filtered)
    built.add(answer(built.missing(), {"c4/p1": [0.7, 0.7]}))
    if not is_filtered:
        assert (built.missing(), kept(built), built.num_tasks) == ((), ["c4/p0", "c4/p1", "c4/p2"], 3)
        return
    assert [(rollout_id_of(slot), slot.task_index) for slot in built.missing()] == [("c4/p3/g0", 43), ("c4/p3/g1", 43)]
    built.add(answer(built.missing(), {"c4/p3": [0.35, 0.35]}))
    built.add(answer(built.missing(), {}))
    assert kept(built) == ["c4/p0", "c4/p2", "c4/p4"]
    assert built.dropped == {"c4/p1": "all rewards are 0.7", "c4/p3": "all rewards are 0.35"}
    assert (built.replaced, built.num_tasks) == ({"c4/p4"}, 5)


def test_failed_prompts_are_tried_again() -> None:
    built = builder(max_attempts_per_prompt=2)
    first = built.missing()
    built.add(answer(first, {"c4/p0": [None, None], "c4/p2": [0.7, None]}))
    again = built.missing()
    assert [rollout_id_of(slot) for slot in again] == ["c4/p0.1/g0", "c4/p0.1/g1"]
    assert [(slot.task_index, slot.attempt) for slot in again] == [(40, 1), (40, 1)]
    assert not {slot.index for slot in again} & {slot.index for slot in first}
    built.add(answer(again, {"c4/p0.1": [None, None]}))
    built.add(answer(built.missing(), {}))
    assert kept(built) == ["c4/p1", "c4/p2", "c4/p3"]
    assert built.dropped["c4/p0.1"] == "no rollout votes: ValueError: broken"


def test_a_retry_keeps_its_place() -> None:
    built = builder(max_attempts_per_prompt=2)
    built.add(answer(built.missing(), {"c4/p0": [None, None]}))
    built.add(answer(built.missing(), {}))
    assert (kept(built), built.replaced, built.num_tasks) == (["c4/p0.1", "c4/p1", "c4/p2"], {"c4/p0.1"}, 3)


def test_shortfall() -> None:
    flat: dict[str, list[float | None]] = {"c4/p1": [0.7, 0.7], "c4/p3": [0.1, 0.1]}
    built = builder(drop_zero_spread=True, max_replacements=1)
    built.add(answer(built.missing(), flat))
    with pytest.raises(
        CollectionError, match=r"3 groups, found 2 after 1 replacements .*c4/p1 \(all rewards are 0.7\); c4/p3"
    ):
        built.add(answer(built.missing(), flat))

    smaller = builder(drop_zero_spread=True, max_replacements=1, on_shortfall="smaller")
    while slots := smaller.missing():
        smaller.add(answer(slots, flat))
    collection = smaller.close()
    assert [group.group_id for group in collection.groups] == ["c4/p0", "c4/p2"]
    windows = windows_of(collection, rollouts_per_window=2, num_windows=3, epochs=2)
    assert [len(window.rollouts) for window in windows] == [2, 2, 0, 2, 2, 0]

    none = builder(num_prompts=1, drop_zero_spread=True, max_replacements=0, on_shortfall="smaller")
    none.add(answer(none.missing(), {"c4/p0": [0.7, 0.7]}))
    with pytest.raises(CollectionError, match="found 0"):
        none.close()


def test_truncated_rollouts() -> None:
    for choice in ("train", "mask"):
        built = builder(num_prompts=1, truncated=choice)
        slots = built.missing()
        built.add([rollout(slots[0], 0.7, "truncated"), rollout(slots[1], 0.1)])
        group = built.close().groups[0]
        assert [r.is_voter for r in group.rollouts] == [choice == "train", True]
        assert group.rollouts[0].status == "truncated"
    built = builder(num_prompts=1, truncated="mask")
    built.add([rollout(slot, 0.7, "truncated") for slot in built.missing()])
    assert built.dropped.keys() == {"c4/p0"}


def test_order_and_interruptions_change_nothing() -> None:
    rewards: dict[str, list[float | None]] = {"c4/p0": [0.7, 0.7], "c4/p2": [None, None], "c4/p3": [0.1, 0.1]}
    options: dict[str, Any] = {"drop_zero_spread": True, "max_attempts_per_prompt": 2}
    whole, rounds = builder(**options), list[list[Rollout]]()
    while slots := whole.missing():
        rounds.append(answer(slots, rewards))
        whole.add(rounds[-1])
    assert len(rounds) == 3
    for seed in range(20):
        source = random.Random(seed)
        num_whole = source.randrange(len(rounds))
        stored = [r for found in rounds[:num_whole] for r in found]
        stored += [r for r in rounds[num_whole] if source.random() < 0.5]
        source.shuffle(stored)
        resumed = builder(**options)
        resumed.add(stored)
        while slots := resumed.missing():
            some = slots[: source.randint(1, len(slots))]
            resumed.add(answer(some, rewards))
        assert (kept(resumed), resumed.dropped, resumed.replaced) == (kept(whole), whole.dropped, whole.replaced)
        assert resumed.num_tasks == whole.num_tasks


def test_rollouts_nobody_asked_for() -> None:
    built = builder()
    slots = built.missing()
    built.add([rollout(slots[0], 0.7)])
    with pytest.raises(CollectionError, match=r"c4/p0/g0 \(1 such"):
        built.add([rollout(slots[0], 0.7)])
    with pytest.raises(CollectionError, match="c4/p9/g0"):
        built.add([Rollout(rollout_id="c4/p9/g0", group_id="c4/p9", prompt_id="p", reward=1.0)])


def test_a_rollout_that_comes_twice_at_once() -> None:
    built = builder()
    found = answer(built.missing(), {})
    with pytest.raises(CollectionError, match="each rollout that it asked for once; found c4/p0/g1 more than once"):
        built.add(one for one in (*found, found[1]))
    assert (built.rollouts, len(built.missing())) == ([], 6)  # nothing of it was taken
    built.add(found)
    assert len(kept(built)) == 3


def test_all_are_kept_for_the_store(tmp_path: Path) -> None:
    built = builder(drop_zero_spread=True, truncated="mask")
    built.add([rollout(slot, 0.7, "truncated" if slot.generation else "ok") for slot in built.missing()])
    while slots := built.missing():
        built.add(answer(slots, {}))
    assert len(built.rollouts) == 12
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, built.rollouts)
    assert list(read_rollouts(path)) == built.rollouts
    masked = [r for group in built.close().groups for r in group.rollouts]
    write_rollouts(path, masked)
    assert "is_masked" not in path.read_text()


def test_extra_groups_stand_in_and_are_carried() -> None:
    built = builder(num_prompts=2, num_extra_prompts=2, drop_zero_spread=True)
    assert len(built.missing()) == 8
    built.add(answer(built.missing(), {"c4/p0": [0.7, 0.7]}))
    assert (built.missing(), kept(built)) == ((), ["c4/p1", "c4/p2"])
    assert (built.replaced, built.num_tasks) == ({"c4/p2"}, 4)
    assert [r.rollout_id for r in built.leftovers] == ["c4/p3/g0", "c4/p3/g1"]

    def later(oldest: int) -> CollectionBuilder:
        calls = (Call(order=0, prompt_ids=(1,), output_ids=(2,), logprobs=(0.0,), weight_version=6),)
        return CollectionBuilder(
            collection=5,
            num_prompts=2,
            num_generations=2,
            first_task=44,
            options=RefillOptions(),
            carried=[dataclasses.replace(r, calls=calls) for r in built.leftovers],
            weight_versions=range(oldest, 8),
        )

    fresh = later(oldest=6)
    assert [(rollout_id_of(slot), slot.task_index) for slot in fresh.missing()] == [("c5/p0/g0", 44), ("c5/p0/g1", 44)]
    fresh.add(answer(fresh.missing(), {}))
    assert (kept(fresh), fresh.num_tasks, fresh.leftovers) == (["c4/p3", "c5/p0"], 1, [])
    assert [r.rollout_id for r in fresh.rollouts] == ["c5/p0/g0", "c5/p0/g1"]

    stale = later(oldest=7)
    assert len(stale.missing()) == 4
    assert stale.dropped == {"c4/p3": "stale: weight version 6, the oldest that may be trained is 7"}


def test_no_retry_where_an_extra_group_is_there() -> None:
    built = builder(num_prompts=2, num_extra_prompts=1, max_attempts_per_prompt=3)
    built.add(answer(built.missing(), {"c4/p1": [None, None]}))
    assert (built.missing(), kept(built)) == ((), ["c4/p0", "c4/p2"])
