"""The exact step: micro-batches only ever sum, every mean was taken before the plan.

``L = Σ weight · loss`` over the trained tokens of all rows of all ranks; each rank adds up the gradients of its own
terms, ranks are summed once, nothing is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenstep.errors import NumericsError, StateError
from evenstep.plan import StepPlan
from evenstep.train import distributed
from evenstep.train.attention import attention_for
from evenstep.train.collate import Cell
from evenstep.train.executor import run_plan
from evenstep.train.routing import replayed_routing
from evenstep.train.scorer import Scorer
from evenstep.train.totals import Totals
from evenstep.train.trainable import (
    refuse_other_parameters,
    refuse_thawed_parameters,
    refuse_tower_alone,
    refuse_training_mode,
    require_master_dtype,
)
from evenstep.train.vision import spec_of
from evenstep.train.window import PreparedWindow
from evenstep.types import Row

__all__ = ["StepOutcome", "StepResult", "Trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What ``forward_backward`` found; gradients are in ``.grad``."""

    loss: float  # Σ weight · loss over the window, the same on every rank
    logprobs: dict[Hashable, Tensor]  # row id -> [T] on the CPU, 0.0 at untrained tokens; rows that ran on this rank
    values: dict[Hashable, Tensor]  # of a critic, instead of log-probs
    metrics: dict[str, float | int | None]
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What ``optim_step`` did."""

    stepped: bool
    skip_reason: str | None
    grad_norm: float  # before clipping


class Trainer(Scorer):
    """Takes the step that one huge batch on one machine would have taken, whatever the rows look like.

    Every rank makes its own Trainer with the same options and gives it the same rows. Parameters are replicated, or
    sharded by ``evenstep.train.shard`` (or your own ``fully_shard``) before the optimizer is built; the Trainer never
    shards.

    Args:
        model: a transformers causal LM in float32 (or float64), or a token classifier with one label: a critic, whose
            rows carry ``returns``.
        optimizer: over the model's parameters.
        options: see ``StepOptions``: layout, max_tokens_per_gpu, loss, normaliser, max_grad_norm, ...

    Raises:
        ConfigError: half-precision parameters, or a wrong option.
        DistributedError: ranks have different options or, replicated, different parameters.
        PlanError: a layout that this model cannot do exactly.
    """

    _is_trainer = True

    def __init__(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.optimizer = optimizer
        super().__init__(model, **options)
        if not self.is_sharded:
            distributed.agree("initial parameters", _fingerprint(model))
        if self.options.activation_checkpointing:
            refuse_training_mode(model)
            model.activation_checkpointing_enable({"use_reentrant": False})
        self._pending: PreparedWindow | None = None
        self._has_remains = False  # of a sharded window that broke off: FSDP2 keeps gradients that nobody can clear

    def _adopt(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        super()._adopt(model, options)
        if self.is_sharded:
            distributed.use_gradient_sums(model)
        # before anything runs: a sharded model hands out gathered parameters after a forward
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.trained.values())
        refuse_other_parameters(model, self.optimizer)
        require_master_dtype(model)
        refuse_tower_alone(self.trained, spec_of(model))

    def forward_backward(
        self, rows: Sequence[Row] | PreparedWindow, voters: Mapping[Hashable, Hashable] | None = None
    ) -> StepResult:
        """Compute the window's exact loss and gradient; afterwards ``.grad`` is final: summed over ranks, not clipped.

        Args:
            rows: the whole window's rows, the same list on every rank; or a window from ``prepare`` (of which a rank
                needs only its own rows).
            voters: rollout id -> group id of all voting rollouts, also those without rows; None: every rollout id
                among the rows.

        Raises:
            StateError: called again before ``optim_step``; parameters were frozen or thawed since the Trainer was
                built; a sharded window broke off before.
            DistributedError: ranks brought different rows or settings; raised on all of them.
            NumericsError: an output or loss at a trained token is not finite; raised on all ranks.
            RowError, CreditError, PlanError: the window is malformed.
        """
        if self._pending is not None:
            raise StateError(
                "forward_backward was called again before optim_step: the gradients of the first window would be "
                "mixed with the second's; call optim_step() in between"
            )
        if self._has_remains:
            raise StateError(
                "the last window broke off between two micro-batches, and sharded parameters still hold gradients of "
                "those that ran; load and shard the model again, with the optimizer's state, before you go on"
            )
        refuse_thawed_parameters(self.model, self.trained)
        objective = self.objective
        window = self._agreed(rows, voters, objective.required_fields())
        self._zero_gradients()
        state = objective.look_ahead(window, lambda visit: self._run_without_gradient(window, visit))
        outputs: dict[Hashable, Tensor] = {}
        totals = Totals()

        def train(cell: Cell, is_last: bool) -> None:
            distributed.set_sync(self.model, is_last=is_last or self.options.sync == "each")
            with replayed_routing(self.routers, cell.experts_TLX):
                out = self._forward(cell)
                (totals.add(cell, objective.terms(cell, out, state)) + out.anchor).backward()
            outputs.update(self._scatter(cell, out))

        # evaluation mode: no dropout in any pass; checkpointed layers recompute in training mode only
        self.model.train(self.options.activation_checkpointing)
        self._has_remains = self.is_sharded
        with attention_for(self.model, self.backends[window.plan.layout]):
            run_plan(window, train, dtype=self.dtype, device=self.device, num_positions=self._num_positions)
        self._has_remains = False
        if not self.is_sharded:
            distributed.sum_gradients(self.parameters)
        if all(p.grad is None for p in self.parameters):
            raise StateError(
                "no parameter received a gradient; the model must be trainable, and a sharded one must reshard after "
                "the last micro-batch"
            )
        metrics = objective.complete(totals.finish(window))
        self._pending = window
        loss = metrics["loss"]
        assert isinstance(loss, float)
        by_name: dict[str, Any] = {"logprobs": {}, "values": {}, objective.output_name: outputs}
        return StepResult(loss=loss, metrics=metrics, plan=window.plan, **by_name)

    def optim_step(self) -> StepOutcome:
        """Clip by the global norm, step, zero the gradients; does nothing on any rank when the window has no signal.

        Raises:
            StateError: no window was run since the last call.
            NumericsError: the gradient's norm is not finite; nothing was changed.
        """
        window = self._pending
        if window is None:
            raise StateError("optim_step needs a gradient: call forward_backward first")
        self._pending = None
        norm = distributed.full_gradient_norm(self.parameters)
        grad_norm = float(norm)
        if window.num_trained_tokens == 0:
            skip_reason = "no trained tokens in the window"
        else:
            skip_reason = self.objective.skip_reason(window, grad_norm)
        if skip_reason is None and not torch.isfinite(norm):
            self._zero_gradients()
            raise NumericsError(
                f"the gradient's norm is {grad_norm} although the loss is finite; weights and optimizer are unchanged; "
                f"lower the learning rate or look for an overflow in the model"
            )
        if skip_reason is None:
            if self.options.max_grad_norm is not None and grad_norm > self.options.max_grad_norm:
                scale = self.options.max_grad_norm / grad_norm
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
            self.optimizer.step()
        self._zero_gradients()
        return StepOutcome(stepped=skip_reason is None, skip_reason=skip_reason, grad_norm=grad_norm)

    def _zero_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)


def _fingerprint(model: nn.Module) -> str:
    sums = [float(p.detach().double().sum()) + 3 * float(p.detach().double().abs().sum()) for p in model.parameters()]
    return f"{len(sums)} parameters, checksum {sum((i + 1) * s for i, s in enumerate(sums))!r}"
