"""Learning rate as a pure function of the optimizer step: nothing to save, nothing that rows could advance."""

from __future__ import annotations

import math

import torch

__all__ = ["learning_rate", "set_learning_rate"]


def learning_rate(optimizer_step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Rate of the step that ``optimizer_step`` earlier ones precede.

    Linear warm-up to ``peak`` over ``warmup_steps``; then constant, or down to 0 at ``total_steps`` along a line or
    half a cosine.

    >>> round(learning_rate(2, peak=1e-3, schedule="linear", warmup_steps=0, total_steps=10), 9)
    0.0008
    """
    if optimizer_step < warmup_steps:
        return peak * (optimizer_step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = min(1.0, (optimizer_step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group of an optimizer this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
