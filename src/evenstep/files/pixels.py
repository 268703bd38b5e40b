"""Pixels of rollouts' images beside the files that name them: ``media/<digest>.npy``, each different image once."""

from __future__ import annotations

import io
import math
import os
import tokenize
import uuid
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from evenstep.errors import FileFormatError
from evenstep.media import Media

__all__ = ["FOLDER", "Pixels", "read_pixels", "write_pixels"]

FOLDER = "media"
Pixels = npt.NDArray[np.float32]


def write_pixels(folder: Path, media: Iterable[Media]) -> None:
    """Write the pixels of images that are not there yet; each file appears under its name only when it is complete.

    What is there and has another size (a copy that was cut off) is written again.

    Raises:
        FileFormatError: an image without pixels that nothing was written of before.
    """
    for digest, image in {image.digest: image for image in media}.items():
        path = folder / FOLDER / f"{digest}.npy"
        if path.is_file() and (image.pixels is None or path.stat().st_size == _num_bytes(image.pixels)):
            continue
        if image.pixels is None:
            raise FileFormatError(
                f"{path}: an image is written with its pixels, found image {digest} without; read the rollout with "
                f"read_rollouts, or copy {FOLDER}/ there first"
            )
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # threads and machines write the same image
        try:
            with temporary.open("wb") as stream:
                np.save(stream, image.pixels, allow_pickle=False)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _num_bytes(pixels: Pixels) -> int:
    """Of the file with these pixels."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(pixels))
    return header.tell() + pixels.nbytes


def read_pixels(folder: Path, digest: str) -> Pixels:
    """The pixels of an image; nothing in the file is executed.

    Raises:
        FileFormatError: there is no such file, or it is no array of float32.
    """
    path = folder / FOLDER / f"{digest}.npy"
    try:
        pixels = _parsed(path.read_bytes())
    except OSError as error:
        raise FileFormatError(
            f"{path}: a rollout names an image whose pixels cannot be read ({error.strerror}); copy the folder "
            f"{FOLDER} together with the file of rollouts"
        ) from None
    except (ValueError, EOFError, tokenize.TokenError, zipfile.BadZipFile) as error:
        raise FileFormatError(f"{path}: must be a NumPy array without objects ({error}); copy it again") from None
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.float32:
        raise FileFormatError(f"{path}: must be one array of float32; copy it again")
    pixels.setflags(write=False)
    return pixels


def _parsed(data: bytes) -> Any:
    """As ``np.load``, but memory is taken only for as many numbers as the file has, whatever its header promises."""
    stream = io.BytesIO(data)
    if data[: len(npy.MAGIC_PREFIX)] == npy.MAGIC_PREFIX:
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(npy.read_magic(stream))
        if read_header is None:
            raise ValueError("another version of the format than 1.0 or 2.0")
        shape, _, dtype = read_header(stream)
        promised, found = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
        if promised != found and not dtype.hasobject:
            raise ValueError(f"{promised} bytes of numbers were promised, found {found}")
        stream.seek(0)
    return np.load(stream, allow_pickle=False)
