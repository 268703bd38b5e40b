"""evenstep's own files: rollouts, rows and lengths, line by line, and the windows of a run from its folder."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evenstep.errors import FileFormatError, PlanError, SegmentationError
from evenstep.files.lines import LengthsLine, LineError, RolloutLine, RowLine
from evenstep.files.reading import to_rollout
from evenstep.imports.rows import FoundRow, RowColumns
from evenstep.imports.text_lines import as_object, numbered_lines
from evenstep.plan import StepPlan
from evenstep.rollout.call_tree import OnUndeclared
from evenstep.rollout.segments import segments_of
from evenstep.types import Rollout
from evenstep.validation import shown

__all__ = ["is_run_folder", "looks_like_own", "own_reader", "read_run", "recorded_lengths", "recorded_plans"]

KINDS = ("rollout", "row", "lengths")
_KIND = re.compile(rb'"kind"\s*:\s*"(\w+)"')
_COLLECTION_IN_NAME = re.compile(r"collection_(\d+)")


def looks_like_own(values: Mapping[str, Any]) -> bool:
    """Whether an object is a line of one of evenstep's files."""
    return "format_version" in values and values.get("kind") in KINDS


def own_reader(file_name: str) -> Callable[[bytes], Iterator[FoundRow | str]]:
    """A reader of the lines of one file; refuses an id that it has seen before."""
    seen: set[str] = set()
    found = _COLLECTION_IN_NAME.search(file_name)
    step = int(found.group(1)) if found else None

    def read(text: bytes) -> Iterator[FoundRow | str]:
        # written first, so the whole line need not be parsed twice
        named = _KIND.search(text, 0, 200)
        kind = named.group(1).decode() if named else as_object(text).get("kind")
        if kind == "rollout":
            line = RolloutLine.parse(text)
            _require_new("rollout_id", line.rollout_id, seen)
            yield from _rows_of_rollout(to_rollout(line), step)
        elif kind == "row":
            row = RowLine.parse(text)
            _require_new("row_id", row.row_id, seen)
            yield FoundRow(
                length=len(row.token_ids),
                rollout_id=row.rollout_id,
                group_id=row.group_id,
                num_trained=sum(row.loss_mask),
                token_ids=row.token_ids,
                routed_experts=None if row.routed_experts is None else row.routed_experts.to_experts(),
            )
        elif kind == "lengths":
            lengths = LengthsLine.parse(text)
            _require_new("row_id", lengths.row_id, seen)
            yield FoundRow(
                length=lengths.num_tokens,
                rollout_id=lengths.rollout_id,
                group_id=lengths.group_id,
                num_trained=lengths.num_trained_tokens,
            )
        else:
            raise LineError(
                "kind", f"must be one of {', '.join(map(repr, KINDS))}, found {shown(kind)}; see docs/files.md"
            )

    return read


def _require_new(name: str, value: str, seen: set[str]) -> None:
    if value in seen:
        raise LineError(name, f'must be unique in the file, found "{value}" before; remove one of the two lines')
    seen.add(value)


def _rows_of_rollout(
    rollout: Rollout, step: int | None, on_undeclared: OnUndeclared = "segment", *, is_replayed: bool = True
) -> Iterator[FoundRow | str]:
    if not rollout.is_voter:
        yield "failed or masked rollouts, which have no rows"
        return
    try:
        segments = segments_of(rollout, on_undeclared=on_undeclared)
    except SegmentationError as error:
        raise LineError("calls", str(error)) from None
    for segment in segments:
        if segment.routed_experts is not None and not is_replayed:
            yield "rows have routed experts that the run did not replay, so these"
        yield FoundRow(
            length=segment.num_tokens + sum(image.num_patches for image in segment.media),
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            step=step,
            num_trained=segment.num_trained_tokens,
            token_ids=None if segment.media else segment.token_ids,  # no layout shares the tokens of images
            routed_experts=segment.routed_experts if is_replayed else None,
        )


# ---------------------------------------------------------------------------------------------------- run folders


def is_run_folder(path: Path) -> bool:
    """Whether a folder is a run's: it has a configuration, and knows what its collections were made of."""
    return (path / "config.toml").is_file() and (path / "collections.jsonl").is_file()


def read_run(folder: Path, columns: RowColumns) -> None:
    """The rows of every window that a run has trained, in the order the run planned them; the step is the window."""
    config = _config(folder)
    try:
        train = config["train"]
        per_window, per_collection = int(train["rollouts_per_window"]), int(train.get("windows_per_collection", 1))
        is_masked = config.get("rollout", {}).get("truncated") == "mask"
        is_replayed = train.get("routing_replay") != "off"
        # a run that refuses undeclared breaks has trained none
        on_undeclared = "realign" if config.get("rollout", {}).get("on_undeclared") == "realign" else "segment"
    except (KeyError, TypeError, ValueError):
        raise FileFormatError(
            f"{folder / 'config.toml'}: must have train.rollouts_per_window, found none; name the rollout files instead"
        ) from None
    for number, text in numbered_lines(folder / "collections.jsonl"):
        where = f"{folder / 'collections.jsonl'}, line {number}"
        try:
            record = as_object(text)
            groups, first_window = _index_fields(record)
        except LineError as problem:
            columns.bad(where, problem)
            continue
        found = _groups_of(folder, record, columns)
        window, count = first_window, 0
        for group_id in groups:
            rollouts = found.get(group_id)
            if rollouts is None:
                columns.bad(
                    where, LineError("groups", f"must be groups of its file, found {group_id!r} without rollouts")
                )
                continue
            if count >= per_window and window + 1 < first_window + per_collection:
                window, count = window + 1, 0
            count += len(rollouts)
            for rollout, at in rollouts:
                if is_masked and rollout.status == "truncated":
                    continue
                columns.take(_rows_of_rollout(rollout, window, on_undeclared, is_replayed=is_replayed), at)


def _index_fields(record: Mapping[str, Any]) -> tuple[list[str], int]:
    groups, first = record.get("groups"), record.get("first_window")
    if not isinstance(groups, list):
        raise LineError("groups", f"must be an array of group ids, found {shown(groups)}; restore the file")
    if type(first) is not int:
        raise LineError("first_window", f"must be a whole number, found {shown(first)}; restore the file")
    return [str(group) for group in groups], first


def _groups_of(folder: Path, record: Mapping[str, Any], columns: RowColumns) -> dict[str, list[tuple[Rollout, str]]]:
    """Group -> its rollouts and where they stand, from a collection's file and what was carried into it."""
    paths = [folder / "rollouts" / f"carried_{record.get('collection', 0):06d}.jsonl.gz"]
    paths.append(folder / "rollouts" / str(record.get("file")))
    groups: dict[str, dict[str, tuple[Rollout, str]]] = {}
    for path in paths:
        if not path.is_file():
            continue
        try:
            for number, text in numbered_lines(path):
                at = f"{path}, line {number}"
                try:
                    rollout = to_rollout(RolloutLine.parse(text))
                except LineError as problem:
                    columns.bad(at, problem)
                    continue
                groups.setdefault(rollout.group_id, {})[rollout.rollout_id] = (rollout, at)
        except LineError as problem:
            columns.bad(str(path), problem)
    return {group: list(found.values()) for group, found in groups.items()}


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FileFormatError(f"{path}: must be TOML, found {error}; restore the file") from None


def recorded_plans(folder: Path) -> dict[int, StepPlan]:
    """The plans that a run has written, by window.

    Raises:
        FileFormatError: a plan's file is broken or was changed.
    """
    return {window: plan for window, (plan, _) in _recorded(folder).items()}


def recorded_lengths(folder: Path) -> dict[int, list[int]]:
    """What these plans took for the lengths of their rows, of windows in which some have images.

    Raises:
        FileFormatError: a plan's file is broken or was changed.
    """
    return {window: lengths for window, (_, lengths) in _recorded(folder).items() if lengths}


def _recorded(folder: Path) -> dict[int, tuple[StepPlan, list[int]]]:
    plans: dict[int, tuple[StepPlan, list[int]]] = {}
    for path in sorted((folder / "plans").glob("window_*.json")):
        try:
            data = json.loads(path.read_bytes())
            rows = data.get("rows", ())
            has_images = any("length" in row for row in rows)
            lengths = [int(row.get("length", row["num_tokens"])) for row in rows] if has_images else []
            plans[int(path.stem.removeprefix("window_"))] = StepPlan.from_json(data), lengths
        except (PlanError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise FileFormatError(f"{path}: must be a step plan, found {error}; remove the file") from None
    return plans
