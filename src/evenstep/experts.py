"""Which experts the tokens of a row or call went to: what an engine recorded, so that training can route alike.

Shape letters: T tokens, L layers with experts, X experts per token, E experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.errors import RowError

__all__ = ["UNKNOWN", "RoutedExperts", "token_keys"]

UNKNOWN = -1  # in the place of an expert that nobody recorded
_STORED = np.dtype("<i2")  # the same bytes on every machine
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of some tokens in each layer that has experts, as an immutable value; ``-1`` where unknown.

    In a layer a token has all of its experts or none, and no expert twice. Entry ``t`` speaks of the forward pass *of*
    token t, whose output predicts token t + 1: so an engine does not know it of the last token that it sampled.

    Two tokens, one layer, two experts a token; of the second nothing is known:

    >>> experts = RoutedExperts.of([[[3, 0]], [[-1, -1]]])
    >>> experts.shape, experts.experts_TLX.tolist(), experts.is_known_T.tolist()
    ((2, 1, 2), [[[3, 0]], [[-1, -1]]], [True, False])
    >>> experts == RoutedExperts(experts.shape, experts.data)
    True

    Raises:
        RowError: data of another size than the shape says, an expert below -1, an expert twice for one token, or a
            token with some of a layer's experts and not the others.
    """

    shape: tuple[int, int, int]  # T, L, X
    data: bytes = field(repr=False)  # [T, L, X] int16, little-endian

    def __post_init__(self) -> None:
        num_bytes = _STORED.itemsize * math.prod(self.shape)
        if len(self.shape) != 3 or min(self.shape) < 0 or len(self.data) != num_bytes:
            raise RowError(
                f"routed_experts must hold two bytes for each of shape {self.shape}, found {len(self.data)} bytes; "
                f"write both from one array"
            )
        experts_TLX = self.experts_TLX
        if not experts_TLX.size:
            return
        sorted_TLX = np.sort(experts_TLX, axis=2)
        lowest_TL, highest_TL = sorted_TLX[..., 0], sorted_TLX[..., -1]
        if lowest_TL.min() < UNKNOWN:
            raise RowError(
                f"routed_experts must be indices of experts, or {UNKNOWN} where unknown, found {lowest_TL.min()}; take "
                f"the indices of the router's top-k as they are"
            )
        is_partly_TL = (lowest_TL == UNKNOWN) & (highest_TL != UNKNOWN)
        if is_partly_TL.any():
            t, layer = np.argwhere(is_partly_TL)[0].tolist()
            raise RowError(
                f"routed_experts must hold all experts of a token in a layer or none, found "
                f"{experts_TLX[t, layer].tolist()} at token {t}, layer {layer}; give {UNKNOWN} for all of them where "
                f"one is unknown"
            )
        is_twice_TL = ((sorted_TLX[..., 1:] == sorted_TLX[..., :-1]) & (sorted_TLX[..., 1:] != UNKNOWN)).any(axis=2)
        if is_twice_TL.any():
            t, layer = np.argwhere(is_twice_TL)[0].tolist()
            raise RowError(
                f"routed_experts must name each expert of a token once, found {experts_TLX[t, layer].tolist()} at "
                f"token {t}, layer {layer}; take the indices of the router's top-k as they are"
            )

    @staticmethod
    def of(values: Any) -> RoutedExperts:
        """From nested lists or an array of integers [T, L, X]; raises as the class does."""
        promised = "routed_experts must be integers of shape [tokens, layers with experts, experts per token]"
        try:
            array = np.asarray(values)
        except ValueError:  # lists of unequal lengths
            raise RowError(f"{promised}, found lists of unequal lengths; give {UNKNOWN} for what is unknown") from None
        if array.ndim != 3 or 0 in array.shape[1:] or array.dtype.kind not in "iu":
            raise RowError(
                f"{promised}, found {array.dtype} of shape {array.shape}; give {UNKNOWN} for what is unknown, or leave "
                f"the field out"
            )
        limits = np.iinfo(np.int16)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise RowError(
                f"routed_experts must be indices of at most {limits.max}, found {array.min()} to {array.max()}; take "
                f"the indices of the router's top-k as they are"
            )
        num_tokens, num_layers, num_experts = array.shape
        return RoutedExperts((num_tokens, num_layers, num_experts), array.astype(_STORED).tobytes())

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def experts_TLX(self) -> npt.NDArray[np.int16]:
        """[T, L, X] read-only."""
        return np.frombuffer(self.data, dtype=_STORED).reshape(self.shape)

    @property
    def is_known_T(self) -> npt.NDArray[np.bool_]:
        """[T] Whether a token's experts are known in every layer."""
        return (self.experts_TLX != UNKNOWN).all(axis=(1, 2))

    def part(self, start: int, stop: int) -> RoutedExperts:
        """Those of the tokens from ``start`` to before ``stop``.

        >>> RoutedExperts.of([[[3]], [[1]], [[0]]]).part(1, 3).experts_TLX.tolist()
        [[[1]], [[0]]]
        """
        return RoutedExperts.of(self.experts_TLX[start:stop])


def token_keys(token_ids_R: Sequence[Int64Array], experts_R: Sequence[RoutedExperts | None]) -> list[Int64Array]:
    """[R][T] A number for all that two tokens at one position must have equal to be one node of a prefix trie.

    That is the token id and, where rows carry experts (all of one shape), the experts that it goes to. Numbers are in
    the order of the ids, those of one id in the order of their experts, so that they do not depend on the order of the
    rows.

    >>> experts = [RoutedExperts.of([[[e]], [[0]]]) for e in (2, 1, 2)]
    >>> [key.tolist() for key in token_keys([np.array([7, 8])] * 3, experts)]
    [[1, 2], [0, 2], [1, 2]]
    """
    shapes = {experts.shape[1:] for experts in experts_R if experts is not None}
    if not shapes:
        return list(token_ids_R)
    ((num_layers, num_experts),) = shapes
    parts: list[npt.NDArray[np.uint8]] = []
    for ids_T, experts in zip(token_ids_R, experts_R, strict=True):
        ids_T8 = ids_T.astype(">i8").view(np.uint8).reshape(-1, 8)
        experts_TX = np.zeros((ids_T.size, num_layers * num_experts), dtype=">i2")
        if experts is not None:
            experts_TX[:] = experts.experts_TLX.reshape(experts_TX.shape) - UNKNOWN
        parts.append(np.concatenate([ids_T8, experts_TX.view(np.uint8)], axis=1))
    # a token's bytes as one value, which compares like the numbers that it is made of
    tokens_N = np.ascontiguousarray(np.concatenate(parts))
    tokens_N = tokens_N.view(f"V{tokens_N.shape[1]}")[:, 0]
    keys_N = np.unique(tokens_N, return_inverse=True)[1].astype(np.int64)
    return np.split(keys_N, np.cumsum([ids_T.size for ids_T in token_ids_R])[:-1])
