"""What a micro-batch needs of memory, from a few measured ones, and the largest that fits a limit.

A rank's peak is what it needs at least (imports, weights, gradients, moments, the optimizer's own), or, once larger,

    fixed + per_token · footprint + per_logit_token · min(footprint, logprob_chunk_tokens)

the last term being the logits, which exist for one chunk of trained tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from evenstep.errors import PlanError

__all__ = ["Budget", "MemoryFit", "MemoryPoint", "fit_memory", "largest_budget"]

REPEATABLE = 0.01  # a peak is the same within about this share when it is measured again
EXTRAPOLATION = 4  # a budget is at most this times the largest cell that was measured
ROUNDING = 16  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """A measured cell."""

    footprint: int  # tokens
    peak_bytes: float  # of the rank that needed most


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """A rank's peak memory as a function of its largest micro-batch.

    >>> fit = MemoryFit(least_bytes=500.0, fixed_bytes=400.0, bytes_per_token=1.0, bytes_per_logit_token=0.5)
    >>> [fit.peak_bytes(footprint, chunk_tokens=100) for footprint in (10, 100, 1000)]
    [500.0, 550.0, 1450.0]
    """

    least_bytes: float  # of a step without activations
    fixed_bytes: float
    bytes_per_token: float
    bytes_per_logit_token: float  # of at most logprob_chunk_tokens
    relative_error: float = 0.0  # standard error of a prediction within what was measured

    def peak_bytes(self, footprint: int, *, chunk_tokens: int) -> float:
        """Predicted peak of a rank whose largest micro-batch occupies ``footprint`` tokens, all of them trained."""
        activations = self.bytes_per_token * footprint + self.bytes_per_logit_token * min(footprint, chunk_tokens)
        return max(self.least_bytes, self.fixed_bytes + activations)

    @property
    def values(self) -> tuple[float, float, float, float]:
        """As ``plan.memory_fit`` has it."""
        return (self.least_bytes, self.fixed_bytes, self.bytes_per_token, self.bytes_per_logit_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A proposed ``plan.max_tokens_per_gpu``."""

    max_tokens_per_gpu: int
    predicted_bytes: float  # peak at the full budget
    reason: str  # what limits it: memory, or what was measured


def fit_memory(points: Sequence[MemoryPoint], *, least_bytes: float, chunk_tokens: int) -> MemoryFit:
    """Fit by non-negative least squares; cells that need no more than a step without activations say nothing.

    >>> points = [MemoryPoint(footprint=f, peak_bytes=300.0 + 2 * f + 3 * min(f, 150)) for f in (100, 200, 300, 400)]
    >>> fit = fit_memory(points, least_bytes=250.0, chunk_tokens=150)
    >>> [round(value, 6) for value in fit.values]
    [250.0, 300.0, 2.0, 3.0]

    Raises:
        PlanError: fewer than two cells needed more than a step without activations, or memory did not grow.
    """
    used = [point for point in points if point.peak_bytes > least_bytes * (1 + REPEATABLE)]
    if len({point.footprint for point in used}) < 2:
        raise PlanError(
            f"a fit needs two cells that need more memory than a step without activations ({least_bytes / 2**20:,.0f} "
            f"MiB), found {len(used)} of {len(points)}; measure larger ones"
        )
    footprints = np.array([point.footprint for point in used], dtype=np.float64)
    peaks = np.array([point.peak_bytes for point in used], dtype=np.float64)
    logits = np.minimum(footprints, chunk_tokens)
    columns = [np.ones(len(used)), footprints]
    # the logits can be told from the rest only by cells on both sides of a chunk
    if len(used) > 3 and logits.max() - logits.min() > 0 and (footprints > chunk_tokens).sum() > 1:
        columns.append(logits)
    table = np.column_stack(columns) / peaks[:, None]  # relative errors count alike
    best, best_error = np.zeros(3), math.inf
    for size in range(1, table.shape[1] + 1):
        for chosen in combinations(range(table.shape[1]), size):
            if 1 not in chosen:
                continue
            solution = np.linalg.lstsq(table[:, chosen], np.ones(len(used)), rcond=None)[0]
            error = float(np.sum((table[:, chosen] @ solution - 1) ** 2))
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(3), error
                best[list(chosen)] = solution
    does_grow = peaks[footprints.argmax()] > peaks[footprints.argmin()]
    if not does_grow or not math.isfinite(best_error) or best[1] <= 0:
        raise PlanError(
            f"memory must grow with a micro-batch's tokens, found peaks of {[round(p / 2**20) for p in peaks]} MiB at "
            f"{[int(f) for f in footprints]} tokens; measure larger cells"
        )
    freedom = max(1, len(used) - int((best > 0).sum()))
    return MemoryFit(
        least_bytes=float(least_bytes),
        fixed_bytes=float(best[0]),
        bytes_per_token=float(best[1]),
        bytes_per_logit_token=float(best[2]),
        relative_error=max(REPEATABLE, math.sqrt(best_error / freedom)),
    )


def largest_budget(
    fit: MemoryFit, *, limit_bytes: float, margin: float, largest_measured: int, chunk_tokens: int
) -> Budget:
    """The largest budget whose predicted peak, two standard errors up, leaves ``margin`` of the limit free.

    >>> fit = MemoryFit(least_bytes=0.0, fixed_bytes=1e9, bytes_per_token=1e6, bytes_per_logit_token=0.0)
    >>> largest_budget(fit, limit_bytes=4e9, margin=0.1, largest_measured=1000, chunk_tokens=1024).max_tokens_per_gpu
    2592

    Raises:
        PlanError: nothing fits.
    """
    room = limit_bytes * (1 - margin) / (1 + 2 * fit.relative_error)
    highest = EXTRAPOLATION * largest_measured
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        if fit.peak_bytes(middle, chunk_tokens=chunk_tokens) <= room:
            low = middle
        else:
            high = middle - 1
    budget = low // ROUNDING * ROUNDING
    if budget < ROUNDING:
        raise PlanError(
            f"no micro-batch fits: a step without one needs "
            f"{fit.peak_bytes(0, chunk_tokens=chunk_tokens) / 2**20:,.0f} MiB of a rank, found a limit of "
            f"{limit_bytes / 2**20:,.0f} MiB less {margin:.0%}; give --memory more, or set "
            f"train.sharding = 'fsdp2' or train.activation_checkpointing = true"
        )
    reason = "memory" if low < highest else f"{EXTRAPOLATION} times the largest cell that was measured"
    predicted = fit.peak_bytes(budget, chunk_tokens=chunk_tokens)
    return Budget(max_tokens_per_gpu=budget, predicted_bytes=predicted, reason=reason)
