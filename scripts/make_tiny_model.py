"""Make a model folder with random weights and the demo's tokenizer, to try a model type without a download.

    python scripts/make_tiny_model.py gpt_oss runs/models/gpt_oss

Types: gpt_oss (sinks, windows of 16 tokens, experts), qwen3_moe (experts), lfm2 (short convolutions and attention),
mamba (scans). Weights depend on ``--seed`` alone.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

DATA = Path(str(files("evenstep"))) / "data" / "ledger"
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
TYPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **EXPERTS,
        "num_local_experts": 4,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba": {"state_size": 8, "time_step_rank": 4},
}


def make_model(model_type: str, *, vocab_size: int, eos_token_id: int, pad_token_id: int, seed: int = 0) -> Any:
    """A causal LM of two layers and 64 dimensions."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        **TYPES[model_type],
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", choices=sorted(TYPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DATA)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = make_model(options.type, vocab_size=len(tokenizer), seed=options.seed, **ids)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {options.folder}")


if __name__ == "__main__":
    main()
