"""A small random model of every type whose routers are known."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_models import EXPERTS_PER_TOKEN, NUM_EXPERTS, VOCAB


def small_model(model_type: str, **settings: Any) -> Any:
    """A float32 model of one layer, with transformers' default way of multiplying with experts."""
    experts = "num_experts" if hasattr(AutoConfig.for_model(model_type), "num_experts") else "num_local_experts"
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        experts: NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | settings
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.4 * noise)
    return model
