"""The experts that a server says it chose, out of its answer.

SGLang's native route gives them as base64 of little-endian int32 [tokens - 1, layers with experts, experts per token],
of prompt and output together: of the last token nothing was computed.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np

from evenstep.errors import EngineError, RowError
from evenstep.experts import UNKNOWN, RoutedExperts

__all__ = ["returned_experts"]


def returned_experts(found: Any, url: str, num_tokens: int, shape: tuple[int, int]) -> RoutedExperts:
    """The experts of a call of so many tokens; those of its last token are unknown.

    Args:
        found: the field of the answer, None where it has none.
        url: of the server.
        num_tokens: of prompt and output together.
        shape: layers with experts and experts per token of the policy.

    Raises:
        EngineError: the server returned none, or those of another model.

    >>> text = "AgAAAAAAAAABAAAAAwAAAA=="    # 2, 0, 1, 3
    >>> returned_experts(text, "http://127.0.0.1:1", 3, (1, 2)).experts_TLX.tolist()
    [[[2, 0]], [[1, 3]], [[-1, -1]]]
    """
    promised = f"the server at {url} must return the experts that it chose"
    if not isinstance(found, str):
        raise EngineError(
            f"{promised}, found no meta_info.routed_experts; start SGLang with --enable-return-routed-experts, or set "
            f"train.routing_replay to 'off'"
        )
    try:
        flat = np.frombuffer(b64decode(found, validate=True), dtype="<i4")
    except ValueError as error:
        raise EngineError(f"{promised} as base64 of int32, found {error}; use a version of SGLang that does") from None
    num_layers, each = shape
    if flat.size != (num_tokens - 1) * num_layers * each:
        raise EngineError(
            f"{promised}, for {num_tokens - 1} tokens {num_layers} layers with {each} experts each, found {flat.size} "
            f"numbers; it serves another model, or counts layers that have no experts"
        )
    try:
        return RoutedExperts.of(
            np.concatenate([flat.reshape(-1, num_layers, each), np.full((1, num_layers, each), UNKNOWN)])
        )
    except RowError as error:
        raise EngineError(f"{promised}, found that {error}") from None
