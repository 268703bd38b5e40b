"""The sentences of a run's page: did it learn, what was a step, what did padding cost, what went wrong."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstep.report.columns import duration
from evenstep.report.history import HELDOUT, counted, spread
from evenstep.report.run_records import RunRecords, setting
from evenstep.report.text import escaped

__all__ = ["Card", "cards"]

MAX_REASONS = 12  # of one kind, each with its count
LARGEST = sys.float_info.max  # a line may hold a whole number beyond it
TELLING = 2.0  # standard errors

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A question, its short answer, and what the answer rests on; all of it is HTML."""

    question: str
    answer: str
    lines: Sequence[str] = field(default_factory=list[str])


def cards(records: RunRecords) -> list[Card]:
    """The summary's questions, in the order in which they are asked."""
    found = [_learned(records)]
    if records.windows:
        found += [_step(records.windows), _padding(records.windows), _losses(records), _time(records.windows)]
    return found


def values_of(windows: Sequence[Metrics], key: str) -> list[float]:
    """A metric's finite numbers over the windows that have it."""
    found = [window.get(key) for window in windows]
    return [v for v in found if isinstance(v, (int, float)) and not isinstance(v, bool) and -LARGEST <= v <= LARGEST]


# --- did it learn ---------------------------------------------------------------------------------------------------


def _learned(records: RunRecords) -> Card:
    question = "Did it learn?"
    evaluations = [e for e in records.evaluations if values_of([e], "eval_reward_mean")]
    rewards = _rewards(records.windows)
    if len(evaluations) < 2:
        why = "There is one held-out evaluation" if evaluations else "There is no held-out evaluation"
        first = (
            [f"It scored {evaluations[0]['eval_reward_mean']:.3f}. {_settings(evaluations[0])}"] if evaluations else []
        )
        return Card(question=question, answer=f"{why}, so nothing can be compared.", lines=[*first, *rewards])
    first, last = evaluations[0], evaluations[-1]
    change = last["eval_reward_mean"] - first["eval_reward_mean"]
    error = _standard_error(first, last)
    if error is None:
        verdict = "Held-out reward rose" if change > 0 else "Held-out reward did not rise"
    elif change > TELLING * error:
        verdict = "Yes: held-out reward rose"
    elif change < -TELLING * error:
        verdict = "No: held-out reward fell"
    else:
        verdict = "Not that one could tell: held-out reward changed by less than two standard errors"
    before, after = first["eval_reward_mean"], last["eval_reward_mean"]
    answer = f"{verdict}, from {before:.3f} to <strong>{after:.3f}</strong> ({change:+.3f})."
    return Card(
        question=question, answer=answer, lines=[*_shares(first, last), *_rests_on(evaluations, error), *rewards]
    )


def _shares(first: Metrics, last: Metrics) -> Iterator[str]:
    for key, floor_key, text in HELDOUT[1:]:
        if values_of([first, last], key) and len(values_of([first, last], key)) == 2:
            change = f"{first[key]:.3f} to {last[key]:.3f} ({last[key] - first[key]:+.3f}{_floor(last, floor_key)})"
            yield f"{text.capitalize()}: {change}."


def _floor(evaluation: Metrics, key: str) -> str:
    values = values_of([evaluation], key)
    return f"; the most common answer: {values[0]:.3f}" if values else ""


def _rests_on(evaluations: Sequence[Metrics], error: float | None) -> Iterator[str]:
    first, last = evaluations[0], evaluations[-1]
    spans = f"Between window {first['window']} and window {last['window']}, {counted(len(evaluations), 'evaluation')}."
    yield f"{spans} {_settings(last)}"
    if values_of([last], "eval_floor"):
        yield f"Always giving the most common answer would score {last['eval_floor']:.3f}."
    if error is not None:
        yield (
            f"The change's standard error is at most {error:.3f} (for rewards within 0 and 1, tasks taken as "
            "independent)."
        )
    settings = {str([e.get(key) for key in SETTINGS]) for e in evaluations}
    if len(settings) > 1:
        yield "Careful: the evaluations were not all made with the same settings."
    lost = [f"{last[key]} {word}" for key, word in (("eval_num_failed", "failed"), ("eval_num_truncated", "truncated"))
            if last.get(key)]  # fmt: skip
    if lost:
        yield f"In the last evaluation {' and '.join(lost)}; failed ones are in no mean."


SETTINGS = ("eval_num_tasks", "eval_rollouts_per_task", "eval_temperature")


def _settings(evaluation: Metrics) -> str:
    tasks, each, temperature = (evaluation.get(key) for key in SETTINGS)
    if tasks is None or each is None or temperature is None:
        return "Its settings were not recorded."
    how = "greedy" if temperature == 0 else f"temperature {escaped(temperature)}"
    return f"avg@{escaped(each)} on {escaped(tasks)} held-out tasks, {how}."


def _standard_error(first: Metrics, last: Metrics) -> float | None:
    """At most, of the difference of two means; a reward within 0 and 1 has a variance of at most m (1 - m)."""
    total = 0.0
    for evaluation in (first, last):
        mean, tasks = evaluation["eval_reward_mean"], values_of([evaluation], "eval_num_tasks")
        if not tasks or tasks[0] < 1 or not 0 <= mean <= 1:
            return None
        total += mean * (1 - mean) / tasks[0]
    return math.sqrt(total)


def _rewards(windows: Sequence[Metrics]) -> Iterator[str]:
    """The training reward; noisy, and of tasks that were trained on."""
    found = values_of(windows, "reward_mean")
    if not found:
        return
    part = max(1, len(found) // 10)
    before, after = statistics.fmean(found[:part]), statistics.fmean(found[-part:])
    which = "in the first and the last window" if part == 1 else f"over the first and the last {part:,} windows"
    yield f"Mean reward in training {which}: {before:.3f} and {after:.3f}."
    spreads = values_of(windows, "reward_std")
    if spreads:
        yield f"Its standard deviation over a window's rollouts: {spread(spreads, 3)}."


# --- what was a step ------------------------------------------------------------------------------------------------


def _step(windows: Sequence[Metrics]) -> Card:
    rollouts, rows = values_of(windows, "num_rollouts"), values_of(windows, "num_rows")
    mean, most = values_of(windows, "segments_per_rollout_mean"), values_of(windows, "segments_per_rollout_max")
    if not rollouts or not rows:
        return Card(question="How many rows did a step have?", answer="The windows do not say.")
    answer = f"<strong>{spread(rows, 0)}</strong> rows, of {spread(rollouts, 0)} rollouts (median, least to most)."
    lines: list[str] = []
    if mean and most:
        lines.append(
            f"Why: a rollout leaves one row per segment, {statistics.median(mean):.2f} on average and up to "
            f"{max(most):.0f}. A new segment begins where the context was compacted or rewritten. The rollouts of a "
            "step are fixed, its rows are not."
        )
    fillers = values_of(windows, "num_fillers")
    if fillers:
        with_some = sum(value > 0 for value in fillers)
        lines.append(
            "Fillers: none, every micro-batch had a row."
            if not with_some
            else f"Fillers: {sum(fillers):,.0f} in {counted(with_some, 'window')}; the plans below show where."
        )
    micro_batches = values_of(windows, "num_microbatches")
    if micro_batches:
        lines.append(f"Micro-batches per rank (K): {spread(micro_batches, 0)}, the same on every rank.")
    return Card(question="How many rows did a step have, and why?", answer=answer, lines=lines)


def _padding(windows: Sequence[Metrics]) -> Card:
    question = "What did padding cost?"
    tokens = footprint = 0.0
    for window in windows:
        found = [values_of([window], key) for key in ("tokens_per_second", "padding_efficiency", *SECONDS)]
        if all(found) and found[1][0] > 0:
            # a window's tokens per second are its real tokens over all of its seconds
            real = found[0][0] * sum(values[0] for values in found[2:])
            tokens += real
            footprint += real / found[1][0]
    if not footprint:
        return Card(question=question, answer="The windows do not say.")
    padding = footprint - tokens
    answer = (
        f"Less than nothing: rows that begin alike shared places, {tokens:,.0f} tokens of rows ran in {footprint:,.0f}."
        if padding < 0
        else f"<strong>{100 * padding / footprint:.1f} %</strong> of what was run forward and backward: "
        f"{padding:,.0f} of {footprint:,.0f} token places."
    )
    lines = [f"Padding efficiency of a window: {spread(values_of(windows, 'padding_efficiency'), 3)}."]
    lockstep = values_of(windows, "lockstep_efficiency")
    if lockstep:
        lines.append(
            f"Lockstep efficiency: {spread(lockstep, 3)}; 1 is a lower bound that no plan under these rules can beat, "
            "the rest is ranks waiting for each other and micro-batches that could not be filled."
        )
    return Card(question=question, answer=answer, lines=lines)


SECONDS = ("seconds_generate", "seconds_score", "seconds_train")


# --- what went wrong, and the time ----------------------------------------------------------------------------------


def _losses(records: RunRecords) -> Card:
    windows = records.windows
    skipped = [window for window in windows if window.get("stepped") is False]
    # rollouts are trained once an epoch and counted once
    once = [window for window in windows if window.get("epoch", 0) == 0]
    totals = {key: sum(values_of(once, key)) for key in ("num_rollouts", "num_failed", "num_truncated", "num_replaced")}
    dropped: Counter[str] = Counter()
    for record in records.collections:
        reasons = record.get("dropped")
        if isinstance(reasons, dict):
            dropped.update(map(str, reasons.values()))
    num_dropped = sum(dropped.values())
    nothing = not skipped and not any(
        (totals["num_failed"], totals["num_truncated"], totals["num_replaced"], num_dropped)
    )
    answer = (
        f"Nothing: all of {counted(len(windows), 'window')} took their optimizer step, and no rollout failed, was "
        f"truncated or replaced."
        if nothing
        else f"{counted(len(windows) - len(skipped), 'optimizer step')} in {counted(len(windows), 'window')}; of "
        f"{totals['num_rollouts']:,.0f} rollouts {totals['num_failed']:,.0f} failed and {totals['num_truncated']:,.0f} "
        f"were truncated; {counted(num_dropped, 'group')} dropped, {totals['num_replaced']:,.0f} trained as "
        "replacements."
    )
    lines = [*_reasons("Windows without a step", Counter(str(window.get("skip_reason")) for window in skipped))]
    if skipped:
        shown = ", ".join(str(window["window"]) for window in skipped[:MAX_REASONS])
        lines.append(f"They are: {shown}{' …' if len(skipped) > MAX_REASONS else '.'}")
    lines += _reasons("Dropped groups", dropped)
    if setting(records.config, "rollout", "truncated") == "mask" and totals["num_truncated"]:
        lines.append("Truncated rollouts were left out of training and of every baseline.")
    return Card(question="What went wrong?", answer=answer, lines=lines)


def _reasons(title: str, counts: Counter[str]) -> Iterator[str]:
    for reason, count in counts.most_common(MAX_REASONS):
        yield f"{title}, {count:,}: {escaped(reason, 300)}"
    if len(counts) > MAX_REASONS:
        yield f"{title}: {len(counts) - MAX_REASONS} more reasons."


def _time(windows: Sequence[Metrics]) -> Card:
    totals = {key: sum(values_of(windows, key)) for key in SECONDS}
    total = sum(totals.values())
    speeds, memory = values_of(windows, "tokens_per_second"), values_of(windows, "peak_memory_bytes")
    answer = f"{duration(total)} in {counted(len(windows), 'window')}"
    if speeds:
        answer += f", {spread(speeds, 0)} tokens per second (median, least to most)"
    lines: list[str] = []
    if total > 0:
        shares = [f"{name.removeprefix('seconds_')} {100 * value / total:.0f} %" for name, value in totals.items()]
        lines.append(f"Of it {', '.join(shares)}; evaluations and checkpoints are not counted.")
    if memory:
        lines.append(f"Peak memory of rank 0: {max(memory) / 2**20:,.0f} MiB.")
    return Card(question="Where did the time go?", answer=f"{answer}.", lines=lines)
