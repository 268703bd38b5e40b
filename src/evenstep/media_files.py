"""Pixels of rollouts' images beside the files that name them: ``media/<digest>.npy``, each different image once."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evenstep.errors import FileFormatError
from evenstep.media import Media

__all__ = ["FOLDER", "Pixels", "read_pixels", "write_pixels"]

FOLDER = "media"
Pixels = npt.NDArray[np.float32]


def write_pixels(folder: Path, media: Iterable[Media]) -> None:
    """Write the pixels of images that are not there yet; each file appears under its name only when it is complete.

    Raises:
        FileFormatError: an image without pixels that nothing was written of before.
    """
    for digest, image in {image.digest: image for image in media}.items():
        path = folder / FOLDER / f"{digest}.npy"
        if path.exists():
            continue
        if image.pixels is None:
            raise FileFormatError(
                f"{path}: an image is written with its pixels, found image {digest} without; read the rollout with "
                f"read_rollouts, or copy {FOLDER}/ there first"
            )
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as stream:
                np.save(stream, image.pixels, allow_pickle=False)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def read_pixels(folder: Path, digest: str) -> Pixels:
    """The pixels of an image; nothing in the file is executed.

    Raises:
        FileFormatError: there is no such file, or it is no array of float32.
    """
    path = folder / FOLDER / f"{digest}.npy"
    try:
        pixels = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    except OSError as error:
        raise FileFormatError(
            f"{path}: a rollout names an image whose pixels cannot be read ({error.strerror}); copy the folder "
            f"{FOLDER} together with the file of rollouts"
        ) from None
    except (ValueError, EOFError) as error:
        raise FileFormatError(f"{path}: must be a NumPy array without objects ({error}); copy it again") from None
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.float32:
        raise FileFormatError(f"{path}: must be one array of float32; copy it again")
    pixels.setflags(write=False)
    return pixels
