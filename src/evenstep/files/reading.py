"""Reading files line by line: the first wrong one raises, and names what was found and the fix."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast
from weakref import WeakValueDictionary

from evenstep.errors import FileFormatError, RowError
from evenstep.files.lines import CallObject, LengthsLine, Line, LineError, RolloutLine, RowLine
from evenstep.files.pixels import Pixels, read_pixels
from evenstep.files.records import RowLengths, RowRecord
from evenstep.files.tails import ends_in_gzip_header, is_complete
from evenstep.media import Media
from evenstep.types import Call, Rollout, Sampling

__all__ = ["read_lengths", "read_rollouts", "read_rows", "rollout_ids", "to_rollout"]

# how a line that was written here begins; the rest of it, which may be long, is not looked at for its id
_HEAD = re.compile(rb'\{"format_version":\d+,"kind":"rollout","rollout_id":("(?:[^"\\]|\\.)*+")')

T = TypeVar("T")
LineT = TypeVar("LineT", bound=Line)


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


def rollout_ids(path: Path) -> Iterator[str]:
    """The ids of a file's rollouts, whose lines are not checked otherwise: one without an id has none."""
    for _, text in _lines(path, allow_truncated_tail=False):
        found = _HEAD.match(text)
        try:
            name: Any = json.loads(text)["rollout_id"] if found is None else json.loads(found[1])
        except (KeyError, TypeError, ValueError):
            continue
        if isinstance(name, str):
            yield name


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
                if not text.endswith(b"\n") and not is_complete(text):
                    raise EOFError
                number += 1
                if not text.strip():
                    raise FileFormatError(
                        f"{path}, line {number}: must be a JSON object, found a blank line; remove it"
                    )
                yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        is_truncated = isinstance(error, EOFError) or ends_in_gzip_header(path)
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
