"""Gradients, weights and log-probs of steps on disk, and how far another run of the same steps is from them.

One rank holds at most one whole parameter besides its own share, whatever the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from evenstep.train import distributed

__all__ = ["Difference", "StoredSteps", "whole"]

LOGPROBS = "logprobs"


@dataclass(slots=True, kw_only=True)
class Difference:
    """Sums over a whole set of parameters: how far d is from f.

    >>> difference = Difference()
    >>> difference.add("w", torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]))
    >>> difference.relative, round(difference.cosine, 3), difference.max_abs, difference.worst
    (1.3333333333333333, 0.6, 4.0, 'w')
    """

    dot: float = 0.0
    square_d: float = 0.0
    square_f: float = 0.0
    square_difference: float = 0.0
    max_abs: float = 0.0
    worst: str | None = None  # the parameter with the largest relative difference of its own
    worst_relative: float = -1.0
    largest_ulp: float = field(default=0.0)  # most |d - f| in units of the last place of f

    def add(self, name: str, d: Tensor, f: Tensor, *, with_ulp: bool = False) -> None:
        """Count one parameter in."""
        d64, f64 = d.double().flatten(), f.double().flatten()
        apart = (d64 - f64).abs()
        squares = [float(torch.dot(a, b)) for a, b in ((d64, f64), (d64, d64), (f64, f64), (apart, apart))]
        self.dot += squares[0]
        self.square_d += squares[1]
        self.square_f += squares[2]
        self.square_difference += squares[3]
        self.max_abs = max(self.max_abs, float(apart.max()))
        relative = _relative(squares[3], squares[2], squares[1])
        if relative > self.worst_relative:
            self.worst, self.worst_relative = name, relative
        if with_ulp:
            size = f.flatten().abs()
            ulp = torch.nextafter(size, torch.full_like(size, math.inf)) - size
            self.largest_ulp = max(self.largest_ulp, float((apart / ulp.double()).max()))

    @property
    def relative(self) -> float:
        """‖d - f‖ / ‖f‖; where f is 0, of d's own norm: 0 or 1."""
        return _relative(self.square_difference, self.square_f, self.square_d)

    @property
    def cosine(self) -> float:
        """1 where both are 0, 0 where one is."""
        if self.square_d == 0.0 or self.square_f == 0.0:
            return float(self.square_d == self.square_f)
        return self.dot / math.sqrt(self.square_d * self.square_f)


def _relative(square_difference: float, square_f: float, square_d: float) -> float:
    reference = square_f or square_d
    return math.sqrt(square_difference / reference) if reference else 0.0


def whole(parameters: Sequence[tuple[str, nn.Parameter]], *, of: str) -> Iterator[tuple[str, Tensor]]:
    """Name and whole CPU tensor of each parameter's ``grad`` or ``weights``; every rank runs through it.

    A parameter without a gradient has zeros.
    """
    for name, parameter in parameters:
        value: Tensor | None = parameter.detach() if of == "weights" else parameter.grad
        if value is None:
            value = torch.zeros_like(parameter)
        yield name, (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


class StoredSteps:
    """A folder with files for each step; rank 0 reads and writes, all ranks call.

    ``gradient_<n>`` and ``weights_<n>`` hold the model's parameters by name (weights after step n, -1: before the
    first), ``logprobs_<n>`` the rows' log-probs one after the other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}_{step}.safetensors"

    def has(self, kind: str, step: int) -> bool:
        return self.path(kind, step).exists()

    def save(self, kind: str, step: int, parameters: Sequence[tuple[str, nn.Parameter]], *, of: str) -> None:
        """Write all parameters' gradients or weights."""
        is_first = distributed.rank_and_size()[0] == 0
        # clones: what was gathered from shards may be part of a longer storage, which cannot be written
        kept = {name: value.clone() for name, value in whole(parameters, of=of) if is_first}
        if is_first:
            self._write(self.path(kind, step), kept)

    def save_logprobs(self, step: int, logprobs: Mapping[Hashable, Tensor], row_ids: Sequence[Hashable]) -> None:
        """Write the rows' log-probs in the window's order; a row that did not run has none."""
        found = {str(index): logprobs[row_id] for index, row_id in enumerate(row_ids) if row_id in logprobs}
        self._write(self.path(LOGPROBS, step), found)

    def read_logprobs(self, step: int) -> dict[int, Tensor]:
        """Position in the window -> [T]."""
        with safe_open(self.path(LOGPROBS, step), "pt") as file:
            return {int(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping

    def load_weights(self, step: int, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Put the weights on disk in the place of the present ones; every rank reads for itself."""
        with torch.no_grad(), safe_open(self.path("weights", step), "pt") as file:
            for name, parameter in parameters:
                value: Any = file.get_tensor(name).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    value = value.to(parameter.device)
                    mesh, placements = parameter.device_mesh, parameter.placements
                    value = distribute_tensor(value, mesh, placements, src_data_rank=None)
                parameter.copy_(value)

    def compare(
        self, kind: str, step: int, parameters: Sequence[tuple[str, nn.Parameter]], *, of: str, with_ulp: bool = False
    ) -> Difference:
        """How far the present gradients or weights are from those on disk (meant on rank 0)."""
        difference = Difference()
        is_first = distributed.rank_and_size()[0] == 0
        with ExitStack() as stack:
            file: Any = stack.enter_context(safe_open(self.path(kind, step), "pt")) if is_first else None
            for name, value in whole(parameters, of=of):
                if file is not None:
                    difference.add(name, value, file.get_tensor(name), with_ulp=with_ulp)
        return difference

    def compare_updates(
        self, step: int, mine: StoredSteps, parameters: Sequence[tuple[str, nn.Parameter]]
    ) -> Difference:
        """How far the last update is from that of the same step on disk, both as the weights have it."""
        difference = Difference()
        is_first = distributed.rank_and_size()[0] == 0
        with ExitStack() as stack:
            paths = [self.path("weights", step), self.path("weights", step - 1), mine.path("weights", step - 1)]
            files: list[Any] = [stack.enter_context(safe_open(path, "pt")) for path in paths] if is_first else []
            for name, after in whole(parameters, of="weights"):
                if files:
                    theirs_after, theirs_before, before = (file.get_tensor(name).double() for file in files)
                    difference.add(name, after.double() - before, theirs_after - theirs_before)
        return difference

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.rename(path)
