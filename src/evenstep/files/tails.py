"""Where the complete lines of a file end, whatever a crash left behind them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from evenstep.errors import FileFormatError

__all__ = ["ends_in_gzip_header", "gz_tail", "is_complete", "plain_tail"]


def is_complete(text: bytes) -> bool:
    """Whether a last line without a newline is a whole object all the same."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def plain_tail(path: Path) -> tuple[int, bytes]:
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
    if last_line and is_complete(last_line):
        return size, b"\n"
    return size - len(last_line), b""


def gz_tail(path: Path) -> tuple[int, bytes]:
    """As `plain_tail` for gzip data: whole members are kept, the complete lines of a cut one are to be appended."""
    num_bytes, last_byte, text = 0, b"\n", b""
    decompressor, is_between = zlib.decompressobj(wbits=31), False
    try:
        with path.open("rb") as stream:
            while data := stream.read(1 << 16):
                # zeros are what a disk may have of the next member after a crash
                while data and not (is_between and not data.strip(b"\0")):
                    is_between = False
                    text += decompressor.decompress(data)
                    data = decompressor.unused_data
                    if decompressor.eof:
                        num_bytes, last_byte, text = stream.tell() - len(data), text[-1:] or last_byte, b""
                        decompressor, is_between = zlib.decompressobj(wbits=31), True
    except zlib.error as error:
        raise FileFormatError(
            f"{path}: a name ending in .gz promises intact gzip data, found {error} after byte {num_bytes}; "
            f"rename the file if it is not compressed, else move it away and start a new one"
        ) from None
    lines = text[: text.rfind(b"\n") + 1]
    return num_bytes, lines if last_byte == b"\n" else b"\n" + lines


def ends_in_gzip_header(path: Path) -> bool:
    """Whether only the first byte of a gzip member's header is there, which Python reports as "not gzip"."""
    num_bytes, _ = gz_tail(path)
    with path.open("rb") as stream:
        stream.seek(num_bytes)
        return stream.read(2) == b"\x1f"
