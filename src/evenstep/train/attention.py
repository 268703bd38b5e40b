"""Attention for packed rows: causal attention inside each row, nothing across, registered with transformers.

One call of scaled-dot-product attention per row; no T × T mask exists. Right-padded rectangles need none of this: with
causal attention a real token never looks at the padding after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from evenstep.errors import PlanError

__all__ = ["DOCUMENTS_KWARG", "attention_for"]

IMPLEMENTATION = "evenstep_documents"
DOCUMENTS_KWARG = "evenstep_document_lengths"  # reaches the attention function through the model's keyword arguments


def document_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each document of a packed row with itself (sliding windows included)."""
    if softcap is not None or s_aux is not None:
        raise PlanError(
            "layout 'packed' promises exact attention, and this model uses soft-capped attention scores or attention "
            "sinks, which its attention function does not compute; use layout 'padded'"
        )
    lengths: tuple[int, ...] = kwargs[DOCUMENTS_KWARG]
    grouped = query_BHTD.shape[1] != key_BHTD.shape[1]
    outputs: list[Tensor] = []
    parts = (tensor.split(lengths, dim=2) for tensor in (query_BHTD, key_BHTD, value_BHTD))
    for query, key, value in zip(*parts, strict=True):
        length = query.shape[2]
        mask = None
        if sliding_window is not None and length > sliding_window:
            position = torch.arange(length, device=query.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < sliding_window)
        outputs.append(
            scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, document_attention)


@contextmanager
def attention_for(model: PreTrainedModel, layout: str) -> Iterator[None]:
    """Switch the model to the attention a layout needs; covers the backward pass too, which may recompute."""
    if layout != "packed":
        yield
        return
    before: str = model.config._attn_implementation  # type: ignore[assignment]
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
