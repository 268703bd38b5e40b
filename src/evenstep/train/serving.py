"""A model from files as an engine, in this process or on servers, with all that a capture server needs beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from evenstep.errors import EngineError
from evenstep.media import vision_spec
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.engine import Engine
from evenstep.rollout.in_process import InProcessEngine
from evenstep.train.models import load_model, load_settings, load_tokenizer
from evenstep.train.vision import spec_of

__all__ = ["LoadedEngine", "connect_engine", "load_engine"]


CONNECT_LIMIT_S = 60.0  # that a server may be away


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine and its tokenizer."""

    engine: Engine
    tokenizer: Any  # of transformers
    renderer: ChatRenderer
    vocab_size: int
    close: Callable[[], None]


def load_engine(path: str, *, max_context_tokens: int) -> LoadedEngine:
    """Load a model in float32.

    Raises:
        ConfigError: as `evenstep.train.models.load_model`, or the tokenizer has no usable chat template.
    """
    model, tokenizer = load_model(path, dtype=torch.float32)
    renderer = ChatRenderer(cast(Any, tokenizer), spec_of(model))
    engine = InProcessEngine(model, eos_token_ids=renderer.stop_token_ids, max_context_tokens=max_context_tokens)
    return LoadedEngine(
        engine=engine,
        tokenizer=tokenizer,
        renderer=renderer,
        vocab_size=model.config.get_text_config().vocab_size,
        close=engine.close,
    )


def connect_engine(
    path: str,
    urls: Sequence[str],
    *,
    kind: str,
    max_context_tokens: int,
    temperature: float,
    max_concurrent: int,
    api_key: str | None = None,
    notice: Callable[[str], None] | None = None,
) -> LoadedEngine:
    """Servers that have the model's weights already; of its files tokenizer, chat template and settings alone are read.

    Raises:
        ConfigError: as `evenstep.train.models.load_tokenizer`, or the tokenizer has no usable chat template.
        EngineError: a server does not answer within a minute, or is not what the files say.
    """
    from evenstep.rollout.server import Expected, ServerEngine, ServerOptions
    from evenstep.rollout.server_api import TOKENIZER_TEXT

    tokenizer, vocab_size = load_tokenizer(path)
    renderer = ChatRenderer(cast(Any, tokenizer), vision_spec(load_settings(path)))
    options = ServerOptions(
        kind=kind,
        urls=tuple(urls),
        max_concurrent=max_concurrent,
        reconnect_limit_s=CONNECT_LIMIT_S,
        api_key=api_key,
        expected=Expected(
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            stop_token_ids=frozenset(renderer.stop_token_ids),
            temperature=temperature,
            dtype=None,
            tokenizer_ids=tuple(tokenizer.encode(TOKENIZER_TEXT, add_special_tokens=False)),
        ),
    )
    engine = ServerEngine(options, is_owner=False, notice=notice)
    try:
        engine.connect()
        engine.adopt()
    except EngineError:
        engine.close()
        raise
    return LoadedEngine(
        engine=engine, tokenizer=tokenizer, renderer=renderer, vocab_size=vocab_size, close=engine.close
    )
