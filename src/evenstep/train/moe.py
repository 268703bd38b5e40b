"""Load balancing of a mixture of experts: a loss whose fractions are counted over the window before it is trained.

    f_e  = (token, slot) pairs routed to expert e / T       T = tokens of the window, over all cells and ranks
    p_t  = softmax of the router's logits over all E experts
    loss = Σ_layers Σ_t Σ_e (E / T) · f_e · p_te

As it is usually written, with both means taken over a micro-batch, the loss is a product of two means: it depends on
how a window is cut, and on its padding. With f a constant of the window (it has no gradient anyway) it is a sum over
tokens like any other term. Tokens are those of the rows, context included; padding and fillers are not among them.
Perfectly balanced routers give X for each layer.

Shapes: T tokens, E experts, X experts per token, L layers with experts.

Source: Fedus et al., "Switch Transformers" (2021), equations 4 to 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenstep.errors import ConfigError
from evenstep.model_files import balance_problem

__all__ = ["Routing", "balance_loss", "balance_weights", "count_tokens", "find_routers", "recorded_routing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What a layer's router said of some tokens."""

    logits_TE: Tensor  # with gradient
    experts_TX: Tensor  # int64: the experts that each token went to

    def at(self, index: Tensor) -> Routing:
        """The same for some of the tokens."""
        return Routing(logits_TE=self.logits_TE[index], experts_TX=self.experts_TX[index])


def find_routers(model: PreTrainedModel, why: str = "moe_balance_coef") -> tuple[nn.Module, ...]:
    """The modules that choose the experts, in the order of the layers; ``why`` is the option that needs them.

    Raises:
        ConfigError: the model has no experts, or chooses them in another way than by the highest softmax.
    """
    problem = balance_problem(model.config.to_dict())
    if problem is not None:
        raise ConfigError(f"{why} needs the routing of every token, and {problem}; leave the option out")
    routers = tuple(module for module in model.modules() if type(module).__name__.endswith("TopKRouter"))
    if not routers:
        raise ConfigError(
            f"{why} needs layers with experts, found none in this {type(model).__name__}; leave the option out"
        )
    return routers


@contextmanager
def recorded_routing(routers: Sequence[nn.Module]) -> Iterator[list[Routing]]:
    """Within the block, a list of what the routers say of all positions of a forward pass, one entry a layer."""
    found: list[Routing] = []

    def keep(_: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        # nothing is computed here: a checkpointed layer compares what it computes with its own second run
        found.append(Routing(logits_TE=output[0], experts_TX=output[2]))

    handles = [router.register_forward_hook(keep) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def count_tokens(routing: Sequence[Routing]) -> Tensor:
    """[L, E] int64, on the CPU: how many of the tokens went to each expert.

    >>> logits, experts = torch.zeros(3, 2), torch.tensor([[0], [1], [0]])
    >>> count_tokens([Routing(logits_TE=logits, experts_TX=experts)]).tolist()
    [[2, 1]]
    """
    counts = [torch.bincount(one.experts_TX.flatten(), minlength=one.logits_TE.shape[-1]) for one in routing]
    return torch.stack(counts).cpu()


def balance_weights(counts_LE: Tensor, num_tokens: int) -> Tensor:
    """[L, E] float64: the factor (E / T) · f_e of each probability, from counts over the whole window.

    Two experts and four tokens, of which three went to the first:

    >>> balance_weights(torch.tensor([[3, 1]]), 4).tolist()
    [[0.375, 0.125]]
    """
    num_experts = counts_LE.shape[-1]
    return num_experts * (counts_LE.double() / num_tokens) / num_tokens


def balance_loss(routing: Sequence[Routing], weights_LE: Tensor) -> Tensor:
    """Σ_layers Σ_t Σ_e weight_e · p_te of some of the window's tokens: a scalar with gradient, in float32 or better.

    Four tokens of which two went to each of two experts, and routers that were sure: 1.0.

    >>> experts = torch.tensor([[0], [1], [0], [1]])
    >>> logits = torch.where(experts == torch.arange(2), 0.0, -1e4)
    >>> routing = [Routing(logits_TE=logits, experts_TX=experts)]
    >>> balance_loss(routing, balance_weights(count_tokens(routing), num_tokens=4)).item()
    1.0
    """
    terms: list[Tensor] = []
    for one, weights_E in zip(routing, weights_LE, strict=True):
        logits_TE = one.logits_TE if one.logits_TE.dtype == torch.float64 else one.logits_TE.float()
        probs_E = torch.softmax(logits_TE, dim=-1).sum(0)
        terms.append(probs_E @ weights_E.to(probs_E))
    return torch.stack(terms).sum()
