"""evenstep: reinforcement learning on rollouts of any shape, with the exact optimizer step of one huge batch.

Top-level names load on first use, so that ``import evenstep`` needs nothing but the standard library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it
_LAZY = {
    "Call": "evenstep.types",
    "Collection": "evenstep.types",
    "EvenstepError": "evenstep.errors",
    "Group": "evenstep.types",
    "Media": "evenstep.media",
    "Rollout": "evenstep.types",
    "RoutedExperts": "evenstep.experts",
    "Row": "evenstep.types",
    "Sampling": "evenstep.types",
    "Segment": "evenstep.types",
    "StepPlan": "evenstep.plan",
    "Window": "evenstep.types",
    "plan_step": "evenstep.plan",
}
_SUBMODULES = ("config", "credit", "errors", "files", "plan", "rollout", "train", "types")

__all__ = [
    "Call",
    "Collection",
    "EvenstepError",
    "Group",
    "Media",
    "Rollout",
    "RoutedExperts",
    "Row",
    "Sampling",
    "Segment",
    "StepPlan",
    "Window",
    "__version__",
    "plan_step",
]

if TYPE_CHECKING:
    from evenstep.errors import EvenstepError as EvenstepError
    from evenstep.experts import RoutedExperts as RoutedExperts
    from evenstep.media import Media as Media
    from evenstep.plan import StepPlan as StepPlan
    from evenstep.plan import plan_step as plan_step
    from evenstep.types import Call as Call
    from evenstep.types import Collection as Collection
    from evenstep.types import Group as Group
    from evenstep.types import Rollout as Rollout
    from evenstep.types import Row as Row
    from evenstep.types import Sampling as Sampling
    from evenstep.types import Segment as Segment
    from evenstep.types import Window as Window


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"evenstep.{name}")
    else:
        raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])
