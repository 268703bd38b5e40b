"""The plans that a page draws: which of a run's, and each as plain data, ranks by micro-batches by rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.errors import EvenstepError, FileFormatError
from evenstep.plan import StepPlan
from evenstep.report.text import shortened, significant, visible

__all__ = ["PlansShown", "plans_shown", "spread_order"]

MAX_PLANS = 60
MAX_BYTES = 600_000  # of all plans in the page
MAX_ROWS = 3_000  # of one plan; ranks beyond it are left out
STACKED = ("fixed", "padded")  # layouts whose rows lie above each other, padded to one width

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansShown:
    """Plans as data for the page, in order of windows, and what is not among them."""

    plans: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_stored: int = 0
    problems: list[str] = field(default_factory=list[str])


def plans_shown(folder: Path, windows: Sequence[Metrics]) -> PlansShown:
    """A bounded choice of a run's plans: first and last, the most telling ones, and the rest spread evenly."""
    stored = {int(path.stem[7:]): path for path in folder.glob("window_*.json") if path.stem[7:].isdecimal()}
    shown: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    num_bytes = 0
    reused = _reused(windows)
    for window in _in_order_of_interest(sorted(stored), windows):
        if len(shown) == MAX_PLANS or num_bytes > MAX_BYTES:
            break
        try:
            plan = _plan_json(stored[window], window)
        except (EvenstepError, OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            problems.append(f"plans/{stored[window].name}: {shortened(str(error) or type(error).__name__, 300)}")
            continue
        plan["also"] = reused.get(window, [])[:50]
        num_bytes += len(json.dumps(plan))
        shown[window] = plan
    return PlansShown(plans=[shown[w] for w in sorted(shown)], num_stored=len(stored), problems=problems)


def spread_order(num: int) -> list[int]:
    """0 … num-1 so that the first few are spread over all of them.

    >>> spread_order(5)
    [0, 4, 2, 1, 3]
    """
    order: dict[int, None] = {}
    parts = 1
    while len(order) < num:
        order.update(dict.fromkeys(part * (num - 1) // parts for part in range(parts + 1)))
        parts *= 2
    return list(order)


def _in_order_of_interest(stored: Sequence[int], windows: Sequence[Metrics]) -> Iterable[int]:
    chosen: dict[int, None] = {}
    if stored:
        chosen |= {stored[0]: None, stored[-1]: None}
    is_stored = set(stored)
    known = [window for window in windows if window["window"] in is_stored]
    for key, sign in (("num_rows", -1), ("num_rows", 1), ("num_fillers", -1), ("padding_efficiency", 1),
                      ("lockstep_efficiency", 1)):  # fmt: skip
        with_value = [window for window in known if isinstance(window.get(key), (int, float))]
        if with_value:
            chosen[min(with_value, key=lambda window: sign * window[key])["window"]] = None
    chosen |= dict.fromkeys(window["window"] for window in known if window.get("stepped") is False)
    # of many windows without a step, a few are enough
    first = dict.fromkeys(list(chosen)[: MAX_PLANS // 3])
    return first | dict.fromkeys(stored[index] for index in spread_order(len(stored)))


def _reused(windows: Sequence[Metrics]) -> dict[int, list[int]]:
    """By window of a first epoch the later windows that ran its plan again."""
    first: dict[str, list[int]] = {}
    for window in windows:
        if window.get("epoch") == 0:
            first.setdefault(str(window.get("collection")), []).append(window["window"])
    found: dict[int, list[int]] = {}
    for window in windows:
        epoch, begun = window.get("epoch"), first.get(str(window.get("collection")))
        if isinstance(epoch, int) and epoch > 0 and begun:
            found.setdefault(window["window"] - epoch * len(begun), []).append(window["window"])
    return found


def _plan_json(path: Path, window: int) -> dict[str, Any]:
    """One plan as the page draws it; rows by their place in the plan's list."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = data.pop("rows", None)
    if rows is None:
        raise FileFormatError("holds no `rows`, which say how long each row is (an older evenstep wrote it)")
    plan = StepPlan.from_json(data)
    cells = plan.cells
    if max((row for rank in cells for cell in rank for row in cell), default=-1) >= len(rows):
        raise FileFormatError(f"its cells name rows beyond the {len(rows)} that it lists")
    tokens = [_length(row["num_tokens"]) for row in rows]
    # what the plan took: with images, room for their patches beside the tokens
    lengths = [_length(row.get("length", row["num_tokens"])) for row in rows]
    num_shown = _num_ranks_shown(cells)
    kept = sorted({row for rank in cells[:num_shown] for cell in rank for row in cell})
    place = {row: index for index, row in enumerate(kept)}
    groups, rollouts = _Numbers(), _Numbers()
    for row in rows:  # numbered over all rows, so that a cut plan has the same names
        groups.of(row["group_id"])
        rollouts.of(row["rollout_id"])
    labels = _rollout_labels(rows)
    names = dict.fromkeys(str(rows[row]["rollout_id"]) for row in kept)
    return {
        "window": window,
        "layout": plan.layout,
        "isStacked": plan.layout in STACKED,
        "numRanks": plan.num_ranks,
        "budget": plan.budget,
        "cellRows": plan.micro_batch_rows if plan.layout == "fixed" else None,
        "multiple": plan.multiple,
        "numRollouts": len(rollouts.names),
        "numGroups": len(groups.names),
        "groupIds": [_name(name) for name in groups.names],
        "rollouts": {str(rollouts.of(name)): [_name(name), labels[name]] for name in names},
        "g": [groups.of(rows[row]["group_id"]) for row in kept],
        "r": [rollouts.of(rows[row]["rollout_id"]) for row in kept],
        "s": [_segment(rows[row]["row_id"]) for row in kept],
        "n": [lengths[row] for row in kept],
        "images": [lengths[row] - tokens[row] for row in kept] if lengths != tokens else None,
        "t": [_length(rows[row]["num_trained_tokens"]) for row in kept],
        "cells": [[[place[row] for row in cell] for cell in rank] for rank in cells[:num_shown]],
        "widths": [[_width(plan, [lengths[row] for row in cell]) for cell in rank] for rank in cells[:num_shown]],
        "rowsPerRollout": np.bincount(np.bincount([rollouts.of(row["rollout_id"]) for row in rows])).tolist(),
        "overlong": [place[item.row] for item in plan.overlong if item.row in place],
        "stats": {name: significant(value) for name, value in plan.stats.to_dict().items()},
    }


def _length(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise FileFormatError(f"a row's number of tokens must be an integer ≥ 0, found {value!r}")
    return value


def _num_ranks_shown(cells: Sequence[Sequence[Sequence[int]]]) -> int:
    """Ranks from the first on whose cells and rows are few enough to draw; at least one."""
    total = 0
    for number, rank in enumerate(cells):
        total += sum(max(len(cell), 1) for cell in rank)
        if total > MAX_ROWS and number:
            return number
    return len(cells)


def _width(plan: StepPlan, lengths: Sequence[int]) -> int:
    """Tokens from the left to the right edge of a cell: of its longest row, padded, or of all its rows end to end."""
    if not lengths:
        return 0
    if plan.layout in STACKED:
        return plan.padded_width(max(lengths))
    # what rows of a tree share is not known here; end to end it is repeated
    return sum(lengths) if plan.layout == "tree" else plan.room.cell_footprint(np.array(lengths, dtype=np.int64))


class _Numbers:
    """Numbers for names, in order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self.numbers)

    def of(self, name: Any) -> int:
        return self.numbers.setdefault(str(name), len(self.numbers))


def _name(text: str) -> str:
    return visible(shortened(text, 120))


def _rollout_labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """A short number of each rollout within its group: the one at the end of its id, or else its place."""
    members: dict[str, dict[str, None]] = {}
    for row in rows:
        members.setdefault(str(row["group_id"]), {})[str(row["rollout_id"])] = None
    labels: dict[str, int] = {}
    for ids in members.values():
        ends = {name: re.search(r"/g(\d{1,4})$", name) for name in ids}
        for place, (name, end) in enumerate(ends.items()):
            labels[name] = int(end[1]) if end is not None and all(ends.values()) else place
    return labels


def _segment(row_id: Any) -> int:
    found = re.search(r"/s(\d{1,6})$", str(row_id))
    return int(found[1]) if found else 0
