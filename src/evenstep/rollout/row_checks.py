"""Tagged rows of somebody else's rollouts: checked as a whole before any of them is used or written.

A producer that splits rollouts itself hands over rows and fillers with tags that say whose they are. One wrong tag
trains a token with another rollout's advantage, so everything is checked, and the first contradiction raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

import numpy as np

from evenstep.errors import CollectionError, RowError

__all__ = ["CheckedRows", "TaggedRow", "check_rows"]

_SEGMENT_TAGS = ("segment", "num_segments")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedRow:
    """One row as a producer hands it over; a mapping with these keys is as good.

    ``segment`` and ``num_segments`` are both given on every row, or on none: then each rollout has one row.
    """

    row_id: str  # "<rollout_id>/s<segment>"; any other text for a filler
    rollout_id: str | None  # whose row it is; None for a filler
    group_id: str | None  # of the rollout; the group that a filler fills up, or None
    num_generations: int | None  # rollouts in the group; None for a filler
    reward: float  # the rollout's, on each of its rows; 0 for a filler
    prompt_ids: Sequence[int]  # the original prompt of the group, before any compaction
    token_ids: Sequence[int]  # [T]
    loss_mask: Sequence[int]  # [T] 1 where the token was sampled and is trained; all 0 for a filler
    is_filler: bool
    segment: int | None = None  # position among the rollout's rows, from 0; None for a filler
    num_segments: int | None = None  # rows of the rollout; None for a filler


_TAGS = tuple(TaggedRow.__dataclass_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """What consistent rows amount to."""

    num_rows: int  # without fillers
    num_fillers: int
    num_rollouts: int  # failed ones, which have no rows, included
    num_groups: int
    num_trained_tokens: int


def check_rows(
    records: Iterable[TaggedRow | Mapping[str, Any]], *, failed: Mapping[str, str] | None = None
) -> CheckedRows:
    """Refuse tagged rows that contradict themselves or each other.

    Args:
        records: all rows and fillers of a collection, in any order.
        failed: rollout id -> group id of the rollouts that failed: they have no rows, and count in their group.

    Raises:
        RowError: something is wrong in one row: a tag is missing or of a wrong type (true and false are no integers),
            the mask is not of 0 and 1 or not of the row's length, the first token is trained, a reward is not finite,
            the row id is not that of its rollout and segment, a filler has an owner, a reward or a mask.
        CollectionError: rows contradict each other: a row id twice, segments missing, twice or outside their number,
            some rows with segment tags and some without, a rollout in two groups, with unequal rewards or numbers of
            segments, a group with unequal prompts or sizes, or not of its size, no rows but fillers.

    >>> row = dict(row_id="r/s0", rollout_id="r", group_id="g", num_generations=1, reward=1.0, prompt_ids=[5],
    ...            token_ids=[5, 6], loss_mask=[0, 1], is_filler=False, segment=0, num_segments=1)
    >>> check_rows([row]).num_trained_tokens
    1
    >>> check_rows([row | {"num_segments": 2}])
    Traceback (most recent call last):
        ...
    evenstep.errors.CollectionError: rollout 'r': its rows must be segments 0 to 1, each once; found 0; hand over all \
rows of a rollout together

    Source: the tags follow from a public proposal for training on rollouts whose context was compacted.
    """
    rows = [_record(index, record) for index, record in enumerate(records)]
    for row in rows:
        _check_row(row)
    _refuse_double(row["row_id"] for row in rows)
    real = [row for row in rows if not row["is_filler"]]
    if not real:
        raise CollectionError(
            f"a collection must hold at least one row that is no filler, found {len(rows)} fillers and nothing else; "
            f"hand over the rows that they fill up"
        )
    _check_segment_tags(real)
    by_rollout = _by(real, "rollout_id")
    for rollout_id, members in by_rollout.items():
        _require_one(f"rollout {rollout_id!r}", members, "group_id", "belong to one group")
        _require_one(f"rollout {rollout_id!r}", members, "reward", "have one reward, which is the rollout's")
        _check_segments(rollout_id, members)
    _check_groups(real, dict(failed or {}), by_rollout)
    return CheckedRows(
        num_rows=len(real),
        num_fillers=len(rows) - len(real),
        num_rollouts=len(by_rollout) + len(failed or {}),
        num_groups=len({row["group_id"] for row in real} | set((failed or {}).values())),
        num_trained_tokens=sum(sum(row["loss_mask"]) for row in real),
    )


def _record(index: int, record: TaggedRow | Mapping[str, Any]) -> dict[str, Any]:
    row = dict(record) if isinstance(record, Mapping) else {tag: getattr(record, tag) for tag in _TAGS}
    name = f"row {row['row_id']!r}" if "row_id" in row else f"row number {index}"
    missing = [tag for tag in _TAGS if tag not in row and tag not in _SEGMENT_TAGS]
    if missing:
        raise RowError(f"{name}: every row must carry all tags, found none of {', '.join(missing)}; add them")
    for tag in ("prompt_ids", "token_ids", "loss_mask"):
        values = row[tag].tolist() if isinstance(row[tag], np.ndarray) else row[tag]
        if not isinstance(values, list | tuple):
            raise RowError(f"{name}: {tag} must be a list, found {type(values).__name__}")
        row[tag] = tuple(cast(Sequence[Any], values))
    return {tag: row.get(tag) for tag in _TAGS}


def _check_row(row: Mapping[str, Any]) -> None:
    """What can be said of one row alone."""
    name = f"row {row['row_id']!r}"
    if not isinstance(row["is_filler"], bool):
        raise RowError(f"{name}: is_filler must be true or false, found {row['is_filler']!r}")
    is_filler: bool = row["is_filler"]
    for tag in ("row_id",) if is_filler else ("row_id", "rollout_id", "group_id"):
        if not isinstance(row[tag], str) or not row[tag]:
            raise RowError(f"{name}: {tag} must be a text that is not empty, found {row[tag]!r}; ids are texts")
    for tag in ("num_generations", *_SEGMENT_TAGS):
        may_be_none = is_filler or tag in _SEGMENT_TAGS
        if not (row[tag] is None and may_be_none):
            _require_integer(name, tag, row[tag], 0 if tag == "segment" else 1)
    for tag in ("prompt_ids", "token_ids", "loss_mask"):
        for value in row[tag]:
            _require_integer(name, tag, value, 0)
    if len(row["token_ids"]) != len(row["loss_mask"]) or not row["token_ids"]:
        raise RowError(
            f"{name}: token_ids and loss_mask must be of one length, at least 1, found {len(row['token_ids'])} and "
            f"{len(row['loss_mask'])}; take both from the same segment"
        )
    if wrong := sorted({value for value in row["loss_mask"] if value not in (0, 1)}):
        raise RowError(f"{name}: loss_mask must hold only 0 and 1, found {wrong[:8]}; weights belong to the loss")
    if row["loss_mask"][0] == 1:
        raise RowError(f"{name}: loss_mask[0] must be 0, found 1; no token comes before the first one")
    reward = row["reward"]
    # NumPy's numbers are Real, its booleans are not
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise RowError(
            f"{name}: reward must be a finite number, found {reward!r}; correct the scorer, or fail the rollout"
        )
    if is_filler:
        _check_filler(name, row)


def _require_integer(name: str, tag: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise RowError(f"{name}: {tag} must be an integer ≥ {least} (true and false are none), found {value!r}")


def _check_filler(name: str, row: Mapping[str, Any]) -> None:
    owned = [tag for tag in ("rollout_id", "num_generations", *_SEGMENT_TAGS) if row[tag] is not None]
    if owned:
        raise RowError(
            f"{name}: a filler belongs to no rollout, found {', '.join(f'{tag} {row[tag]!r}' for tag in owned)}; set "
            f"them to None, or is_filler to False"
        )
    if any(row["loss_mask"]):
        raise RowError(
            f"{name}: a filler trains nothing, found {sum(row['loss_mask'])} tokens in its mask; set it to 0"
        )
    if row["reward"] != 0:
        raise RowError(f"{name}: a filler has no reward, found {row['reward']}; set it to 0")


def _refuse_double(row_ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for row_id in row_ids:
        if row_id in seen:
            raise CollectionError(f"row ids must be unique, found {row_id!r} twice; each row is handed over once")
        seen.add(row_id)


def _check_segment_tags(rows: Sequence[dict[str, Any]]) -> None:
    """Segment tags stand on every row or on none; without them each row is all of its rollout."""
    tagged = [row for row in rows if any(row[tag] is not None for tag in _SEGMENT_TAGS)]
    bare = [row for row in rows if any(row[tag] is None for tag in _SEGMENT_TAGS)]
    if tagged and bare:
        raise CollectionError(
            f"segment and num_segments must both be on every row or on none, found both tags missing or one of them on "
            f"{len(bare)} of {len(rows)} rows, the first is {bare[0]['row_id']!r}; tag all rows"
        )
    for row in bare:
        row["segment"], row["num_segments"] = 0, 1
    row_of_segment: dict[tuple[str, int], str] = {}
    for row in rows:
        other = row_of_segment.setdefault((row["rollout_id"], row["segment"]), row["row_id"])
        if other != row["row_id"]:
            raise CollectionError(
                f"rollout {row['rollout_id']!r}: each of its rows must be another segment, found segment "
                f"{row['segment']} in {other!r} and {row['row_id']!r}; number its rows from 0"
            )
        expected = f"{row['rollout_id']}/s{row['segment']}"
        if row["row_id"] != expected:
            raise RowError(
                f"row {row['row_id']!r}: the id of segment {row['segment']} of rollout {row['rollout_id']!r} must be "
                f"{expected!r}; one of the three tags is another row's"
            )


def _by(rows: Iterable[dict[str, Any]], tag: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[tag], []).append(row)
    return found


def _require_one(whose: str, rows: Sequence[Mapping[str, Any]], tag: str, promise: str) -> None:
    first = rows[0]
    for row in rows:
        if row[tag] != first[tag]:
            raise CollectionError(
                f"{whose}: all of its rows must {promise}, found {tag} {first[tag]!r} in {first['row_id']!r} and "
                f"{row[tag]!r} in {row['row_id']!r}"
            )


def _check_segments(rollout_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
    _require_one(f"rollout {rollout_id!r}", rows, "num_segments", "say the same number of segments")
    num_segments: int = rows[0]["num_segments"]
    found = sorted(row["segment"] for row in rows)
    if outside := [segment for segment in found if segment >= num_segments]:
        raise CollectionError(
            f"rollout {rollout_id!r}: it has num_segments = {num_segments}, found segment {outside[0]}; segments count "
            f"from 0"
        )
    if len(found) != num_segments:  # each is there once at most
        raise CollectionError(
            f"rollout {rollout_id!r}: its rows must be segments 0 to {num_segments - 1}, each once; found "
            f"{', '.join(map(str, found))}; hand over all rows of a rollout together"
        )


def _check_groups(
    rows: Iterable[dict[str, Any]], failed: dict[str, str], by_rollout: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    if both := sorted(failed.keys() & by_rollout.keys()):
        raise CollectionError(
            f"rollout {both[0]!r}: a failed rollout must have no rows, found some; it is one or the other"
        )
    for group_id, members in _by(rows, "group_id").items():
        _require_one(f"group {group_id!r}", members, "num_generations", "say the same group size")
        _require_one(f"group {group_id!r}", members, "prompt_ids", "answer one original prompt")
        rollouts = {row["rollout_id"] for row in members} | {r for r, group in failed.items() if group == group_id}
        expected: int = members[0]["num_generations"]
        if len(rollouts) != expected:
            raise CollectionError(
                f"group {group_id!r}: num_generations = {expected} rollouts were promised, found {len(rollouts)}: "
                f"{', '.join(sorted(rollouts)[:8])}; hand over whole groups, and name failed rollouts in `failed`"
            )
