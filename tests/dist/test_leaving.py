"""A rank that leaves its group ends with success, even where gloo's worker threads still hold its tensors.

The group is kept, as a device mesh keeps it, so that nothing joins the workers; and the interpreter's lock is never
given up by itself, so that a worker which has to drop the last tensor of a collective is late. Without a rest in
``joined`` two of eight such launches were aborted ("terminate called without an active exception").
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import sys, torch, torch.distributed as dist
from evenstep.rank_exit import exits_at_once
from evenstep.train.launch import joined

sys.setswitchinterval(100.0)
with exits_at_once(), joined():
    kept = dist.group.WORLD
    for _ in range(300):
        dist.all_reduce(torch.ones(1000))
"""


@pytest.mark.long
def test_ranks_end_with_success(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "rank.py"]
    for _ in range(12):
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
