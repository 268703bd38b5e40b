"""A tokenizer that can spell the names of an image's marks, and what a vision model makes of them."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny_vision as tiny
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.segments import rows_of
from evenstep.types import Rollout, Row

END = "<|end|>"
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, so that it can spell every text, and the marks of turns and images."""
    marks = (END, "<|user|>", "<|assistant|>", *MARKS)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate((*marks, *letters))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        extra_special_tokens=list(marks[1:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


class Spelling:
    """A tokenizer of bytes, its model's spec and renderer, and an engine that says texts or marks."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        start, image, end, video = (self.tokenizer.convert_tokens_to_ids(name) for name in MARKS)
        self.spec = replace(
            tiny.spec(), image_token_id=image, video_token_id=video, start_token_id=start, end_token_id=end
        )
        self.renderer = ChatRenderer(self.tokenizer, self.spec)

    def ids(self, *parts: str) -> tuple[int, ...]:
        """Marks as themselves; any other text letter by letter, whatever it spells."""
        found: list[int] = []
        for part in parts:
            found += (
                [self.tokenizer.convert_tokens_to_ids(part)]
                if part in self.tokenizer.all_special_tokens
                else [i for letter in part for i in self.tokenizer.encode(letter, add_special_tokens=False)]
            )
        return tuple(found)

    def check(self, rollout: Rollout) -> list[Row]:
        """What the trainer asks of its rows."""
        rows = rows_of([rollout])
        for row in rows:
            self.spec.check(row.media, row.token_ids, row.loss_mask, f"row {row.row_id!r}")
        return rows
