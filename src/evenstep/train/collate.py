"""From the rows of one plan cell to tensors: the one place where padding is made.

The loss never sees a [B, T] rectangle. A cell carries flat per-token tensors of its *trained* tokens only, and
``gather_N``, the flat position in the model's hidden states that predicts each of them; what stands at masked positions
of a row (NaN, garbage) is never read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evenstep.train.attention import DOCUMENTS_KWARG
from evenstep.types import PER_TOKEN_FIELDS, Float64Array, Row

__all__ = ["FILLER_TOKENS", "Cell", "collate"]

FILLER_TOKENS = 2  # tokens of an inert filler row
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
    input_ids_BT: Tensor  # [B, T] int64; packed: [1, T]
    position_ids_BT: Tensor | None  # packed only: positions restart at each row
    document_lengths: tuple[int, ...] | None  # packed only: T split into rows
    gather_N: Tensor  # [N] flat index into B * T of the token before each trained token
    targets_N: Tensor  # [N] ids of the trained tokens
    row_index_N: Tensor  # [N] which of `rows` each trained token belongs to
    starts: tuple[int, ...]  # flat index into B * T of each row's first token
    weights_N: Tensor  # [N]
    advantages_N: Tensor  # [N]
    old_logprobs_N: Tensor | None
    ref_logprobs_N: Tensor | None
    engine_logprobs_N: Tensor | None
    old_values_N: Tensor | None
    returns_N: Tensor | None

    def model_inputs(self) -> dict[str, object]:
        """Keyword arguments of a transformers model's forward."""
        inputs: dict[str, object] = {"input_ids": self.input_ids_BT, "use_cache": False}
        if self.document_lengths is not None:
            inputs |= {"position_ids": self.position_ids_BT, DOCUMENTS_KWARG: self.document_lengths}
        return inputs

    def token_index(self) -> Tensor:
        """Flat index into B * T of every token of its rows, context included: neither padding nor fillers.

        A position that several rows go through stands in it once for each of them.
        """
        parts = [np.arange(start, start + row.num_tokens) for start, row in zip(self.starts, self.rows, strict=True)]
        index = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
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
) -> Cell:
    """Lay out the rows of a cell.

    Args:
        rows: the cell's rows; none for an inert filler.
        weights: the weight of each row's trained tokens.
        layout: ``fixed`` and ``padded`` make a right-padded rectangle, ``packed`` one concatenated row.
        multiple: widths (packed: each row's share) are rounded up to it.
        num_shape_rows: ``fixed``: rows the rectangle must have; inert fillers make up the difference.
        dtype: of per-token floats.
        device: of all tensors.
        fields: the per-token fields that every row of the window carries; a cell without rows has them too, empty, so
            that every rank sums the same metrics.
    """
    num_fillers = max(num_shape_rows, 1) - len(rows) if len(rows) < max(num_shape_rows, 1) else 0
    documents = [row.token_ids for row in rows] + [np.zeros(FILLER_TOKENS, dtype=np.int64)] * num_fillers
    shares = [-(-len(ids) // multiple) * multiple for ids in documents]
    if layout == "packed":
        starts = np.concatenate([[0], np.cumsum(shares)[:-1]])
        flat = np.full(sum(shares), PAD_ID, dtype=np.int64)
        for start, ids in zip(starts, documents, strict=True):
            flat[start : start + len(ids)] = ids
        input_ids = flat[None]
        position_ids = torch.from_numpy(np.concatenate([np.arange(share) for share in shares])[None]).to(device)
        document_lengths = tuple(shares)
    else:
        width = max(shares)
        starts = np.arange(len(documents)) * width
        input_ids = np.full((len(documents), width), PAD_ID, dtype=np.int64)
        for i, ids in enumerate(documents):
            input_ids[i, : len(ids)] = ids
        position_ids = document_lengths = None

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
        input_ids_BT=torch.from_numpy(input_ids).to(device),
        position_ids_BT=position_ids,
        document_lengths=document_lengths,
        gather_N=join([start + t - 1 for start, t in zip(starts, trained, strict=False)], torch.int64),
        targets_N=join([row.token_ids[t] for row, t in zip(rows, trained, strict=True)], torch.int64),
        row_index_N=join([np.repeat(np.arange(len(rows)), counts)], torch.int64),
        weights_N=join([np.repeat(np.asarray(weights, dtype=np.float64), counts)], dtype),
        advantages_N=join([row.advantages_T[t] for row, t in zip(rows, trained, strict=True)], dtype),
        starts=tuple(int(start) for start in starts[: len(rows)]),
        **{f"{name}_N": per_token(name) for name in PER_TOKEN_FIELDS},
    )
