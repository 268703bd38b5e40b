"""One window on one tiny model under one way of running it: what the Trainer gives, and what the oracle says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import evenstep.train
import evenstep.train.executor as executor_module
from evenstep.plan import StepPlan
from evenstep.plan.measure import PlanStats
from evenstep.train.collate import Cell, collate
from evenstep.train.options import StepOptions
from evenstep.train.window import PreparedWindow, prepare_window
from evenstep.types import Row
from oracle import OracleStep, TokenLoss, oracle_step
from tiny_models import VOCAB, no_float32, tiny_model, true_float64

SCORING_BUDGET = 25  # tokens, where the window is scored in other cells than it is trained in


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One window on one tiny model under one way of running it."""

    name: str
    rows: Sequence[Row]
    voters: Mapping[Hashable, Hashable] | None = None
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of tiny_model
    trainer: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of Trainer
    is_sharded: bool = False  # FSDP2
    optimizer: str = "SGD"
    optimizer_args: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    num_steps: int = 1  # windows of the same rows, each followed by an optimizer step
    keeps_weights: bool = False
    forbids_float32: bool = False  # fail on any float32 tensor in scoring and forward_backward; triples the time
    reference_rows: Sequence[Row] | None = None  # what the oracle sees where it is not `rows`: the same tokens
    scoring: Literal["reused plan", "other cells"] | None = None  # old log-probs come from a pass before the first step
    has_dirty_fillers: bool = False  # inert rows and padding hold random tokens

    @property
    def is_float64(self) -> bool:
        return self.model.get("dtype", torch.float64) == torch.float64

    def precision(self) -> contextlib.AbstractContextManager[None]:
        return true_float64(self.model.get("family")) if self.is_float64 else contextlib.nullcontext()

    def oracle(self, dtype: torch.dtype | None = None) -> OracleStep:
        """The reference for the first window; ``dtype`` float64 gives the exact one of a float32 case."""
        arguments = {"dtype": torch.float64, "attention": "eager"} | dict(self.model)
        arguments |= {} if dtype is None else {"dtype": dtype}
        names = {"normaliser", "normaliser_constant", *(field.name for field in dataclasses.fields(TokenLoss))}
        settings = {name: value for name, value in self.trainer.items() if name in names}
        is_float64 = arguments["dtype"] == torch.float64
        with true_float64(arguments.get("family")) if is_float64 else contextlib.nullcontext():
            rows = self.rows if self.reference_rows is None else self.reference_rows
            return oracle_step(tiny_model(**arguments), rows, voters=self.voters, **settings)

    def plan(self, num_ranks: int) -> StepPlan:
        """The plan of the window, made here: no rank is needed."""
        window = prepare_window(
            self.rows,
            self.voters,
            num_ranks=num_ranks,
            options=StepOptions(**self.trainer),
            plan_sync="micro_batch" if self.is_sharded else "step",
            vocab_size=VOCAB,
        )
        return window.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """What one rank saw; tensors are whole, on the CPU."""

    loss: float
    gradient: dict[str, Tensor]  # final, not clipped
    logprobs: dict[Hashable, Tensor]  # of all rows
    own_logprobs: dict[Hashable, Tensor]  # of the rows that ran here
    metrics: dict[str, Any]
    cells: tuple[Any, ...]  # cells[rank][k]
    stats: PlanStats
    scored_cells: tuple[Any, ...]  # cells of the scoring passes, one entry a pass
    num_dirty_fillers: int  # inert rows with random tokens that ran here, in all passes
    weights: list[dict[str, Tensor]]  # if kept: before the first and after each optimizer step
    stepped: tuple[bool, ...]
    skip_reasons: tuple[str | None, ...]
    grad_norms: tuple[float, ...]


def whole(tensor: Tensor) -> Tensor:
    """A full copy of a parameter or gradient, sharded or not."""
    full = tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    return full.detach().clone()


def whole_weights(model: Any) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def run_case(case: StepCase) -> CaseOutcome:
    with case.precision():
        return run_built(case, *build(case))


def run_cases(cases: Sequence[StepCase]) -> list[CaseOutcome]:
    """The function that runs on every rank."""
    outcomes = []
    for case in cases:
        try:
            outcomes.append(run_case(case))
        except BaseException as error:
            error.add_note(f"in case {case.name!r}")
            raise
    return outcomes


def build(case: StepCase) -> tuple[Any, Any]:
    """(model, trainer) of the case."""
    model = tiny_model(**case.model)
    if case.is_sharded:
        evenstep.train.shard(model)
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), **case.optimizer_args)
    return model, evenstep.train.Trainer(model, optimizer, **case.trainer)


@contextlib.contextmanager
def dirty_fillers() -> Iterator[list[Cell]]:
    """Within the block, inert rows and padding hold random tokens; yields the cells that ran so far."""
    generator = torch.Generator().manual_seed(0)
    cells: list[Cell] = []

    def dirty(rows: Sequence[Row], *args: Any, **settings: Any) -> Cell:
        cell = collate(rows, *args, **settings)
        ids_BT = cell.input_ids_BT.clone()
        is_real_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        is_real_BT.view(-1)[cell.token_index()] = True
        ids_BT[~is_real_BT] = torch.randint(1, VOCAB, (int((~is_real_BT).sum()),), generator=generator)
        cells.append(dataclasses.replace(cell, input_ids_BT=ids_BT))
        return cells[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_module, "collate", dirty)
        yield cells


def score(case: StepCase, trainer: evenstep.train.Trainer) -> tuple[PreparedWindow, tuple[Any, ...]]:
    """(the window with old log-probs from a pass at the current weights, the cells of that pass)."""
    if case.scoring == "reused plan":
        passes = [trainer.prepare(case.rows, case.voters)]
    elif trainer.options.layout == "fixed":  # its cells know no budget
        halves = [half for half in (case.rows[::2], case.rows[1::2]) if half]
        passes = [trainer.prepare(half, case.voters) for half in halves]
    else:
        passes = [trainer.prepare(case.rows, case.voters, max_tokens_per_gpu=SCORING_BUDGET)]
    scored: dict[Hashable, Tensor] = {}
    for one in passes:
        scored |= trainer.gather(trainer.score(one))
    rows = [dataclasses.replace(row, old_logprobs=scored[row.row_id].double().numpy()) for row in case.rows]
    return trainer.prepare(rows, case.voters), tuple(one.plan.cells for one in passes)


def run_built(case: StepCase, model: Any, trainer: evenstep.train.Trainer) -> CaseOutcome:
    weights = [whole_weights(model)] if case.keeps_weights else []
    gradient: dict[str, Tensor] = {}
    steps = []
    window: Sequence[Row] | PreparedWindow = case.rows
    scored_cells: tuple[Any, ...] = ()
    with contextlib.ExitStack() as stack:
        dirty_cells = stack.enter_context(dirty_fillers()) if case.has_dirty_fillers else []
        if case.scoring is not None:
            with no_float32() if case.forbids_float32 else contextlib.nullcontext():
                window, scored_cells = score(case, trainer)
        for step in range(case.num_steps):
            with no_float32() if case.forbids_float32 else contextlib.nullcontext():
                # a prepared window has its voters
                result = trainer.forward_backward(window, voters=case.voters if case.scoring is None else None)
            if step == 0:
                first = result
                logprobs = dict(trainer.gather(result.logprobs))
                for name, parameter in model.named_parameters():
                    gradient[name] = whole(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            steps.append(trainer.optim_step())
            if case.keeps_weights:
                weights.append(whole_weights(model))
    return CaseOutcome(
        loss=float(first.loss),
        gradient=gradient,
        logprobs=logprobs,
        own_logprobs=dict(first.logprobs),
        metrics=dict(first.metrics),
        cells=first.plan.cells,
        stats=first.plan.stats,
        scored_cells=scored_cells,
        num_dirty_fillers=sum(cell.num_fillers for cell in dirty_cells),
        weights=weights,
        stepped=tuple(step.stepped for step in steps),
        skip_reasons=tuple(step.skip_reason for step in steps),
        grad_norms=tuple(float(step.grad_norm) for step in steps),
    )
