"""Tiny models whose layers carry a state from token to token, and true float64 for them.

lfm2 has short convolutions, mamba scans alone, qwen3_next gated delta rules and experts; two of them have attention as
well. Their code casts to float32 in many places, so instead of replacing each, ``keeps_float64()`` replaces the casts
themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

HYBRIDS = ("lfm2", "mamba", "qwen3_next")
SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "conv_L_cache": 3},
    "mamba": {"state_size": 4, "expand": 2, "time_step_rank": 4},
    "qwen3_next": {
        **{"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
    },
}


def hybrid_model(family: str, shape: dict[str, Any]) -> Any:
    """A causal LM of one of the families, on top of what all tiny models have in common."""
    attention = {"attn_implementation": shape.pop("attn_implementation")} if family != "mamba" else {}
    shape.pop("attn_implementation", None)
    config = AutoConfig.for_model(family, **shape, **SHAPES[family])
    return AutoModelForCausalLM.from_config(config, **attention)


@contextlib.contextmanager
def keeps_float64() -> Iterator[None]:
    """Within the block, what casts to float32 or asks for it gives float64 instead."""

    def instead(function: Any) -> Any:
        def wider(*args: Any, **kwargs: Any) -> Any:
            named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
            return function(*(torch.float64 if arg is torch.float32 else arg for arg in args), **named)

        return wider

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(Tensor, "to", instead(Tensor.to))
        patch.setattr(functional, "softmax", instead(functional.softmax))
        yield
