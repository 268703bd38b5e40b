"""Attention along the paths of a trie, block by block, for what one fused call per node cannot do.

Scores are made where they are needed: the tokens of a node (cut into pieces of ``PIECE`` columns) against the tokens of
its subtree. Maxima, sums and outputs are carried from block to block, and the backward pass makes the scores again, so
that nothing of the size of a row squared exists, and keys and values are never copied per row. In this form sliding
windows, attention sinks and soft caps are each a line.

Shapes: X heads of keys and values, G query heads for each of them, T tokens, D head dimension.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention"
(2022).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenstep.train.trie import Node

__all__ = ["block_attention"]

PIECE = 128  # columns of a block
MAX_SCORES = 1 << 20  # of a block and head of keys


class Block(NamedTuple):
    """Rows (queries) and columns (keys) of one block of scores."""

    row: int
    row_stop: int
    column: int
    column_stop: int
    is_diagonal: bool  # the columns themselves are the rows: causal
    has_window: bool  # some pairs are out of the window


@lru_cache(maxsize=8)
def blocks_of(nodes: tuple[Node, ...], window: int | None, max_rows: int) -> tuple[tuple[Block, ...], Tensor]:
    """(all blocks with a pair that sees each other, those on the diagonal first; [T] position of each token).

    >>> blocks_of((Node(0, 2, 3, 0), Node(2, 3, 3, 2)), None, 100)[0][-1]
    Block(row=2, row_stop=3, column=0, column_stop=2, is_diagonal=False, has_window=False)
    """
    position_T = np.concatenate([np.arange(n.depth, n.depth + n.stop - n.start) for n in nodes])
    diagonal: list[Block] = []
    others: list[Block] = []
    for node in nodes:
        for column in range(node.start, node.stop, PIECE):
            column_stop = min(column + PIECE, node.stop)
            is_wider = window is not None and column_stop - column > window
            diagonal.append(Block(column, column_stop, column, column_stop, True, is_wider))
            first, last = position_T[column], position_T[column_stop - 1]
            for row in range(column_stop, node.end, max_rows):
                row_stop = min(row + max_rows, node.end)
                nearest, farthest = position_T[row:row_stop].min() - last, position_T[row:row_stop].max() - first
                if window is None or nearest < window:
                    has_window = window is not None and bool(farthest >= window)
                    others.append(Block(row, row_stop, column, column_stop, False, has_window))
    # every token sees itself: once its diagonal block is in, its maximum is finite
    return (*diagonal, *others), torch.from_numpy(position_T)


def block_attention(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    nodes: tuple[Node, ...],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[1, H, T, D] Each token's attention to itself and to the tokens before it on its path.

    With s = scale · q·k, or softcap · tanh(s / softcap), weights are exp(s) / (Σ exp(s) + exp(sink)), over the tokens
    at most ``window - 1`` positions back. Computed in float32, or float64 where the query is.
    """
    inputs = (query_BHTD, key_BHTD, value_BHTD)
    out: Tensor = _BlockAttention.apply(*inputs, sinks_H, nodes, scale, window, softcap)  # type: ignore[assignment]
    return out


class _BlockAttention(torch.autograd.Function):
    """Saves queries, keys, values, outputs and one number per query."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query_BHTD, key_BHTD, value_BHTD, sinks_H, nodes, scale, window, softcap = args
        inputs = (query_BHTD, key_BHTD, value_BHTD, sinks_H)
        with torch.autocast(query_BHTD.device.type, enabled=False):
            out_BHTD, saved, ctx.shape = _forward(*inputs, nodes, scale, window, softcap)
        ctx.save_for_backward(*saved)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        return out_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        with torch.autocast(grads[0].device.type, enabled=False):
            found = _backward(grads[0], ctx.saved_tensors, ctx.shape)
        parts = [None if dtype is None else part.to(dtype) for part, dtype in zip(found, ctx.dtypes, strict=True)]
        return (*parts, *[None] * 4)


class _Shape(NamedTuple):
    blocks: tuple[Block, ...]
    num_groups: int  # G
    scale: float
    window: int | None
    softcap: float | None


def _forward(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    sinks_H: Tensor | None,
    nodes: tuple[Node, ...],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, tuple[Tensor, ...], _Shape]:
    num_keys = key_BHTD.shape[1]
    num_groups = query_BHTD.shape[1] // num_keys
    max_rows = max(PIECE, MAX_SCORES // (PIECE * num_groups))
    blocks, position_T = blocks_of(nodes, window, max_rows)
    position_T = position_T.to(query_BHTD.device)
    shape = _Shape(blocks, num_groups, scale, window, softcap)
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    query = _by_key(query_BHTD.to(dtype), num_groups)
    key, value = key_BHTD[0].to(dtype).contiguous(), value_BHTD[0].to(dtype).contiguous()
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    sinks = query.new_full((num_keys, query.shape[1], 1), -torch.inf)
    highest, total = sinks.clone(), torch.zeros_like(sinks)
    if sinks_H is not None:
        by_key = sinks_H.to(dtype).view(num_keys, 1, num_groups)
        sinks = by_key.expand(-1, query_BHTD.shape[2], -1).reshape(num_keys, -1, 1)
        highest, total = sinks.clone(), torch.ones_like(sinks)
    for block in blocks:
        rows = slice(block.row * num_groups, block.row_stop * num_groups)
        columns = slice(block.column, block.column_stop)
        scores = _scores(query[:, rows], key[:, columns], block, position_T, shape)
        before = highest[:, rows]
        after = torch.maximum(before, scores.amax(-1, keepdim=True))
        weights = scores.sub_(after).exp_()
        kept = torch.exp(before - after)
        total[:, rows] = total[:, rows] * kept + weights.sum(-1, keepdim=True)
        out[:, rows] = torch.baddbmm(out[:, rows] * kept, weights, value[:, columns])
        highest[:, rows] = after
    out /= total
    saved = (query, key, value, out, highest + total.log(), sinks, position_T)
    return _by_head(out, num_groups).to(value_BHTD.dtype), saved, shape


def _backward(grad_BHTD: Tensor, saved: tuple[Tensor, ...], shape: _Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, out, log_total, sinks, position_T = saved
    num_groups, scale, softcap = shape.num_groups, shape.scale, shape.softcap
    grad = _by_key(grad_BHTD.to(query.dtype), num_groups)
    along = (grad * out).sum(-1, keepdim=True)
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for block in shape.blocks:
        rows = slice(block.row * num_groups, block.row_stop * num_groups)
        columns = slice(block.column, block.column_stop)
        scores = _scores(query[:, rows], key[:, columns], block, position_T, shape)
        weights = torch.exp(scores - log_total[:, rows])
        grad_value[:, columns].baddbmm_(weights.transpose(1, 2), grad[:, rows])
        grad_scores = torch.bmm(grad[:, rows], value[:, columns].transpose(1, 2)).sub_(along[:, rows]).mul_(weights)
        if softcap is not None:
            grad_scores = torch.where(weights > 0, grad_scores * (1 - (scores / softcap) ** 2), 0.0)
        grad_query[:, rows].baddbmm_(grad_scores, key[:, columns], alpha=scale)
        grad_key[:, columns].baddbmm_(grad_scores.transpose(1, 2), query[:, rows], alpha=scale)
    weights = torch.exp(sinks - log_total)  # 0 without sinks
    grad_sinks = -(weights * along).view(len(key), -1, num_groups).sum(1).flatten()
    return _by_head(grad_query, num_groups), grad_key[None], grad_value[None], grad_sinks


def _scores(query: Tensor, key: Tensor, block: Block, position_T: Tensor, shape: _Shape) -> Tensor:
    """[X, rows · G, columns] of one block, -inf where a pair does not see each other."""
    scores = torch.baddbmm(query.new_empty(()), query, key.transpose(1, 2), beta=0, alpha=shape.scale)
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    if block.is_diagonal or block.has_window:
        row_T, column_T = position_T[block.row : block.row_stop], position_T[block.column : block.column_stop]
        distance = row_T[:, None] - column_T[None, :]
        is_hidden = distance < 0
        if shape.window is not None:
            is_hidden = is_hidden | (distance >= shape.window)
        by_row = scores.view(len(key), len(row_T), shape.num_groups, len(column_T))
        by_row.masked_fill_(is_hidden[:, None], -torch.inf)
    return scores


def _by_key(tensor_BHTD: Tensor, num_groups: int) -> Tensor:
    """[1, X · G, T, D] -> [X, T · G, D]: the queries of a token that share a key stand together."""
    _, num_heads, num_tokens, dim = tensor_BHTD.shape
    by_key = tensor_BHTD.view(num_heads // num_groups, num_groups, num_tokens, dim)
    return by_key.transpose(1, 2).reshape(num_heads // num_groups, num_tokens * num_groups, dim)


def _by_head(tensor: Tensor, num_groups: int) -> Tensor:
    """[X, T · G, D] -> [1, X · G, T, D]."""
    num_keys, _, dim = tensor.shape
    return tensor.view(num_keys, -1, num_groups, dim).transpose(1, 2).reshape(1, num_keys * num_groups, -1, dim)
