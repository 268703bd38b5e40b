"""Does a model give each row the log-probs it has alone, in this layout? Asked once, before anything is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from evenstep.errors import PlanError
from evenstep.train.attention import attention_for
from evenstep.train.collate import collate
from evenstep.train.critic import is_critic, value_inputs
from evenstep.train.logprobs import cell_logprobs
from evenstep.types import Row

__all__ = ["num_embeddings", "verify_layout"]

LENGTHS = (7, 3, 5)  # tokens of the rows that are tried together
TOLERANCE = 1e-3  # nats; rounding is below 1e-5, a row that sees another one is off by more than 0.1


def num_embeddings(model: PreTrainedModel) -> int:
    """Token ids the model has an embedding for."""
    embeddings = model.get_input_embeddings()
    return embeddings.num_embeddings if isinstance(embeddings, torch.nn.Embedding) else int(model.config.vocab_size)


def verify_layout(model: PreTrainedModel, layout: str) -> None:
    """Compare a few rows laid out together with each of them alone, through the model's own logits.

    Finds models whose attention cannot be told where a row ends, that look ahead into padding, or that change the
    logits after the output head in a way evenstep does not know. Of a critic, whose head may still be 0, the hidden
    states before it are compared.

    Raises:
        PlanError: a log-prob (or hidden state) differs by more than 1e-3.
    """
    num_ids = num_embeddings(model)
    draw = np.random.default_rng(0)
    rows = [
        Row(
            row_id=i,
            rollout_id=i,
            group_id=0,
            token_ids=draw.integers(num_ids, size=length),  # type: ignore[arg-type]
            loss_mask=[0] + [1] * (length - 1),
        )
        for i, length in enumerate(LENGTHS)
    ]
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    shape: dict[str, Any] = {"multiple": 1, "num_shape_rows": 1, "dtype": torch.float64, "device": device}
    with torch.no_grad():
        if is_critic(model):
            alone = [value_inputs(model, collate([row], [0.0], layout="padded", **shape)) for row in rows]
        else:
            alone = [_own_logprobs(model, row, device) for row in rows]
        with attention_for(model, layout):
            cell = collate(rows, [0.0] * len(rows), layout=layout, **shape)
            together = value_inputs(model, cell) if is_critic(model) else cell_logprobs(model, cell).logprobs_N.double()
    model.train(was_training)
    # weights that are not finite are found, with their rows, when they are trained
    worst = float((torch.cat(alone) - together).abs().nan_to_num(0.0).max())
    if worst > TOLERANCE:
        advice = "use layout 'padded'" if layout == "packed" else "this model cannot be trained exactly"
        raise PlanError(
            f"layout {layout!r} must give each row the log-probs it has alone, and with {type(model).__name__} they "
            f"differ by {worst:.3g} nats; {advice}"
        )


def _own_logprobs(model: PreTrainedModel, row: Row, device: torch.device) -> torch.Tensor:
    """[T - 1] Log-probs of a row by itself, from the logits of the model's own forward."""
    ids_1T = torch.from_numpy(row.token_ids.copy())[None].to(device)
    logprobs_TV = torch.log_softmax(model(input_ids=ids_1T, use_cache=False).logits[0].double(), dim=-1)
    return logprobs_TV[:-1].gather(1, ids_1T[0, 1:, None])[:, 0]
