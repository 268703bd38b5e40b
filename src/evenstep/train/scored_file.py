"""What the first arm of a replay scored, in a file for the others: old log-probs and values of a collection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.train.passes import WindowRows
from evenstep.types import Row

__all__ = ["read_scored", "write_scored"]

FIELDS = ("old_logprobs", "ref_logprobs", "old_values")


def write_scored(path: Path, windows: Sequence[WindowRows]) -> None:
    """Write what was scored; the file appears under its name only when it is complete."""
    rows = [row for window in windows for row in window.rows]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(row, name) for row in rows])
        for name in FIELDS
        if rows and getattr(rows[0], name) is not None
    }
    ends = [(i, rollout, value) for i, w in enumerate(windows) for rollout, value in w.terminal_values.items()]
    partial_path = path.with_suffix(".partial.npz")
    np.savez(partial_path, terminal=np.array(json.dumps(ends)), **arrays)
    partial_path.rename(path)


def read_scored(path: Path, windows: Sequence[WindowRows]) -> list[WindowRows]:
    """The windows with what was scored, row by row in the order that it was written in."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    ends = json.loads(str(arrays.pop("terminal")))
    found: list[WindowRows] = []
    start = 0
    for index, window in enumerate(windows):
        rows: list[Row] = []
        for row in window.rows:
            part = {name: values[start : start + row.num_tokens] for name, values in arrays.items()}
            rows.append(replace(row, **part))  # type: ignore[arg-type]
            start += row.num_tokens
        terminal = {rollout: value for i, rollout, value in ends if i == index}
        found.append(replace(window, rows=tuple(rows), terminal_values=terminal))
    return found
