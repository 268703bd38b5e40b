"""The only part of evenstep that computes with torch: one exact optimizer step from rows.

Names load on first use: the process that only starts ranks needs torch, but no transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# name -> module that defines it
_LAZY = {
    "LOSSES": "evenstep.train.losses",
    "Scorer": "evenstep.train.scorer",
    "StepOptions": "evenstep.train.options",
    "StepOutcome": "evenstep.train.step",
    "StepResult": "evenstep.train.step",
    "TokenBatch": "evenstep.train.losses",
    "Trainer": "evenstep.train.step",
    "VALUE_LOSSES": "evenstep.train.losses",
    "ValueBatch": "evenstep.train.losses",
    "shard": "evenstep.train.distributed",
}

__all__ = [
    "LOSSES",
    "VALUE_LOSSES",
    "Scorer",
    "StepOptions",
    "StepOutcome",
    "StepResult",
    "TokenBatch",
    "Trainer",
    "ValueBatch",
    "shard",
]

if TYPE_CHECKING:
    from evenstep.train.distributed import shard as shard
    from evenstep.train.losses import LOSSES as LOSSES
    from evenstep.train.losses import VALUE_LOSSES as VALUE_LOSSES
    from evenstep.train.losses import TokenBatch as TokenBatch
    from evenstep.train.losses import ValueBatch as ValueBatch
    from evenstep.train.options import StepOptions as StepOptions
    from evenstep.train.scorer import Scorer as Scorer
    from evenstep.train.step import StepOutcome as StepOutcome
    from evenstep.train.step import StepResult as StepResult
    from evenstep.train.step import Trainer as Trainer


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'evenstep.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
