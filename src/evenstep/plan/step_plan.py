"""The plan as a value: which rows each rank runs in each of its micro-batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from evenstep.errors import PlanError
from evenstep.plan.cost import CostModel
from evenstep.plan.footprint import Layout, Room
from evenstep.plan.measure import PlanStats
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.promises import check_promises
from evenstep.plan.request import Request
from evenstep.types import Int64Array

__all__ = ["Cells", "Overlong", "StepPlan"]

Cells = tuple[tuple[tuple[int, ...], ...], ...]
_FORMAT_VERSION = 1


class Overlong(NamedTuple):
    """A row that alone exceeds the budget and therefore stands alone."""

    row: int  # index into lengths
    length: int  # tokens
    budget: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Which rows run in which micro-batch of which rank, for one optimizer step.

    >>> from evenstep.plan import plan_step
    >>> plan = plan_step([7, 5, 4, 3, 2], num_ranks=2, max_tokens_per_gpu=12, layout="packed")
    >>> for r, cells in enumerate(plan.cells):            # 7+3 beside 5+4+2: one column, K = 1
    ...     print(f"rank {r}:", cells)
    rank 0: ((1, 2, 4),)
    rank 1: ((0, 3),)
    >>> StepPlan.from_json(plan.to_json()) == plan
    True
    """

    request: Request  # what the plan was asked to be
    cells: Cells  # [W][K] row indices, longest row first; () is an inert filler
    window: tuple[int, ...] | None  # rows of this step, ascending; None: all rows
    overlong: tuple[Overlong, ...]  # rows over the budget, each alone in its cell
    stats: PlanStats

    @property
    def num_ranks(self) -> int:
        return self.request.num_ranks

    @property
    def max_tokens_per_gpu(self) -> int | None:
        return self.request.max_tokens_per_gpu

    @property
    def layout(self) -> Layout:
        return self.request.layout

    @property
    def cost(self) -> CostModel:
        return self.request.cost

    @property
    def micro_batch_rows(self) -> int:
        """Rows a cell's shape has in layout ``fixed``; the executor fills cells up to it. 1 in other layouts."""
        return self.request.micro_batch_rows

    @property
    def room(self) -> Room:
        return self.request.room

    @property
    def budget(self) -> int | None:
        """Most tokens a cell may occupy: ``max_tokens_per_gpu * cp * tp``."""
        return self.room.budget

    @property
    def multiple(self) -> int:
        """Widths are multiples of it: ``lcm(2 * cp if cp > 1 else 1, pad_to_multiple)``."""
        return self.room.multiple

    @property
    def num_microbatches(self) -> int:
        """K, the same on every rank."""
        return len(self.cells[0])

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of the rows this plan covers, ascending."""
        return tuple(range(self.stats.num_rows)) if self.window is None else self.window

    def for_rank(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """[K] The cells of one rank, in the order it runs them.

        >>> from evenstep.plan import plan_step
        >>> plan = plan_step([7, 5, 4, 3, 2, 2], num_ranks=2, max_tokens_per_gpu=7, layout="packed",
        ...                  num_microbatches_multiple=2)
        >>> plan.for_rank(1)                                  # K = 2: 5 + 2 beside 7, then 3 + 2 beside 4
        ((1, 4), (3, 5))

        Raises:
            PlanError: no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"rank must be within 0 and {self.num_ranks - 1}, found {rank}")
        return self.cells[rank]

    def padded_width(self, longest: int) -> int:
        """Tokens each row of a padded or fixed cell takes when its longest row has ``longest`` tokens."""
        room = self.room
        return int(room.alone(np.array([longest], dtype=np.int64))[0]) // (
            room.cell_rows if room.layout == "fixed" else 1
        )

    def check(
        self,
        lengths: Sequence[int] | Int64Array,
        *,
        rollout_ids: Sequence[Hashable] | None = None,
        group_ids: Sequence[Hashable] | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """Verify every promise of the plan against the rows' lengths; cheap enough for every step.

        Layout ``tree`` needs the ``prefixes`` that it was planned with.

        Raises:
            PlanError: names the promise, the rows, ranks and micro-batches, and the numbers.
        """
        check_promises(self, lengths, rollout_ids=rollout_ids, group_ids=group_ids, prefixes=prefixes)

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of what runs where: equal on every platform and in every process.

        Ranks compare it before the first collective of a window.
        """
        request = asdict(self.request)
        for name in ("cost", "effort"):  # how the plan was found is not what it is
            del request[name]
        sizes = np.array([len(cell) for rank in self.cells for cell in rank], dtype="<i8")
        rows = np.array([row for rank in self.cells for cell in rank for row in cell], dtype="<i8")
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode())
        for array in (sizes, rows):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the request's fields, ``cells[rank][k]``, ``window``, ``overlong``, ``stats``, ``hash``."""
        return {
            "format_version": _FORMAT_VERSION,
            **asdict(self.request),
            "cells": [[list(cell) for cell in rank] for rank in self.cells],
            "window": None if self.window is None else list(self.window),
            "overlong": [item._asdict() for item in self.overlong],
            "stats": self.stats.to_dict(),
            "hash": self.hash,
        }

    def to_json(self) -> str:
        """The plan as JSON text; see ``to_dict`` for its keys."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes | Mapping[str, Any]) -> StepPlan:
        """Rebuild a plan from ``to_json()`` or ``to_dict()``.

        Raises:
            PlanError: another format version, a key is absent, or the hash is not that of the cells.
        """
        data: dict[str, Any] = dict(text) if isinstance(text, Mapping) else json.loads(text)
        if data.get("format_version") != _FORMAT_VERSION:
            raise PlanError(f"a plan file has format_version {_FORMAT_VERSION}, found {data.get('format_version')!r}")
        names = list(Request.__slots__)
        absent = [n for n in [*names, "cells", "window", "overlong", "stats", "hash"] if n not in data]
        if absent:
            raise PlanError(f"a plan file has the keys of StepPlan.to_dict(), found none of {absent}; write it again")
        fields = {name: data[name] for name in names}
        fields["cost"] = CostModel.from_dict(data["cost"])
        plan = cls(
            request=Request(**fields),
            cells=tuple(tuple(tuple(cell) for cell in rank) for rank in data["cells"]),
            window=None if data["window"] is None else tuple(data["window"]),
            overlong=tuple(Overlong(**item) for item in data["overlong"]),
            stats=PlanStats(**data["stats"]),
        )
        if plan.hash != data["hash"]:
            raise PlanError(f"the plan's hash is {plan.hash}, the file says {data['hash']}; it was changed by hand")
        return plan
