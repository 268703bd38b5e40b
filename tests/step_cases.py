"""One window on one tiny model under one way of running it: what the Trainer gives, and what the oracle says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import evenstep.train
from evenstep.types import Row
from oracle import OracleStep, TokenLoss, oracle_step
from tiny_models import no_float32, tiny_model, true_float64


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
    forbids_float32: bool = False  # fail on any float32 tensor in forward_backward; triples the time

    @property
    def is_float64(self) -> bool:
        return self.model.get("dtype", torch.float64) == torch.float64

    def precision(self) -> contextlib.AbstractContextManager[None]:
        return true_float64() if self.is_float64 else contextlib.nullcontext()

    def oracle(self, dtype: torch.dtype | None = None) -> OracleStep:
        """The reference for the first window; ``dtype`` float64 gives the exact one of a float32 case."""
        arguments = {"dtype": torch.float64, "attention": "eager"} | dict(self.model)
        arguments |= {} if dtype is None else {"dtype": dtype}
        names = {"normaliser", "normaliser_constant", *(field.name for field in dataclasses.fields(TokenLoss))}
        settings = {name: value for name, value in self.trainer.items() if name in names}
        with true_float64() if arguments["dtype"] == torch.float64 else contextlib.nullcontext():
            return oracle_step(tiny_model(**arguments), self.rows, voters=self.voters, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """What one rank saw; tensors are whole, on the CPU."""

    loss: float
    gradient: dict[str, Tensor]  # final, not clipped
    logprobs: dict[Hashable, Tensor]  # of all rows
    own_logprobs: dict[Hashable, Tensor]  # of the rows that ran here
    metrics: dict[str, Any]
    cells: tuple[Any, ...]  # cells[rank][k]
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


def run_built(case: StepCase, model: Any, trainer: evenstep.train.Trainer) -> CaseOutcome:
    weights = [whole_weights(model)] if case.keeps_weights else []
    gradient: dict[str, Tensor] = {}
    steps = []
    for step in range(case.num_steps):
        with no_float32() if case.forbids_float32 else contextlib.nullcontext():
            result = trainer.forward_backward(case.rows, voters=case.voters)
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
        weights=weights,
        stepped=tuple(step.stepped for step in steps),
        skip_reasons=tuple(step.skip_reason for step in steps),
        grad_norms=tuple(float(step.grad_norm) for step in steps),
    )
