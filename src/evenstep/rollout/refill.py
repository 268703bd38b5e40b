"""Which groups a collection closes with: unfit ones are dropped and replaced, within budgets, and never by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from evenstep.credit import zero_spread_groups
from evenstep.errors import CollectionError
from evenstep.rollout.collector import Slot, close_collection, group_id_of, group_slots, rollout_id_of
from evenstep.types import Collection, Rollout

__all__ = ["CollectionBuilder", "RefillOptions", "with_vote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillOptions:
    """What makes a group unfit, and what may be spent on replacing it."""

    drop_zero_spread: bool = False  # drop groups whose voters all have one reward
    truncated: Literal["train", "mask"] = "train"  # mask: truncated rollouts do not vote and are not trained
    num_extra_prompts: int = 0  # groups beyond the collection's that are generated at once, to be put in or carried
    max_attempts_per_prompt: int = 1  # how often a prompt whose rollouts all failed is tried
    max_replacements: int = 16  # groups of a collection that may be replaced by a fresh prompt's
    on_shortfall: Literal["raise", "smaller"] = "raise"  # when the budget is spent: stop, or close with fewer groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    group_id: str
    rollout_ids: tuple[str, ...]
    place: tuple[int, int]  # carried before own, then in the order asked for
    slots: tuple[Slot, ...] = ()  # none of a carried one
    is_replacement: bool = False


def with_vote(rollout: Rollout, truncated: Literal["train", "mask"]) -> Rollout:
    """The rollout, which does not vote where it is truncated and such ones are masked."""
    return replace(rollout, is_masked=True) if truncated == "mask" and rollout.status == "truncated" else rollout


class CollectionBuilder:
    """Asks for slots, takes their rollouts, and says which groups the collection closes with.

    All it knows follows from the rollouts it was given, in whatever order, so rollouts that an interrupted run left
    behind bring it back to where that run was.

    >>> builder = CollectionBuilder(collection=0, num_prompts=1, num_generations=2, first_task=0,
    ...                             options=RefillOptions(drop_zero_spread=True))
    >>> def answer(rewards):
    ...     return [Rollout(rollout_id=rollout_id_of(slot), group_id=group_id_of(slot), prompt_id="t", reward=reward)
    ...             for slot, reward in zip(builder.missing(), rewards)]
    >>> builder.add(answer([0.7, 0.7]))
    >>> builder.dropped
    {'c0/p0': 'all rewards are 0.7'}
    >>> builder.add(answer([0.7, 0.1]))
    >>> builder.missing(), [group.group_id for group in builder.close().groups], builder.num_tasks
    ((), ['c0/p1'], 2)

    Args:
        collection: its index.
        num_prompts: groups it closes with.
        num_generations: rollouts of a group.
        first_task: index of the first task to draw.
        options: see ``RefillOptions``.
        carried: rollouts of whole, fit groups that the collection before left over.
        weight_versions: that a rollout may come from; a carried group with an older call is dropped.
    """

    def __init__(
        self,
        *,
        collection: int,
        num_prompts: int,
        num_generations: int,
        first_task: int,
        options: RefillOptions,
        carried: Sequence[Rollout] = (),
        weight_versions: range = range(1),
    ) -> None:
        self.rollouts: list[Rollout] = []  # all that were given, dropped ones too, without the carried
        self.dropped: dict[str, str] = {}  # group id -> why
        self.num_tasks = 0  # tasks that were drawn, from first_task on
        self._collection, self._num_prompts, self._num_generations = collection, num_prompts, num_generations
        self._first_task, self._options, self._weight_versions = first_task, options, weight_versions
        self._num_slots = 0
        self._num_replacements = 0
        self._by_id: dict[str, Rollout] = {}
        self._fit: list[_Group] = []
        self._pending: list[_Group] = []
        self._take_carried(carried)
        if (num_needed := num_prompts - len(self._fit)) > 0:
            self._pending = [self._fresh() for _ in range(num_needed + options.num_extra_prompts)]

    @property
    def replaced(self) -> frozenset[str]:
        """Ids of the groups of the collection that stand in for a dropped one."""
        return frozenset(group.group_id for group in self._closing()[0] if group.is_replacement)

    @property
    def leftovers(self) -> list[Rollout]:
        """Rollouts of the fit groups that the collection has no place for: the next one's ``carried``."""
        return [self._by_id[name] for group in self._closing()[1] for name in group.rollout_ids]

    def missing(self) -> tuple[Slot, ...]:
        """The slots to generate now; none when the collection can close."""
        return tuple(slot for group in self._pending for slot in group.slots if rollout_id_of(slot) not in self._by_id)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Take finished rollouts, and decide once all that were asked for are there.

        Raises:
            CollectionError: a rollout nobody asked for, or twice; or the budget is spent and ``on_shortfall`` is raise.
        """
        rollouts = list(rollouts)
        waiting = {rollout.rollout_id: rollout for rollout in rollouts}
        if len(waiting) < len(rollouts):
            twice = next(name for name, count in Counter(r.rollout_id for r in rollouts).items() if count > 1)
            raise CollectionError(
                f"collection {self._collection} takes each rollout that it asked for once; found {twice} more than "
                f"once; keep one rollout per slot"
            )
        while waiting and (asked := [name for slot in self.missing() if (name := rollout_id_of(slot)) in waiting]):
            for name in asked:
                rollout = waiting.pop(name)
                self.rollouts.append(rollout)
                self._by_id[name] = with_vote(rollout, self._options.truncated)
            if not self.missing():
                self._decide()
        if waiting:
            raise CollectionError(
                f"collection {self._collection} takes each rollout that it asked for once; found {next(iter(waiting))} "
                f"({len(waiting)} such rollouts); leave them for the collection that they belong to"
            )

    def close(self) -> Collection:
        """The collection of the fit groups; see ``close_collection``.

        Raises:
            CollectionError: no group is left.
        """
        groups, _ = self._closing()
        if not groups:
            raise CollectionError(self._shortfall())
        return close_collection(
            [self._by_id[name] for group in groups for name in group.rollout_ids],
            collection=self._collection,
            num_prompts=len(groups),
            num_generations=self._num_generations,
            weight_versions=self._weight_versions,
            groups={group.group_id: group.rollout_ids for group in groups},
        )

    def _closing(self) -> tuple[list[_Group], list[_Group]]:
        in_order = sorted(self._fit, key=lambda group: group.place)
        return in_order[: self._num_prompts], in_order[self._num_prompts :]

    def _take_carried(self, carried: Sequence[Rollout]) -> None:
        by_group: dict[str, list[Rollout]] = {}
        for rollout in carried:
            by_group.setdefault(rollout.group_id, []).append(rollout)
        for group_id, members in by_group.items():
            version = min((r.weight_version for r in members if r.weight_version is not None), default=None)
            oldest = self._weight_versions[0]
            if version is not None and version < oldest:
                self.dropped[group_id] = f"stale: weight version {version}, the oldest that may be trained is {oldest}"
                continue
            names = tuple(rollout.rollout_id for rollout in members)
            self._fit.append(_Group(group_id=group_id, rollout_ids=names, place=(0, len(self._fit))))
            self._by_id |= {rollout.rollout_id: with_vote(rollout, self._options.truncated) for rollout in members}

    def _decide(self) -> None:
        decided, self._pending = self._pending, []
        to_retry: list[_Group] = []
        for group in decided:
            members = [self._by_id[name] for name in group.rollout_ids]
            if any(rollout.is_voter for rollout in members):
                if self._options.drop_zero_spread and zero_spread_groups(members):
                    reward = next(rollout.reward for rollout in members if rollout.is_voter)
                    self.dropped[group.group_id] = f"all rewards are {reward}"
                else:
                    self._fit.append(group)
                continue
            why = next((r.status_reason for r in members if r.status_reason), "") or ""
            self.dropped[group.group_id] = f"no rollout votes: {''.join(why.strip().splitlines()[-1:])}"
            if group.slots[0].attempt + 1 < self._options.max_attempts_per_prompt:
                to_retry.append(group)
        # groups that were generated beyond the collection's own stand in first
        for _ in range(self._num_prompts - len(self._fit)):
            if to_retry:
                slot = to_retry.pop(0).slots[0]
                self._pending.append(self._group(slot.occurrence, attempt=slot.attempt + 1, is_replacement=True))
            elif self._num_replacements < self._options.max_replacements:
                self._num_replacements += 1
                self._pending.append(self._fresh(is_replacement=True))
            elif self._options.on_shortfall == "raise":
                raise CollectionError(self._shortfall())
            else:
                break

    def _shortfall(self) -> str:
        listed = "; ".join(f"{group_id} ({reason})" for group_id, reason in list(self.dropped.items())[:4])
        return (
            f"collection {self._collection} closes with {self._num_prompts} groups, found {len(self._fit)} after "
            f"{self._num_replacements} replacements (rollout.max_replacements = {self._options.max_replacements}); "
            f"{len(self.dropped)} were dropped: {listed}{' …' if len(self.dropped) > 4 else ''}; raise the budget"
            f"{', or set rollout.on_shortfall = ' + repr('smaller') if self._options.on_shortfall == 'raise' else ''}"
        )

    def _fresh(self, *, is_replacement: bool = False) -> _Group:
        """A group of the next task."""
        occurrence = self.num_tasks
        self.num_tasks += 1
        is_promoted = occurrence >= self._num_prompts
        return self._group(occurrence, attempt=0, is_replacement=is_replacement or is_promoted)

    def _group(self, occurrence: int, *, attempt: int, is_replacement: bool) -> _Group:
        slots = group_slots(
            collection=self._collection,
            occurrence=occurrence,
            num_generations=self._num_generations,
            attempt=attempt,
            task_index=self._first_task + occurrence,
            first_index=self._num_slots,
        )
        self._num_slots += len(slots)
        return _Group(
            group_id=group_id_of(slots[0]),
            rollout_ids=tuple(rollout_id_of(slot) for slot in slots),
            place=(1, occurrence),
            slots=slots,
            is_replacement=is_replacement,
        )
