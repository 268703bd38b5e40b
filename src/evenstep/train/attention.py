"""Attention for packed rows and prefix tries: each token sees its own row's tokens before it, and nothing else.

Functions registered with transformers' attention interface; what they need to know of the rows reaches them as a
keyword argument of the model's call. Right-padded rectangles need none of this: with causal attention a real token never
looks at the padding after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from evenstep.train.blocks import block_attention
from evenstep.train.trie import Node, paths

__all__ = ["NODES_KWARG", "attention_for"]

NODES_KWARG = "evenstep_nodes"  # reaches the attention function through the model's keyword arguments
IMPLEMENTATION = "evenstep_nodes"
# fused calls copy the keys and values of each node's path: at most this many for each token, and masks of this size
MAX_COPIES = 6
MAX_MASK = 1 << 22


def node_attention(
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
    """Causal attention along the path of each node: a fused call per node, or blocks where that cannot be exact."""
    nodes: tuple[Node, ...] = kwargs[NODES_KWARG]
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    longest = max(node.depth + node.stop - node.start for node in nodes)
    window = None if sliding_window is None or longest <= sliding_window else sliding_window
    if window is None and softcap is None and s_aux is None and _is_cheap_by_node(nodes):
        out_BHTD = _by_node(query_BHTD, key_BHTD, value_BHTD, nodes, scale)
    else:
        settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": s_aux}
        out_BHTD = block_attention(query_BHTD, key_BHTD, value_BHTD, nodes, **settings)
    return out_BHTD.transpose(1, 2).contiguous(), None


def _is_cheap_by_node(nodes: tuple[Node, ...]) -> bool:
    below = [(node.depth + node.stop - node.start, node.stop - node.start) for node in nodes if node.depth]
    num_copies = sum(keys for keys, _ in below)
    return num_copies <= MAX_COPIES * nodes[-1].stop and all(keys * queries <= MAX_MASK for keys, queries in below)


def _by_node(query: Tensor, key: Tensor, value: Tensor, nodes: tuple[Node, ...], scale: float) -> Tensor:
    lengths = [node.stop - node.start for node in nodes]
    is_grouped = query.shape[1] != key.shape[1]
    queries, keys, values = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    outputs: list[Tensor] = []
    for i, (node, path) in enumerate(zip(nodes, paths(nodes), strict=True)):
        mask = None
        if path:
            length = lengths[i]
            mask = torch.ones(length, node.depth + length, dtype=torch.bool, device=query.device).tril(node.depth)
        outputs.append(
            scaled_dot_product_attention(
                queries[i],
                torch.cat([keys[j] for j in (*path, i)], dim=2) if path else keys[i],
                torch.cat([values[j] for j in (*path, i)], dim=2) if path else values[i],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=is_grouped,
            )
        )
    return torch.cat(outputs, dim=2)


AttentionInterface.register(IMPLEMENTATION, node_attention)


@contextmanager
def attention_for(model: PreTrainedModel, layout: str) -> Iterator[None]:
    """Switch the model to the attention a layout needs; covers the backward pass too, which may recompute."""
    if layout not in ("packed", "tree"):
        yield
        return
    before: str = model.config._attn_implementation  # type: ignore[assignment]
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
