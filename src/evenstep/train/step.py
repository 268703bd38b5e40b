"""The exact step: micro-batches only ever sum, every mean was taken before the plan.

``L = Σ weight · loss`` over the trained tokens of all rows of all ranks; each rank adds up the gradients of its own
terms, ranks are summed once, nothing is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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
from evenstep.train.losses import LOSSES, LossFunction, TokenBatch
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
        )
        fn(cell, k == len(cells) - 1)


class Trainer:
    """Takes the step that one huge batch on one machine would have taken, whatever the rows look like.

    Every rank makes its own Trainer with the same arguments and gives it the same rows. Parameters are replicated, or
    sharded by ``evenstep.train.shard`` (or your own ``fully_shard``) before the optimizer is built; the Trainer never
    shards.

    Args:
        model: a transformers causal LM in float32 (or float64).
        optimizer: over the model's parameters.
        layout: ``fixed``, ``padded`` or ``packed``.
        max_tokens_per_gpu: most tokens a micro-batch may occupy on a rank; None: no limit.
        loss: a name in ``LOSSES`` or a function with their signature.
        normaliser: ``token``, ``rollout``, ``prompt``, ``constant`` or ``row``.
        normaliser_constant: the constant of ``constant``.
        max_grad_norm: clip the summed gradient to this global norm; None: do not clip.
        clip_low: the ratio is clipped below at ``1 - clip_low``.
        clip_high: and above at ``1 + clip_high``.
        temperature: of sampling; logits are divided by it in every pass.
        pad_to_multiple: row widths are rounded up to it.
        micro_batch_rows: rows of a micro-batch in layout ``fixed``.
        logprob_micro_batch_rows: rows of a log-prob micro-batch; with ``fixed`` fillers cover both.
        pad_scope: ``window`` or ``group``: what ``fixed`` fills up to a multiple.
        effort: of the planner, ``default`` or ``high``.
        allow_row_splits: let normaliser ``row`` weigh rollouts with several rows.
        sync: ``last`` reduces sharded gradients once per window, ``each`` in every micro-batch (less memory).
        logprob_chunk_tokens: trained tokens whose logits exist at once.

    Raises:
        ConfigError: half-precision parameters, or an unknown option.
        DistributedError: ranks hold different parameters.
        PlanError: a layout that this model cannot do exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        *,
        layout: str = "padded",
        max_tokens_per_gpu: int | None = None,
        loss: str | LossFunction = "ppo_clip",
        normaliser: str = "token",
        normaliser_constant: float | None = None,
        max_grad_norm: float | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        temperature: float = 1.0,
        pad_to_multiple: int = 1,
        micro_batch_rows: int = 1,
        logprob_micro_batch_rows: int = 1,
        pad_scope: str = "window",
        effort: str = "default",
        allow_row_splits: bool = False,
        sync: str = "last",
        logprob_chunk_tokens: int = 1024,
    ) -> None:
        if isinstance(loss, str) and loss not in LOSSES:
            raise ConfigError(f"unknown loss {loss!r}; choose one of {', '.join(LOSSES)}, or pass a function")
        if sync not in ("last", "each"):
            raise ConfigError(f"sync must be 'last' or 'each', found {sync!r}")
        if not temperature > 0:
            raise ConfigError(f"temperature must be above 0, found {temperature}; a greedy policy has no gradient")
        problem = layout_problem(model.config.to_dict(), layout)
        if problem is not None:
            raise PlanError(f"layout {layout!r} must keep rows apart, and {problem}; use layout 'padded'")
        self.model = model
        self.optimizer = optimizer
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.dtype = _master_dtype(model)
        self.device = next(model.parameters()).device
        self.is_sharded = distributed.is_sharded(model)
        if self.is_sharded:
            distributed.use_gradient_sums(model)
        else:
            distributed.agree("initial parameters", _fingerprint(model))
        self._loss_function = LOSSES[loss] if isinstance(loss, str) else loss
        self._normalisation: dict[str, Any] = {
            "normaliser": normaliser,
            "normaliser_constant": normaliser_constant,
            "allow_row_splits": allow_row_splits,
        }
        self._plan_options: dict[str, Any] = {
            "layout": layout,
            "max_tokens_per_gpu": max_tokens_per_gpu,
            "pad_to_multiple": pad_to_multiple,
            "sync": "micro_batch" if self.is_sharded else "step",
            "micro_batch_rows": micro_batch_rows,
            "logprob_micro_batch_rows": logprob_micro_batch_rows,
            "pad_scope": pad_scope,
            "effort": effort,
        }
        self._clip = (clip_low, clip_high)
        self._max_grad_norm = max_grad_norm
        self._temperature = temperature
        self._sync = sync
        self._chunk_tokens = logprob_chunk_tokens
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
        _, num_ranks = distributed.rank_and_size()
        options = self._plan_options
        if max_tokens_per_gpu is not None:
            options = {**options, "max_tokens_per_gpu": max_tokens_per_gpu}
        return prepare_window(rows, voters, num_ranks=num_ranks, plan_options=options, **self._normalisation)

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
        totals = _Totals()

        def train(cell: Cell, is_last: bool) -> None:
            distributed.set_sync(self.model, is_last=is_last or self._sync == "each")
            out = self._logprobs(cell)
            loss = totals.add(cell, out, self._loss_function, self._clip)
            (loss + out.anchor).backward()
            logprobs.update(cell.scatter(out.logprobs_N))

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
        elif not window.has_signal:
            skip_reason = "all advantages are exactly 0"
        elif not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NumericsError(
                f"the gradient's norm is {grad_norm} although the loss is finite; weights and optimizer are unchanged; "
                f"lower the learning rate or look for an overflow in the model"
            )
        else:
            if self._max_grad_norm is not None and grad_norm > self._max_grad_norm:
                scale = self._max_grad_norm / grad_norm
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
        self.model.eval()  # no dropout in any pass
        return cell_logprobs(self.model, cell, temperature=self._temperature, chunk_tokens=self._chunk_tokens)


class _Totals:
    """Numerators of a rank's metrics; divided once, after they were summed over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._num_fillers = 0
        self._bad_rows: list[Hashable] = []

    def add(self, cell: Cell, out: TokenLogprobs, loss_function: LossFunction, clip: tuple[float, float]) -> Tensor:
        """Weighted loss of a cell, with gradient; its numerators are kept."""
        batch = TokenBatch(
            logprobs_N=out.logprobs_N,
            old_logprobs_N=out.logprobs_N.detach() if cell.old_logprobs_N is None else cell.old_logprobs_N,
            advantages_N=cell.advantages_N,
            ref_logprobs_N=cell.ref_logprobs_N,
            engine_logprobs_N=cell.engine_logprobs_N,
            clip_low=clip[0],
            clip_high=clip[1],
        )
        losses_N, token_metrics = loss_function(batch)
        weighted_N = cell.weights_N * losses_N
        with torch.no_grad():
            is_bad_N = ~(torch.isfinite(weighted_N) & torch.isfinite(out.logprobs_N))
            self._sum("bad", is_bad_N)
            if bool(is_bad_N.any()):
                self._bad_rows += [cell.rows[i].row_id for i in cell.row_index_N[is_bad_N].unique().tolist()]
            self._sum("loss", weighted_N)
            self._sum("entropy", out.entropies_N)
            for name, values_N in token_metrics.items():
                self._sum(name, values_N)
            logprobs_N = out.logprobs_N.double()
            ratio_deviation_N = torch.expm1(logprobs_N - batch.old_logprobs_N.double()).abs()
            self._max("ratio_max_deviation", ratio_deviation_N)
            for name, other_N in (("kl", cell.ref_logprobs_N), ("engine_trainer_kl", cell.engine_logprobs_N)):
                if other_N is not None:
                    # k3: exp(x) - 1 - x with x the log-ratio, an unbiased estimate that is never negative
                    log_ratio_N = (other_N.double() - logprobs_N) * (1 if name == "kl" else -1)
                    self._sum(name, torch.expm1(log_ratio_N) - log_ratio_N)
            self._num_fillers += cell.num_fillers
        return weighted_N.sum()

    def finish(self, window: PreparedWindow) -> dict[str, float | int | None]:
        """Metrics of the whole window, the same on every rank."""
        names = {name: float(value) for name, value in self._sums.items()}
        sums, maxima = distributed.reduce_sums(
            {**names, "num_fillers": self._num_fillers}, {name: float(value) for name, value in self._maxima.items()}
        )
        if sums.pop("bad") > 0:
            bad = sorted({repr(row) for part in distributed.exchange(self._bad_rows) for row in part})
            raise NumericsError(
                f"log-probs and losses of trained tokens must be finite; they are not in rows {', '.join(bad[:8])}"
                f"{' …' if len(bad) > 8 else ''} ({len(bad)} rows); look at their tokens, old log-probs and advantages"
            )
        num_tokens = window.num_trained_tokens
        stats = window.plan.stats
        metrics: dict[str, float | int | None] = {
            "num_voters": window.num_voters,
            "num_rows": window.num_rows,
            "num_fillers": int(sums.pop("num_fillers")),
            "segments_per_rollout_mean": window.segments_per_rollout_mean,
            "segments_per_rollout_max": window.segments_per_rollout_max,
            "num_trained_tokens": num_tokens,
            "num_microbatches": stats.num_microbatches,
            "padding_efficiency": stats.padding_efficiency,
            "lockstep_efficiency": stats.lockstep_efficiency,
            "loss": sums.pop("loss"),
            "kl": None,
            "engine_trainer_kl": None,
        }
        metrics |= {name: total / num_tokens if num_tokens else None for name, total in sums.items()}
        return metrics | maxima

    def _sum(self, name: str, values_N: Tensor) -> None:
        total = values_N.double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def _max(self, name: str, values_N: Tensor) -> None:
        highest = values_N.max() if values_N.numel() else values_N.new_zeros(())
        self._maxima[name] = torch.maximum(self._maxima[name], highest) if name in self._maxima else highest


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
