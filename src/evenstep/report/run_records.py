"""What a run folder says about its run: every line that can be read, and what could not be."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.errors import FileFormatError
from evenstep.train.run_folder import Record, read_records

__all__ = ["RunRecords", "read_run", "setting"]

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """The line files of a run, in order of windows; the folder may belong to a run that is still going on."""

    folder: Path
    config: Mapping[str, Any]  # config.toml as it stands there; empty when it cannot be read
    config_text: str
    windows: Sequence[Metrics]  # a line for each trained window
    evaluations: Sequence[Metrics]
    collections: Sequence[Metrics]  # a line for each closed collection
    problems: Sequence[str]  # what was left out, and why

    @property
    def num_windows_planned(self) -> int | None:
        """Windows of the whole run as configured; None when the configuration does not say."""
        factors = [
            setting(self.config, "run", "num_collections"),
            setting(self.config, "train", "windows_per_collection"),
            setting(self.config, "train", "epochs"),
        ]
        if not all(isinstance(factor, int) and factor > 0 for factor in factors):
            return None
        return factors[0] * factors[1] * factors[2]


def setting(config: Mapping[str, Any], section: str, key: str) -> Any:
    """A key of a configuration that another version may have written; None where it is absent.

    >>> setting({"train": {"lr": 1e-4}}, "train", "lr"), setting({"train": 3}, "train", "lr")
    (0.0001, None)
    """
    values = config.get(section)
    return values.get(key) if isinstance(values, Mapping) else None


def read_run(folder: Path) -> RunRecords:
    """Read the line files of a run folder.

    Raises:
        FileFormatError: no run folder, one without a window or evaluation yet, or a line that is not what it must be.
    """
    path = folder / "metrics.jsonl"
    promised = "a run folder was promised, the one that `evenstep train` wrote (run.dir)"
    if folder.is_file():
        raise FileFormatError(f"{folder}: {promised}, found a file; name its folder: {folder.parent}")
    if not folder.is_dir():
        raise FileFormatError(f"{folder}: {promised}, found no such folder; check the path")
    if not path.is_file():
        raise FileFormatError(f"{folder}: {promised}, found no metrics.jsonl in it; check the path")
    problems: list[str] = []
    records = _numbered(path, problems, "the run goes on, or was stopped there")
    windows: dict[int, Metrics] = {}
    evaluations: dict[int, Metrics] = {}
    num_twice = 0
    for record in records:
        kind = evaluations if "eval_reward_mean" in record else windows
        num_twice += record["window"] in kind
        kind[record["window"]] = record
    if num_twice:
        problems.append(f"metrics.jsonl: {num_twice} lines speak of a window that a later line speaks of, too")
    if not records:
        raise FileFormatError(
            f"{path}: at least one window or evaluation was promised, found none; wait until the run has done its "
            f"first, or look for its error"
        )
    config, config_text = _config(folder / "config.toml", problems)
    index = folder / "collections.jsonl"
    collections = _collections(index, problems) if index.is_file() else []
    return RunRecords(
        folder=folder,
        config=config,
        config_text=config_text,
        windows=[windows[window] for window in sorted(windows)],
        evaluations=[evaluations[window] for window in sorted(evaluations)],
        collections=collections,
        problems=problems,
    )


def _numbered(path: Path, problems: list[str], why_cut: str) -> list[Record]:
    try:
        records, is_cut = read_records(path)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if is_cut:
        problems.append(f"{path.name}: its last line has no end yet ({why_cut})")
    for number, record in enumerate(records, start=1):
        window = record.get("window")
        if not isinstance(window, int) or isinstance(window, bool) or window < 0:
            raise FileFormatError(
                f"{path}, line {number}: `window` must be an integer ≥ 0, found {window!r}; is this the metrics.jsonl "
                f"of an evenstep run?"
            )
    return records


def _collections(path: Path, problems: list[str]) -> list[Record]:
    """A page without them is a page all the same."""
    try:
        records, is_cut = read_records(path)
    except (FileFormatError, OSError) as error:
        problems.append(str(error))
        return []
    if is_cut:
        problems.append(f"{path.name}: its last line has no end yet")
    return [record for record in records if isinstance(record.get("collection"), int)]


def _config(path: Path, problems: list[str]) -> tuple[Mapping[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"config.toml cannot be read: {error}")
        return {}, ""
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        problems.append(f"config.toml is not TOML: {error}")
        return {}, text
