"""The exact step: micro-batches only ever sum, every mean was taken before the plan.

``L = Σ weight · loss`` over the trained tokens of all rows of all ranks; each rank adds up the gradients of its own
terms, ranks are summed once, nothing is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenstep.errors import ConfigError, EvenstepError, NumericsError, PlanError, StateError
from evenstep.model_files import layout_problem
from evenstep.plan import StepPlan
from evenstep.train import distributed
from evenstep.train.attention import attention_for
from evenstep.train.collate import Cell, collate
from evenstep.train.logprobs import TokenLogprobs, cell_logprobs
from evenstep.train.losses import gspo
from evenstep.train.options import StepOptions
from evenstep.train.totals import Totals
from evenstep.train.verify import num_embeddings, verify_layout
from evenstep.train.window import PreparedWindow, prepare_window
from evenstep.types import Row

__all__ = ["StepOutcome", "StepResult", "Trainer", "run_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What ``forward_backward`` found; gradients are in ``.grad``."""

    loss: float  # Σ weight · loss over the window, the same on every rank
    logprobs: dict[Hashable, Tensor]  # row id -> [T] on the CPU, 0.0 at untrained tokens; rows that ran on this rank
    metrics: dict[str, float | int | None]
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What ``optim_step`` did."""

    stepped: bool
    skip_reason: str | None
    grad_norm: float  # before clipping


def run_plan(
    window: PreparedWindow,
    fn: Callable[[Cell, bool], None],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run ``fn(cell, is_last)`` on this rank's cells in the plan's order: the one executor of every pass."""
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
        )
        fn(cell, k == len(cells) - 1)


class Trainer:
    """Takes the step that one huge batch on one machine would have taken, whatever the rows look like.

    Every rank makes its own Trainer with the same options and gives it the same rows. Parameters are replicated, or
    sharded by ``evenstep.train.shard`` (or your own ``fully_shard``) before the optimizer is built; the Trainer never
    shards.

    Args:
        model: a transformers causal LM in float32 (or float64).
        optimizer: over the model's parameters.
        options: see ``StepOptions``: layout, max_tokens_per_gpu, loss, normaliser, max_grad_norm, ...

    Raises:
        ConfigError: half-precision parameters, or a wrong option.
        DistributedError: ranks have different options or, replicated, different parameters.
        PlanError: a layout that this model cannot do exactly.
    """

    def __init__(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        unknown = sorted(set(options) - set(StepOptions.__slots__))
        if unknown:
            raise ConfigError(
                f"Trainer has no option {', '.join(map(repr, unknown))}; it has: {', '.join(StepOptions.__slots__)}"
            )
        self.options = StepOptions(**options)
        problem = layout_problem(model.config.to_dict(), self.options.layout)
        if problem is not None:
            raise PlanError(f"layout {self.options.layout!r} must keep rows apart, and {problem}; use layout 'padded'")
        self.model = model
        self.optimizer = optimizer
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        _refuse_foreign(optimizer, self.parameters)
        self.dtype = _master_dtype(model)
        self.device = next(model.parameters()).device
        self.is_sharded = distributed.is_sharded(model)
        distributed.agree("Trainer options", self.options.describe())
        if self.is_sharded:
            distributed.use_gradient_sums(model)
        else:
            distributed.agree("initial parameters", _fingerprint(model))
        verify_layout(model, self.options.layout)
        if self.options.activation_checkpointing:
            _refuse_dropout(model)
            model.activation_checkpointing_enable({"use_reentrant": False})
        self._pending: PreparedWindow | None = None

    def prepare(
        self,
        rows: Sequence[Row],
        voters: Mapping[Hashable, Hashable] | None = None,
        *,
        max_tokens_per_gpu: int | None = None,
    ) -> PreparedWindow:
        """Count, weigh and plan a window without running it; no collective is entered.

        ``max_tokens_per_gpu`` replaces the Trainer's budget, for a pass without gradients that has more room.
        """
        options = self.options
        budget = options.max_tokens_per_gpu if max_tokens_per_gpu is None else max_tokens_per_gpu
        return prepare_window(
            rows,
            voters,
            num_ranks=distributed.rank_and_size()[1],
            options=replace(options, max_tokens_per_gpu=budget),
            # sharded ranks meet in every micro-batch, replicated ones once per window
            plan_sync="micro_batch" if self.is_sharded else "step",
            vocab_size=num_embeddings(self.model),
        )

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
            StateError: called again before ``optim_step``.
            DistributedError: ranks brought different rows or settings; raised on all of them.
            NumericsError: a log-prob or loss at a trained token is not finite; raised on all ranks.
            RowError, CreditError, PlanError: the window is malformed.
        """
        if self._pending is not None:
            raise StateError(
                "forward_backward was called again before optim_step: the gradients of the first window would be "
                "mixed with the second's; call optim_step() in between"
            )
        window = self._agreed(rows, voters)
        self.optimizer.zero_grad(set_to_none=True)
        logprobs: dict[Hashable, Tensor] = {}
        totals = Totals(self.options, self._rollout_log_ratios(window))

        def train(cell: Cell, is_last: bool) -> None:
            distributed.set_sync(self.model, is_last=is_last or self.options.sync == "each")
            out = self._logprobs(cell)
            (totals.add(cell, out) + out.anchor).backward()
            logprobs.update(cell.scatter(out.logprobs_N))

        # evaluation mode: no dropout in any pass; checkpointed layers recompute in training mode only
        self.model.train(self.options.activation_checkpointing)
        with attention_for(self.model, window.plan.layout):
            run_plan(window, train, dtype=self.dtype, device=self.device)
        if not self.is_sharded:
            distributed.sum_gradients(self.parameters)
        if all(p.grad is None for p in self.parameters):
            raise StateError(
                "no parameter received a gradient; the model must be trainable, and a sharded one must reshard after "
                "the last micro-batch"
            )
        metrics = totals.finish(window)
        self._pending = window
        loss = metrics["loss"]
        assert isinstance(loss, float)
        return StepResult(loss=loss, logprobs=logprobs, metrics=metrics, plan=window.plan)

    def score(
        self, rows: Sequence[Row] | PreparedWindow, voters: Mapping[Hashable, Hashable] | None = None
    ) -> dict[Hashable, Tensor]:
        """Log-probs at the current weights, without gradient, of the rows that ran on this rank, by row id.

        Giving the prepared window that will be trained reuses its plan, so that both passes see the same cells.
        """
        window = self._agreed(rows, voters)
        logprobs: dict[Hashable, Tensor] = {}

        def score(cell: Cell, _: bool) -> None:
            logprobs.update(cell.scatter(self._logprobs(cell).logprobs_N))

        self.model.eval()
        with torch.no_grad(), attention_for(self.model, window.plan.layout):
            run_plan(window, score, dtype=self.dtype, device=self.device)
        return logprobs

    def gather(self, values: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """Per-row results of all ranks, on every rank."""
        return {row_id: value for part in distributed.exchange(dict(values)) for row_id, value in part.items()}

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
        skip_reason = None
        if window.num_trained_tokens == 0:
            skip_reason = "no trained tokens in the window"
        elif not window.has_signal and not self.options.has_other_terms:
            skip_reason = "all advantages are exactly 0"
        elif not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NumericsError(
                f"the gradient's norm is {grad_norm} although the loss is finite; weights and optimizer are unchanged; "
                f"lower the learning rate or look for an overflow in the model"
            )
        else:
            if self.options.max_grad_norm is not None and grad_norm > self.options.max_grad_norm:
                scale = self.options.max_grad_norm / grad_norm
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(stepped=skip_reason is None, skip_reason=skip_reason, grad_norm=grad_norm)

    def _agreed(
        self, rows: Sequence[Row] | PreparedWindow, voters: Mapping[Hashable, Hashable] | None
    ) -> PreparedWindow:
        error: EvenstepError | None = None
        window: PreparedWindow | None = None
        try:
            window = rows if isinstance(rows, PreparedWindow) else self.prepare(rows, voters)
        except EvenstepError as found:
            error = found
        distributed.agree("window", window.digest if window is not None else "", error)
        assert window is not None
        return window

    def _logprobs(self, cell: Cell) -> TokenLogprobs:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.compute_dtype == "bfloat16"):
            return cell_logprobs(
                self.model,
                cell,
                temperature=self.options.temperature,
                chunk_tokens=self.options.logprob_chunk_tokens,
                entropy_gradient=self.options.entropy_coef != 0.0,
            )

    def _rollout_log_ratios(self, window: PreparedWindow) -> dict[Hashable, float] | None:
        """gspo by rollout: its mean log-ratio at the current weights, over rows in other cells and ranks too."""
        if self.options.loss_function is not gspo or self.options.ratio_unit != "rollout":
            return None
        rows = {row.row_id: row for row in window.rows.values()}
        current = self.score(window) if "old_logprobs" in window.fields else {}
        sums = {row_id: (rows[row_id].rollout_id, _log_ratio(rows[row_id], lp)) for row_id, lp in current.items()}
        totals = dict.fromkeys((row.rollout_id for row in rows.values()), 0.0)
        for part in distributed.exchange(sums):
            for rollout_id, log_ratio in part.values():
                totals[rollout_id] = totals.get(rollout_id, 0.0) + log_ratio
        return {
            rollout_id: total / max(window.tokens_per_rollout[rollout_id], 1) for rollout_id, total in totals.items()
        }


def _log_ratio(row: Row, logprobs_T: Tensor) -> float:
    """Sum of current minus old log-probs over a row's trained tokens."""
    assert row.old_logprobs is not None
    return float((logprobs_T.double().numpy() - row.old_logprobs)[row.loss_mask].sum())


def _refuse_foreign(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    ours = {id(parameter) for parameter in parameters}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in ours for parameter in held):
        raise ConfigError(
            f"the optimizer must hold the model's trainable parameters, found none of {len(ours)} among its "
            f"{len(held)}; build it after the model is sharded, from model.parameters()"
        )


def _refuse_dropout(model: PreTrainedModel) -> None:
    """Activation checkpointing runs in training mode, where dropout would be active."""
    settings = {k: v for k, v in model.config.to_dict().items() if "dropout" in k and isinstance(v, (int, float)) and v}
    active = {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p}
    if settings or active:
        raise ConfigError(
            f"activation_checkpointing needs a model without dropout, found {settings or active}; set it to 0 in the "
            f"model's configuration before loading it"
        )


def _master_dtype(model: nn.Module) -> torch.dtype:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"master parameters must be float32 (or float64), found {parameter.dtype} in {name}; small updates "
                f"vanish in half precision: load the model with dtype=torch.float32"
            )
    return next(model.parameters()).dtype


def _fingerprint(model: nn.Module) -> str:
    sums = [float(p.detach().double().sum()) + 3 * float(p.detach().double().abs().sum()) for p in model.parameters()]
    return f"{len(sums)} parameters, checksum {sum((i + 1) * s for i, s in enumerate(sums))!r}"
