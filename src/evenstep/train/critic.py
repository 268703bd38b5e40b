"""What a critic is trained on: one value per trained token, read where the token is predicted.

A critic is a transformers token classifier with one label: a backbone and a linear head. Everything else about its step
(weights, plan, sums, clipping) is the policy's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenstep.errors import ConfigError
from evenstep.train.collate import Cell
from evenstep.train.losses import LOSSES, VALUE_LOSSES, ValueBatch
from evenstep.train.options import StepOptions
from evenstep.train.totals import Terms, refuse_clash
from evenstep.train.window import PreparedWindow

__all__ = ["TokenValues", "ValueObjective", "is_critic", "value_inputs"]

RESERVED = {"value_mean", "return_mean", "return_square", "value_error", "explained_variance"}
# options of a policy's loss, which a critic's has no use for
OF_POLICY = ("dual_clip", "kl_coef", "entropy_coef", "importance_cap", "sequence_mask")


def is_critic(model: PreTrainedModel) -> bool:
    """Whether a model has no vocabulary to give log-probs of."""
    return model.get_output_embeddings() is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What a critic's forward pass says about the trained tokens of a cell."""

    values_N: Tensor
    anchor: Tensor  # scalar 0 that ties the model's output to the graph: add it to the loss


class ValueObjective:
    """Value loss of a critic, with clipping around the old values.

    Raises:
        ConfigError: the model has more than one label, or the loss or another option is a policy's.
    """

    output_name = "values"

    def __init__(self, options: StepOptions, model: PreTrainedModel) -> None:
        if options.loss in LOSSES:
            raise ConfigError(
                f"loss {options.loss!r} trains a policy, and {type(model).__name__} has no output embeddings; choose "
                f"one of {', '.join(VALUE_LOSSES)} for a critic, or give a causal LM"
            )
        num_labels = model.config.num_labels
        if num_labels != 1:
            raise ConfigError(
                f"a critic gives one value per token, found {type(model).__name__} with {num_labels} labels; load it "
                f"with AutoModelForTokenClassification.from_pretrained(..., num_labels=1)"
            )
        if given := [name for name in OF_POLICY if getattr(options, name)]:
            raise ConfigError(f"{', '.join(given)} belong to a policy's loss, found them with a critic; leave them out")
        self._options = options

    def required_fields(self) -> dict[str, str]:
        """Per-token fields that every row must carry, and why."""
        required = {"returns": "a critic's loss"}
        if self._options.value_clip is not None:
            required["old_values"] = f"value_clip = {self._options.value_clip}"
        return required

    def skip_reason(self, window: PreparedWindow, grad_norm: float) -> str | None:
        return None

    def forward(self, model: PreTrainedModel, cell: Cell) -> TokenValues:
        values_BT: Tensor = model(**cell.model_inputs()).logits.squeeze(-1)
        values_BT = values_BT if values_BT.dtype == torch.float64 else values_BT.float()
        return TokenValues(values_N=values_BT.reshape(-1).index_select(0, cell.gather_N), anchor=values_BT[:, :0].sum())

    def look_ahead(self, window: PreparedWindow, run_pass: Callable[..., None]) -> None:
        return None

    def terms(self, cell: Cell, out: TokenValues, state: None) -> Terms:
        """The losses of a cell's trained tokens, before weighting, and its metrics."""
        assert cell.returns_N is not None
        old_N = out.values_N.detach() if cell.old_values_N is None else cell.old_values_N
        batch = ValueBatch(
            values_N=out.values_N, old_values_N=old_N, returns_N=cell.returns_N, clip=self._options.value_clip
        )
        losses_N, means = self._options.loss_function(batch)
        refuse_clash(means, RESERVED)
        values_N, returns_N = out.values_N.detach().double(), cell.returns_N.double()
        errors_N = returns_N - values_N
        means = {
            **means,
            "value_mean": values_N,
            "return_mean": returns_N,
            "value_error": errors_N**2,
            "return_square": returns_N**2,
        }
        return Terms(losses_N=losses_N, outputs_N=out.values_N, means=means)

    @staticmethod
    def complete(metrics: dict[str, float | int | None]) -> dict[str, float | int | None]:
        """Add ``explained_variance`` = 1 - Var(R - V) / Var(R) over trained tokens; None where R does not vary."""
        square = metrics.pop("return_square")
        explained: float | None = None
        if square is not None:
            value_mean, return_mean, error = (
                cast(float, metrics[name]) for name in ("value_mean", "return_mean", "value_error")
            )
            variance = square - return_mean**2
            if variance > 1e-12 * square:
                explained = 1.0 - (error - (return_mean - value_mean) ** 2) / variance
        return metrics | {"explained_variance": explained}


def value_inputs(model: PreTrainedModel, cell: Cell) -> Tensor:
    """[N, H + 1] The hidden states that a cell's values are read from, and the values."""
    found: list[Tensor] = []
    handle = value_head(model).register_forward_pre_hook(lambda _, args: found.append(args[0]))
    try:
        logits = model(**cell.model_inputs()).logits
    finally:
        handle.remove()
    if logits.shape[:2] != cell.input_ids_BT.shape:
        raise ConfigError(
            f"a critic gives one value per token, found {type(model).__name__} with outputs of shape "
            f"{tuple(logits.shape)} for tokens of shape {tuple(cell.input_ids_BT.shape)}; load it with "
            f"AutoModelForTokenClassification.from_pretrained(..., num_labels=1)"
        )
    both = torch.cat([found[0].double(), logits.double()], dim=-1)
    return both.reshape(-1, both.shape[-1]).index_select(0, cell.gather_N)


def value_head(model: PreTrainedModel) -> nn.Linear:
    """The linear layer that makes values from hidden states."""
    heads = [m for name, m in model.named_children() if isinstance(m, nn.Linear) and m.out_features == 1]
    if not heads:
        raise ConfigError(
            f"a critic needs a linear head with one output, found none among the modules of {type(model).__name__}"
        )
    return heads[-1]
