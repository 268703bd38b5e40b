"""Images inside a model's forward: features of the vision tower in the place of placeholder embeddings.

The tower runs between the embedding and the first decoder layer, in a hook in front of the decoder, so it is part of
the model's own forward: sharded parameters are gathered and given back as ever. Ranks of a sharded tower must run it
equally often, so a micro-batch without an image runs it on a blank one, whose features count 0 times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from evenstep.media import Media, VisionSpec, vision_spec
from evenstep.train.lora import is_lora
from evenstep.types import Int64Array

__all__ = ["Images", "images_placed", "make_images", "spec_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a micro-batch, one after the other; Q patches in all, N placeholder tokens."""

    pixels_QD: Tensor
    grids_M3: Tensor  # [M, 3] patches in time, height and width
    index_N: Tensor  # flat index into B * T of each placeholder; empty: blank, to run the tower as others do


def spec_of(model: nn.Module) -> VisionSpec | None:
    """What a model makes of images; None where it sees none."""
    return vision_spec(cast(Any, model).config.to_dict())


def make_images(
    media: Sequence[tuple[Media, Int64Array]], spec: VisionSpec, *, dtype: torch.dtype, device: torch.device
) -> Images:
    """The tensors of images and the flat indices of each one's placeholders; a blank image where there are none."""
    if media:
        pixels = np.concatenate([cast(Any, image.pixels) for image, _ in media])
        grids = [image.grid for image, _ in media]
        index = np.concatenate([places for _, places in media])
    else:
        pixels = np.zeros((spec.merge_size**2, spec.patch_numbers), dtype=np.float32)
        grids, index = [(1, spec.merge_size, spec.merge_size)], np.zeros(0, dtype=np.int64)
    return Images(
        pixels_QD=torch.from_numpy(pixels).to(device=device, dtype=dtype),
        grids_M3=torch.tensor(grids, device=device),
        index_N=torch.from_numpy(index).to(device),
    )


@contextmanager
def images_placed(model: nn.Module, images: Images | None) -> Iterator[None]:
    """Within the block, the model's forward sees these images; it is given token ids and positions, and no pixels."""
    if images is None:
        yield
        return
    inner = cast(Any, model.get_base_model() if is_lora(model) else model).model

    def place(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        embeds_BTH: Tensor = kwargs["inputs_embeds"]
        found = inner.get_image_features(images.pixels_QD, images.grids_M3, return_dict=True).pooler_output
        features_NH = torch.cat(tuple(found)).to(embeds_BTH.dtype)
        flat_NH = embeds_BTH.reshape(-1, embeds_BTH.shape[-1])
        if images.index_N.numel():
            flat_NH = flat_NH.index_copy(0, images.index_N, features_NH)
        else:
            flat_NH = flat_NH + 0.0 * features_NH.sum()
        return args, kwargs | {"inputs_embeds": flat_NH.view_as(embeds_BTH)}

    handle = inner.language_model.register_forward_pre_hook(place, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
