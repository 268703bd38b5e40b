"""Which groups a collection closes with: unfit ones are dropped and replaced, within budgets, and never by chance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from evenstep.credit import zero_spread_groups
from evenstep.errors import CollectionError
from evenstep.rollout.collector import Slot, close_collection, group_id_of, group_slots, rollout_id_of
from evenstep.types import Collection, Rollout

__all__ = ["CollectionBuilder", "RefillOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillOptions:
    """What makes a group unfit, and what may be spent on replacing it."""

    drop_zero_spread: bool = False  # drop groups whose voters all have one reward
    truncated: Literal["train", "mask"] = "train"  # mask: truncated rollouts do not vote and are not trained
    max_attempts_per_prompt: int = 1  # how often a prompt whose rollouts all failed is tried
    max_replacements: int = 16  # groups of a collection that may be replaced by a fresh prompt's
    on_shortfall: Literal["raise", "smaller"] = "raise"  # when the budget is spent: stop, or close with fewer groups


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
    """

    def __init__(
        self, *, collection: int, num_prompts: int, num_generations: int, first_task: int, options: RefillOptions
    ) -> None:
        self.rollouts: list[Rollout] = []  # all that were given, dropped ones too
        self.dropped: dict[str, str] = {}  # group id -> why
        self.num_tasks = num_prompts  # tasks that were drawn, from first_task on
        self._collection, self._num_prompts, self._num_generations = collection, num_prompts, num_generations
        self._first_task, self._options = first_task, options
        self._num_slots = 0
        self._by_id: dict[str, Rollout] = {}
        self._kept: list[tuple[Slot, ...]] = []
        self._pending = [self._group(occurrence, attempt=0) for occurrence in range(num_prompts)]

    @property
    def replaced(self) -> frozenset[str]:
        """Ids of the kept groups that stand in for a dropped one."""
        return frozenset(
            group_id_of(slots[0])
            for slots in self._kept
            if slots[0].attempt or slots[0].occurrence >= self._num_prompts
        )

    def missing(self) -> tuple[Slot, ...]:
        """The slots to generate now; none when the collection can close."""
        return tuple(slot for group in self._pending for slot in group if rollout_id_of(slot) not in self._by_id)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Take finished rollouts, and decide once all that were asked for are there.

        Raises:
            CollectionError: a rollout nobody asked for, or twice; or the budget is spent and ``on_shortfall`` is raise.
        """
        waiting = {rollout.rollout_id: rollout for rollout in rollouts}
        while waiting and (asked := [name for slot in self.missing() if (name := rollout_id_of(slot)) in waiting]):
            for name in asked:
                rollout = waiting.pop(name)
                self.rollouts.append(rollout)
                self._by_id[name] = self._with_vote(rollout)
            if not self.missing():
                self._decide()
        if waiting:
            raise CollectionError(
                f"collection {self._collection} takes each rollout that it asked for once; found {next(iter(waiting))} "
                f"({len(waiting)} such rollouts); leave them for the collection that they belong to"
            )

    def close(self, weight_version: int | None = None) -> Collection:
        """The collection of the kept groups; see ``close_collection``.

        Raises:
            CollectionError: no group is left.
        """
        if not self._kept:
            raise CollectionError(self._shortfall())
        slots = [slot for group in sorted(self._kept, key=lambda group: group[0].occurrence) for slot in group]
        return close_collection(
            [self._by_id[rollout_id_of(slot)] for slot in slots],
            collection=self._collection,
            num_prompts=len(self._kept),
            num_generations=self._num_generations,
            weight_version=weight_version,
            slots=slots,
        )

    def _decide(self) -> None:
        decided, self._pending = self._pending, []
        for slots in decided:
            reason = self._reason_to_drop(slots)
            if reason is None:
                self._kept.append(slots)
                continue
            self.dropped[group_id_of(slots[0])] = reason
            occurrence, attempt = slots[0].occurrence, slots[0].attempt + 1
            if reason.startswith("no rollout") and attempt < self._options.max_attempts_per_prompt:
                self._pending.append(self._group(occurrence, attempt=attempt))
            elif self.num_tasks - self._num_prompts < self._options.max_replacements:
                self._pending.append(self._group(self.num_tasks, attempt=0))
                self.num_tasks += 1
            elif self._options.on_shortfall == "raise":
                raise CollectionError(self._shortfall())

    def _reason_to_drop(self, slots: tuple[Slot, ...]) -> str | None:
        group = [self._by_id[rollout_id_of(slot)] for slot in slots]
        if not any(rollout.is_voter for rollout in group):
            first = next((r.status_reason for r in group if r.status_reason), "") or ""
            return f"no rollout votes; {rollout_id_of(slots[0])}: {''.join(first.strip().splitlines()[-1:])}"
        if self._options.drop_zero_spread and zero_spread_groups(group):
            return f"all rewards are {next(rollout.reward for rollout in group if rollout.is_voter)}"
        return None

    def _shortfall(self) -> str:
        listed = "; ".join(f"{group_id} ({reason})" for group_id, reason in list(self.dropped.items())[:4])
        return (
            f"collection {self._collection} closes with {self._num_prompts} groups, found {len(self._kept)} after "
            f"rollout.max_replacements = {self._options.max_replacements} replacements; {len(self.dropped)} were "
            f"dropped: {listed}{' …' if len(self.dropped) > 4 else ''}; raise the budget, or set "
            f"rollout.on_shortfall = 'smaller'"
        )

    def _with_vote(self, rollout: Rollout) -> Rollout:
        is_masked = self._options.truncated == "mask" and rollout.status == "truncated"
        return replace(rollout, is_masked=True) if is_masked else rollout

    def _group(self, occurrence: int, *, attempt: int) -> tuple[Slot, ...]:
        slots = group_slots(
            collection=self._collection,
            occurrence=occurrence,
            num_generations=self._num_generations,
            attempt=attempt,
            task_index=self._first_task + occurrence,
            first_index=self._num_slots,
        )
        self._num_slots += len(slots)
        return slots
