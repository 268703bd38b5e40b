"""Log-probabilities of the trained tokens of a cell, without ever holding all logits.

A hook in front of the output head takes the hidden states that predict a trained token and computes their log-probs in
chunks whose logits are recomputed in the backward pass. The head itself then runs on zero tokens, which keeps it in the
graph of the model's own output, where sharded parameters have their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from evenstep.train.collate import Cell
from evenstep.train.moe import Routing, recorded_routing
from evenstep.train.vision import images_placed

__all__ = ["TokenLogprobs", "cell_logprobs"]

# what transformers applies to logits after the output head, by the name of its configuration key
POST_HEAD_KEYS = ("logit_scale", "logits_scaling")
SOFT_CAP_KEY = "final_logit_softcapping"  # cap · tanh(logits / cap), which chunks can do themselves
CPU_CHUNK_LOGITS = 1 << 20  # of a chunk on a CPU: 4 MiB in float32
MIN_CPU_CHUNK = 256  # tokens; below, each chunk's products with the head become slow


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """What a forward pass says about the trained tokens of a cell."""

    logprobs_N: Tensor  # of the sampled id, at the given temperature
    entropies_N: Tensor  # nats; with gradient only where it was asked for
    anchor: Tensor  # scalar 0 that ties the model's output to the graph: add it to the loss
    routing: tuple[Routing, ...]  # of all tokens of the rows, context included; one entry for each router asked for


def cell_logprobs(
    model: nn.Module,
    cell: Cell,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy_gradient: bool = False,
    routers: Sequence[nn.Module] = (),
) -> TokenLogprobs:
    """Run the model on a cell and return log-probs and entropies of its trained tokens.

    ``logprob = (z / temperature)[id] - logsumexp(z / temperature)``, upcast to at least float32 chunk by chunk.

    Args:
        model: a transformers causal LM.
        cell: the micro-batch.
        temperature: that of sampling.
        chunk_tokens: trained tokens whose logits exist at once.
        entropy_gradient: whether entropies carry a gradient.
        routers: of experts; what they say is recorded.
    """
    head = cast(nn.Module, model.get_output_embeddings())  # type: ignore[operator]
    is_own_group = isinstance(head, FSDPModule)
    config = model.config.to_dict()  # type: ignore[union-attr,operator]
    # a head that the model rescales afterwards, or that is sharded on its own, must run inside its own forward
    whole = is_own_group or any(config.get(key) is not None for key in POST_HEAD_KEYS)
    cap: float | None = config.get(SOFT_CAP_KEY)
    vocab_size: int = model.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
    found: list[tuple[Tensor, Tensor]] = []

    def logits_of(hidden_NH: Tensor) -> Tensor:
        # head.forward and not head(): the call would come back to the hook below
        logits_NV: Tensor = head.forward(hidden_NH)
        return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)

    def before_head(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        hidden = args[0]
        chosen_NH = hidden.reshape(-1, hidden.shape[-1]).index_select(0, cell.gather_N)
        if whole:
            return (chosen_NH,)
        settings = (temperature, chunk_tokens, entropy_gradient, vocab_size)
        found.append(chunked_logprobs(logits_of, chosen_NH, cell.targets_N, *settings))
        return (hidden[:, :0],)

    handle = head.register_forward_pre_hook(before_head)
    try:
        with recorded_routing(routers) as routing, images_placed(model, cell.images):
            logits: Tensor = model(**cell.model_inputs()).logits
    finally:
        handle.remove()
    if whole:
        found.append(score_logits(logits, cell.targets_N, temperature, entropy_gradient))
    logprobs_N, entropies_N = found[0]
    return TokenLogprobs(
        logprobs_N=logprobs_N,
        entropies_N=entropies_N,
        anchor=logits[:, :0].sum(),
        routing=tuple(one.at(cell.token_index()) for one in routing),
    )


def chunked_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """(log-probs [N], entropies [N]) with the logits of at most ``chunk_tokens`` tokens alive at once.

    On a CPU the logits of a chunk are kept small enough for its cache: with 4,096 ids and 1,024 tokens this takes 1.6
    times as long, most of it for pages that are given back and faulted in again.
    """
    if hidden_NH.device.type == "cpu":
        chunk_tokens = min(chunk_tokens, max(MIN_CPU_CHUNK, CPU_CHUNK_LOGITS // vocab_size))

    def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        runs = count()

        def one(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            is_again = next(runs) > 0  # by the backward pass, for the gradient alone
            return score_logits(head(hidden), targets, temperature, entropy_gradient, skip_entropy=is_again)

        if not torch.is_grad_enabled():
            return one(hidden, targets)
        return checkpoint(one, hidden, targets, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    # an empty cell still runs one empty chunk, so that the head and everything below it gets a (zero) gradient
    parts = [slice(start, start + chunk_tokens) for start in range(0, max(len(targets_N), 1), chunk_tokens)]
    logprobs, entropies = zip(*(chunk(hidden_NH[part], targets_N[part]) for part in parts), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def score_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    *,
    skip_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-prob of the target [N], entropy in nats [N]) of tempered logits.

    ``skip_entropy`` leaves entropies without a gradient at 0.

    >>> logp, entropy = score_logits(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5)
    >>> round(logp.item(), 6)
    -0.01815
    """
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    lse_N = torch.logsumexp(logits_NV, dim=-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - lse_N
    if skip_entropy and not entropy_gradient:
        return logprobs_N, torch.zeros_like(logprobs_N)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probs_NV = torch.exp(logits_NV - lse_N[:, None])
        # a logit of -inf has probability 0 and adds nothing, also not the 0 * inf of a gradient through its product
        entropies_N = lse_N - (probs_NV * torch.where(probs_NV > 0, logits_NV, 0.0)).sum(-1)
    return logprobs_N, entropies_N
