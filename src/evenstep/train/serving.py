"""A model from files as an engine that generates in this process, with all that a server needs beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.in_process import InProcessEngine
from evenstep.train.models import load_model

__all__ = ["LoadedEngine", "load_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine and its tokenizer."""

    engine: InProcessEngine
    tokenizer: Any  # of transformers
    renderer: ChatRenderer
    vocab_size: int


def load_engine(path: str, *, max_context_tokens: int) -> LoadedEngine:
    """Load a model in float32.

    Raises:
        ConfigError: as `evenstep.train.models.load_model`, or the tokenizer has no usable chat template.
    """
    model, tokenizer = load_model(path, dtype=torch.float32)
    renderer = ChatRenderer(cast(Any, tokenizer))
    return LoadedEngine(
        engine=InProcessEngine(model, eos_token_ids=renderer.stop_token_ids, max_context_tokens=max_context_tokens),
        tokenizer=tokenizer,
        renderer=renderer,
        vocab_size=model.config.get_text_config().vocab_size,
    )
