"""A compaction policy of one's own: every second observation stays, however long ago it was seen.

    evenstep train examples/ledger.toml --set compaction.policy=examples/custom_compaction.py:EveryNth

The fields are the policy's options, beside those of its schedule, and are checked like every other key:

    --set compaction.n=3 --set compaction.schedule=rolling

What a policy returns starts a new segment by itself, which is recorded, trained and counted like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from evenstep.rollout.compaction import CompactionPolicy, Context, Guard


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryNth(CompactionPolicy):
    """Keeps the turns whose index is a multiple of ``n``; when they do not fit either, the oldest of them go."""

    name: ClassVar[str] = "every_nth"
    n: int = 2
    marker: str = "..."  # stands once for each run of dropped turns

    async def compact(self, context: Context, guard: Guard) -> Context | None:
        kept = tuple(turn for turn in context.turns if turn.index % self.n == 0)
        shorter = replace(context, turns=kept, marker=self.marker)
        while shorter.turns and not guard.fits(shorter):
            shorter = replace(shorter, turns=shorter.turns[1:])
        return shorter if len(shorter.turns) < len(context.turns) else None
