"""Images among a row's tokens: where they stand, their patches, and the positions that their tokens have.

A vision model turns an image into patches, runs its tower over them, and puts one feature for each
``merge_size x merge_size`` block of patches in the place of one placeholder token. Letters beside those of
``evenstep.types``: M images of a row, Q patches of an image, D numbers of a patch.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.errors import ConfigError, RowError

__all__ = ["VISION_MODEL_TYPES", "Media", "VisionSpec", "check_media", "rope_positions", "vision_spec"]

# Model types whose tower sees each image by itself, and whose image tokens have a position in time, height and width.
VISION_MODEL_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl"})

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One image in its place among the tokens of a prompt or row: a run of ``num_tokens`` placeholders.

    Two are equal when place, grid and digest are; the digest is that of grid and patches, so it is computed when it is
    not given, and checked when it is. Without pixels an image can be counted and compared, but not trained on.

    >>> image = Media(start=3, grid=(1, 2, 4), num_tokens=2, pixels=np.zeros((8, 6)))
    >>> image.stop, image.num_patches, len(image.digest)
    (5, 8, 32)

    Raises:
        RowError: a place or grid below its least, pixels that are not one finite row of numbers for each patch,
            another digest than theirs, or neither pixels nor digest.
    """

    start: int  # first placeholder token
    num_tokens: int  # placeholder tokens
    grid: tuple[int, int, int]  # patches in time, height and width
    # [Q, D] normalised, in the order of the model's processor; None: they are elsewhere
    pixels: Float32Array | None = field(compare=False, repr=False)
    digest: str = ""

    def __post_init__(self) -> None:
        grid = tuple(_whole("grid", size) for size in self.grid)
        for name in ("start", "num_tokens"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if self.start < 0 or self.num_tokens < 1 or len(grid) != 3 or min(grid) < 1:
            raise RowError(
                f"an image stands at token 0 or later, takes at least 1 token and has patches in time, height and "
                f"width, found start {self.start}, {self.num_tokens} tokens, grid {self.grid}"
            )
        object.__setattr__(self, "grid", grid)
        if self.pixels is None:
            if not self.digest:
                raise RowError(f"an image has pixels, or the digest of some, found neither at token {self.start}")
            return
        pixels = np.asarray(self.pixels)
        if pixels.dtype.kind not in "iuf" or pixels.ndim != 2 or len(pixels) != grid[0] * grid[1] * grid[2]:
            raise RowError(
                f"an image of grid {grid} has pixels of shape [{grid[0] * grid[1] * grid[2]}, numbers of a patch], "
                f"found {pixels.dtype} of shape {pixels.shape}; give pixel_values and image_grid_thw of one image"
            )
        pixels = np.ascontiguousarray(pixels, dtype=np.float32)
        if not np.isfinite(pixels).all():
            raise RowError(f"an image's pixels must be finite, found {pixels[~np.isfinite(pixels)][0]}")
        if pixels.flags.writeable:
            pixels = pixels.copy()
            pixels.setflags(write=False)
        digest = pixels_digest(grid, pixels)
        if self.digest not in ("", digest):
            raise RowError(
                f"an image's digest must be that of its grid and pixels, found {self.digest} for {digest}; the pixels "
                f"are those of another image, or were changed"
            )
        for name, value in (("pixels", pixels), ("digest", digest)):
            object.__setattr__(self, name, value)

    @property
    def stop(self) -> int:
        """The token after the last placeholder."""
        return self.start + self.num_tokens

    def moved(self, start: int) -> Media:
        """The same image at another place; its pixels are not looked at again."""
        if start < 0:
            raise RowError(f"an image stands at token 0 or later, found start {start}")
        moved = copy.copy(self)
        object.__setattr__(moved, "start", _whole("start", start))
        return moved

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


def _whole(name: str, value: Any) -> int:
    """A whole number as Python's own: others would be written, hashed and compared in another way."""
    try:
        return operator.index(value)
    except TypeError:
        raise RowError(f"an image's {name} is a whole number, found {value!r}; convert it first") from None


def pixels_digest(grid: tuple[int, ...], pixels: Float32Array) -> str:
    """32 hex digits that name an image's patches."""
    state = hashlib.blake2b(repr((tuple(grid), pixels.shape)).encode(), digest_size=16)
    state.update(np.ascontiguousarray(pixels, dtype="<f4").tobytes())
    return state.hexdigest()


def check_media(media: Sequence[Media], token_ids: Int64Array, where: str) -> None:
    """Require images in the order of their tokens, apart from each other, each on a run of one placeholder id.

    Raises:
        RowError: names the image and its tokens.
    """
    end = -1
    for index, image in enumerate(media):
        if image.start <= end:
            raise RowError(
                f"{where}: images must stand in the order of their tokens, with at least one token between two, found "
                f"image {index} at token {image.start} after one that ends before token {end}; sort them by start"
            )
        end = image.stop
        if end > len(token_ids):
            raise RowError(
                f"{where}: image {index} takes tokens {image.start} to {end - 1}, and there are {len(token_ids)}; "
                f"leave out images whose tokens were dropped"
            )
        found = np.unique(token_ids[image.start : end])
        if found.size != 1:
            raise RowError(
                f"{where}: image {index} must stand on {image.num_tokens} equal placeholder ids from token "
                f"{image.start} on, found ids {found[:8].tolist()}; its place or its size is another one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """What a vision model makes of an image: from ``config.json`` and ``preprocessor_config.json``.

    An image is not resized: its sides are multiples of ``patch_size * merge_size`` pixels.

    >>> spec = VisionSpec(image_token_id=9, start_token_id=7, end_token_id=8, patch_size=2, temporal_patch_size=2,
    ...                   merge_size=2, num_channels=3)
    >>> image = spec.media(np.zeros((4, 8, 3), dtype=np.uint8), start=1)
    >>> image.grid, image.num_tokens, image.pixels.shape
    ((1, 2, 4), 2, (8, 24))
    """

    image_token_id: int  # the placeholder
    start_token_id: int  # before the placeholders of an image
    end_token_id: int  # after them
    patch_size: int  # pixels of a patch's side
    temporal_patch_size: int  # frames of a patch; an image stands in all of them
    merge_size: int  # patches of the side of a block that becomes one token
    num_channels: int
    video_token_id: int | None = None  # the placeholder of videos, which are not known here
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)  # of each channel, of values between 0 and 1
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def patch_numbers(self) -> int:
        """D: numbers of a patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    def placeholder_among(self, ids: Sequence[int]) -> int | None:
        """The first of these ids that stands for an image or begins a video; None where there is none.

        >>> spec = VisionSpec(image_token_id=9, start_token_id=7, end_token_id=8, patch_size=2, temporal_patch_size=2,
        ...                   merge_size=2, num_channels=3, video_token_id=6)
        >>> spec.placeholder_among([1, 9]), spec.placeholder_among([7, 6]), spec.placeholder_among([7, 1, 6])
        (9, 6, None)
        """
        before: int | None = None
        for token in ids:
            if token == self.image_token_id or (token == self.video_token_id and before == self.start_token_id):
                return token
            before = token
        return None

    def media(self, image: npt.NDArray[np.uint8], *, start: int) -> Media:
        """An image [height, width, 3] of bytes, standing at token ``start``.

        Patches come block by block, so that those of one token follow each other; the numbers of a patch are by
        channel, frame, row and column.

        Raises:
            ValueError: another shape or type, or sides that are no multiples of ``patch_size * merge_size``.
        """
        patch, merge = self.patch_size, self.merge_size
        side = patch * merge
        given: Any = image
        if not isinstance(given, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            found = f"{given.dtype} of shape {given.shape}" if isinstance(given, np.ndarray) else type(given).__name__
            raise ValueError(f"an image must be a NumPy array of uint8 [height, width, 3], found {found}")
        height, width = image.shape[:2]
        if height % side or width % side or not height or not width:
            raise ValueError(
                f"an image's sides must be multiples of {side} pixels ({patch} of a patch x {merge} patches of a token)"
                f", found {height} x {width}; resize or pad it"
            )
        values = (image.astype(np.float64) / 255.0 - np.array(self.mean)) / np.array(self.std)
        rows, columns = height // side, width // side
        blocks = values.transpose(2, 0, 1).reshape(3, rows, merge, patch, columns, merge, patch)
        blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]  # a frame axis behind the channels
        blocks = np.repeat(blocks, self.temporal_patch_size, axis=5)
        grid = (1, height // patch, width // patch)
        pixels = blocks.reshape(grid[1] * grid[2], self.patch_numbers).astype(np.float32)
        return Media(start=start, num_tokens=rows * columns, grid=grid, pixels=pixels)

    def check(
        self, media: Sequence[Media], token_ids: Int64Array, is_trained_T: npt.NDArray[np.bool_], who: str
    ) -> None:
        """Require that images are this model's, and that no placeholder of the context is without one.

        Raises:
            RowError: names the image or the token.
        """
        covered = np.zeros(len(token_ids), dtype=bool)
        for index, image in enumerate(media):
            time, height, width = image.grid
            if time != 1:
                raise RowError(
                    f"{who}: image {index} has {time} frames; a still image has 1, and videos are not known here"
                )
            num_tokens = image.num_patches // self.merge_size**2
            if height % self.merge_size or width % self.merge_size or num_tokens != image.num_tokens:
                raise RowError(
                    f"{who}: image {index} has a grid of {image.grid} patches, which is {num_tokens} tokens of "
                    f"{self.merge_size} x {self.merge_size}, and stands on {image.num_tokens}; take grid and "
                    f"placeholders from the same processor"
                )
            if image.pixels is None:
                raise RowError(f"{who}: image {index} ({image.digest}) is here without its pixels; read them with it")
            if image.pixels.shape[1] != self.patch_numbers:
                raise RowError(
                    f"{who}: a patch of the model has {self.patch_numbers} numbers, found {image.pixels.shape[1]} in "
                    f"image {index}; use the processor that belongs to the model"
                )
            if token_ids[image.start] != self.image_token_id:
                raise RowError(
                    f"{who}: image {index} must stand on the model's placeholder id {self.image_token_id}, found "
                    f"{token_ids[image.start]} at token {image.start}; its place is another one"
                )
            covered[image.start : image.stop] = True
        lost = np.flatnonzero((token_ids == self.image_token_id) & ~covered & ~is_trained_T)
        if lost.size:
            raise RowError(
                f"{who}: token {lost[0]} is an image placeholder ({self.image_token_id}) without an image, one of "
                f"{lost.size}; give the row its images, or where they were compacted away leave out their tokens"
            )
        if self.video_token_id is None:
            return
        # behind a start token: one alone was sampled
        is_video = (token_ids[1:] == self.video_token_id) & (token_ids[:-1] == self.start_token_id)
        videos = np.flatnonzero(is_video & ~is_trained_T[1:]) + 1
        if videos.size:
            raise RowError(
                f"{who}: token {videos[0]} begins a video ({self.video_token_id}), and videos are not known here: "
                f"without its frames the row would be another one; leave out rollouts with videos"
            )


def vision_spec(settings: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> VisionSpec | None:
    """What a model makes of images, from its ``config.json``; None for a model that sees none, or none known here.

    Args:
        settings: ``config.json``, or a configuration's ``to_dict()``.
        processor: ``preprocessor_config.json``, with mean and standard deviation of the channels. None where images
            come as patches already: then bytes are only divided by 255.

    Raises:
        ConfigError: a number is missing.
    """
    if settings.get("model_type") not in VISION_MODEL_TYPES:
        return None
    vision: Mapping[str, Any] = settings.get("vision_config") or {}
    try:
        normalise: dict[str, Any] = {}
        if processor is not None:
            if processor.get("rescale_factor", 1 / 255) != 1 / 255:
                raise ConfigError(
                    f"preprocessor_config.json must divide bytes by 255, found rescale_factor "
                    f"{processor['rescale_factor']}; give patches of your own processor instead of images"
                )
            skipped = [name for name in ("do_rescale", "do_normalize") if processor.get(name, True) is False]
            if skipped:
                raise ConfigError(
                    f"preprocessor_config.json must divide bytes by 255 and normalise them, found {skipped[0]} false; "
                    f"give patches of your own processor instead of images"
                )
            normalise = {"mean": tuple(processor["image_mean"]), "std": tuple(processor["image_std"])}
        return VisionSpec(
            image_token_id=int(settings["image_token_id"]),
            start_token_id=int(settings["vision_start_token_id"]),
            end_token_id=int(settings["vision_end_token_id"]),
            video_token_id=None if settings.get("video_token_id") is None else int(settings["video_token_id"]),
            patch_size=int(vision["patch_size"]),
            temporal_patch_size=int(vision["temporal_patch_size"]),
            merge_size=int(vision["spatial_merge_size"]),
            num_channels=int(vision.get("in_channels", vision.get("in_chans", 3))),
            **normalise,
        )
    except KeyError as error:
        raise ConfigError(
            f"a vision model's config.json and preprocessor_config.json must say {error}, found no such key; download "
            f"the model again"
        ) from None


def rope_positions(num_tokens: int, media: Sequence[Media], merge_size: int) -> Int64Array:
    """[3, T] Position of each token in time, height and width, counted within its own row.

    Text goes on from the largest position so far, alike in all three. The tokens of an image begin there together and
    go apart by frame, row and column; the text behind them goes on after the longer side.

    >>> image = Media(start=1, grid=(1, 2, 4), num_tokens=2, pixels=np.zeros((8, 6)))
    >>> rope_positions(5, [image], merge_size=2).tolist()
    [[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]]
    """
    parts: list[Int64Array] = []
    token = position = 0
    for image in media:
        parts.append(np.tile(np.arange(image.start - token) + position, (3, 1)))
        position += image.start - token
        time, height, width = image.grid[0], image.grid[1] // merge_size, image.grid[2] // merge_size
        parts.append(np.indices((time, height, width)).reshape(3, -1) + position)
        position += max(height, width)
        token = image.stop
    parts.append(np.tile(np.arange(num_tokens - token) + position, (3, 1)))
    return np.concatenate(parts, axis=1).astype(np.int64)
