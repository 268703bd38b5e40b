"""What a run has reported so far, and the sentences that can be made of it."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.report.columns import duration, number

__all__ = ["HELDOUT", "History", "counted", "spread"]

# shares of an evaluation: its key, the key of the floor beneath it, what it is called
HELDOUT = (
    ("eval_reward_mean", "eval_floor", "all tasks"),
    ("eval_long_reward_mean", "eval_long_floor", "tasks of 3+ segments"),
)
# key of a window's metrics, what it is called, digits
OF_A_STEP = (
    ("num_rollouts", "rollouts", 0),
    ("num_rows", "rows", 0),
    ("segments_per_rollout_mean", "segments per rollout, mean", 2),
    ("segments_per_rollout_max", "segments per rollout, most", 0),
    ("num_fillers", "fillers", 0),
    ("num_microbatches", "micro-batches per rank (K)", 0),
    ("padding_efficiency", "padding efficiency", 3),
    ("lockstep_efficiency", "lockstep efficiency", 3),
    ("tokens_per_second", "tokens per second", 0),
    ("seconds_generate", "seconds to generate", 2),
    ("seconds_score", "seconds to score", 2),
    ("seconds_train", "seconds to train", 2),
)
MAX_SHOWN = 200  # windows: more than a terminal has lines
LOST = (("eval_num_failed", "failed, in no mean"), ("eval_num_truncated", "truncated"))
PLACES = (
    ("report.html", "this run as a page, for a browser"),
    ("config.toml", "the resolved configuration"),
    ("metrics.jsonl", "a line per window and evaluation"),
    ("collections.jsonl", "which groups each collection was made of"),
    ("rollouts", "every rollout, token by token"),
    ("plans", "the plan of every step"),
    ("checkpoints", "to resume"),
    ("model", "the policy, a Hugging Face folder"),
    ("adapter", "its adapters alone, in peft's format"),
    ("critic", "the critic, a Hugging Face folder"),
)


class History:
    """Collects what a run reports.

    Args:
        clock: seconds, for the time that is left.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self.num_windows = 0  # of the whole run
        self.first_window = 0  # of this process
        self.windows: list[dict[str, Any]] = []  # the newest, which may be shown
        self.num_reported = 0  # all of them; what is said of all at the end is kept as numbers alone
        self._num_steps = 0
        self._values = {name: array("d") for name, _, _ in OF_A_STEP}
        self.evaluations: list[dict[str, Any]] = []

    def start(self, info: Mapping[str, Any]) -> None:
        self.num_windows, self.first_window = info["num_windows"], info["first_window"]
        self.evaluations = list(info["evaluations"])
        self._started = self._clock()

    def add_window(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics with the newest held-out score and the time left."""
        self.num_reported += 1
        num_done = self.num_reported
        per_window = (self._clock() - self._started) / num_done
        row = {
            **metrics,
            "heldout": self.evaluations[-1]["eval_reward_mean"] if self.evaluations else None,
            "eta_s": per_window * (self.num_windows - self.first_window - num_done),
        }
        self.windows.append(row)
        del self.windows[:-MAX_SHOWN]  # a run may be longer than memory
        self._num_steps += bool(metrics["stepped"])
        for name, values in self._values.items():
            if metrics[name] is not None:
                values.append(metrics[name])
        return row

    def opening(self, info: Mapping[str, Any]) -> str:
        goes_on = f", going on after window {info['first_window']}" if info["first_window"] else ""
        return (
            f"evenstep: {number(info['num_parameters'])} parameters on {counted(info['num_ranks'], 'rank')}, "
            f"{counted(info['num_windows'], 'window')}{goes_on}, in {info['folder']}"
        )

    def evaluation_line(self, result: Mapping[str, Any]) -> str:
        scores = ", ".join(f"{text} {result[key]:.3f}" for key, _, text in HELDOUT if result[key] is not None)
        lost = ", ".join(f"{result[key]} {word}" for key, word in LOST if result.get(key))
        return f"held-out after {counted(result['window'], 'window')}: {scores}{f' ({lost})' if lost else ''}"

    def summary(self, folder: str) -> Iterator[str]:
        """The last words: what was learned, what a step looked like, where things are."""
        yield from self._learned()
        yield from self._step()
        yield "Where things are"
        for name, meaning in PLACES:
            if (Path(folder) / name).exists():
                yield f"  {Path(folder) / name}: {meaning}"
        yield f"Took {duration(self._clock() - self._started)}."

    def _learned(self) -> Iterator[str]:
        if not self.evaluations:
            return
        first, last = self.evaluations[0], self.evaluations[-1]
        yield "What was learned (held-out reward; floor: always the most common answer)"
        for key, floor_key, text in HELDOUT:
            before, after, floor = first[key], last[key], last[floor_key]
            if before is None or after is None:
                continue
            floor_text = "" if floor is None else f"; floor {floor:.3f}"
            yield f"  {text}: {before:.3f} -> {after:.3f} ({after - before:+.3f}{floor_text})"

    def _step(self) -> Iterator[str]:
        if not self.num_reported:
            return
        counts = f"{counted(self.num_reported, 'window')}, {counted(self._num_steps, 'optimizer step')}"
        yield f"What a step looked like ({counts}; median, least to most)"
        for name, text, digits in OF_A_STEP:
            if self._values[name]:
                yield f"  {text}: {spread(self._values[name], digits)}"


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and the least and the most where they differ.

    >>> spread([3, 1, 2], 0), spread([0.5, 0.5], 2)
    ('2 (1 to 3)', '0.50')
    """
    median, least, most = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return median if least == most else f"{median} ({least} to {most})"


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "rank"), counted(2000, "rank")
    ('1 rank', '2,000 ranks')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
