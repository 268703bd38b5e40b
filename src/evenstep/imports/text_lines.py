"""Numbered lines of plain or gzipped text files; JSON objects and their fields, with errors that name them."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from evenstep.errors import FileFormatError
from evenstep.files.lines import LineError
from evenstep.validation import shown

__all__ = [
    "as_count",
    "as_ids",
    "as_mask",
    "as_object",
    "first_bytes",
    "numbered_lines",
    "optional_text",
    "text_tokens",
]

GZIP_MAGIC = b"\x1f\x8b"


def first_bytes(path: Path, count: int) -> bytes:
    """The first bytes of a file, uncompressed where it is gzipped.

    Raises:
        FileFormatError: the file cannot be read, or is broken from its first bytes on.
    """
    try:
        with _open(path) as stream:
            return stream.read(count)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileFormatError(f"{path}: must be intact gzip data, found {error}; copy or compress it again") from None
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers, and without the mark that some editors put in front of UTF-8.

    A gzip file that was cut off ends in a `LineError`.
    """
    number = 0
    try:
        with _open(path) as stream:
            for text in stream:
                number += 1
                text = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
                if text.strip():
                    yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise LineError(
            "", f"the rest of the file must be intact gzip data, found {error} after line {number}; copy it again"
        ) from None
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as stream:
        is_gzip = stream.read(2) == GZIP_MAGIC
    return cast(IO[bytes], gzip.open(path, "rb")) if is_gzip else path.open("rb")


def as_object(text: bytes) -> dict[str, Any]:
    """The JSON object of a line; raises `LineError`."""
    try:
        value: Any = json.loads(text)
    except ValueError as error:  # also a line that is no UTF-8
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        raise LineError(
            "",
            f"must be one complete JSON object, found {shown(text.decode(errors='replace').strip())} ({reason}); "
            f"write each object on a line of its own",
        ) from None
    except RecursionError:
        raise LineError("", "must be a JSON object, found one nested too deeply; flatten it") from None
    if not isinstance(value, dict):
        raise LineError("", f"must be a JSON object, found {shown(value)}; write one object per line")
    return cast("dict[str, Any]", value)


def as_count(values: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    """A field that is a whole number; raises `LineError`."""
    if name not in values:
        raise LineError(name, "is required, found no such field; add it, or check --format")
    value = values[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LineError(name, f"must be a whole number ≥ {least}, found {shown(value)}; count the tokens")
    return value


def as_ids(values: Mapping[str, Any], name: str) -> list[int]:
    """A field that is a list of token ids; raises `LineError`."""
    if name not in values:
        raise LineError(name, "is required, found no such field; add it, or check --format")
    ids: Any = values[name]
    if not isinstance(ids, list):
        raise LineError(name, f"must be an array of token ids, found {shown(ids)}; write the ids themselves")
    listed = cast("list[Any]", ids)
    # a set of types looks at all items at C speed
    if not {type(item) for item in listed} <= {int} or (listed and not 0 <= min(listed) <= max(listed) < 2**31):
        wrong = next(item for item in listed if type(item) is not int or not 0 <= item < 2**31)
        raise LineError(name, f"must hold token ids (integers ≥ 0), found {shown(wrong)}; write the ids themselves")
    return listed


def as_mask(values: Mapping[str, Any], name: str, num_tokens: int) -> int:
    """How many of a row's tokens a mask of 0 and 1 (or booleans) marks; raises `LineError`."""
    mask: Any = values.get(name)
    if not isinstance(mask, list):
        raise LineError(name, f"must be an array of 0 and 1, found {shown(mask)}; write one value for each token")
    listed = cast("list[Any]", mask)
    if len(listed) != num_tokens:
        raise LineError(
            name, f"must have one value for each of {num_tokens} tokens, found {len(listed)}; take both from one row"
        )
    if not {type(item) for item in listed} <= {int, bool, float} or not set(listed) <= {0, 1}:
        wrong = next(item for item in listed if item not in (0, 1))
        raise LineError(name, f"must hold 0 and 1 only, found {shown(wrong)}")
    return int(sum(listed))


def optional_text(values: Mapping[str, Any], *names: str) -> str | None:
    """The first of these fields that is there, as text."""
    for name in names:
        value = values.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return None


def text_tokens(parts: Sequence[str], bytes_per_token: float) -> int:
    """About how many tokens a text has: its UTF-8 bytes over ``bytes_per_token``, at least 1.

    >>> text_tokens(["What is 12 + 30?", "42"], bytes_per_token=4.0)
    4
    """
    return max(1, round(sum(len(part.encode("utf-8", "surrogatepass")) for part in parts) / bytes_per_token))
