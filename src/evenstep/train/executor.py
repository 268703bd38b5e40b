"""The executor of every pass: a plan's micro-batches on this rank, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenstep.train import distributed
from evenstep.train.collate import Cell, collate
from evenstep.train.window import PreparedWindow

__all__ = ["run_plan"]


def run_plan(
    window: PreparedWindow,
    fn: Callable[[Cell, bool], None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int | None = None,
) -> None:
    """Run ``fn(cell, is_last)`` on this rank's cells in the plan's order; ``num_positions``: see ``collate``."""
    plan = window.plan
    cells = plan.cells[distributed.rank_and_size()[0]]
    for k, indices in enumerate(cells):
        cell = collate(
            [window.rows[index] for index in indices],
            window.weights_R[list(indices)],
            layout=plan.layout,
            multiple=plan.multiple,
            num_shape_rows=plan.micro_batch_rows,
            dtype=dtype,
            device=device,
            fields=window.fields,
            width=plan.padded_width,
            vision=window.vision,
            router_shape=window.router_shape,
            num_positions=num_positions,
        )
        fn(cell, k == len(cells) - 1)
