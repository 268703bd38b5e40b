"""The script that measures gpt-oss on a GPU: its tiny form runs here, its real one says what it needs.

1. Every arm runs the same windows and finds the same loss and gradient norm; padded is fewer and fuller micro-batches
   than fixed, and a ladder or a multiple of widths is fewer shapes and more padding.
2. Arms that disagree end it with both numbers.
3. Graphs are counted: one for each shape that torch compiles.
4. Without a CUDA device the real form ends with a message.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_models.py"
TINY = ["--tiny", "--layers", "2", "--steps", "2", "--warm-up", "1"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # its dataclasses look for their module
        patch.setitem(__import__("sys").modules, "gpu_models", module)
        spec.loader.exec_module(module)
    return module


def test_the_tiny_form_runs(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(TINY)
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    figures = {name: [float(re.sub("%", "", text)) for text in rest] for name, *rest in lines[1:]}
    assert list(figures) == list(script.ARMS)
    num_microbatches, efficiency, shapes, graphs = (
        {name: values[column] for name, values in figures.items()} for column in range(4)
    )
    assert num_microbatches["fixed"] == script.TINY.num_rows
    assert efficiency["fixed"] == 100
    assert all(num_microbatches[name] < num_microbatches["fixed"] / 2 for name in figures if name != "fixed")
    assert shapes["bucket-0.5"] < shapes["padded"]
    assert efficiency["multiple"] < efficiency["bucket-0.5"] < efficiency["padded"]
    assert set(graphs.values()) == {0}  # plain attention is not compiled


def test_arms_that_disagree_are_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model = script.make_model
    scales = iter((1.0, 1.5))

    def another(*args: Any) -> Any:
        model = make_model(*args)
        with torch.no_grad():
            model.lm_head.weight.mul_(next(scales))
        return model

    monkeypatch.setattr(script, "make_model", another)
    with pytest.raises(SystemExit, match=r"padded: norms of the first window are \d\S*, not \d"):
        script.main([*TINY, "--arms", "fixed", "padded"])


def test_graphs_are_counted_by_shape(script: ModuleType) -> None:
    torch._dynamo.reset()
    counters.clear()
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    for size, num_graphs in ((3, 1), (3, 1), (4, 2), (5, 3)):
        double(torch.ones(size))
        assert script.compiled_graphs() == num_graphs


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_the_real_form_needs_a_gpu(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="torch finds no CUDA device; --tiny runs it on a CPU"):
        script.main([])
