"""What a run leaves on disk: one folder, whose files only grow or are replaced whole."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from evenstep.errors import ConfigError, FileFormatError
from evenstep.files import read_rollouts, write_rollouts
from evenstep.files.writing import write_text
from evenstep.plan import StepPlan
from evenstep.types import Rollout, Row

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["Record", "RunFolder", "read_records"]

HELD_WAIT_S = 20.0  # for the ranks of a launcher that was killed

Record = dict[str, Any]


class RunFolder:
    """The paths and line files of a run; only rank 0 writes.

    ``metrics.jsonl`` has a line per window and evaluation, ``collections.jsonl`` one per closed collection. What is no
    finite number is null there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts, self.plans, self.checkpoints = path / "rollouts", path / "plans", path / "checkpoints"
        self._metrics, self._index = path / "metrics.jsonl", path / "collections.jsonl"

    @property
    def has_run(self) -> bool:
        """Whether a run was begun in it."""
        return self._metrics.is_file()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else's while it is used; free again when a process was killed, once its ranks have ended.

        Raises:
            ConfigError: another process trains in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a") as file:
            deadline = time.monotonic() + HELD_WAIT_S
            while not _locked(file):
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"run.dir must be a folder that no other process trains in, found {str(self.path)!r} in use; "
                        f"stop that run first, or choose another folder with --run-dir"
                    )
                time.sleep(0.1)
            yield

    def open(self, config: str, *, window: int, collection: int) -> list[Record]:
        """Make the folder, or go back to where ``window`` and ``collection`` begin; the evaluations made till then."""
        for folder in (self.rollouts, self.plans, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "config.toml", config)
        _keep(self._index, lambda record: record["collection"] < collection)
        kept = _keep(self._metrics, lambda record: _is_before(record, window))
        return [record for record in kept if "eval_reward_mean" in record]

    def collection(self, index: int) -> Path:
        """Every rollout that was generated for a collection, dropped ones too."""
        return self.rollouts / f"collection_{index:06d}.jsonl.gz"

    def read_carried(self, index: int) -> list[Rollout]:
        """Whole groups that the collection before left over for this one."""
        path = self._carried(index)
        return list(read_rollouts(path)) if path.exists() else []

    def write_carried(self, index: int, rollouts: Sequence[Rollout]) -> None:
        """Leave these for collection ``index``, and nothing else: what an interrupted run had left is now trained."""
        if rollouts:
            write_rollouts(self._carried(index), rollouts)
        else:
            self._carried(index).unlink(missing_ok=True)

    def _carried(self, index: int) -> Path:
        return self.rollouts / f"carried_{index:06d}.jsonl.gz"

    def write_plan(
        self, window: int, plan: StepPlan, rows: Sequence[Row], lengths: Sequence[int] | None = None
    ) -> None:
        """The plan, and under ``rows`` what its indices speak of: ids and lengths, as in a file of lengths.

        ``lengths``: what the plan took for each row, where that is not its tokens; None: it is.
        """
        lengths = [row.num_tokens for row in rows] if lengths is None else lengths
        described = [
            {
                "row_id": row.row_id,
                "rollout_id": row.rollout_id,
                "group_id": row.group_id,
                "num_tokens": row.num_tokens,
                "num_trained_tokens": row.num_trained_tokens,
            }
            | ({} if length == row.num_tokens else {"length": length})
            for row, length in zip(rows, lengths, strict=True)
        ]
        write_text(self.plans / f"window_{window:06d}.json", json.dumps(plan.to_dict() | {"rows": described}))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        _append(self._metrics, record)

    def read_index(self) -> list[Record]:
        """A record for each closed collection, in order.

        Raises:
            FileFormatError: there is no such file, or a line of it is broken.
        """
        if not self._index.is_file():
            raise FileFormatError(
                f"{self.path}: a run folder was promised, the one that `evenstep train` wrote (run.dir), found no "
                f"{self._index.name} in it; check the path"
            )
        return read_records(self._index)[0]

    def append_index(self, record: Mapping[str, Any]) -> None:
        _append(self._index, record)


def _locked(file: IO[str]) -> bool:
    """Take the lock of a file if nobody has it; it is given back when the file is closed or the process ends."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())


def _keep(path: Path, is_kept: Callable[[Record], bool]) -> list[Record]:
    """Drop the lines of what is going to be done again; written aside, then renamed."""
    kept = [record for record in read_records(path)[0] if is_kept(record)] if path.exists() else []
    write_text(path, "".join(map(_line, kept)))
    return kept


def _line(record: Mapping[str, Any]) -> str:
    """A record as it is written: JSON has no infinities, which an exponential of log-probs may have become."""
    written = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(written, allow_nan=False) + "\n"


def read_records(path: Path) -> tuple[list[Record], bool]:
    """The objects of a file, one a line; and whether a last line without an end (crash, or still written) was left out.

    Raises:
        FileFormatError: another line is not a JSON object.
    """
    records: list[Record] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    end = lines.pop()  # what follows the last line break
    for number, line in enumerate([*lines, end] if end else lines, start=1):
        try:
            found, problem = json.loads(line), "another JSON value"
        except json.JSONDecodeError as error:
            found, problem = None, error.msg
        if isinstance(found, dict):
            records.append(cast(Record, found))
        elif number > len(lines):
            return records, True
        else:
            raise FileFormatError(
                f"{path}, line {number}: a JSON object was expected, found {line.strip()[:60]!r} ({problem}); remove "
                f"the line, or start a new run"
            )
    return records, False


def _is_before(record: Record, window: int) -> bool:
    # an evaluation at window n was made before window n was trained; the one at window 0 before the run's first
    return record["window"] <= window if "eval_reward_mean" in record and window else record["window"] < window
