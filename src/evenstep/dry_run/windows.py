"""Which rows make a step: windows of imported rows, by a number of rollouts or as their trainer cut them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from evenstep.errors import PlanError
from evenstep.experts import token_keys
from evenstep.imports import ImportedRows
from evenstep.plan.prefixes import SharedPrefixes, shared_prefixes
from evenstep.types import Int64Array

__all__ = ["PlanWindow", "cut_windows", "evenly_spaced", "with_prefixes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanWindow:
    """The rows of one optimizer step."""

    name: str
    rows: Int64Array  # indices into the imported rows, ascending
    step: int | None = None  # the trainer's own number of it
    prefixes: SharedPrefixes | None = None  # of its rows, numbered from 0; None: no token ids


def cut_windows(rows: ImportedRows, rollouts_per_window: int | None) -> list[PlanWindow]:
    """Windows of ``rollouts_per_window`` rollouts in whole groups; without it the file's own steps, or one window.

    A window closes with the group that brings it to ``rollouts_per_window``; the last one may have fewer.

    Raises:
        PlanError: ``rollouts_per_window`` is below 1.
    """
    if rollouts_per_window is None:
        if rows.steps_R is None:
            return [PlanWindow(name="all rows", rows=np.arange(rows.num_rows))]
        kind = "window" if rows.format == "evenstep" else "step"
        steps = np.unique(rows.steps_R).tolist()
        order = np.argsort(rows.steps_R, kind="stable")
        parts = np.split(order, np.searchsorted(rows.steps_R[order], steps[1:]))
        return [
            PlanWindow(name=f"{kind} {step}", rows=np.sort(part), step=step)
            for step, part in zip(steps, parts, strict=True)
        ]
    if rollouts_per_window < 1:
        raise PlanError(f"--windows must be at least 1 rollout per window, found {rollouts_per_window}; raise it")
    window_of_unit: dict[str, int] = {}
    seen_rollouts: set[str] = set()
    units = rows.rollout_ids if rows.group_ids is None else rows.group_ids
    rollouts_of_unit: dict[str, int] = {}
    for unit, rollout in zip(units, rows.rollout_ids, strict=True):
        if rollout not in seen_rollouts:
            seen_rollouts.add(rollout)
            rollouts_of_unit[unit] = rollouts_of_unit.get(unit, 0) + 1
        rollouts_of_unit.setdefault(unit, 0)
    window, held = 0, 0
    for unit, count in rollouts_of_unit.items():
        if held >= rollouts_per_window:
            window, held = window + 1, 0
        window_of_unit[unit] = window
        held += count
    window_of_R = np.array([window_of_unit[unit] for unit in units], dtype=np.int64)
    order = np.argsort(window_of_R, kind="stable")
    parts = np.split(order, np.searchsorted(window_of_R[order], np.arange(1, window + 1)))
    return [PlanWindow(name=f"window {i}", rows=np.sort(part)) for i, part in enumerate(parts)]


def evenly_spaced(windows: Sequence[PlanWindow], most: int) -> list[PlanWindow]:
    """At most ``most`` of the windows, the first and the last among them; 0: all.

    >>> windows = [PlanWindow(name=str(i), rows=np.arange(1)) for i in range(10)]
    >>> [window.name for window in evenly_spaced(windows, 4)]
    ['0', '3', '6', '9']
    """
    if most <= 0 or len(windows) <= most:
        return list(windows)
    if most == 1:
        return [windows[0]]
    return [windows[round(i * (len(windows) - 1) / (most - 1))] for i in range(most)]


def with_prefixes(window: PlanWindow, rows: ImportedRows) -> PlanWindow:
    """The window with what its rows share, by the keys that training merges by, where the file had their token ids."""
    if rows.token_ids is None:
        return window
    indices = window.rows.tolist()
    token_ids = [rows.token_ids[index].astype(np.int64) for index in indices]
    if not all(ids.size for ids in token_ids):
        return window
    keys = token_keys(token_ids, [rows.routed_experts[index] for index in indices])
    return replace(window, prefixes=shared_prefixes(keys))
