"""One way in for every kind of file: told by its content, or by name."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.errors import FileFormatError
from evenstep.files.lines import LineError
from evenstep.imports import nemo, own, plain, prime, texts
from evenstep.imports.parquet import column_names, read_parquet
from evenstep.imports.rows import FoundRow, ImportedRows, RowColumns
from evenstep.imports.text_lines import as_object, first_bytes, numbered_lines
from evenstep.validation import nearest, shown

__all__ = ["FORMATS", "import_rows"]

# name -> what it is; in the order in which objects are asked whether they look like it
FORMATS: Mapping[str, str] = {
    "evenstep": "evenstep's rollouts, rows, lengths, or a run's folder",
    "nemo-rl": "NeMo-RL train_data_step*.jsonl",
    "prime-rl": "prime-rl token_exports/**/rank_*.jsonl",
    "verifiers": "verifiers traces.jsonl, each branch a row",
    "nemo-gym": "NeMo-Gym rollouts",
    "verl": "verl rollout JSONL (text: lengths are approximate)",
    "completions": "TRL completions, Parquet or JSONL (text: lengths are approximate)",
    "lengths": "objects with a length or token ids, JSONL or Parquet",
    "csv": "a table with a header and a column of lengths",
    "numbers": "a length on each line",
}
BYTES_PER_TOKEN = 4.0
_LOOKS: Sequence[tuple[str, Callable[[Mapping[str, Any]], bool]]] = (
    ("evenstep", own.looks_like_own),
    ("nemo-rl", nemo.looks_like_nemo_rl),
    ("prime-rl", prime.looks_like_prime_rl),
    ("verifiers", prime.looks_like_verifiers),
    ("nemo-gym", nemo.looks_like_nemo_gym),
    ("verl", texts.looks_like_verl),
    ("completions", texts.looks_like_completions),
    ("lengths", plain.looks_like_lengths),
)
_DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".csv.gz", ".txt", ".txt.gz")
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy", ".npz")

ObjectReader = Callable[[Mapping[str, Any]], Iterator[FoundRow | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """How the rows of a file are found."""

    format: str | None
    column: str | None
    bytes_per_token: float


def import_rows(
    *paths: str | Path,
    format: str | None = None,
    column: str | None = None,
    skip_bad: bool = False,
    keep_token_ids: bool = False,
    bytes_per_token: float = BYTES_PER_TOKEN,
) -> ImportedRows:
    """The rows of files of one format, in order.

    Args:
        paths: files (gzipped or not), or folders whose files are read in the order of their names.
        format: a key of ``FORMATS``; None: what the content looks like.
        column: the column or field that holds lengths, where its name does not say so.
        skip_bad: leave out lines that cannot be read and list them, instead of raising at the first.
        keep_token_ids: keep the rows' token ids where the file has them.
        bytes_per_token: how long text is taken to be where a file has text alone.

    Raises:
        FileFormatError: a file cannot be read, is of no known format, or holds a line that is not of its format.
    """
    if format is not None and format not in FORMATS:
        hint = nearest(format, FORMATS)
        raise FileFormatError(
            f"--format must be one of {', '.join(FORMATS)}, found {format!r}"
            + (f"; did you mean {hint}?" if hint else "")
        )
    if not bytes_per_token > 0:
        raise FileFormatError(f"--bytes-per-token must be above 0, found {bytes_per_token}; 4 suits most texts")
    columns = RowColumns(skip_bad=skip_bad, keep_token_ids=keep_token_ids)
    how = _How(format=format, column=column, bytes_per_token=bytes_per_token)
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        for name, file in _read_path(path, columns, how):
            found.setdefault(name, file)
    if len(found) > 1:
        named = ", ".join(f"{file} ({name})" for name, file in found.items())
        raise FileFormatError(f"all files must have one format, found {named}; plan them one by one")
    return columns.finish(next(iter(found), format or "none"), ", ".join(map(str, paths)))


def _read_path(path: Path, columns: RowColumns, how: _How) -> Iterator[tuple[str, Path]]:
    """Read a file or folder; yields the format of each file."""
    if path.name == "rollouts" and own.is_run_folder(path.parent):
        path = path.parent
    if own.is_run_folder(path) and how.format in (None, "evenstep"):
        own.read_run(path, columns)
        yield "evenstep", path
    elif path.is_dir():
        files = sorted((p for p in path.rglob("*") if _is_data(p, path)), key=_natural)
        if not files:
            raise FileFormatError(
                f"{path}: a folder must hold files to read ({', '.join(_DATA_SUFFIXES)}) or be a run's, found none; "
                f"name the files"
            )
        for file in files:
            yield _read_file(file, columns, how), file
    else:
        yield _read_file(path, columns, how), path


def _is_data(path: Path, folder: Path) -> bool:
    """Whether a file of a folder is read: not what editors and file systems hide there, which may be a copy."""
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.name.endswith(_DATA_SUFFIXES) and not is_hidden and path.is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    """step_10 after step_9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _read_file(path: Path, columns: RowColumns, how: _How) -> str:
    if path.exists() and not path.is_file():
        raise FileFormatError(
            f"{path}: must be a file, found a pipe or device, which gives its bytes once, and its format is told by "
            f"looking first; write them to a file"
        )
    head = first_bytes(path, 4)
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise FileFormatError(f"{path}: must be UTF-8 text or Parquet, found UTF-16; save it as UTF-8")
    if head[:1] == b"\x80" or path.suffix in _PICKLES or head == b"PK\x03\x04":
        raise FileFormatError(
            f"{path}: must be text or Parquet, found what may hold a pickle, which is never loaded; export it as JSONL"
        )
    if head == b"PAR1" or path.suffix == ".parquet":
        return _read_parquet(path, columns, how)
    name = _with_column(path, how.format or _detected(path, how.column), how)
    try:
        if name == "numbers":
            plain.read_numbers(path, columns)
        elif name == "csv":
            plain.read_csv(path, columns, how.column)
        else:
            _read_objects(path, columns, name, how)
    except LineError as problem:  # the file has no end
        columns.bad(str(path), problem)
    return name


def _with_column(path: Path, name: str, how: _How) -> str:
    """The format, unless a column was asked for that it does not have."""
    if how.column is not None and name not in ("csv", "lengths"):
        raise FileFormatError(
            f"{path}: --column belongs to formats csv and lengths, found {how.column!r} with {name}; leave one of them "
            f"out"
        )
    return name


def _read_objects(path: Path, columns: RowColumns, name: str, how: _How) -> None:
    own_lines = own.own_reader(path.name) if name == "evenstep" else None
    reader = _object_reader(name, path.name, how)

    def rows_of(text: bytes) -> Iterator[FoundRow | str]:
        yield from own_lines(text) if own_lines is not None else reader(as_object(text))

    for number, text in numbered_lines(path):
        columns.take(rows_of(text), f"{path}, line {number}")


def _object_reader(name: str, file_name: str, how: _How) -> ObjectReader:
    readers: dict[str, ObjectReader] = {
        "nemo-rl": lambda values: nemo.nemo_rl_rows(values, file_name),
        "prime-rl": prime.prime_rl_rows,
        "verifiers": lambda values: prime.verifiers_rows(values, how.bytes_per_token),
        "nemo-gym": lambda values: nemo.nemo_gym_rows(values, how.bytes_per_token),
        "verl": lambda values: texts.verl_rows(values, how.bytes_per_token),
        "completions": lambda values: texts.completion_rows(values, how.bytes_per_token),
        "lengths": lambda values: plain.length_row(values, how.column),
        "evenstep": lambda _: iter(()),  # its lines are read as bytes
    }
    return readers[name]


def _read_parquet(path: Path, columns: RowColumns, how: _How) -> str:
    names = column_names(path)
    shape = dict.fromkeys(names)
    is_text = how.column is None and texts.looks_like_completions(shape) and not plain.looks_like_lengths(shape)
    name = _with_column(path, how.format or ("completions" if is_text else "lengths"), how)
    if name not in ("completions", "lengths"):
        raise FileFormatError(f"{path}: --format {name} is a text format, found a Parquet file; leave --format out")
    column = how.column
    if name == "lengths" and (column is not None or not plain.looks_like_lengths(shape)):
        try:
            column = plain.guess_column(names, column)
        except LineError as problem:
            raise problem.at(str(path)) from None
    read_parquet(path, columns, _object_reader(name, path.name, _How(
        format=name, column=column, bytes_per_token=how.bytes_per_token
    )))  # fmt: skip
    return name


def _detected(path: Path, column: str | None) -> str:
    """The format that the first lines look like; broken ones are passed over. Objects whose field of lengths is known
    are lengths, whoever wrote them."""
    seen = ""
    try:
        for count, (_, text) in enumerate(numbered_lines(path)):
            stripped = text.strip()
            if stripped.startswith(b"#"):
                continue
            seen = seen or stripped.decode(errors="replace")
            if stripped.startswith(b"{"):
                try:
                    values = as_object(text)
                except LineError:
                    values = {}
                if values and column is not None:
                    return "lengths"
                for name, looks in _LOOKS:
                    if values and looks(values):
                        return name
            elif plain.is_number(stripped):
                return "numbers"
            elif count == 0 and not stripped.startswith(b"["):
                if any(mark in stripped for mark in b",;\t") or path.name.removesuffix(".gz").endswith(".csv"):
                    return "csv"
                if _is_word(stripped):
                    return "csv"  # a table of one column
            if count >= 20:
                break
    except LineError as problem:
        raise problem.at(str(path)) from None
    if not seen:
        raise FileFormatError(f"{path}: must hold at least one row, found an empty file; check the path")
    raise FileFormatError(
        f"{path}: must look like one of {', '.join(FORMATS)}, found {shown(seen)}; name its format with --format, or "
        f"the field that holds lengths with --format lengths --column NAME"
    )


def _is_word(text: bytes) -> bool:
    return re.fullmatch(rb"[\"']?[A-Za-z_][\w .-]*[\"']?", text) is not None
