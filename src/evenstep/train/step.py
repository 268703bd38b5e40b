"""The exact step: micro-batches only ever sum, every mean was taken before the plan.

``L = Σ weight · loss`` over the trained tokens of all rows of all ranks; each rank adds up the gradients of its own
terms, ranks are summed once, nothing is divided afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenstep.errors import ConfigError, EvenstepError, NumericsError, PlanError, RowError, StateError
from evenstep.media import VisionSpec
from evenstep.model_files import capacity_problem, layout_problem, rotary_limit
from evenstep.plan import StepPlan
from evenstep.plan.choose import CHOICES
from evenstep.plan.footprint import Layout
from evenstep.train import distributed
from evenstep.train.attention import Backend, attention_for, choose_backend
from evenstep.train.auto_layout import AutoLayout, cost_of_model, launch_tokens_of
from evenstep.train.collate import Cell, collate
from evenstep.train.critic import ValueObjective, is_critic
from evenstep.train.losses import VALUE_LOSSES
from evenstep.train.options import StepOptions
from evenstep.train.policy import PolicyObjective
from evenstep.train.routing import refuse_experts, replayed_routers, replayed_routing, router_shape
from evenstep.train.totals import Totals
from evenstep.train.verify import num_embeddings, verify_layout
from evenstep.train.vision import spec_of
from evenstep.train.window import PreparedWindow, check_images, prepare_window
from evenstep.types import Row

_log = logging.getLogger(__name__)

__all__ = ["Scorer", "StepOutcome", "StepResult", "Trainer", "run_plan", "share_layouts"]


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
            width=plan.padded_width,
            vision=window.vision,
            router_shape=window.router_shape,
        )
        fn(cell, k == len(cells) - 1)


NO_CONTEXT_PARALLELISM = "training does no context parallelism, every rank runs whole rows: "


class Scorer:
    """Runs a model over windows without gradient: log-probs of a causal LM, values of a critic, by row id.

    Every rank makes its own Scorer with the same options and gives it the same rows.

    Args:
        model: a transformers causal LM, or a token classifier with one label (a critic); replicated or sharded.
        options: see ``StepOptions``: layout, max_tokens_per_gpu, temperature, ...

    Raises:
        ConfigError: a wrong option.
        DistributedError: ranks have different options.
        PlanError: a layout that this model cannot do exactly.
    """

    _is_trainer = False

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        error: EvenstepError | None = None
        try:
            self._adopt(model, options)
        except EvenstepError as found:
            error = found
        described = self.options.describe() if error is None else ""
        # an error on one rank is raised on all of them, where the others would wait in the first collective
        distributed.agree(f"{type(self).__name__} options", described, error)
        for layout in tuple(self.backends):
            try:
                verify_layout(
                    model,
                    layout,
                    backend=self.backends[layout],
                    compute_dtype=self.options.compute_dtype,
                    trained=self.trained,
                )
            except EvenstepError as found:
                if self.options.layout != "auto" or layout == "padded":
                    error = found
                else:
                    _log.warning("layout 'auto' leaves %s out: %s", layout, found)
                    del self.backends[layout]
        distributed.agree("layouts that were verified", " ".join(self.backends), error)
        self.auto = self.auto_layout()
        self._rotary_limit = rotary_limit(model.config.to_dict())
        self._vision = None if is_critic(model) else spec_of(model)

    def auto_layout(self) -> AutoLayout | None:
        """What layout ``auto`` chooses from and by; None for any other."""
        if self.options.layout != "auto":
            return None
        device = self.device.type
        settings = self.model.config.to_dict()
        return AutoLayout(
            layouts=tuple(self.backends),
            cost=cost_of_model(settings, device=device, is_sharded=self.is_sharded),
            launch_tokens={layout: launch_tokens_of(used, device) for layout, used in self.backends.items()},
        )

    def _adopt(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        unknown = sorted(set(options) - set(StepOptions.__slots__))
        if unknown:
            raise ConfigError(
                f"{NO_CONTEXT_PARALLELISM if set(unknown) & {'cp', 'context_parallel_size'} else ''}"
                f"{type(self).__name__} has no option {', '.join(map(repr, unknown))}; it has: "
                f"{', '.join(StepOptions.__slots__)}"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "give the model itself, not a DistributedDataParallel wrapper: gradients of replicated parameters are "
                "summed over ranks once per window, and the wrapper would average them as well; pass model.module"
            )
        problem = capacity_problem(model.config.to_dict())
        if problem is not None:
            raise PlanError(
                f"a token's experts must not depend on the other rows of its micro-batch, found that {problem} in this "
                f"{type(model).__name__}; set the limit to None in its configuration if the model can run without, or "
                f"train another model"
            )
        default: dict[str, Any] = {"loss": next(iter(VALUE_LOSSES))} if is_critic(model) else {}
        self.options = StepOptions(**(default | options))
        self.model = model
        self.trained: dict[str, nn.Parameter] = {}
        # of each layout that may run: the backend of attention, None for the model's own
        self.backends: dict[Layout, Backend | None] = {}
        for layout in CHOICES if self.options.layout == "auto" else (self.options.layout,):
            self._add_layout(layout)
        self.objective: Any = (ValueObjective if is_critic(model) else PolicyObjective)(self.options, model)
        # a critic routes freely: an engine recorded what the policy chose
        self.routers = () if is_critic(model) else replayed_routers(model, self.options.routing_replay)
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32  # of per-token numbers
        self.is_sharded = distributed.is_sharded(model)

    def _add_layout(self, layout: Layout) -> None:
        """Find how the model does a layout; what it cannot do exactly is refused, or no choice of layout "auto"."""
        options, is_auto = self.options, self.options.layout == "auto"
        problem = layout_problem(self.model.config.to_dict(), layout)
        if problem is not None:
            if is_auto:
                return
            raise PlanError(f"layout {layout!r} must keep rows apart, and {problem}; use layout 'padded'")
        try:
            self.backends[layout] = choose_backend(
                self.model,
                layout,
                "auto" if is_auto and layout == "padded" else options.attention,
                compute_dtype=options.compute_dtype,
                is_trained=self._is_trainer,
            )
        except ConfigError:
            if not is_auto or layout == "packed":  # a backend that does not even pack is a wrong option
                raise

    def prepare(
        self,
        rows: Sequence[Row],
        voters: Mapping[Hashable, Hashable] | None = None,
        *,
        max_tokens_per_gpu: int | None = None,
    ) -> PreparedWindow:
        """Count, weigh and plan a window without running it; no collective is entered.

        ``max_tokens_per_gpu`` replaces the budget of the options, for a pass without gradients that has more room.
        """
        if self.options.routing_replay != "off" and not self.routers and not is_critic(self.model):
            refuse_experts(rows, self.model)
        return prepare_window(
            rows,
            voters,
            num_ranks=distributed.rank_and_size()[1],
            options=self.options,
            max_tokens_per_gpu=max_tokens_per_gpu,
            auto=self.auto,
            rotary_limit=self._rotary_limit,
            # sharded ranks meet in every micro-batch, replicated ones once per window
            plan_sync="micro_batch" if self.is_sharded else "step",
            vocab_size=num_embeddings(self.model),
            vision=self._vision,
            router_shape=router_shape(self.routers) if self.routers else None,
        )

    def score(
        self, rows: Sequence[Row] | PreparedWindow, voters: Mapping[Hashable, Hashable] | None = None
    ) -> dict[Hashable, Tensor]:
        """Log-probs (of a critic: values) at the current weights, of the rows that ran on this rank, by row id.

        Giving the prepared window that will be trained reuses its plan, so that both passes see the same cells.

        Raises:
            DistributedError: ranks brought different rows or settings; raised on all of them.
            RowError, CreditError, PlanError: the window is malformed.
        """
        window = self._agreed(rows, voters)
        outputs: dict[Hashable, Tensor] = {}
        self._run_without_gradient(window, lambda cell, out: outputs.update(self._scatter(cell, out)))
        return outputs

    def gather(self, values: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """Per-row results of all ranks, on every rank."""
        return {row_id: value for part in distributed.exchange(dict(values)) for row_id, value in part.items()}

    def _agreed(
        self,
        rows: Sequence[Row] | PreparedWindow,
        voters: Mapping[Hashable, Hashable] | None,
        required_fields: Mapping[str, str] | None = None,
    ) -> PreparedWindow:
        error: Exception | None = None
        window: PreparedWindow | None = None
        try:
            window = self._own(rows, voters) if isinstance(rows, PreparedWindow) else self.prepare(rows, voters)
            for name, why in (required_fields or {}).items():
                if name not in window.fields:
                    raise RowError(f"{why} needs {name} on every row, found none; add them, or leave the option out")
        except Exception as found:  # noqa: BLE001 -- raised again, on every rank
            error = found
        distributed.agree("window", window.digest if window is not None else "", error)
        assert window is not None
        return window

    def _own(self, window: PreparedWindow, voters: object) -> PreparedWindow:
        """The window, if it was prepared under this object's settings."""
        if voters is not None:
            raise ConfigError("a prepared window has its voters already; give them to prepare() instead")
        own = self.options.window_settings
        if is_critic(self.model):  # it routes freely, whatever a policy's window says
            own["routing_replay"] = window.settings["routing_replay"]
        if window.settings != own:
            raise ConfigError(
                f"a prepared window must have the settings of the {type(self).__name__} that runs it, found "
                f"{window.settings} for {own}; prepare it with this one"
            )
        if not is_critic(self.model):
            self._require_own_experts(window)
        if window.plan.layout not in self.backends:
            raise ConfigError(
                f"a window was planned in layout {window.plan.layout!r}, which this {type(self).__name__}'s model does "
                f"not do exactly; it does {', '.join(self.backends)}: prepare the window with this one"
            )
        if window.vision not in (None, self._vision):
            raise ConfigError(
                f"a window with images must be prepared for the model that runs it, found one of another model than "
                f"{type(self.model).__name__}, which sees {'no' if self._vision is None else 'other'} images: prepare "
                f"the window with this one"
            )
        if self._vision is not None and window.vision is None:  # prepared for a model that knows no placeholders
            check_images(list(window.rows.values()), self._vision, window.plan.layout)
        return window

    def _require_own_experts(self, window: PreparedWindow) -> None:
        """Refuse a window whose tokens would route freely, or elsewhere, although its rows carry experts."""
        own = router_shape(self.routers) if self.routers else None
        if own is not None and window.has_left_experts:
            raise ConfigError(
                "a prepared window must have the experts that its rows carry, found that they were left aside, as a "
                "critic does; prepare it with the policy, a critic runs it too"
            )
        if window.router_shape is not None and window.router_shape != own:
            raise ConfigError(
                f"a prepared window must have the experts of the model that runs it, found {window.router_shape} for "
                f"{own or 'a model whose routers are not known'} of this {type(self.model).__name__}; prepare it with "
                f"this {type(self).__name__}, or set routing_replay to 'off' in both"
            )

    def _run_without_gradient(self, window: PreparedWindow, visit: Callable[[Cell, Any], None]) -> None:
        def run(cell: Cell, _: bool) -> None:
            with replayed_routing(self.routers, cell.experts_TLX):
                out = self._forward(cell)
            visit(cell, out)

        self.model.eval()
        with torch.no_grad(), attention_for(self.model, self.backends[window.plan.layout]):
            run_plan(window, run, dtype=self.dtype, device=self.device)

    def _forward(self, cell: Cell) -> Any:
        is_bfloat16 = self.options.compute_dtype == "bfloat16"
        # a cached cast of the head's weight would add up its gradient over chunks in bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_bfloat16, cache_enabled=False):
            return self.objective.forward(self.model, cell)

    def _scatter(self, cell: Cell, out: Any) -> dict[Hashable, Tensor]:
        return cell.scatter(getattr(out, f"{self.objective.output_name}_N"))


def share_layouts(*scorers: Scorer) -> None:
    """Let layout ``auto`` choose from what all of them do exactly: one prepares a window that each may run."""
    common = set.intersection(*(set(scorer.backends) for scorer in scorers))
    for scorer in scorers:
        scorer.backends = {layout: used for layout, used in scorer.backends.items() if layout in common}
        scorer.auto = scorer.auto_layout()


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
            _refuse_training_mode(model)
            model.activation_checkpointing_enable({"use_reentrant": False})
        self._pending: PreparedWindow | None = None

    def _adopt(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        super()._adopt(model, options)
        if self.is_sharded:
            distributed.use_gradient_sums(model)
        # before anything runs: a sharded model hands out gathered parameters after a forward
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.trained.values())
        _refuse_other_parameters(model, self.optimizer)
        _require_master_dtype(model)
        _refuse_tower_alone(self.trained, spec_of(model))

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
            NumericsError: an output or loss at a trained token is not finite; raised on all ranks.
            RowError, CreditError, PlanError: the window is malformed.
        """
        if self._pending is not None:
            raise StateError(
                "forward_backward was called again before optim_step: the gradients of the first window would be "
                "mixed with the second's; call optim_step() in between"
            )
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
        with attention_for(self.model, self.backends[window.plan.layout]):
            run_plan(window, train, dtype=self.dtype, device=self.device)
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
            skip_reason = self.objective.skip_reason(window)
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


def _refuse_other_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must hold just what trains: a gradient that nothing steps would still count in the norm."""
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for key, name in trained.items() if key not in set(map(id, held))]
    if missing or not trained:
        raise ConfigError(
            f"the optimizer must hold the model's trainable parameters, found {len(missing)} of {len(trained)} that "
            f"are not among its {len(held)} ({', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}); build it "
            f"after the model is sharded, from model.parameters(), or set requires_grad to False for what shall stay"
        )


def _refuse_training_mode(model: PreTrainedModel) -> None:
    """Activation checkpointing runs in training mode, where dropout, router jitter and batch norm would be active."""
    whole = model.config.to_dict()
    parts = [whole, *(value for value in whole.values() if isinstance(value, dict))]  # of a vision model: text, vision
    settings = {
        name: value
        for part in parts
        for name, value in part.items()
        if isinstance(name, str)  # others are of labels
        and ("dropout" in name or "jitter" in name)
        and isinstance(value, (int, float))
        and value
    }
    modules = {
        name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    }
    modules |= {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p}
    if settings or modules:
        raise ConfigError(
            f"activation_checkpointing needs a model without dropout, router noise or batch norm, found "
            f"{settings or modules}; set it to 0 in the model's configuration before loading it"
        )


def _refuse_tower_alone(trained: Iterable[str], vision: VisionSpec | None) -> None:
    """Rows of text give a vision tower no gradient, so where it alone trains a window of text could not be run."""
    if vision is not None and all("visual" in name.split(".") for name in trained):
        raise ConfigError(
            "a policy must train more than its vision tower, found that alone: rows without images would have no "
            "gradient; let the decoder train too, or with adapters name layers of it in target_modules"
        )


def _require_master_dtype(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"master parameters must be float32 (or float64), found {parameter.dtype} in {name}; small updates "
                f"vanish in half precision: load the model with dtype=torch.float32"
            )


def _fingerprint(model: nn.Module) -> str:
    sums = [float(p.detach().double().sum()) + 3 * float(p.detach().double().abs().sum()) for p in model.parameters()]
    return f"{len(sums)} parameters, checksum {sum((i + 1) * s for i, s in enumerate(sums))!r}"
