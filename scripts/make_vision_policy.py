"""Make a tiny random policy that sees images, in the shape of Qwen2-VL, with a tokenizer of characters.

python scripts/make_vision_policy.py FOLDER [--seed N]

An image token is 8 x 8 pixels. The weights are a pure function of the seed; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from evenstep.train.models import PROCESSOR

ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TOKENS = ("<|pad|>", "<|unk|>", "<|end|>", *ROLES, *IMAGE, *string.ascii_lowercase, *string.digits, *" .,:?!\n")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, role and mark of an image."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        extra_special_tokens=[*ROLES, *IMAGE],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_model(seed: int) -> Qwen2VLForConditionalGeneration:
    """Two layers of decoder and two of vision tower, 0.1 million parameters."""
    torch.manual_seed(seed)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(TOKENS),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": None,
            "eos_token_id": TOKENS.index("<|end|>"),
            "pad_token_id": None,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
        },
        tie_word_embeddings=False,
        vision_start_token_id=TOKENS.index("<|vision_start|>"),
        image_token_id=TOKENS.index("<|image_pad|>"),
        vision_end_token_id=TOKENS.index("<|vision_end|>"),
        video_token_id=TOKENS.index("<|video_pad|>"),
    )
    return Qwen2VLForConditionalGeneration(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make_model(given.seed).save_pretrained(given.folder)
    make_tokenizer().save_pretrained(given.folder)
    processor = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 1 / 255}
    (given.folder / PROCESSOR).write_text(json.dumps(processor, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
