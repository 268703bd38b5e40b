"""Lengths alone: a number on each line, tables with a header, and JSON objects with a length or token ids."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.files.lines import LineError
from evenstep.imports.rows import FoundRow, RowColumns
from evenstep.imports.text_lines import as_count, as_ids, numbered_lines, optional_text
from evenstep.validation import nearest, shown

__all__ = ["guess_column", "is_number", "length_row", "looks_like_lengths", "read_csv", "read_numbers"]

# in order of preference; compared without case, "-" and blanks as "_"
LENGTH_NAMES = (
    *("num_tokens", "length", "input_length", "input_lengths", "total_tokens", "num_total_tokens", "seq_len"),
    *("sequence_length", "seq_length", "total_length", "tokens", "n_tokens", "token_count", "len", "lengths"),
)
PARTS = (("prompt_length", "response_length"), ("prompt_tokens", "completion_tokens"), ("prompt_len", "response_len"))
ID_LISTS = ("token_ids", "input_ids")
ROLLOUT_NAMES = ("rollout_id", "trajectory_id", "sample_id", "request_id")
GROUP_NAMES = ("group_id", "uid", "prompt_id")
MAX_CELL_CHARACTERS = 2**31 - 1  # a table may hold completions beside their lengths
STEP_NAMES = ("step", "window", "global_step")


def read_numbers(path: Path, columns: RowColumns) -> None:
    """A length on each line; blank lines and lines that begin with ``#`` say nothing."""
    source = f"{path}, line "
    for number, text in numbered_lines(path):
        if text.lstrip().startswith(b"#"):
            continue
        where = f"{source}{number}"
        try:
            columns.add(FoundRow(length=_whole("", text.decode(errors="replace").strip())), where)
        except LineError as problem:
            columns.bad(where, problem)


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value.is_integer():
        raise LineError(name, f"must be a whole number of tokens, found {shown(text)}; write one length")
    return int(value)


def guess_column(names: Sequence[str], column: str | None) -> str:
    """The column that holds lengths: the one that is asked for, else the best known name, else the only one.

    >>> guess_column(["id", "Seq Len", "reward"], None)
    'Seq Len'

    Raises:
        LineError: there is no such column, or none can be told to be it.
    """
    if column is not None:
        if column in names:
            return column
        hint = nearest(column, names)
        raise LineError(
            "", f"--column must name one of {', '.join(map(repr, names))}, found {column!r}"
            + (f"; did you mean {hint!r}?" if hint else "; choose one")
        )  # fmt: skip
    plain = {name.strip().lower().replace("-", "_").replace(" ", "_"): name for name in names}
    for known in LENGTH_NAMES:
        if known in plain:
            return plain[known]
    if len(names) == 1:
        return names[0]
    raise LineError(
        "",
        f"a column of lengths must be known by its name ({', '.join(LENGTH_NAMES[:4])}, …), found "
        f"{', '.join(map(repr, names))}; name it with --column",
    )


def read_csv(path: Path, columns: RowColumns, column: str | None) -> None:
    """A table with a header; separated by commas, semicolons or tabs."""
    at = [0]  # the line that the table's reader has come to

    def lines() -> Iterator[str]:
        for at[0], text in numbered_lines(path):
            yield text.decode(errors="replace")

    texts = lines()
    header = next(texts, None)
    if header is None:
        return
    where = f"{path}, line {at[0]}"
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    try:
        # by cells, not by signs: a quoted name may hold any of them
        delimiter = max(",;\t", key=lambda mark: len(next(csv.reader([header], delimiter=mark))))
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter))]
    except csv.Error as error:
        raise LineError("", f"must be a header, found {error}; end lines with a line feed, and quote cells").at(
            where
        ) from None
    if all(is_number(name) for name in names) and len(names) > 1:
        problem = (
            f"must be a header, found the numbers {shown(header.strip())}; put a line with the columns' names first"
        )
        raise LineError("", problem).at(where)
    try:
        chosen = names.index(guess_column(names, column))
    except LineError as error:
        raise error.at(where) from None
    row_of = _table_row(names, chosen)
    table = csv.reader(texts, delimiter=delimiter)
    source = f"{path}, line "
    while True:
        try:
            cells = next(table, None)
        except csv.Error as error:
            columns.bad(f"{source}{at[0]}", LineError("", f"must be a line of a table, found {error}; quote its cells"))
            continue
        if cells is None:
            break
        where = f"{source}{at[0]}"
        try:
            if len(cells) != len(names):
                raise LineError(
                    "", f"must have {len(names)} columns as the header has, found {len(cells)}; complete the line"
                )
            columns.add(row_of(cells), where)
        except LineError as problem:
            columns.bad(where, problem)


def _table_row(names: Sequence[str], chosen: int) -> Callable[[Sequence[str]], FoundRow]:
    """A reader of a table's lines, with the columns that it needs looked up once."""
    known = {name.lower(): index for index, name in enumerate(names)}
    rollout, group, step = (
        next((known[name] for name in wanted if name in known), None)
        for wanted in (ROLLOUT_NAMES, GROUP_NAMES, STEP_NAMES)
    )
    label = names[chosen]

    def row_of(cells: Sequence[str]) -> FoundRow:
        return FoundRow(
            length=_whole(label, cells[chosen].strip()),
            rollout_id=None if rollout is None else cells[rollout].strip() or None,
            group_id=None if group is None else cells[group].strip() or None,
            step=None if step is None or not cells[step].strip() else _whole(names[step], cells[step].strip()),
        )

    return row_of


def is_number(text: str | bytes) -> bool:
    """Whether a text is written like a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def looks_like_lengths(values: Mapping[str, Any]) -> bool:
    """Whether an object says how long a row is, by a number or by its token ids."""
    return (
        any(name in values for name in (*LENGTH_NAMES, *ID_LISTS))
        or any(all(name in values for name in pair) for pair in PARTS)
    )  # fmt: skip


def length_row(values: Mapping[str, Any], column: str | None) -> Iterator[FoundRow]:
    """The row of an object with a length, two lengths that add up, or token ids."""
    token_ids: list[int] | None = None
    if column is not None:
        if isinstance(values.get(column), list):
            token_ids = as_ids(values, column)
            length = len(token_ids)
        else:
            length = as_count(values, column, least=1)
    elif name := next((name for name in LENGTH_NAMES if isinstance(values.get(name), int | float)), None):
        length = as_count(values, name, least=1)
    elif pair := next((pair for pair in PARTS if all(name in values for name in pair)), None):
        length = sum(as_count(values, name) for name in pair)
    elif name := next((name for name in (*ID_LISTS, *LENGTH_NAMES) if isinstance(values.get(name), list)), None):
        token_ids = as_ids(values, name)
        length = len(token_ids)
    elif name := next((name for name in (*LENGTH_NAMES, *ID_LISTS) if name in values), None):
        length = as_count(values, name, least=1)  # which it is not, so this says what it must be
    else:
        raise LineError(
            "", f"an object must have a length ({', '.join(LENGTH_NAMES[:4])}, …) or token_ids, found the fields "
            f"{', '.join(list(values)[:8]) or 'none'}; name the field with --column"
        )  # fmt: skip
    step = next((values[name] for name in STEP_NAMES if type(values.get(name)) is int), None)
    yield FoundRow(
        length=length,
        rollout_id=optional_text(values, *ROLLOUT_NAMES),
        group_id=optional_text(values, *GROUP_NAMES),
        step=step,
        token_ids=token_ids,
    )
