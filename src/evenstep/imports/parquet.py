"""Parquet tables through pyarrow (extra ``parquet``): columns of lengths, of token ids, or of completions as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evenstep.errors import FileFormatError
from evenstep.files.lines import LineError
from evenstep.imports.rows import FoundRow, RowColumns

__all__ = ["column_names", "read_parquet"]

_BATCH_ROWS = 4096


def _open(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise FileFormatError(
            f"{path}: a Parquet file needs pyarrow, which is not installed; run: pip install 'evenstep[parquet]'"
        ) from None
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        raise FileFormatError(f"{path}: must be a Parquet file, found {error}; write it again") from None


def column_names(path: Path) -> list[str]:
    """The names of a table's columns."""
    return list(_open(path).schema_arrow.names)


def read_parquet(
    path: Path, columns: RowColumns, reader: Callable[[Mapping[str, Any]], Iterator[FoundRow | str]]
) -> None:
    """Every record through the reader of an object; errors name the record, from 1 on."""
    number = 0
    try:
        for batch in _open(path).iter_batches(batch_size=_BATCH_ROWS):
            for record in batch.to_pylist():
                number += 1
                columns.take(reader(record), f"{path}, record {number}")
    except (OSError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        columns.bad(f"{path}, after record {number}", LineError("", f"must be intact, found {error}; write it again"))
