"""Versioned JSONL: rollouts, rows, and lengths alone; ``.gz`` by suffix; one self-contained object a line.

Every line carries ``format_version`` and ``kind``. Reading is strict and streams: the first wrong line raises, naming
file, line, field, what was found and the fix. Fields this version does not know are kept in ``extra`` and written
back. NaN and infinities are neither read nor written. What a reader accepts a writer writes, and the other way round.

>>> import tempfile, pathlib
>>> from evenstep.types import Call, Rollout
>>> call = Call(order=0, prompt_ids=(5, 6), output_ids=(7, 2), logprobs=(-0.5, -0.1))
>>> rollout = Rollout(rollout_id="p0/0", group_id="p0", prompt_id="p0", reward=1.0, calls=(call,))
>>> with tempfile.TemporaryDirectory() as folder:
...     path = pathlib.Path(folder) / "rollouts.jsonl.gz"
...     write_rollouts(path, [rollout])
...     list(read_rollouts(path)) == [rollout]
True
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar, cast
from weakref import WeakValueDictionary

from evenstep.errors import FileFormatError, RowError
from evenstep.experts import RoutedExperts
from evenstep.file_lines import (
    FORMAT_VERSION,
    CallObject,
    ExpertsObject,
    LengthsLine,
    Line,
    LineError,
    RolloutLine,
    RowLine,
)
from evenstep.media import Media
from evenstep.media_files import Pixels, read_pixels, write_pixels
from evenstep.types import Call, Rollout, Row, Sampling

__all__ = [
    "FORMAT_VERSION",
    "RolloutWriter",
    "RowLengths",
    "RowRecord",
    "read_lengths",
    "read_rollouts",
    "read_rows",
    "write_lengths",
    "write_rollouts",
    "write_rows",
]

T = TypeVar("T")
LineT = TypeVar("LineT", bound=Line)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """One row as it lies in a file.

    >>> record = RowRecord(row_id="a", rollout_id="p0/0", group_id="p0", reward=1.0, token_ids=(5, 6, 7),
    ...                    loss_mask=(0, 0, 1), logprobs=(0.0, 0.0, -0.5))
    >>> record.to_row(advantage=0.5).advantages_T.tolist()
    [0.0, 0.0, 0.5]
    """

    row_id: str
    rollout_id: str
    group_id: str
    reward: float  # the rollout's, on each of its rows
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[int, ...]  # [T] 1 where the token was sampled and is trained
    logprobs: tuple[float, ...]  # [T] the engine's, 0.0 where loss_mask is 0
    advantage: float | None = None  # None: not computed yet
    routed_experts: RoutedExperts | None = None  # [T]
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # unknown fields of the file, kept as they were

    def to_row(self, *, advantage: float | None = None) -> Row:
        """The row for training; ``advantage`` takes the place of the record's own (0.0 when neither is given)."""
        value = self.advantage if advantage is None else advantage
        return Row(
            row_id=self.row_id,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            advantage=0.0 if value is None else value,
            engine_logprobs=self.logprobs,
            routed_experts=self.routed_experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """The shape of a row without its content, for people who may not share data."""

    row_id: str
    rollout_id: str
    group_id: str
    num_tokens: int
    num_trained_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


# ---------------------------------------------------------------------------------------------------- reading


def read_rollouts(
    path: str | os.PathLike[str], *, allow_truncated_tail: bool = False, pixels: bool = True
) -> Iterator[Rollout]:
    """Yield the rollouts of a file, one line at a time.

    Args:
        path: JSONL, gzipped when the name ends in ``.gz``.
        allow_truncated_tail: stop before a last line that a crash cut off, instead of raising.
        pixels: False leaves images at their place and size, and needs no file of theirs.

    Raises:
        FileFormatError: no such file, a line that is not a valid rollout, a ``rollout_id`` used twice, or an image
            whose file is missing or another one.
    """
    convert = partial(to_rollout, pixels_of=_PixelsOf(Path(path).parent)) if pixels else to_rollout
    return _read(Path(path), RolloutLine, convert, "rollout_id", allow_truncated_tail)


class _PixelsOf:
    """Each image is read once while any rollout that was read before is still there; this keeps none of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: WeakValueDictionary[str, Pixels] = WeakValueDictionary()

    def __call__(self, digest: str) -> Pixels:
        pixels = self._known.get(digest)
        if pixels is None:
            pixels = self._known[digest] = read_pixels(self._folder, digest)
        return pixels


def read_rows(path: str | os.PathLike[str], *, allow_truncated_tail: bool = False) -> Iterator[RowRecord]:
    """Yield the rows of a file; arguments and errors as for `read_rollouts`, with ``row_id`` used once."""
    return _read(Path(path), RowLine, _to_record, "row_id", allow_truncated_tail)


def read_lengths(path: str | os.PathLike[str], *, allow_truncated_tail: bool = False) -> Iterator[RowLengths]:
    """Yield the row lengths of a file; arguments and errors as for `read_rollouts`, with ``row_id`` used once."""
    return _read(Path(path), LengthsLine, lambda line: RowLengths(**_fields(line)), "row_id", allow_truncated_tail)


def _read(
    path: Path, line_type: type[LineT], convert: Callable[[LineT], T], id_name: str, allow_truncated_tail: bool
) -> Iterator[T]:
    line_of_id: dict[str, int] = {}
    for number, text in _lines(path, allow_truncated_tail):
        try:
            line = line_type.parse(text)
            unique_id: str = line.__dict__[id_name]
            if unique_id in line_of_id:
                raise LineError(
                    id_name,
                    f'must be unique in the file, found "{unique_id}" also on line {line_of_id[unique_id]}; '
                    f"remove one of the two lines or give it another id",
                )
        except LineError as problem:
            raise problem.at(f"{path}, line {number}") from None
        line_of_id[unique_id] = number
        yield convert(line)


def _lines(path: Path, allow_truncated_tail: bool) -> Iterator[tuple[int, bytes]]:
    """Numbered complete lines; a truncated tail ends them or raises."""
    number = 0
    try:
        with _open(path) as stream:
            for text in stream:
                if not text.endswith(b"\n") and not _is_complete(text):
                    raise EOFError
                number += 1
                if not text.strip():
                    raise FileFormatError(
                        f"{path}, line {number}: must be a JSON object, found a blank line; remove it"
                    )
                yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        is_truncated = isinstance(error, EOFError) or _ends_in_gzip_header(path)
        if not is_truncated:
            raise FileFormatError(
                f"{path}: a name ending in .gz promises intact gzip data, found {error} after {number} lines; "
                f"rename the file if it is not compressed, else copy or compress it again"
            ) from None
        if not allow_truncated_tail:
            raise FileFormatError(
                f"{path}: cut off after {number} complete lines, the next one has no end (as after a crash); "
                f"read with allow_truncated_tail=True to use the complete ones"
            ) from None
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _is_complete(text: bytes) -> bool:
    """Whether a last line without a newline is a whole object all the same."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def to_rollout(line: RolloutLine, pixels_of: Callable[[str], Pixels | None] = lambda digest: None) -> Rollout:
    """The rollout of a line; ``pixels_of`` a digest: what an image is, None to leave it at its place and size."""
    return Rollout(
        rollout_id=line.rollout_id,
        group_id=line.group_id,
        prompt_id=line.prompt_id,
        calls=tuple(_to_call(call, pixels_of) for call in line.calls),
        reward=line.reward,
        status=line.status,
        status_reason=line.status_reason,
        info=line.info,
        extra=line.__pydantic_extra__,
    )


def _to_call(call: CallObject, pixels_of: Callable[[str], Pixels | None]) -> Call:
    media: list[Media] = []
    for image in call.media:
        place: dict[str, Any] = {"start": image.start, "num_tokens": image.num_tokens, "grid": image.grid}
        try:
            media.append(Media(**place, digest=image.digest, pixels=pixels_of(image.digest)))
        except RowError as error:
            raise FileFormatError(f"image {image.digest} of call {call.order} is not what it was: {error}") from None
    sampling = Sampling(
        temperature=call.sampling.temperature,
        top_p=call.sampling.top_p,
        top_k=call.sampling.top_k,
        max_tokens=call.sampling.max_tokens,
        seed=call.sampling.seed,
        extra=call.sampling.__pydantic_extra__,
    )
    return Call(
        order=call.order,
        prompt_ids=call.prompt_ids,
        output_ids=call.output_ids,
        logprobs=call.logprobs,
        parent=call.parent,
        weight_version=call.weight_version,
        sampling=sampling,
        break_reason=call.break_reason,
        finish_reason=call.finish_reason,
        is_rejected=call.is_rejected,
        media=tuple(media),
        routed_experts=None if call.routed_experts is None else call.routed_experts.to_experts(),
        extra=call.__pydantic_extra__,
    )


def _to_record(line: RowLine) -> RowRecord:
    experts = line.routed_experts
    fields = _fields(line)
    fields["routed_experts"] = None if experts is None else experts.to_experts()
    return RowRecord(**fields)


def _fields(line: RowLine | LengthsLine) -> dict[str, Any]:
    known = {name: line.__dict__[name] for name in type(line).model_fields if name not in ("format_version", "kind")}
    return known | {"extra": line.__pydantic_extra__}


# ---------------------------------------------------------------------------------------------------- writing


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


def _unique(path: str | os.PathLike[str], id_name: str, records: Iterable[T]) -> Iterator[T]:
    """The records, unless an id comes twice, which no reader would take."""
    seen: set[Any] = set()
    for record in records:
        unique_id = record.__getattribute__(id_name)
        if unique_id in seen:
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

    Raises:
        FileFormatError: the folder is missing or cannot be written.
    """
    try:
        _write(Path(path), [text.encode()])
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written ({error.strerror}); make the folder or free space") from None


def _write(path: Path, lines: Iterable[bytes]) -> None:
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
        FileFormatError: the file's last line is incomplete, or a rollout that `read_rollouts` would refuse.
    """

    def __init__(self, path: str | os.PathLike[str], *, repair_truncated_tail: bool = False) -> None:
        self.path = Path(path)
        num_bytes, missing = (0, b"")
        if self.path.exists():
            num_bytes, missing = _gz_tail(self.path) if self.path.suffix == ".gz" else _plain_tail(self.path)
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

    def append(self, rollouts: Iterable[Rollout]) -> None:
        """Write a batch and wait until the disk has it; nothing is written when one of its rollouts is refused.

        Raises:
            OSError: the disk did not take all of it; the file is as it was before, so that it may be tried again.
        """
        self._append_bytes(b"".join(_rollout_bytes(self.path, rollout) for rollout in rollouts))

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


def _plain_tail(path: Path) -> tuple[int, bytes]:
    """How many bytes to keep, and what to append to them so that the file ends after a complete line."""
    size = path.stat().st_size
    tail = b""
    with path.open("rb") as stream:
        start = size
        while start > 0 and b"\n" not in tail:
            step = min(1 << 20, start)
            start -= step
            stream.seek(start)
            tail = stream.read(step) + tail
    last_line = tail[tail.rfind(b"\n") + 1 :]
    if last_line and _is_complete(last_line):
        return size, b"\n"
    return size - len(last_line), b""


def _gz_tail(path: Path) -> tuple[int, bytes]:
    """As `_plain_tail` for gzip data: whole members are kept, the complete lines of a cut one are to be appended."""
    num_bytes, last_byte, text = 0, b"\n", b""
    decompressor = zlib.decompressobj(wbits=31)
    try:
        with path.open("rb") as stream:
            while data := stream.read(1 << 16):
                while data:
                    text += decompressor.decompress(data)
                    data = decompressor.unused_data
                    if decompressor.eof:
                        num_bytes, last_byte, text = stream.tell() - len(data), text[-1:] or last_byte, b""
                        decompressor = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        raise FileFormatError(
            f"{path}: a name ending in .gz promises intact gzip data, found {error} after byte {num_bytes}; "
            f"rename the file if it is not compressed, else move it away and start a new one"
        ) from None
    lines = text[: text.rfind(b"\n") + 1]
    return num_bytes, lines if last_byte == b"\n" else b"\n" + lines


def _ends_in_gzip_header(path: Path) -> bool:
    """Whether only the first byte of a gzip member's header is there, which Python reports as "not gzip"."""
    num_bytes, _ = _gz_tail(path)
    with path.open("rb") as stream:
        stream.seek(num_bytes)
        return stream.read(2) == b"\x1f"
