"""What every reader yields, and what becomes of it: the rows of a file as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from evenstep.errors import FileFormatError
from evenstep.experts import RoutedExperts
from evenstep.files.lines import LineError
from evenstep.types import Int64Array
from evenstep.validation import shown

__all__ = ["MAX_ROW_TOKENS", "FoundRow", "ImportedRows", "RowColumns", "SkippedLine"]

MAX_ROW_TOKENS = 2**31 - 1  # the planner's own limit
MAX_KEPT_TOKENS = 50_000_000  # 200 MB of ids; beyond it only lengths are kept
MAX_KEPT_EXPERT_BYTES = 2_000_000_000
TokenIds = npt.NDArray[np.int32]
NameT = TypeVar("NameT", str, str | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRow:
    """One row as a reader found it; what the file does not say is None."""

    length: int  # tokens, and patches of images
    rollout_id: str | None = None  # the row's rollout; None: that of its line
    group_id: str | None = None
    step: int | None = None  # optimizer step of the trainer that wrote the file
    num_trained: int | None = None  # tokens that are trained
    token_ids: Sequence[int] | None = None  # [length]
    routed_experts: RoutedExperts | None = None  # [length]
    is_approximate: bool = False  # the length was worked out from text


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedLine:
    """A line that could not be read."""

    where: str  # file and line
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedRows:
    """The rows of a file, in its order; R rows."""

    format: str
    lengths_R: Int64Array
    rollout_ids: tuple[str, ...]  # [R]
    group_ids: tuple[str, ...] | None  # [R] None: the file names no groups
    steps_R: Int64Array | None  # [R] optimizer step of the trainer that wrote the file
    num_trained_R: Int64Array | None
    token_ids: tuple[TokenIds, ...] | None  # [R][T] where they were asked for and rows have them; [R][0] of one without
    routed_experts: tuple[RoutedExperts | None, ...]  # [R][T] beside token ids that were kept
    lines: tuple[str, ...]  # [R] "file, line" of each row
    num_approximate: int  # rows whose lengths were worked out from text
    skipped: tuple[SkippedLine, ...]
    notes: tuple[str, ...] = ()  # what a reader left out on purpose, and how much

    @property
    def num_rows(self) -> int:
        return int(self.lengths_R.size)

    @property
    def num_without_ids(self) -> int:
        """Rows that layout ``tree`` cannot be planned with."""
        return self.num_rows if self.token_ids is None else sum(ids.size == 0 for ids in self.token_ids)

    @property
    def num_with_experts(self) -> int:
        """Rows that carry experts which keep their tokens apart in layout ``tree``."""
        return sum(experts is not None for experts in self.routed_experts)


@dataclass(slots=True)
class RowColumns:
    """Collects found rows; with ``skip_bad`` also the lines that could not be read, else the first of them raises.

    >>> columns = RowColumns(skip_bad=True)
    >>> columns.add(FoundRow(length=7), "a.jsonl, line 1")
    >>> columns.bad("a.jsonl, line 2", LineError("length", "must be a number, found null; count the tokens"))
    >>> rows = columns.finish("lengths", "a.jsonl")
    >>> rows.lengths_R.tolist(), rows.skipped[0].where
    ([7], 'a.jsonl, line 2')
    """

    skip_bad: bool = False
    keep_token_ids: bool = False
    lengths: list[int] = field(default_factory=list[int])
    rollout_ids: list[str | None] = field(default_factory=list[str | None])
    group_ids: list[str | None] = field(default_factory=list[str | None])
    steps: list[int | None] = field(default_factory=list[int | None])
    num_trained: list[int | None] = field(default_factory=list[int | None])
    token_ids: list[TokenIds] = field(default_factory=list[TokenIds])
    routed_experts: list[RoutedExperts | None] = field(default_factory=list[RoutedExperts | None])
    lines: list[str] = field(default_factory=list[str])
    skipped: list[SkippedLine] = field(default_factory=list[SkippedLine])
    notes: dict[str, int] = field(default_factory=dict[str, int])  # what was left out on purpose -> how often
    num_approximate: int = 0
    num_kept_tokens: int = 0
    num_expert_bytes: int = 0
    expert_shape: tuple[int, ...] | None = None  # layers with experts, experts per token

    def add(self, row: FoundRow, where: str) -> None:
        if not 1 <= row.length <= MAX_ROW_TOKENS:
            raise LineError(
                "", f"a row must have between 1 and {MAX_ROW_TOKENS} tokens, found {row.length}; leave it out"
            )
        if row.step is not None and not -(2**63) <= row.step < 2**63:
            raise LineError("", f"a step must be a 64-bit integer, found {shown(row.step)}; number the trainer's steps")
        if row.routed_experts is not None:
            shape = row.routed_experts.shape[1:]
            if self.expert_shape not in (None, shape):
                raise LineError(
                    "routed_experts",
                    f"must have the layers with experts and experts per token that the rows before have "
                    f"{self.expert_shape}, found {shape}; plan the rows of each model by themselves",
                )
            self.expert_shape = shape
        kept = row.token_ids if self.keep_token_ids else None
        try:
            ids = np.array(kept or (), dtype=np.int32)
        except OverflowError:
            highest = max(kept or ())
            raise LineError("", f"token ids must be within 0 and {2**31 - 1}, found {highest}; correct them") from None
        self.lengths.append(row.length)
        self.rollout_ids.append(row.rollout_id)
        self.group_ids.append(row.group_id)
        self.steps.append(row.step)
        self.num_trained.append(row.num_trained)
        self.token_ids.append(ids)
        self.routed_experts.append(row.routed_experts if kept else None)
        if kept:
            self.num_kept_tokens += row.length
            self.num_expert_bytes += 0 if row.routed_experts is None else len(row.routed_experts.data)
            if self.num_kept_tokens > MAX_KEPT_TOKENS:
                self._forget_ids("tokens are the most whose ids", MAX_KEPT_TOKENS)
            elif self.num_expert_bytes > MAX_KEPT_EXPERT_BYTES:
                self._forget_ids("bytes of routed experts are the most that", MAX_KEPT_EXPERT_BYTES)
        self.lines.append(where)
        self.num_approximate += row.is_approximate

    def _forget_ids(self, what: str, most: int) -> None:
        self.note(f"{what} are kept, so layout tree", most)
        self.keep_token_ids = False
        self.num_kept_tokens = 0
        self.token_ids = [np.zeros(0, dtype=np.int32)] * len(self.token_ids)
        self.routed_experts = [None] * len(self.routed_experts)

    def take(self, found: Iterable[FoundRow | str], where: str) -> None:
        """The rows of one line, and in words what its reader left out; a line that is wrong is a bad one."""
        try:
            for row in found:
                if isinstance(row, str):
                    self.note(row)
                else:
                    self.add(row, where)
        except LineError as problem:
            self.bad(where, problem)

    def bad(self, where: str, problem: LineError) -> None:
        """A line that holds no row; raises unless such lines are to be skipped."""
        error = problem.at(where)
        if not self.skip_bad:
            raise FileFormatError(f"{error} (or leave such lines out with --skip-bad)")
        self.skipped.append(SkippedLine(where=where, problem=str(error).removeprefix(where).lstrip(", :")))

    def note(self, what: str, count: int = 1) -> None:
        self.notes[what] = self.notes.get(what, 0) + count

    def finish(self, format_name: str, source: str) -> ImportedRows:
        """The columns; raises when there is no row at all."""
        if not self.lengths:
            found = f"{len(self.skipped)} lines that could not be read" if self.skipped else "none"
            first = f" ({self.skipped[0].where}: {self.skipped[0].problem})" if self.skipped else ""
            left_out = "".join(f"; {count} {what}" for what, count in self.notes.items())
            raise FileFormatError(
                f"{source}: must hold at least one row, found {found}{first}{left_out}; check the file, or name its "
                f"format with --format"
            )
        rollouts = _told_apart(list(_rollout_of_each(self.rollout_ids, self.lines)), self.steps)
        num_steps = len(self.steps) - self.steps.count(None)
        if 0 < num_steps < len(self.steps):
            self.note("rows name no step, so the steps of the others are no windows", len(self.steps) - num_steps)
        return ImportedRows(
            format=format_name,
            lengths_R=np.array(self.lengths, dtype=np.int64),
            rollout_ids=tuple(rollouts),
            group_ids=_all_or_none(_told_apart(self.group_ids, self.steps), rollouts),
            steps_R=_all_numbers(self.steps),
            num_trained_R=_all_numbers(self.num_trained),
            token_ids=tuple(self.token_ids) if self.num_kept_tokens else None,
            routed_experts=tuple(self.routed_experts),
            lines=tuple(self.lines),
            num_approximate=self.num_approximate,
            skipped=tuple(self.skipped),
            notes=tuple(f"{count:,} {what}" for what, count in self.notes.items()),
        )


def _rollout_of_each(names: Sequence[str | None], lines: Sequence[str]) -> Iterator[str]:
    """Rollout of each row; where the file names none, the rows of one line are one rollout."""
    first = 0
    for i, name in enumerate(names):
        if lines[i] != lines[first]:
            first = i
        yield f"row {first}" if name is None else name


def _told_apart(names: Sequence[NameT], steps: Sequence[int | None]) -> list[NameT]:
    """The names, with their steps where one comes again in another step: many trainers number from 0 in each."""
    step_of: dict[Any, int | None] = {}
    if None in steps or all(step_of.setdefault(name, step) == step for name, step in zip(names, steps, strict=True)):
        return list(names)
    return [
        name if name is None else cast(NameT, f"step {step}, {name}") for name, step in zip(names, steps, strict=True)
    ]


def _all_or_none(groups: Sequence[str | None], rollouts: Sequence[str]) -> tuple[str, ...] | None:
    """Group of each row, its rollout alone where the file names none; None when it names none at all."""
    if all(name is None for name in groups):
        return None
    return tuple(
        f"group of {rollout}" if name is None else name for name, rollout in zip(groups, rollouts, strict=True)
    )


def _all_numbers(values: Sequence[int | None]) -> Int64Array | None:
    kept = [value for value in values if value is not None]
    return np.array(kept, dtype=np.int64) if len(kept) == len(values) else None
