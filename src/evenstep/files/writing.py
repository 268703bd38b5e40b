"""Writing files: whole ones appear under their name when they are complete; rollouts can be appended."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from evenstep.errors import FileFormatError
from evenstep.experts import RoutedExperts
from evenstep.files.lines import FORMAT_VERSION, ExpertsObject, LengthsLine, Line, LineError, RolloutLine, RowLine
from evenstep.files.pixels import write_pixels
from evenstep.files.reading import rollout_ids
from evenstep.files.records import RowLengths, RowRecord
from evenstep.files.tails import gz_tail, plain_tail
from evenstep.media import Media
from evenstep.types import Rollout, Sampling

__all__ = ["RolloutWriter", "write_lengths", "write_rollouts", "write_rows", "write_text"]

T = TypeVar("T")


def write_rollouts(path: str | os.PathLike[str], rollouts: Iterable[Rollout]) -> None:
    """Write a file of rollouts; it appears under its name only when it is complete.

    Raises:
        FileFormatError: a rollout that `read_rollouts` would refuse; ``path`` is left as it was then.
    """
    _write(Path(path), (_rollout_bytes(path, rollout) for rollout in _unique(path, "rollout_id", rollouts)))


def write_rows(path: str | os.PathLike[str], rows: Iterable[RowRecord]) -> None:
    """Write a file of rows; as `write_rollouts`."""
    named = ((row, f"{path}, row {row.row_id!r}") for row in _unique(path, "row_id", rows))
    _write(Path(path), (_encoded(RowLine, "row", row, where) for row, where in named))


def write_lengths(path: str | os.PathLike[str], rows: Iterable[RowLengths]) -> None:
    """Write a file of row lengths; as `write_rollouts`."""
    named = ((row, f"{path}, row {row.row_id!r}") for row in _unique(path, "row_id", rows))
    _write(Path(path), (_encoded(LengthsLine, "lengths", row, where) for row, where in named))


def _unique(
    path: str | os.PathLike[str], id_name: str, records: Iterable[T], *, known: Set[Any] = frozenset()
) -> Iterator[T]:
    """The records, unless an id comes twice, or is ``known`` to be in the file, which no reader would take."""
    seen: set[Any] = set()
    for record in records:
        unique_id = record.__getattribute__(id_name)
        if unique_id in seen or unique_id in known:
            raise FileFormatError(
                f"{path}, field `{id_name}`: must be unique in the file, found {unique_id!r} twice; write it once, or "
                f"give the other another id"
            )
        seen.add(unique_id)
        yield record


def _rollout_bytes(path: str | os.PathLike[str], rollout: Rollout) -> bytes:
    write_pixels(Path(path).parent, (image for call in rollout.calls for image in call.media))  # before who names them
    return _encoded(RolloutLine, "rollout", rollout, f"{path}, rollout {rollout.rollout_id!r}")


def _encoded(line_type: type[Line], kind: str, record: Rollout | RowRecord | RowLengths, where: str) -> bytes:
    try:
        values = {"format_version": FORMAT_VERSION, "kind": kind, **_plain(record)}
        return line_type.from_values(values).model_dump_json().encode() + b"\n"
    except LineError as problem:
        raise problem.at(where) from None


def _plain(record: Any) -> dict[str, Any]:
    """A record as nested dicts, its ``extra`` fields beside the known ones."""
    values: dict[str, Any] = {}
    for name in (item.name for item in dataclasses.fields(record) if item.metadata.get("is_stored", True)):
        value = record.__getattribute__(name)
        if isinstance(value, Sampling):
            value = _plain(value)
        elif name == "media":
            names = ("start", "num_tokens", "grid", "digest")
            value = tuple({each: getattr(image, each) for each in names} for image in cast(tuple[Media, ...], value))
        elif isinstance(value, RoutedExperts):
            value = ExpertsObject.plain(value)
        elif name == "calls":
            value = tuple(_plain(call) for call in value)
        elif isinstance(value, list):
            value = tuple(cast(list[Any], value))
        elif isinstance(value, Mapping):
            value = dict(cast(Mapping[str, Any], value))
        values[name] = value
    extra: dict[str, Any] = values.pop("extra")
    if clashes := sorted(extra.keys() & values.keys()):
        raise LineError("extra", f"must not hold known fields, found {clashes}; set the fields themselves")
    return values | extra


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file; it appears under its name only when it is complete.

    Halves of surrogate pairs, as in the name of a file that is no UTF-8, are written as escapes.

    Raises:
        FileFormatError: the folder is missing or cannot be written.
    """
    try:
        _write(Path(path), [text.encode(errors="backslashreplace")])
    except OSError as error:
        raise _refusal(path, error.strerror) from None


def check_place(path: Path | None, *, makes_folders: bool = False) -> None:
    """Refuse a place that `write_text` cannot write to, before the work whose result belongs there.

    Args:
        path: None is no place, and fine.
        makes_folders: its folders are made when it is written.

    Raises:
        FileFormatError: it is a folder, or in none that can be written.
    """
    if path is None:
        return
    folder = path.parent
    while makes_folders and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    number = 0
    if path.is_dir():
        number = errno.EISDIR
    elif not folder.is_dir():
        number = errno.ENOTDIR if folder.exists() else errno.ENOENT
    elif not os.access(path if path.exists() else folder, os.W_OK):
        number = errno.EACCES
    if number:
        raise _refusal(path, os.strerror(number))


def _refusal(path: str | os.PathLike[str], reason: str | None) -> FileFormatError:
    return FileFormatError(
        f"{path}: cannot be written there ({reason}); make the folder, free space, or name another place"
    )


def _write(path: Path, lines: Iterable[bytes]) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if (path.exists() and not path.is_file()) or path.parent == Path("/dev"):
        with path.open("ab") as raw:  # a device or pipe takes bytes; a file moved there would be in its place
            raw.writelines(lines)
        return
    path = Path(os.path.realpath(path))  # a link stays one
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as stream:
                    stream.writelines(lines)
            else:
                raw.writelines(lines)
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RolloutWriter:
    """Append rollouts to a file so that a crash costs at most the batch being written.

    Each `append` is one write, flushed and synced to the disk; in ``.gz`` files it is a gzip member of its own.

    Args:
        path: created when missing, else appended to.
        repair_truncated_tail: cut off an incomplete last line that a crash left, instead of raising; what
            `read_rollouts` yields with ``allow_truncated_tail=True`` stays. ``was_repaired`` says whether it happened.

    Raises:
        FileFormatError: the file's last line is incomplete, or a rollout that `read_rollouts` would refuse, also
            because its id is in the file already.
    """

    def __init__(self, path: str | os.PathLike[str], *, repair_truncated_tail: bool = False) -> None:
        self.path = Path(path)
        num_bytes, missing = (0, b"")
        if self.path.exists():
            num_bytes, missing = gz_tail(self.path) if self.path.suffix == ".gz" else plain_tail(self.path)
        self.was_repaired = self.path.exists() and num_bytes < self.path.stat().st_size
        if self.was_repaired and not repair_truncated_tail:
            raise FileFormatError(
                f"{self.path}: cannot append, what follows byte {num_bytes} has no end (as after a crash); "
                f"open with repair_truncated_tail=True to cut off the incomplete line"
            )
        if self.was_repaired:
            os.truncate(self.path, num_bytes)
        self._stream = self.path.open("ab", buffering=0)
        self._append_bytes(missing)
        self._known = set(rollout_ids(self.path))

    def append(self, rollouts: Iterable[Rollout]) -> None:
        """Write a batch and wait until the disk has it; nothing is written when one of its rollouts is refused.

        Raises:
            OSError: the disk did not take all of it; the file is as it was before, so that it may be tried again.
        """
        batch = list(_unique(self.path, "rollout_id", rollouts, known=self._known))
        self._append_bytes(b"".join(_rollout_bytes(self.path, rollout) for rollout in batch))
        self._known.update(rollout.rollout_id for rollout in batch)

    def _append_bytes(self, data: bytes) -> None:
        if data:
            left = memoryview(gzip.compress(data, mtime=0) if self.path.suffix == ".gz" else data)
            num_bytes = os.fstat(self._stream.fileno()).st_size
            try:
                while left:
                    left = left[self._stream.write(left) :]
                os.fsync(self._stream.fileno())
            except OSError:
                self._stream.truncate(num_bytes)
                raise

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
