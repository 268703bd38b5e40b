"""Faults in one rank of one arm of a replay: what a real arm may do to itself, done by patching that process alone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    arm: str
    rank: int
    kind: str  # lose_row, crash, crash_at_once, oom, hang, kill


def be_rank(folder: str, fault: Fault | None) -> None:
    """Be a rank of a launch, as the command of a rank is, with its fault."""
    from evenstep.replay.spec import Launch
    from evenstep.train.rank_errors import reported
    from evenstep.train.replay_arm import run_launch

    launch = Launch.read(Path(folder))
    if fault is not None and (launch.name, os.environ["RANK"]) == (fault.arm, str(fault.rank)):
        install(fault)
    with reported(Path(folder)):
        run_launch(Path(folder))


def install(fault: Fault) -> None:
    import torch

    from evenstep.train import executor, step

    if fault.kind == "lose_row":
        collate: Any = executor.collate

        def loses(rows: Any, weights: Any, **options: Any) -> Any:
            return collate(rows[:-1], weights[:-1], **options) if len(rows) > 1 else collate(rows, weights, **options)

        executor.collate = loses
        return
    forward_backward: Any = step.Trainer.forward_backward
    calls = 0

    def breaks(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 2 and fault.kind != "crash_at_once":
            return forward_backward(self, *arguments)
        if fault.kind == "oom":
            raise torch.OutOfMemoryError("not enough")
        if fault.kind == "kill":
            os.kill(os.getpid(), 9)
        if fault.kind == "hang":
            time.sleep(100)
        raise RuntimeError("the arm broke")

    step.Trainer.forward_backward = breaks
