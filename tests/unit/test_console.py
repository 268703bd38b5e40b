"""What is locked here:

1. Piped output has one aligned line per window, the header now and then, no control codes, and is flushed line by line.
2. On a terminal a table shows as many columns as fit, never wider than the terminal, and the cursor comes back.
3. A window without an optimizer step is marked and explained; metrics that are null are shown as absent.
4. The newest held-out score stands beside every later window, and the time left follows from the windows so far.
5. The end says what was learned, what a step looked like, and which files are there.
6. A run may be longer than memory: what is kept of it does not grow but for a few numbers a window.
7. When the reader of piped output has ended, that is said with the way to go on.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenstep.errors import StateError
from evenstep.report.columns import COLUMNS, GAP, duration, fitting, number
from evenstep.report.console import HEADER_EVERY, LiveReporter, PlainReporter, make_reporter
from evenstep.report.history import MAX_SHOWN, History

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
INFO = {"num_ranks": 2, "num_parameters": 612_345, "num_windows": 40, "first_window": 0, "folder": "runs/demo"} | {
    "evaluations": []
}


def window_metrics(window: int, **changes: Any) -> dict[str, Any]:
    metrics = {"window": window, "optimizer_step": window, "stepped": True, "skip_reason": None, "num_rollouts": 64}
    metrics |= {"num_rows": 150 + window, "num_fillers": 1, "segments_per_rollout_mean": 2.4}
    metrics |= {"segments_per_rollout_max": 7, "num_microbatches": 6, "padding_efficiency": 0.871}
    metrics |= {"lockstep_efficiency": 0.934, "reward_mean": 0.4, "tokens_per_second": 12_345.6, "grad_norm": 0.123}
    metrics |= {"seconds_generate": 1.2, "seconds_score": 0.0, "seconds_train": 0.8}
    return metrics | changes


def heldout(window: int, reward: float, **changes: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"window": window, "eval_reward_mean": reward, "eval_floor": 0.125}
    return result | {"eval_long_reward_mean": reward - 0.1, "eval_long_floor": None} | changes


class Clock:
    """A clock that advances when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_plain(num_windows: int, folder: str = "runs/demo", **changes: Any) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    reporter = PlainReporter(stream, History(clock))
    reporter.start(INFO | {"folder": folder})
    reporter.evaluation(heldout(0, 0.41))
    for window in range(num_windows):
        reporter.phase("generate")
        clock.now += 2.0
        reporter.window(window_metrics(window, **changes))
    reporter.evaluation(heldout(num_windows, 0.61))
    reporter.finish({"folder": folder})
    return stream.getvalue().splitlines()


def test_plain_lines_are_aligned_and_free_of_control_codes() -> None:
    lines = run_plain(HEADER_EVERY + 2)
    headers = [line for line in lines if line.lstrip().startswith("step")]
    rows = [line for line in lines if re.match(r" *\d+ ", line)]
    assert (len(headers), len(rows)) == (2, HEADER_EVERY + 2)
    assert {len(line) for line in headers + rows} == {sum(column.width + GAP for column in COLUMNS) - GAP}
    assert not any(CONTROL.search(line) for line in lines)
    cells = dict(zip(headers[0].split("  "), rows[0].split("  "), strict=False))
    assert cells  # columns are apart by at least two blanks
    assert re.split(r" {2,}", rows[0].strip()) == [
        "1", "0.400", "0.410", "64", "150", "2.4/7", "1", "6", "87%", "93%", "12.3k", "0.123", "1.2/0.0/0.8", "1m18s"
    ]  # fmt: skip


def test_every_line_is_flushed() -> None:
    class Stream(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Stream()
    with make_reporter(stream) as reporter:
        assert isinstance(reporter, PlainReporter)
        reporter.start(INFO)
        reporter.window(window_metrics(0))
        assert stream.flushed == stream.getvalue() != ""


def test_a_window_that_did_not_step_is_marked() -> None:
    lines = run_plain(1, stepped=False, skip_reason="all advantages are 0", grad_norm=None, reward_mean=None)
    (row,) = [line for line in lines if re.match(r" *1\* ", line)]
    assert re.split(r" {2,}", row.strip())[1] == "-"
    assert "* window 1 took no optimizer step: all advantages are 0" in lines


def test_heldout_score_and_time_left() -> None:
    clock = Clock()
    history = History(clock)
    history.start(INFO | {"first_window": 30})
    clock.now = 4.0
    first = history.add_window(window_metrics(30))
    assert (first["heldout"], first["eta_s"]) == (None, 4.0 * 9)
    history.evaluations.append(heldout(31, 0.5))
    clock.now = 6.0
    second = history.add_window(window_metrics(31))
    assert (second["heldout"], second["eta_s"]) == (0.5, 3.0 * 8)


def test_the_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    text = "\n".join(run_plain(3, folder=str(tmp_path)))
    assert "all tasks: 0.410 -> 0.610 (+0.200; floor 0.125)" in text
    assert "tasks of 3+ segments: 0.310 -> 0.510 (+0.200)" in text
    assert "held-out after 3 windows: all tasks 0.610, tasks of 3+ segments 0.510" in text
    assert "rows: 151 (150 to 152)" in text
    assert "rollouts: 64\n" in text
    assert f"{tmp_path / 'metrics.jsonl'}: a line per window" in text
    assert "checkpoints" not in text


def test_shares_that_an_evaluation_has_not() -> None:
    history = History(Clock())
    line = history.evaluation_line(heldout(0, 0.5, eval_long_reward_mean=None))
    assert line == "held-out after 0 windows: all tasks 0.500"


def run_live(width: int, num_windows: int, height: int = 24) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=height, highlight=False, markup=False)
    reporter = LiveReporter(console, History(Clock()))
    reporter.start(INFO)
    for window in range(num_windows):
        reporter.phase("train")
        reporter.window(window_metrics(window))
    reporter.notice("row [a/1] has 700 tokens")
    reporter.finish({"folder": "runs/demo"})
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 80, 100, 140, 200])
def test_the_live_table_fits_the_terminal(width: int) -> None:
    output = run_live(width, num_windows=30)
    table, _, _ = CONTROL.sub("", output).partition("What a step looked like")
    lines = [line.rstrip("\r") for line in table.splitlines()]
    assert max(map(len, lines)) <= width
    header = [line for line in lines if line.strip().startswith("step")][-1]
    assert header.split() == " ".join(column.header for column in fitting(width)).split()
    rows = [line for line in lines if re.match(r" *30 ", line)]
    assert rows
    assert "row [a/1] has 700 tokens" in lines  # text, not markup
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is back


def test_columns_by_width() -> None:
    narrow = [column.header for column in fitting(80)]
    assert narrow == ["step", "reward", "held-out", "rollouts", "rows", "segments", "fillers", "K", "padding", "ETA"]
    assert list(fitting(140)) == list(COLUMNS)
    assert len(fitting(1)) == 1


def test_the_cursor_comes_back_after_an_error() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24)
    reporter = LiveReporter(console, History(Clock()))
    reporter.start(INFO)
    reporter.close()
    reporter.close()
    assert stream.getvalue().count("\x1b[?25h") >= 1


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (7, "7"), (9_999, "9999"), (123_456, "123.5k"), (-0.5, "-0.500"), (2e-7, "2.0e-07"), (2345.6, "2346"),
     (5e8, "500M"), (0.0, "0.000"), (None, "-")],
)  # fmt: skip
def test_numbers_fit_their_columns(value: float | None, text: str) -> None:
    assert number(value) == text
    assert len(text) <= 8


@pytest.mark.parametrize("seconds, text", [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (360_000, "100h00m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_long_run_is_not_kept_in_memory() -> None:
    history = History()
    history.start({"num_windows": 10_000, "first_window": 0, "evaluations": []})
    for window in range(3 * MAX_SHOWN):
        history.add_window(window_metrics(window, stepped=window > 0, num_rows=window))
    assert len(history.windows) == MAX_SHOWN
    assert history.windows[-1]["window"] == 3 * MAX_SHOWN - 1
    said = "\n".join(history.summary("nowhere"))
    assert f"{3 * MAX_SHOWN:,} windows, {3 * MAX_SHOWN - 1:,} optimizer steps".replace(",", "") in said.replace(",", "")
    assert f"rows: {(3 * MAX_SHOWN - 1) / 2:.0f} (0 to {3 * MAX_SHOWN - 1})".replace(",", "") in said.replace(",", "")


def test_a_reader_that_has_ended_is_said() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = io.TextIOWrapper(os.fdopen(writing, "wb", buffering=0), write_through=True)
    with stream, pytest.raises(StateError, match="go on with --resume"):
        PlainReporter(stream).notice("x")
