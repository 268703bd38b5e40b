"""Routing replay: tokens go to the experts that an engine recorded, with weights of the router's own.

A router takes the X experts with the highest scores and weighs them by these scores. Here the scores stay as the router
computes them, with their gradient, and the X experts are read at recorded indices instead: ``torch.topk`` within a
router's forward gives ``scores.gather(recorded)`` where it would have given the highest. So whatever formula a router
has for its weights is kept. A token whose experts are unknown keeps the router's own choice.

Padding and fillers are spread evenly over the experts, never all on one, with equal weights: nothing reads what they
become, but scores that are all 0 there would make weights of 0 / 0, and NaN reaches the gradient through a factor of 0.

Shape letters: T tokens of a micro-batch (padding included), L layers with experts, E experts, X experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from evenstep.errors import ConfigError, RowError, StateError
from evenstep.experts import UNKNOWN
from evenstep.train.moe import find_routers
from evenstep.types import Int64Array, Row

__all__ = [
    "RouterShape",
    "check_experts",
    "experts_of_cell",
    "refuse_experts",
    "replayed_routers",
    "replayed_routing",
    "router_shape",
]

PADDING = -2  # in a micro-batch, and below: expert PADDING - e, for a token that nothing reads


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """What the routers of a model choose."""

    num_layers: int  # L, those with experts
    num_experts: int  # E of each of them
    experts_per_token: int  # X


def replayed_routers(model: PreTrainedModel, replay: str) -> tuple[nn.Module, ...]:
    """The routers whose choice ``routing_replay`` sets, in the order of the layers; none where a model has none.

    Raises:
        ConfigError: replay is ``required`` of a model whose routers are not known.
    """
    if replay == "off":
        return ()
    try:
        return find_routers(model, f"routing_replay = {replay!r}")
    except ConfigError:
        if replay == "required":
            raise
        return ()


def refuse_experts(rows: Sequence[Row], model: PreTrainedModel) -> None:
    """Refuse what rows carry for a model that cannot be sent there, which would route freely, and silently.

    Raises:
        RowError: a row carries experts.
    """
    row = next((row for row in rows if row.routed_experts is not None), None)
    if row is None:
        return
    try:
        find_routers(model, "routed_experts")
    except ConfigError as error:
        raise RowError(f"row {row.row_id!r}: {error}, or set routing_replay to 'off'") from None


def router_shape(routers: Sequence[nn.Module]) -> RouterShape:
    """The shape of what some routers choose; they are alike in the model types that are known."""
    first: Any = routers[0]
    return RouterShape(num_layers=len(routers), num_experts=first.num_experts, experts_per_token=first.top_k)


def check_experts(rows: Sequence[Row], shape: RouterShape, *, is_required: bool) -> None:
    """Compare what rows carry with what a model's routers choose.

    Raises:
        RowError: experts of another number of layers or experts per token, an index that no expert has, or with
            ``is_required`` a token whose experts are unknown although a trained token's log-prob depends on it.
    """
    for row in rows:
        experts = row.routed_experts
        if experts is not None:
            expected = (shape.num_layers, shape.experts_per_token)
            if experts.shape[1:] != expected:
                raise RowError(
                    f"row {row.row_id!r}: routed_experts must have the model's {expected[0]} layers with experts and "
                    f"{expected[1]} experts per token, found shape {experts.shape}; record them from this model"
                )
            highest = int(experts.experts_TLX.max())
            if highest >= shape.num_experts:
                t, layer, _ = np.argwhere(experts.experts_TLX == highest)[0].tolist()
                raise RowError(
                    f"row {row.row_id!r}: routed_experts must be below the model's {shape.num_experts} experts, found "
                    f"{highest} at token {t}, layer {layer}; record them from this model"
                )
        if is_required and row.num_trained_tokens:
            num_inputs = int(np.flatnonzero(row.loss_mask)[-1])  # a token's log-prob depends on the tokens before it
            is_known_T = np.zeros(num_inputs, np.bool_) if experts is None else experts.is_known_T[:num_inputs]
            if not is_known_T.all():
                found = "none" if experts is None else f"none at token {is_known_T.argmin()}"
                raise RowError(
                    f"row {row.row_id!r}: routing_replay = 'required' needs the experts of every token before the last "
                    f"trained one (token {num_inputs}), found {found}; have the engine record them, or set "
                    f"routing_replay to 'recorded': what is unknown then routes freely"
                )


def experts_of_cell(
    rows: Sequence[Row], index_by_row: Sequence[Int64Array], num_tokens: int, shape: RouterShape
) -> npt.NDArray[np.int16]:
    """[T, L, X] where each token of a micro-batch goes; ``UNKNOWN``: the router's own choice.

    Padding and fillers are told apart: ``PADDING - e`` stands for expert e.

    Three tokens of padding and four experts, of which each token has two:

    >>> shape = RouterShape(num_layers=1, num_experts=4, experts_per_token=2)
    >>> (PADDING - experts_of_cell([], [], 3, shape))[:, 0].tolist()
    [[0, 1], [2, 3], [0, 1]]
    """
    slots_TX = np.arange(num_tokens * shape.experts_per_token).reshape(num_tokens, shape.experts_per_token)
    experts_TLX = np.repeat(
        (PADDING - slots_TX % shape.num_experts).astype(np.int16)[:, None], shape.num_layers, axis=1
    )
    for index_T in index_by_row:
        experts_TLX[index_T] = UNKNOWN
    for row, index_T in zip(rows, index_by_row, strict=True):
        if row.routed_experts is not None:
            experts_TLX[index_T] = row.routed_experts.experts_TLX
    return experts_TLX


@contextmanager
def replayed_routing(routers: Sequence[nn.Module], experts_TLX: Tensor | None) -> Iterator[None]:
    """Within the block, forward passes over one micro-batch, and their repetition in the backward pass, route so.

    Args:
        routers: in the order of the layers; none of a critic, which routes freely.
        experts_TLX: see ``experts_of_cell``; None: every router chooses for itself.
    """
    if experts_TLX is None or not routers:
        yield
        return
    handles: list[Any] = []
    choices = [_Choice(experts_TX) for experts_TX in experts_TLX.unbind(1)]
    for router, choice in zip(routers, choices, strict=True):
        handles.append(router.register_forward_pre_hook(choice.begin))
        # also where the forward ends early, as the repetition of a checkpointed layer does
        handles.append(router.register_forward_hook(choice.end, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not all(choice.has_run for choice in choices):
        raise StateError(
            f"every router must run in each forward pass for its choice to be replayed, found "
            f"{sum(not choice.has_run for choice in choices)} of {len(choices)} that did not: another kernel took "
            f"their place; set routing_replay to 'off', or load the model without it"
        )


class _Choice(TorchFunctionMode):
    """While one router runs, its ``topk`` reads the scores at recorded experts."""

    def __init__(self, experts_TX: Tensor) -> None:
        super().__init__()
        self._is_padding_T1 = experts_TX[:, :1] <= PADDING
        self._experts_TX = torch.where(self._is_padding_T1, PADDING - experts_TX, experts_TX)
        self._num_choices = 0
        self.has_run = False

    def begin(self, *_: Any) -> None:
        self._num_choices, self.has_run = 0, True
        self.__enter__()

    def end(self, router: nn.Module, _: Any, output: Any) -> None:
        self.__exit__(None, None, None)
        if output is not None and self._num_choices != 1:
            raise StateError(
                f"a router whose choice is replayed must make it with one topk, found {self._num_choices} in "
                f"{type(router).__name__}; set routing_replay to 'off' for this model"
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        chosen = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return chosen
        self._num_choices += 1
        scores_TE: Tensor = args[0]
        experts_TX = torch.where(self._experts_TX == UNKNOWN, chosen.indices, self._experts_TX.long())
        chosen_TX = scores_TE.gather(-1, experts_TX).masked_fill(self._is_padding_T1, 1.0)
        return torch.return_types.topk((chosen_TX, experts_TX))
