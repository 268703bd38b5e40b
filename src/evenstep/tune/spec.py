"""What a probe's ranks are told, and what they answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["ANSWER", "CellShape", "Measured", "Probe", "read_measured"]

SPEC, ANSWER = "probe.json", "measured.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellShape:
    """A micro-batch of rows of one length on each rank.

    >>> CellShape(num_rows=4, row_tokens=128).footprint, CellShape(num_rows=2, row_tokens=3).pairs
    (512, 12)
    """

    num_rows: int
    row_tokens: int

    @property
    def footprint(self) -> int:
        return self.num_rows * self.row_tokens

    @property
    def pairs(self) -> int:
        """Attended pairs of a causal model."""
        return self.num_rows * self.row_tokens * (self.row_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One start of ranks: cells one after the other, each at least as large as the one before."""

    cells: tuple[CellShape, ...]  # whose memory is measured
    timed: tuple[CellShape, ...] = ()
    max_seconds: float | None = None  # stop after a cell that takes longer
    max_bytes: float | None = None  # stop when the next cell may need more

    def write(self, folder: Path) -> None:
        (folder / SPEC).write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Probe:
        values = json.loads((folder / SPEC).read_text())
        for name in ("cells", "timed"):
            values[name] = tuple(CellShape(**cell) for cell in values[name])
        return Probe(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a cell took, of the rank that took most; without a peak it was only timed."""

    num_rows: int
    row_tokens: int
    least_bytes: float  # peak of a step without activations, in the same processes
    peak_bytes: float | None
    seconds: float  # of one micro-batch, forward and backward
    device_bytes: float | None  # memory of the GPU

    @property
    def shape(self) -> CellShape:
        return CellShape(num_rows=self.num_rows, row_tokens=self.row_tokens)


def read_measured(folder: Path) -> Sequence[Measured]:
    """What the ranks of a probe have measured so far."""
    path = folder / ANSWER
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Measured(**json.loads(line)) for line in lines if line.endswith("\n")]
