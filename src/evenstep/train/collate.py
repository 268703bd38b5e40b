"""From the rows of one plan cell to tensors: the one place where padding is made.

The loss never sees a [B, T] rectangle. A cell carries flat per-token tensors of its *trained* tokens only, and
``gather_N``, the flat position in the model's hidden states that predicts each of them; what stands at masked positions
of a row (NaN, garbage) is never read. In a prefix trie rows share positions: a hidden state may then predict tokens of
several rows, each with its own target, weight and advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evenstep.media import VisionSpec, rope_positions
from evenstep.plan.footprint import FILLER_TOKENS
from evenstep.train.attention import NODES_KWARG
from evenstep.train.routing import RouterShape, experts_of_cell
from evenstep.train.trie import Node, build_trie
from evenstep.train.vision import Images, make_images
from evenstep.train.window import prefix_keys
from evenstep.types import PER_TOKEN_FIELDS, Float64Array, Int64Array, Row

__all__ = ["Cell", "collate"]

TAIL = 64  # tokens of a node of padding, or more where rows are longer
PAD_ID = 0  # never looked at: lengths and masks are carried


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The tensors of one micro-batch; N counts its trained tokens.

    Rows ``[5, 6, 7]`` (last two trained) and ``[8, 9]`` (last trained), padded:

    >>> rows = [Row(row_id=r, rollout_id=r, group_id="g", token_ids=ids, loss_mask=mask, advantage=1.0)
    ...         for r, ids, mask in (("a", [5, 6, 7], [0, 1, 1]), ("b", [8, 9], [0, 1]))]
    >>> cell = collate(rows, [0.1, 0.2], layout="padded", multiple=1, num_shape_rows=0,
    ...                dtype=torch.float64, device=torch.device("cpu"))
    >>> cell.input_ids_BT.tolist()
    [[5, 6, 7], [8, 9, 0]]
    >>> cell.gather_N.tolist(), cell.targets_N.tolist(), cell.weights_N.tolist()
    ([0, 1, 3], [6, 7, 9], [0.1, 0.1, 0.2])
    >>> cell.token_index().tolist()
    [0, 1, 2, 3, 4]
    """

    rows: tuple[Row, ...]
    num_fillers: int  # inert rows in this cell
    input_ids_BT: Tensor  # [B, T] int64; packed and tree: [1, T]
    # each token's position in its row, [3, B, T] where there are images; None: a rectangle without
    position_ids_BT: Tensor | None
    nodes: tuple[Node, ...] | None  # packed and tree only: which tokens see each other; packed: one node a row
    gather_N: Tensor  # [N] flat index into B * T of the token before each trained token
    targets_N: Tensor  # [N] ids of the trained tokens
    row_index_N: Tensor  # [N] which of `rows` each trained token belongs to
    index_by_row: tuple[Int64Array, ...]  # flat index into B * T of each token of each row
    weights_N: Tensor  # [N]
    advantages_N: Tensor  # [N]
    old_logprobs_N: Tensor | None
    ref_logprobs_N: Tensor | None
    engine_logprobs_N: Tensor | None
    old_values_N: Tensor | None
    returns_N: Tensor | None
    images: Images | None = None  # of its rows, or a blank one where other cells of the window have some
    experts_TLX: Tensor | None = None  # of all B * T positions where routing is replayed; see evenstep.train.routing

    def model_inputs(self) -> dict[str, object]:
        """Keyword arguments of a transformers model's forward."""
        inputs: dict[str, object] = {"input_ids": self.input_ids_BT, "use_cache": False}
        if self.position_ids_BT is not None:
            inputs["position_ids"] = self.position_ids_BT
        if self.nodes is not None:
            inputs[NODES_KWARG] = self.nodes
        return inputs

    def token_index(self) -> Tensor:
        """Flat index into B * T of every token of its rows, context included: neither padding nor fillers.

        A position that several rows go through stands in it once for each of them.
        """
        index = np.concatenate(self.index_by_row) if self.index_by_row else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(index).to(self.input_ids_BT.device)

    def scatter(self, values_N: Tensor) -> dict[Hashable, Tensor]:
        """Per row id, a CPU tensor of the row's own length: the value at trained tokens, 0.0 elsewhere."""
        values = values_N.detach().cpu()
        out: dict[Hashable, Tensor] = {}
        start = 0
        for row in self.rows:
            full_T = torch.zeros(row.num_tokens, dtype=values.dtype)
            full_T[np.flatnonzero(row.loss_mask)] = values[start : start + row.num_trained_tokens]
            out[row.row_id] = full_T
            start += row.num_trained_tokens
        return out


def collate(
    rows: Sequence[Row],
    weights: Sequence[float] | Float64Array,
    *,
    layout: str,
    multiple: int,
    num_shape_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    fields: Sequence[str] = (),
    width: Callable[[int], int] = lambda num_tokens: num_tokens,
    vision: VisionSpec | None = None,
    router_shape: RouterShape | None = None,
    num_positions: int | None = None,
) -> Cell:
    """Lay out the rows of a cell.

    Args:
        rows: the cell's rows; none for an inert filler.
        weights: the weight of each row's trained tokens.
        layout: ``fixed`` and ``padded`` make a right-padded rectangle, ``packed`` one concatenated row, ``tree`` the
            rows' prefix trie in depth-first order.
        multiple: widths (packed: each row's share; tree: the whole) are rounded up to it.
        num_shape_rows: ``fixed``: rows the rectangle must have; inert fillers make up the difference.
        dtype: of per-token floats.
        device: of all tensors.
        fields: the per-token fields that every row of the window carries; a cell without rows has them too, empty, so
            that every rank sums the same metrics.
        width: how many tokens a rectangle's width (packed, tree: the whole) is rounded up to after that.
        vision: of the model, where any row of the window has images.
        router_shape: of a model whose routing is replayed; None: it is not.
        num_positions: that the model has a table of, at least as many as each row's; padding stays within them.
    """
    num_fillers = max(num_shape_rows, 1) - len(rows) if len(rows) < max(num_shape_rows, 1) else 0
    documents = [*prefix_keys(rows), *[np.full(FILLER_TOKENS, PAD_ID)] * num_fillers]
    ids = [*[row.token_ids for row in rows], *documents[len(rows) :]]
    place = {"tree": _as_trie, "packed": _in_a_row}.get(layout, _in_a_rectangle)
    if num_positions is not None and layout in ("fixed", "padded"):
        multiple, width = 1, _within(num_positions, multiple, width)
    input_ids_BT, index_by_row, nodes = place(ids, documents, multiple, width)
    position_ids: Tensor | None = None
    if nodes is not None:
        parts = [np.arange(node.depth, node.depth + node.stop - node.start) for node in nodes]
        positions_T = np.concatenate(parts)
        if num_positions is not None:
            positions_T = np.minimum(positions_T, num_positions - 1)
        position_ids = torch.from_numpy(positions_T[None]).to(device)
    images: Images | None = None
    if vision is not None:
        position_ids = _positions_among_images(rows, input_ids_BT, index_by_row, position_ids, vision).to(device)
        places = [
            (image, index[image.start : image.stop])
            for row, index in zip(rows, index_by_row, strict=False)
            for image in row.media
        ]
        images = make_images(places, vision, dtype=dtype, device=device)

    own_index = index_by_row[: len(rows)]
    experts_TLX: Tensor | None = None
    if router_shape is not None:
        experts_TLX = torch.from_numpy(experts_of_cell(rows, own_index, input_ids_BT.size, router_shape)).to(device)

    trained = [np.flatnonzero(row.loss_mask) for row in rows]
    counts = [len(t) for t in trained]

    def join(parts: list[np.ndarray], kind: torch.dtype) -> Tensor:
        array = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(array).to(device=device, dtype=kind)

    def per_token(name: str) -> Tensor | None:
        if name not in fields:
            return None
        values = [getattr(row, name) for row in rows]
        return join([value[t] for value, t in zip(values, trained, strict=True)], dtype)

    return Cell(
        rows=tuple(rows),
        num_fillers=num_fillers,
        input_ids_BT=torch.from_numpy(input_ids_BT).to(device),
        position_ids_BT=position_ids,
        nodes=nodes,
        gather_N=join([index[t - 1] for index, t in zip(index_by_row, trained, strict=False)], torch.int64),
        targets_N=join([row.token_ids[t] for row, t in zip(rows, trained, strict=True)], torch.int64),
        row_index_N=join([np.repeat(np.arange(len(rows)), counts)], torch.int64),
        weights_N=join([np.repeat(np.asarray(weights, dtype=np.float64), counts)], dtype),
        advantages_N=join([row.advantages_T[t] for row, t in zip(rows, trained, strict=True)], dtype),
        index_by_row=tuple(own_index),
        images=images,
        experts_TLX=experts_TLX,
        **{f"{name}_N": per_token(name) for name in PER_TOKEN_FIELDS},
    )


def _positions_among_images(
    rows: Sequence[Row],
    input_ids_BT: Int64Array,
    index_by_row: Sequence[Int64Array],
    position_ids_BT: Tensor | None,
    vision: VisionSpec,
) -> Tensor:
    """[3, B, T] Positions in time, height and width, each row's from its own beginning; of padding as of text."""
    if position_ids_BT is None:
        flat_T = np.tile(np.arange(input_ids_BT.shape[1]), len(input_ids_BT))
    else:
        flat_T = position_ids_BT.cpu().numpy().reshape(-1)
    flat_3T = np.tile(flat_T, (3, 1))
    for row, index in zip(rows, index_by_row, strict=False):
        flat_3T[:, index] = rope_positions(row.num_tokens, row.media, vision.merge_size)
    return torch.from_numpy(flat_3T.reshape(3, *input_ids_BT.shape))


# flat token ids [B, T], for each row the flat index of its tokens, nodes
_Placed = tuple[Int64Array, list[Int64Array], tuple[Node, ...] | None]
_Width = Callable[[int], int]


def _within(num_positions: int, multiple: int, width: _Width) -> _Width:
    """The width of a rectangle that is never wider than the positions that there are."""
    return lambda num_tokens: min(width(_round_up(num_tokens, multiple)), max(num_positions, num_tokens))


def _in_a_rectangle(ids: list[Int64Array], _: list[Int64Array], multiple: int, width: _Width) -> _Placed:
    num_columns = width(_round_up(max(map(len, ids)), multiple))
    input_ids_BT = np.full((len(ids), num_columns), PAD_ID, dtype=np.int64)
    for i, row in enumerate(ids):
        input_ids_BT[i, : len(row)] = row
    return input_ids_BT, [i * num_columns + np.arange(len(row)) for i, row in enumerate(ids)], None


def _in_a_row(ids: list[Int64Array], _: list[Int64Array], multiple: int, width: _Width) -> _Placed:
    shares = [_round_up(len(row), multiple) for row in ids]
    stops = np.cumsum(shares).tolist()
    starts = [stop - share for stop, share in zip(stops, shares, strict=True)]
    index_by_row = [start + np.arange(len(row)) for start, row in zip(starts, ids, strict=True)]
    nodes = [Node(start, stop, stop, 0) for start, stop in zip(starts, stops, strict=True)]
    input_ids_T = _with_tail(nodes, width(stops[-1]))
    for index, row in zip(index_by_row, ids, strict=True):
        input_ids_T[index] = row
    return input_ids_T[None], index_by_row, tuple(nodes)


def _as_trie(ids: list[Int64Array], keys: list[Int64Array], multiple: int, width: _Width) -> _Placed:
    trie = build_trie(keys)
    nodes = list(trie.nodes)
    input_ids_T = _with_tail(nodes, width(_round_up(trie.num_tokens, multiple)))
    for index, row in zip(trie.index_R, ids, strict=True):
        input_ids_T[index] = row
    return input_ids_T[None], list(trie.index_R), tuple(nodes)


def _with_tail(nodes: list[Node], num_tokens: int) -> Int64Array:
    """Padding for so many tokens; what the rows leave of it becomes nodes of their own, which nothing sees.

    They are no longer than the rows, or ``TAIL``: padding stays within the positions that a model knows, and attention
    over it costs what tokens do, not their square.
    """
    size = nodes[-1].stop
    most = max(TAIL, *(node.depth + node.stop - node.start for node in nodes))
    for start in range(size, num_tokens, most):
        stop = min(start + most, num_tokens)
        nodes.append(Node(start, stop, stop, 0))
    return np.full(max(num_tokens, size), PAD_ID, dtype=np.int64)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
