"""Gathering the rollouts of a collection, closing it, and cutting it into windows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from evenstep.errors import CollectionError, ConfigError, EvenstepError
from evenstep.rollout.agent import AgentOptions, RolloutIdentity, run_rollout
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import Compaction
from evenstep.rollout.engine import Barrier, BatchEngine, Engine
from evenstep.rollout.environment import Environment, TaskSource
from evenstep.rollout.seeds import call_seed
from evenstep.types import Collection, Group, Rollout, Window

__all__ = [
    "Player",
    "Slot",
    "as_closed",
    "close_collection",
    "generate_rollouts",
    "group_id_of",
    "group_slots",
    "rollout_id_of",
    "slots_of",
    "windows_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One rollout that a collection is going to hold.

    >>> slots_of(collection=1, num_prompts=4, num_generations=2)[3]
    Slot(index=3, collection=1, occurrence=1, generation=1, attempt=0, task_index=5)
    """

    index: int  # in the collection, from 0
    collection: int
    occurrence: int  # of a prompt in the collection, from 0
    generation: int  # in the group, from 0
    attempt: int  # how often this slot was generated before
    task_index: int  # which task of the split


def group_id_of(slot: Slot) -> str:
    """The id of the group that a slot belongs to: one occurrence of a prompt in one collection, at one attempt."""
    return f"c{slot.collection}/p{slot.occurrence}" + (f".{slot.attempt}" if slot.attempt else "")


def rollout_id_of(slot: Slot) -> str:
    """The id of the rollout that fills a slot."""
    return f"{group_id_of(slot)}/g{slot.generation}"


def group_slots(
    *, collection: int, occurrence: int, num_generations: int, attempt: int, task_index: int, first_index: int
) -> tuple[Slot, ...]:
    """[G] The slots of one group."""
    return tuple(
        Slot(
            index=first_index + generation,
            collection=collection,
            occurrence=occurrence,
            generation=generation,
            attempt=attempt,
            task_index=task_index,
        )
        for generation in range(num_generations)
    )


def slots_of(
    *, collection: int, num_prompts: int, num_generations: int, num_tasks: int | None = None
) -> tuple[Slot, ...]:
    """[P · G] The slots of a collection, group by group.

    Prompt occurrence ``p`` of collection ``c`` is task ``c · num_prompts + p`` (modulo ``num_tasks``, where the
    split is finite). A task that comes again is another occurrence: another group with other seeds.
    """
    slots: list[Slot] = []
    for occurrence in range(num_prompts):
        task_index = collection * num_prompts + occurrence
        slots += group_slots(
            collection=collection,
            occurrence=occurrence,
            num_generations=num_generations,
            attempt=0,
            task_index=task_index if num_tasks is None else task_index % num_tasks,
            first_index=len(slots),
        )
    return tuple(slots)


class Player(Protocol):
    """Plays rollouts in another way than the agent loop."""

    async def play(
        self,
        rollouts: Sequence[tuple[RolloutIdentity, Environment]],
        engine: Engine,
        options: AgentOptions,
        *,
        on_done: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """One rollout for each identity, in this order; ``on_done`` is called with each as it ends."""
        ...


async def generate_rollouts(
    slots: Sequence[Slot],
    *,
    tasks: TaskSource,
    engine: Engine,
    renderer: ChatRenderer,
    compaction: Compaction,
    options: AgentOptions,
    run_seed: int,
    batch_rollouts: int,
    rank: int = 0,
    num_ranks: int = 1,
    player: Player | None = None,
    on_done: Callable[[Rollout], None] | None = None,
) -> list[Rollout]:
    """Generate this rank's share of the slots, in slot order.

    With a ``BatchEngine``, slots are cut into generation batches of ``batch_rollouts`` by their position in ``slots``;
    rank r takes batches r, r + W, r + 2W, …. A batch's membership and the shape of each of its forwards therefore do
    not depend on the number of ranks, and neither do the tokens.

    With any other engine, rank r takes groups r, r + W, … and ``batch_rollouts`` of its rollouts run at any time: the
    next one begins as soon as one is done. A rollout's seeds are the same in both.

    A ``player`` plays the whole share instead, in its own way.

    Args:
        on_done: called with each rollout as it ends; what it was called with is whole whatever ends the rest.

    Raises:
        ConfigError: ``batch_rollouts`` below 1, or the agent's context is larger than the engine's.
        EngineError: a call cannot be served.
    """
    if batch_rollouts < 1:
        raise ConfigError(f"rollout.generation_batch_rollouts must be at least 1, found {batch_rollouts}")
    if options.max_context_tokens > engine.max_context_tokens:
        raise ConfigError(
            f"model.max_context_tokens = {options.max_context_tokens} is more than the engine's "
            f"{engine.max_context_tokens}; lower it, or use a model with a longer context"
        )
    starts = range(rank * batch_rollouts, len(slots), num_ranks * batch_rollouts)
    if isinstance(engine, BatchEngine):
        mine = [slot for start in starts for slot in slots[start : start + batch_rollouts]]
    else:
        mine = _dealt(slots, rank, num_ranks)
    if player is not None:
        played = [
            (_identity(slot, tasks=tasks, run_seed=run_seed), tasks.environment(slot.task_index)) for slot in mine
        ]
        return await player.play(played, engine, options, on_done=on_done)

    async def run(slot: Slot, engine: Engine) -> Rollout:
        rollout = await run_rollout(
            identity=_identity(slot, tasks=tasks, run_seed=run_seed),
            environment=tasks.environment(slot.task_index),
            engine=engine,
            renderer=renderer,
            compaction=compaction,
            options=options,
        )
        if on_done is not None:
            on_done(rollout)
        return rollout

    if not isinstance(engine, BatchEngine):
        return await _side_by_side(mine, lambda slot: run(slot, engine), batch_rollouts)
    rollouts: list[Rollout] = []
    for start in starts:
        batch = slots[start : start + batch_rollouts]
        barrier = Barrier(engine, [(slot.index,) for slot in batch])

        async def run_and_leave(slot: Slot, barrier: Barrier = barrier) -> Rollout:
            try:
                return await run(slot, barrier)
            finally:
                barrier.leave((slot.index,))

        rollouts += await _side_by_side(batch, run_and_leave, len(batch))
    return rollouts


def _dealt(slots: Sequence[Slot], rank: int, num_ranks: int) -> list[Slot]:
    """A rank's share: every ``num_ranks``-th group, whole."""
    place = {group_id: at for at, group_id in enumerate(dict.fromkeys(map(group_id_of, slots)))}
    return [slot for slot in slots if place[group_id_of(slot)] % num_ranks == rank]


async def _side_by_side(
    slots: Sequence[Slot], run: Callable[[Slot], Awaitable[Rollout]], most_at_once: int
) -> list[Rollout]:
    """Their rollouts in the order of the slots; the first error ends all."""
    places = asyncio.Semaphore(max(most_at_once, 1))

    async def run_in_place(slot: Slot) -> Rollout:
        async with places:
            return await run(slot)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run_in_place(slot)) for slot in slots]
    except* EvenstepError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


def _identity(slot: Slot, *, tasks: TaskSource, run_seed: int) -> RolloutIdentity:
    def seed_of_call(order: int) -> int:
        return call_seed(
            run=run_seed,
            collection=slot.collection,
            occurrence=slot.occurrence,
            generation=slot.generation,
            attempt=slot.attempt,
            call=order,
        )

    return RolloutIdentity(
        rollout_id=rollout_id_of(slot),
        group_id=group_id_of(slot),
        prompt_id=tasks.prompt_id(slot.task_index),
        key=(slot.index,),
        seed_of_call=seed_of_call,
    )


def close_collection(
    rollouts: Sequence[Rollout],
    *,
    collection: int,
    num_prompts: int,
    num_generations: int,
    weight_versions: range | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Collection:
    """Close a collection with exactly ``num_prompts × num_generations`` rollouts, however many calls they have.

    Groups are in order of their occurrence, rollouts in order of their generation, whatever the order given. A failed
    rollout keeps its slot, without calls and without a reward.

    >>> def rollout(occurrence, generation):
    ...     return Rollout(rollout_id=f"c0/p{occurrence}/g{generation}", group_id=f"c0/p{occurrence}", prompt_id="t",
    ...                    reward=1.0)
    >>> collection = close_collection([rollout(1, 0), rollout(0, 0)], collection=0, num_prompts=2, num_generations=1)
    >>> [group.group_id for group in collection.groups]
    ['c0/p0', 'c0/p1']
    >>> close_collection([rollout(1, 0)], collection=0, num_prompts=2, num_generations=1)
    Traceback (most recent call last):
        ...
    evenstep.errors.CollectionError: collection 0 closes with exactly 2 × 1 = 2 rollouts; 1 were given, and these \
slots have none: c0/p0/g0; generate them, or give every slot a rollout (one with status 'failed' counts)

    Args:
        weight_versions: the weights that a call may come from; None does not check.
        groups: group id -> ids of its rollouts, in order; None: those of occurrences 0 to ``num_prompts - 1``.

    Raises:
        CollectionError: a rollout too many or too few, twice, of another collection, or of stale weights, with
            its id.
    """
    if groups is None:
        slots = slots_of(collection=collection, num_prompts=num_prompts, num_generations=num_generations)
        groups = {}
        for slot in slots:
            groups[group_id_of(slot)] = [*groups.get(group_id_of(slot), ()), rollout_id_of(slot)]
    group_of = {name: group_id for group_id, names in groups.items() for name in names}
    by_id = {rollout.rollout_id: as_closed(rollout) for rollout in rollouts}
    promise = (
        f"collection {collection} closes with exactly {num_prompts} × {num_generations} = {len(group_of)} rollouts"
    )
    _refuse(
        f"{promise}, each once; found some more than once",
        [name for name, count in Counter(rollout.rollout_id for rollout in rollouts).items() if count > 1],
        "keep one rollout per slot",
    )
    _refuse(
        f"{promise}; {len(rollouts)} were given, and these slots have none",
        [name for name in group_of if name not in by_id],
        "generate them, or give every slot a rollout (one with status 'failed' counts)",
    )
    _refuse(
        f"{promise}; {len(rollouts)} were given, and these are not of its slots",
        sorted(set(by_id) - set(group_of)),
        "leave them for the collection that they belong to",
    )
    _refuse(
        f"a rollout's group_id must be the one of its slot in collection {collection}; it is another in",
        [name for name, group_id in group_of.items() if by_id[name].group_id != group_id],
        "build ids with group_id_of and rollout_id_of",
    )
    if weight_versions is not None:
        found = {name: sorted({call.weight_version for call in by_id[name].calls}) for name in group_of}
        promised = " to ".join(map(str, sorted({weight_versions[0], weight_versions[-1]})))
        _refuse(
            f"every call of collection {collection} must come from weight version {promised}; others are in",
            [f"{name} (versions {known})" for name, known in found.items() if set(known) - set(weight_versions)],
            "generate them again with the present weights",
        )
    closed: list[Group] = []
    for group_id, names in groups.items():
        members = tuple(by_id[name] for name in names)
        prompts = sorted({member.prompt_id for member in members})
        if len(prompts) > 1:
            raise CollectionError(
                f"the rollouts of group {group_id} must answer one prompt, found {', '.join(prompts)}; "
                f"a group is one occurrence of one prompt"
            )
        closed.append(Group(group_id=group_id, prompt_id=prompts[0], rollouts=members))
    return Collection(collection=collection, groups=tuple(closed))


def as_closed(rollout: Rollout) -> Rollout:
    """As a collection holds it: a failed one keeps its slot, without calls and without a reward."""
    return replace(rollout, calls=(), reward=None) if rollout.status == "failed" else rollout


def _refuse(what: str, ids: Sequence[str], fix: str) -> None:
    if ids:
        shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        raise CollectionError(f"{what}: {shown}; {fix}")


def windows_of(
    collection: Collection,
    *,
    rollouts_per_window: int,
    epochs: int = 1,
    first_window: int = 0,
    num_windows: int | None = None,
) -> tuple[Window, ...]:
    """The windows of a collection: ``rollouts_per_window`` rollouts each, whole groups, every epoch a pass over all.

    The number of windows follows from rollouts alone, never from their rows: P · G / rollouts_per_window per epoch.

    >>> def group(name):
    ...     ids = (f"{name}/g0", f"{name}/g1")
    ...     rollouts = tuple(Rollout(rollout_id=i, group_id=name, prompt_id="t", reward=1.0) for i in ids)
    ...     return Group(group_id=name, prompt_id="t", rollouts=rollouts)
    >>> collection = Collection(collection=0, groups=(group("c0/p0"), group("c0/p1")))
    >>> for window in windows_of(collection, rollouts_per_window=2, epochs=2, first_window=6):
    ...     print(window.window, window.epoch, [rollout.rollout_id for rollout in window.rollouts])
    6 0 ['c0/p0/g0', 'c0/p0/g1']
    7 0 ['c0/p1/g0', 'c0/p1/g1']
    8 1 ['c0/p0/g0', 'c0/p0/g1']
    9 1 ['c0/p1/g0', 'c0/p1/g1']

    Args:
        num_windows: of an epoch, for a collection that may have closed with fewer groups: its last windows are then
            smaller, or empty. None: the collection divides into whole windows.

    Raises:
        CollectionError: the rollouts do not divide into such windows, or a window would cut a group.
    """
    num_rollouts = len(collection.rollouts)
    sizes = sorted({len(group.rollouts) for group in collection.groups})
    if (
        len(sizes) != 1
        or rollouts_per_window < 1
        or rollouts_per_window % sizes[0]
        or (num_windows is None and num_rollouts % rollouts_per_window)
    ):
        raise CollectionError(
            f"a window holds whole groups, and a collection whole windows; found rollouts_per_window = "
            f"{rollouts_per_window} for collection {collection.collection} of {num_rollouts} rollouts in groups of "
            f"{', '.join(map(str, sizes)) or 'none'}; choose a multiple of the group that divides {num_rollouts}"
        )
    if epochs < 1:
        raise CollectionError(f"epochs must be at least 1, found {epochs}")
    groups_per_window = rollouts_per_window // sizes[0]
    num_windows = len(collection.groups) // groups_per_window if num_windows is None else num_windows
    starts = range(0, num_windows * groups_per_window, groups_per_window)
    return tuple(
        Window(
            window=first_window + epoch * len(starts) + index,
            collection=collection.collection,
            epoch=epoch,
            groups=collection.groups[start : start + groups_per_window],
        )
        for epoch in range(epochs)
        for index, start in enumerate(starts)
    )
