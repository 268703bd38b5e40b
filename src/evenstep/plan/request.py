"""Reading ``plan_step``'s arguments: everything is checked here, once, and bad input never reaches the algorithms."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from evenstep.errors import PlanError
from evenstep.plan.cost import CostModel
from evenstep.plan.footprint import LAYOUTS, Layout, Room
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.plan.problem import Problem, make_problem
from evenstep.types import Int64Array

__all__ = [
    "Effort",
    "Placement",
    "Request",
    "Sync",
    "id_ranks",
    "problem_of",
    "read_lengths",
    "require_choice",
    "require_prefixes",
    "whole",
]

Placement = Literal["global", "local"]
Sync = Literal["micro_batch", "step"]
Effort = Literal["default", "high"]
_AMPLE = 2**45  # tokens that no window has; as a budget it is no limit, and its multiples stay exact integers
_LONGEST = 2**31  # beyond it, sums of attended pairs leave the exact integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a plan is asked to be, apart from the rows themselves."""

    num_ranks: int  # W
    max_tokens_per_gpu: int | None
    layout: Layout
    placement: Placement
    micro_batch_rows: int
    logprob_micro_batch_rows: int
    pad_scope: Literal["window", "group"]
    pad_to_multiple: int
    bucket: float | None
    cp: int
    tp: int
    sync: Sync
    cost: CostModel
    effort: Effort
    min_microbatches: int
    num_microbatches_multiple: int
    max_rows_per_microbatch: int | None
    overlong_policy: Literal["alone", "error"]  # the argument `overlong`

    @property
    def room(self) -> Room:
        """The shape rules of this plan's cells."""
        alignment = 2 * self.cp if self.cp > 1 else 1
        given = None if self.max_tokens_per_gpu is None else self.max_tokens_per_gpu * self.cp * self.tp
        budget = None if given is None else min(given, _AMPLE)
        return Room(
            layout=self.layout,
            budget=budget,
            multiple=math.lcm(alignment, self.pad_to_multiple),
            bucket=self.bucket,
            max_rows=self.max_rows_per_microbatch,
            cell_rows=self.micro_batch_rows,
        )

    def validate(self) -> None:
        """Refuse values outside their range and combinations that contradict each other."""
        for name, least in (
            ("num_ranks", 1),
            ("micro_batch_rows", 1),
            ("logprob_micro_batch_rows", 1),
            ("pad_to_multiple", 1),
            ("cp", 1),
            ("tp", 1),
            ("min_microbatches", 1),
            ("num_microbatches_multiple", 1),
        ):
            if getattr(self, name) < least:
                raise PlanError(f"{name} must be an integer ≥ {least}, found {getattr(self, name)}; raise it")
        for name in ("max_tokens_per_gpu", "max_rows_per_microbatch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be an integer ≥ 1 or None, found {value}; raise it")
        require_choice("layout", self.layout, LAYOUTS)
        require_choice("placement", self.placement, ("global", "local"))
        require_choice("sync", self.sync, ("micro_batch", "step"))
        require_choice("effort", self.effort, ("default", "high"))
        require_choice("pad_scope", self.pad_scope, ("window", "group"))
        require_choice("overlong", self.overlong_policy, ("alone", "error"))
        self._validate_cost_and_bucket()
        self._validate_combinations()

    def _validate_cost_and_bucket(self) -> None:
        cost: Any = self.cost
        if not isinstance(cost, CostModel):
            raise PlanError(f"cost must be a CostModel or None, found {type(cost).__name__}; see CostModel.from_shape")
        bucket: Any = self.bucket
        if bucket is None:
            return
        if isinstance(bucket, bool) or not isinstance(bucket, (int, float)) or not 0.0 < float(bucket) < 1.0:
            raise PlanError(
                f"bucket must be None or the largest share of a width that may be wasted, between 0 and 1, "
                f"found {bucket!r}; 0.125 is a good start"
            )

    def _validate_combinations(self) -> None:
        room = self.room
        if room.budget is not None and room.multiple > room.budget:
            raise PlanError(
                f"a width is a multiple of {room.multiple} (pad_to_multiple = {self.pad_to_multiple}, cp = {self.cp}), "
                f"more than the budget of {room.budget} tokens (max_tokens_per_gpu = {self.max_tokens_per_gpu}); "
                f"lower pad_to_multiple or raise max_tokens_per_gpu"
            )
        if room.multiple > _AMPLE:
            raise PlanError(f"pad_to_multiple must be at most {_AMPLE}, found {self.pad_to_multiple}; lower it")
        if self.layout == "fixed":
            if self.max_rows_per_microbatch is not None and self.max_rows_per_microbatch < self.micro_batch_rows:
                raise PlanError(
                    f"layout 'fixed' runs micro_batch_rows = {self.micro_batch_rows} rows at a time, more than "
                    f"max_rows_per_microbatch = {self.max_rows_per_microbatch}; lower micro_batch_rows"
                )
            return
        for name, value, neutral in (
            ("micro_batch_rows", self.micro_batch_rows, 1),
            ("logprob_micro_batch_rows", self.logprob_micro_batch_rows, 1),
            ("pad_scope", self.pad_scope, "window"),
        ):
            if value != neutral:
                raise PlanError(
                    f"{name} = {value!r} applies to layout 'fixed' only, found layout {self.layout!r}; "
                    f"leave it out, or choose layout='fixed'"
                )


def whole(name: str, value: Any) -> int:
    """``value`` as a plain int; booleans and floats are refused."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise PlanError(f"{name} must be a whole number, found {value!r}; give an integer")
    return int(cast("int", value))


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise PlanError(f"{name} must be one of {', '.join(map(repr, choices))}, found {value!r}")


def read_lengths(lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Int64Array:
    """[R] The row lengths as int64; anything but whole numbers ≥ 1 raises."""
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise PlanError(f"lengths must be a flat list of integers, found shape {array.shape}")
    if array.size == 0:
        raise PlanError("lengths must name at least one row, found 0; a window without rows needs no plan, skip it")
    if array.dtype.kind not in "iu":
        bad = [(i, v) for i, v in enumerate(array.tolist()) if type(v) is not int]
        where = f"lengths[{bad[0][0]}] = {bad[0][1]!r}" if bad else f"dtype {array.dtype}"
        raise PlanError(f"lengths must be integers ≥ 1, found {where}; count the row's tokens")
    wrong = np.flatnonzero((array < 1) | (array >= _LONGEST))
    if wrong.size:
        first = int(wrong[0])
        raise PlanError(
            f"lengths must be between 1 and {_LONGEST - 1}, found lengths[{first}] = {array[first]} "
            f"({wrong.size} rows in all); a row without tokens is no row, leave it out"
        )
    return array.astype(np.int64)


def require_prefixes(layout: str, prefixes: SharedPrefixes | None, lengths_R: Int64Array) -> None:
    """Raise unless layout ``tree`` has prefixes that belong to these lengths, and no other layout has any."""
    if layout != "tree":
        if prefixes is not None:
            raise PlanError(f"prefixes say what rows share in layout 'tree', found layout {layout!r}; leave them out")
        return
    given: Any = prefixes
    if not isinstance(given, SharedPrefixes):
        raise PlanError(
            f"layout 'tree' needs prefixes: which rows begin alike, found {type(given).__name__}; give "
            f"prefixes=shared_prefixes(token ids of each row)"
        )
    for name in ("order_R", "shared_R"):
        values: Any = getattr(given, name)
        kind = str(values.dtype) if type(values) is np.ndarray else type(values).__name__
        if not kind.startswith("int"):
            raise PlanError(
                f"prefixes.{name} must be an array of integers, found {kind}; use np.array(..., dtype=np.int64)"
            )
    order, shared = given.order_R, given.shared_R
    if order.shape != lengths_R.shape or shared.shape != lengths_R.shape:
        raise PlanError(
            f"prefixes must cover each of the {lengths_R.size} rows, found {order.size} rows and {shared.size} shared "
            f"lengths; make them of the same rows"
        )
    if not np.array_equal(np.sort(order), np.arange(order.size)):
        raise PlanError(f"prefixes.order_R must name each of the {order.size} rows once, found {order[:20].tolist()}")
    most = lengths_R[order]
    most = np.minimum(most, np.append(0, most[:-1]))
    wrong = np.flatnonzero((shared < 0) | (shared > most))
    if wrong.size:
        at = int(wrong[0])
        raise PlanError(
            f"a row shares with the one before it at most what both have, found row {order[at]} of "
            f"{lengths_R[order[at]]} tokens sharing {shared[at]}, at most {most[at]} are possible ({wrong.size} rows "
            f"wrong in all); make prefixes of the rows that have these lengths"
        )


def id_ranks(name: str, ids: Sequence[Hashable] | None, num_rows: int, *, unique: bool) -> Int64Array | None:
    """[R] Position of each id in the order of all ids, which depends on their values alone; None without ids."""
    if ids is None:
        return None
    listed: list[Hashable] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if len(listed) != num_rows:
        raise PlanError(f"{name} must name each of the {num_rows} rows, found {len(listed)}; give one id per length")
    # Plain integers or strings sort by value; anything else by a text that names its type.
    kinds = {type(item) for item in listed}
    is_plain = kinds == {str} or (kinds == {int} and _fit_int64(cast("list[int]", listed)))
    keys = np.array(listed if is_plain else [_id_key(item) for item in listed])
    values, ranks, counts = np.unique(keys, return_inverse=True, return_counts=True)
    if unique and len(values) != num_rows:
        rows = np.flatnonzero(ranks == int(counts.argmax())).tolist()
        raise PlanError(f"{name} must be unique, found {listed[rows[0]]!r} at rows {rows[:5]}; number the rows")
    return ranks.astype(np.int64)


def _fit_int64(items: list[int]) -> bool:
    return min(items) >= -(2**63) and max(items) < 2**63


def _id_key(item: Hashable) -> str:
    """Text that orders ids the same way on every platform and in every process."""
    value = cast("Any", item.item()) if isinstance(item, np.generic) else cast("Any", item)
    if isinstance(value, tuple):
        return "(" + ",".join(_id_key(part) for part in cast("tuple[Hashable, ...]", value)) + ")"
    if value is None or isinstance(value, (str, bytes, int, float)):
        return f"{type(value).__name__}:{value!r}"
    raise PlanError(
        f"ids must be strings, numbers or tuples of them, found {type(value).__name__}: its order could differ between "
        f"processes; pass str(id)"
    )


def read_groups_of_rows(
    name: str, listed: Sequence[Sequence[int]], num_rows: int, *, may_be_empty: bool
) -> list[Int64Array]:
    """Index lists that together name each row exactly once (windows, or the rows of each rank)."""
    if isinstance(listed, (str, bytes, Mapping)) or not isinstance(listed, (list, tuple, np.ndarray)):
        raise PlanError(f"{name} must be a list of index lists, found {type(listed).__name__}")
    parts: list[Int64Array] = []
    for i, part in enumerate(listed):
        array = np.asarray(part)
        if array.size == 0:
            if not may_be_empty:
                raise PlanError(f"{name}[{i}] must name at least one row, found none; leave the empty window out")
            array = np.zeros(0, dtype=np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise PlanError(f"{name}[{i}] must be a flat list of row indices, found {part!r}")
        outside = array[(array < 0) | (array >= num_rows)]
        if outside.size:
            raise PlanError(f"{name}[{i}] names row {outside[0]}, there are rows 0 to {num_rows - 1}")
        parts.append(array.astype(np.int64))
    seen = np.bincount(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64), minlength=num_rows)
    wrong = np.flatnonzero(seen != 1)
    if wrong.size:
        first = int(wrong[0])
        raise PlanError(
            f"{name} must name every row exactly once, found row {first} {seen[first]} times "
            f"({wrong.size} rows in all); each row is trained once"
        )
    return parts


def problem_of(
    request: Request,
    rows: Int64Array,
    lengths_R: Int64Array,
    ties: Int64Array | None,
    prefixes: SharedPrefixes | None,
) -> Problem:
    """The rows with indices ``rows`` in canonical order, under a request's rules; ``prefixes`` are of all rows."""
    return make_problem(
        rows,
        lengths_R,
        ties,
        room=request.room,
        cost=request.cost,
        num_ranks=request.num_ranks,
        min_microbatches=request.min_microbatches,
        k_multiple=request.num_microbatches_multiple,
        prefixes=None if prefixes is None else prefixes.among(rows),
    )
