"""Passes without gradient: what a model can do exactly, the windows it may run, and their log-probs or values.

Training is the same with a gradient: see ``step``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenstep.errors import ConfigError, EvenstepError, PlanError, RowError
from evenstep.model_files import capacity_problem, layout_problem, rotary_limit
from evenstep.plan.choose import CHOICES
from evenstep.plan.footprint import Layout
from evenstep.train import distributed
from evenstep.train.attention import Backend, attention_for, choose_backend
from evenstep.train.auto_layout import AutoLayout, cost_of_model, launch_tokens_of
from evenstep.train.collate import Cell
from evenstep.train.critic import ValueObjective, is_critic
from evenstep.train.executor import run_plan
from evenstep.train.losses import VALUE_LOSSES
from evenstep.train.options import StepOptions
from evenstep.train.policy import PolicyObjective
from evenstep.train.routing import refuse_experts, replayed_routers, replayed_routing, router_shape
from evenstep.train.verify import num_embeddings, num_outputs, num_positions, verify_layout
from evenstep.train.vision import spec_of
from evenstep.train.window import PreparedWindow, check_images, prepare_window
from evenstep.types import Row

__all__ = ["Scorer", "share_layouts"]

_log = logging.getLogger(__name__)
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
        self._num_positions = num_positions(model)
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
        rows = list(rows)  # which are looked at more than once
        self._require_positions(rows)
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
            num_outputs=num_outputs(self.model),
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
        self._require_positions(window.rows.values())
        if self._vision is not None and window.vision is None:  # prepared for a model that knows no placeholders
            check_images(list(window.rows.values()), self._vision, window.plan.layout)
        return window

    def _require_positions(self, rows: Iterable[Row]) -> None:
        """Refuse rows with more tokens than a model has learned positions, which would end a rank in the middle."""
        limit = self._num_positions
        longer = [] if limit is None else [row for row in rows if row.num_tokens > limit]
        if longer:
            raise RowError(
                f"a row has at most the {limit} positions that {type(self.model).__name__} has learned, found "
                f"{longer[0].num_tokens} tokens in row {longer[0].row_id!r} ({len(longer)} rows are longer); keep "
                f"rollouts within {limit} tokens, or train a model with rotary positions"
            )

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
            run_plan(window, run, dtype=self.dtype, device=self.device, num_positions=self._num_positions)

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
