"""A tiny model of random weights in a folder, with a tokenizer of one token a character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def save_character_model(
    folder: Path, *, characters: str, roles: Sequence[str], chat_template: str, max_position_embeddings: int
) -> Path:
    """Qwen3 of one layer; turns end with ``<end>`` and begin with a role, which is a token too."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    known = ["<pad>", "<end>", *roles, "<unk>", *characters]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        extra_special_tokens=list(roles),
        chat_template=chat_template,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(known),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
