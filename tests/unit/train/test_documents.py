"""Locks: the Python that README.md and docs/planning.md show runs as it stands, given a model and a forward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[3]


def blocks(document: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found
    return found


@pytest.mark.parametrize("document", ["README.md", "docs/planning.md"])
def test_python_blocks_run(document: str) -> None:
    weight = torch.ones((), requires_grad=True)
    given: dict[str, Any] = {
        "model": tiny_model(dtype=torch.float32),
        "lengths": [5, 9, 3],
        "my_rank": 7,
        "data_parallel_size": 2,
        "data_parallel_rank": 1,
        "context_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "forward": lambda rows: weight * len(rows),
        "forward_filler": lambda: weight * 1.0,
    }
    for block in blocks(document):
        exec(compile(block, document, "exec"), given)
    assert given["plan"].num_microbatches >= 1
