"""Which rows begin alike: all that a planner has to know of a prefix trie, as integers.

With rows in the order of their tokens, the trie is known from how much each row shares with the one before it: the
nodes of any subset of rows are the sum of its lengths less what its neighbours share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstep.errors import PlanError
from evenstep.types import Int64Array

__all__ = ["SharedPrefixes", "shared_prefixes"]


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Rows in the order of their tokens, and how many leading tokens each has in common with the one before it.

    >>> shared = shared_prefixes([[7, 8, 1], [5, 6], [7, 8, 2, 3]])
    >>> shared.order_R.tolist(), shared.shared_R.tolist()
    ([1, 0, 2], [0, 0, 2])
    >>> shared.num_nodes(np.array([3, 2, 4]))    # 3 + 2 + 4 - 2
    7
    """

    order_R: Int64Array  # row indices; equal rows by index
    shared_R: Int64Array  # tokens that order_R[i] shares with order_R[i - 1]; the first is 0

    def among(self, rows: Int64Array) -> SharedPrefixes:
        """The same of a subset, which keeps its row indices.

        >>> shared_prefixes([[7, 8, 1], [7, 8], [7, 9]]).among(np.array([0, 2])).shared_R.tolist()
        [0, 1]
        """
        position = np.empty(int(self.order_R.max()) + 1, dtype=np.int64)
        position[self.order_R] = np.arange(self.order_R.size)
        kept = np.sort(position[rows])
        shared = np.zeros(kept.size, dtype=np.int64)
        if kept.size > 1:
            # what two rows share is the least that any neighbours between them do
            starts = np.stack([kept[:-1] + 1, kept[1:] + 1], axis=1).ravel()
            shared[1:] = np.minimum.reduceat(np.append(self.shared_R, 0), starts)[::2]
        return SharedPrefixes(self.order_R[kept], shared)

    def num_nodes(self, lengths: Int64Array) -> int:
        """Distinct nodes of the trie: Σ lengths - Σ shared, over these rows."""
        return int(lengths[self.order_R].sum() - self.shared_R.sum())


def shared_prefixes(keys: Sequence[Sequence[int] | npt.NDArray[np.integer[Any]]]) -> SharedPrefixes:
    """Order rows by their keys and compare neighbours.

    Args:
        keys: for each row, one integer ≥ 0 per token: its id or, where more must be equal for two tokens to be one
            node (experts, media), a number for all of that together. Positions need no key: they are the index.

    Raises:
        PlanError: a key below 0.
    """
    arrays = [np.asarray(key, dtype=np.int64) for key in keys]
    for row, array in enumerate(arrays):
        if array.size and array.min() < 0:
            raise PlanError(f"keys of tokens must be integers ≥ 0, found {array.min()} in row {row}; number them")
    # big-endian bytes compare like the integers, and a row before the rows that it begins
    order = sorted(range(len(arrays)), key=lambda row: arrays[row].astype(">i8").tobytes())
    shared = [0] * len(order)
    for i in range(1, len(order)):
        one, other = arrays[order[i - 1]], arrays[order[i]]
        length = min(one.size, other.size)
        differs = one[:length] != other[:length]
        shared[i] = int(differs.argmax()) if differs.any() else length
    return SharedPrefixes(np.array(order, dtype=np.int64), np.array(shared, dtype=np.int64))
