"""What is locked here: on a terminal of any width the table of a replay has every arm's name and every figure."""

from __future__ import annotations

import io
from typing import Any

import pytest

from evenstep.replay.show import print_result

NAME = "padded,max_tokens_per_gpu=1024"
FIGURES: dict[str, Any] = {
    "status": "ok",
    "passed": True,
    "problem": None,
    "first_deviation": None,
    "steps_completed": 3,
    "rows_consumed": 184,
    "rows_expected": 184,
    "step_seconds_median": 0.123,
    "speedup_paired_median": 1.18,
    "tokens_per_second": 5290.0,
    "peak_memory_bytes": 419 << 20,
    "padding_efficiency": 0.979,
    "num_microbatches_median": 2,
    "gradient_relative_difference_max": 8.2e-7,
    "gradient_cosine_min": 1 - 2**-40,
    "update_relative_difference_max": 1.1e-5,
    "weight_max_difference_lr": 0.0006,
    "loss_max_abs_difference": 0.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", ["20", "80", "300"])
def test_no_figure_is_cut(monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    result = {"arms": {NAME: FIGURES}, "noise_floor": FIGURES, "num_steps": 3, "limit": None, "passed": True}
    print_result(result, terminal)
    shown = terminal.getvalue()
    assert "…" not in shown
    for figure in (NAME, "tokens/s", "184/184", "0.123", "5,290", "0.979", "8.2e-07", "9.1e-13", "1.1e-05", "0.0006"):
        assert figure in shown
