"""What one launch of an arm's ranks is told, and what it leaves: the files between a replay and its ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["Launch", "Role", "read_errors", "read_stacks", "read_steps"]

# reference: writes what the others are compared with; arm: compared; oracle: compared, and written for the later ones
Role = Literal["reference", "arm", "oracle", "timed"]
SPEC, STEPS = "launch.json", "steps.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of an arm's ranks; its folder holds this and ``config.toml``, and gets ``steps.jsonl``."""

    name: str  # of the arm
    role: Role
    source: str  # run folder or file of rollouts
    num_windows: int
    first_collection: int
    optimizer_step: int  # that it starts with
    dtype: Literal["float32", "float64"]
    total_windows: int  # of the run, for the learning rate's schedule
    compared: tuple[int, ...]  # positions of the steps whose gradients and weights are compared
    step_timeout_s: float
    has_own_weights: bool = (
        False  # go on from its own weights, where else each compared step begins with the reference's
    )
    permutation_seed: int | None = None  # order of rows, cells and ranks of each plan
    checkpoint: str | None = None  # a run's checkpoint to start from
    extra_copies: int = 0  # of the parameters, that later launches store beside the reference's
    scored: str = ""  # folder of what was scored once for all arms
    stores: str | None = None  # folder to write gradients and weights to
    references: dict[str, str] | None = None  # name -> folder of gradients and weights to compare with

    def write(self, folder: Path) -> None:
        (folder / SPEC).write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Launch:
        values = json.loads((folder / SPEC).read_text())
        return Launch(**(values | {"compared": tuple(values["compared"])}))


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The steps that a launch finished; a line that is cut short is left out."""
    path = folder / STEPS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_errors(folder: Path) -> list[dict[str, Any]]:
    """What ranks said before they ended, the first one first; not that they lost another rank, which says why."""
    found = [json.loads(path.read_text()) for path in folder.glob("error.*.json")]
    causes = [error for error in found if "connection to another rank was lost" not in error["text"]]
    return sorted(causes, key=lambda error: error["time"])


def read_stacks(folder: Path) -> dict[int, str]:
    """Rank -> the stack it stood in when it was ended, or when its step's time was up."""
    texts = {int(path.suffix[1:]): path.read_text(errors="replace") for path in folder.glob("stack.*")}
    return {rank: text for rank, text in sorted(texts.items()) if text}
