"""The reference of the load-balancing loss: one row at a time, no padding, first the counts, then the gradient.

    f_e = (token, slot) pairs that went to expert e / T     loss = Σ_layers Σ_t Σ_e (E / T) · f_e · p_te

Counts are exact fractions of integers; probabilities are written out as exp / Σ exp. It shares no code with what it
judges, and asks the model for its router logits in the way that transformers has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from evenstep.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleBalance:
    """The load-balancing loss of a window, without its coefficient."""

    loss: float
    gradient: dict[str, Tensor]  # parameter name -> gradient, float64
    fractions: list[list[Fraction]]  # [L][E] of tokens; a layer's sum is the number of experts per token


def oracle_balance(
    model: Any,
    rows: Sequence[Row],
    experts_per_token: int,
    recorded: Callable[[Row, int, int], list[int] | None] = lambda row, layer, t: None,
) -> OracleBalance:
    """Loss and full gradient; leaves the model's ``.grad`` as None.

    ``recorded(row, layer, t)`` are the experts that a token went to; None: those that the router likes best.
    """
    counts: dict[tuple[int, int], int] = {}
    num_tokens = num_layers = num_experts = 0
    for row in rows:
        num_tokens += len(row.token_ids)
        with torch.no_grad():
            layers = router_logits(model, row)
        num_layers, num_experts = len(layers), layers[0].shape[1]
        for layer, logits_TE in enumerate(layers):
            for t, logits in enumerate(logits_TE.tolist()):
                best = sorted(range(num_experts), key=lambda e, logits=logits: -logits[e])[:experts_per_token]
                for expert in recorded(row, layer, t) or best:
                    counts[layer, expert] = counts.get((layer, expert), 0) + 1
    fractions = [
        [Fraction(counts.get((layer, e), 0), num_tokens) for e in range(num_experts)] for layer in range(num_layers)
    ]
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for row in rows:
        terms = []
        for layer, logits_TE in enumerate(router_logits(model, row)):
            for logits_E in logits_TE:
                powers_E = torch.exp(logits_E - logits_E.max())
                for e, probability in enumerate(powers_E / powers_E.sum()):
                    terms.append(float(Fraction(num_experts, num_tokens) * fractions[layer][e]) * probability)
        row_loss = torch.stack(terms).sum()
        row_loss.backward()
        loss += float(row_loss.detach())
    gradient = {
        name: torch.zeros_like(parameter).double() if parameter.grad is None else parameter.grad.double()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return OracleBalance(loss=loss, gradient=gradient, fractions=fractions)


def router_logits(model: Any, row: Row) -> tuple[Tensor, ...]:
    """[L][T, E] Router logits of a row by itself."""
    ids = torch.tensor([[int(token) for token in row.token_ids]])
    return model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
