"""A tiny random model that sees images, in float32 or true float64, rows with images, and its own step row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl as qwen2_5_vl
import transformers.models.qwen2_vl.modeling_qwen2_vl as qwen2_vl
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from evenstep import Row
from evenstep.media import Media, VisionSpec, vision_spec
from tiny_models import _eager_attention, _frequencies, _rms_norm

VOCAB, IMAGE, START, END = 23, 20, 21, 22  # ids from 20 on are those of images
PATCH, MERGE = 2, 2
FAMILIES = ("qwen2_vl", "qwen2_5_vl")


def tiny_vision_model(
    family: str = "qwen2_vl", *, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 0.4
) -> Any:
    """As ``tiny_models.tiny_model``: weights are a pure function of ``seed``, and far from uniform."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    vision: dict[str, Any] = {"depth": 2, "patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": MERGE}
    ids = {"image_token_id": IMAGE, "video_token_id": 19, "vision_start_token_id": START, "vision_end_token_id": END}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 8, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "in_channels": 3}
        config: Any = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
        model: Any = Qwen2VLForConditionalGeneration(config)
    else:
        vision |= {"hidden_size": 8, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 12, "in_channels": 3}
        vision |= {"window_size": 8, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
        model = Qwen2_5_VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = (parameter.ndim == 1 and "norm" in name) or "ln_q.weight" in name
            parameter.copy_(1.0 + 0.5 * scale * noise if is_norm else scale * noise)
    model = model.to(dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if isinstance(module, (*ROTARY, *VISION_ROTARY)):
                module.inv_freq = _frequencies(module.config.rope_parameters, module.inv_freq)
    return model


ROTARY = (qwen2_vl.Qwen2VLRotaryEmbedding, qwen2_5_vl.Qwen2_5_VLRotaryEmbedding)
VISION_ROTARY = (qwen2_vl.Qwen2VLVisionRotaryEmbedding, qwen2_5_vl.Qwen2_5_VLVisionRotaryEmbedding)


def _rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids.expand(3, -1, -1)[..., None].to(x.dtype) * self.inv_freq
    return self.recomposition_frequencies(angles.cos()), self.recomposition_frequencies(angles.sin())


def _vision_rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].to(x.dtype) * self.inv_freq
    return self.recomposition_frequencies(angles.cos()), self.recomposition_frequencies(angles.sin())


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return q * cos + qwen2_vl.rotate_half(q) * sin, k * cos + qwen2_vl.rotate_half(k) * sin


@contextlib.contextmanager
def true_float64() -> Iterator[None]:
    """Within the block, the tiny models keep the dtype of their inputs throughout."""
    replaced: list[tuple[Any, str, Any]] = [
        (qwen2_vl.Qwen2VLRMSNorm, "forward", _rms_norm),
        (qwen2_5_vl.Qwen2_5_VLRMSNorm, "forward", _rms_norm),
        *((rotary, "forward", _rotary) for rotary in ROTARY),
        *((rotary, "forward", _vision_rotary) for rotary in VISION_ROTARY),
        *((module, "apply_rotary_pos_emb_vision", _turned) for module in (qwen2_vl, qwen2_5_vl)),
        *((module, "eager_attention_forward", _eager_attention) for module in (qwen2_vl, qwen2_5_vl)),
    ]
    originals = [vars(owner)[name] for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


def spec(family: str = "qwen2_vl") -> VisionSpec:
    found = vision_spec(tiny_vision_model(family).config.to_dict())
    assert found is not None
    return found


def picture(seed: int, *, height: int = 4, width: int = 4, start: int = 0) -> Media:
    """An image of random patches; 4 x 4 pixels are one token."""
    grid = (1, height // PATCH, width // PATCH)
    pixels = np.random.default_rng(seed).normal(size=(grid[1] * grid[2], 3 * 2 * PATCH**2))
    return Media(start=start, num_tokens=grid[1] * grid[2] // MERGE**2, grid=grid, pixels=pixels)


def row_of(name: str, *parts: int | Media, trained: int = 2, group: str = "g", advantage: float = 1.0) -> Row:
    """A row of ids and images, each of these between its two marks; the last ``trained`` tokens are trained."""
    ids: list[int] = []
    media: list[Media] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        start = len(ids) + 1
        media.append(Media(start=start, num_tokens=part.num_tokens, grid=part.grid, pixels=part.pixels))
        ids += [START, *[IMAGE] * part.num_tokens, END]
    mask = [0] * (len(ids) - trained) + [1] * trained
    return Row(
        row_id=name,
        rollout_id=name,
        group_id=group,
        token_ids=ids,
        loss_mask=mask,
        advantage=advantage,
        old_logprobs=np.linspace(-3.0, -2.0, len(ids)),
        media=media,
    )


def mixed_rows() -> list[Row]:
    """Rows with one image, two, and none, of several sizes."""
    wide, tall, small, other = (
        picture(1, height=4, width=12),
        picture(2, height=8, width=4),
        picture(3),
        picture(4, height=8, width=8),
    )
    return [
        row_of("one", 1, wide, 2, 3, 4, advantage=0.7),
        row_of("two", 5, small, 6, tall, 7, 8, 9, trained=3, advantage=-1.3),
        row_of("text", 3, 1, 4, 1, 5, trained=3, advantage=0.3),
        row_of("large", other, 2, 7, 1, 8, trained=2, advantage=-0.9),
        row_of("short", 9, 8, 7, trained=1, advantage=1.1),
        row_of("same", 1, wide, 3, 3, advantage=-0.2),
    ]


def own_logprobs(model: Any, row: Row) -> Tensor:
    """[T - 1] Log-probs of a row's tokens from the second on, through the model's own pixels, places and positions."""
    ids = torch.from_numpy(row.token_ids.copy())[None]
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if row.media:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        inputs["pixel_values"] = torch.cat([torch.from_numpy(np.array(image.pixels)) for image in row.media])
        inputs["pixel_values"] = inputs["pixel_values"].to(next(model.parameters()).dtype)
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in row.media])
    logits = model(**inputs).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def own_step(model: Any, rows: Sequence[Row], clip: float = 0.2) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient) of the clipped surrogate with token mean, one row at a time, written out."""
    num_trained = sum(int(row.loss_mask.sum()) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    for row in rows:
        logprobs = own_logprobs(model, row)
        total = torch.zeros((), dtype=logprobs.dtype)
        for t in np.flatnonzero(row.loss_mask):
            assert row.old_logprobs is not None
            ratio = torch.exp(logprobs[t - 1] - row.old_logprobs[t])
            advantage = float(row.advantages_T[t])
            total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage) / num_trained
        total.backward()
        loss += total.detach()
    gradient = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return float(loss), gradient
