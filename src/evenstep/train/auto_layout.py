"""What layout "auto" chooses from and by: the layouts that a model does exactly, and what their parts cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.errors import PlanError
from evenstep.plan import CostModel
from evenstep.plan.footprint import Layout

__all__ = ["AutoLayout", "cost_of_model", "launch_tokens_of"]

# Tokens whose linear work takes as long as what a micro-batch costs besides its tokens. On a CPU: measured with a model
# of 5 million parameters on two ranks, replicated and sharded. On a GPU: launches and collectives of some billions.
_CPU_REPLICATED, _CPU_SHARDED, _GPU = 64.0, 200.0, 1024.0
# And as long as one launch of attention in every layer, forward and backward: about 1.3 tokens were measured on a CPU;
# on a GPU a token of some billion parameters takes about 70 µs, four kernels in each of 36 layers twenty times that.
_LAUNCH_TOKENS = {"cpu": 2.0, "cuda": 20.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoLayout:
    """Layouts to choose from, and the costs to choose by."""

    layouts: tuple[Layout, ...]
    cost: CostModel
    launch_tokens: Mapping[str, float]  # layout -> see ``plan_cheapest``


def cost_of_model(settings: Mapping[str, Any], *, device: str, is_sharded: bool) -> CostModel:
    """Cost of micro-batches from a Hugging Face model config; the planner's default where it does not say its shape.

    >>> shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=512)
    >>> cost_of_model(shape, device="cpu", is_sharded=False).c0
    64.0
    """
    overhead = _GPU if device != "cpu" else _CPU_SHARDED if is_sharded else _CPU_REPLICATED
    try:
        return CostModel.from_hf_config(settings, overhead_tokens=overhead)
    except PlanError:
        return CostModel(c0=overhead)


def launch_tokens_of(backend: str | None, device: str) -> float:
    """Tokens' worth of one launch of attention: none where a kernel takes all rows at once."""
    return _LAUNCH_TOKENS["cpu" if device == "cpu" else "cuda"] if backend == "sdpa" else 0.0
