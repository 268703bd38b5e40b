"""Rows that begin alike, merged: each token that several rows have in common is computed once.

A trie is laid out flat in depth-first order, so that everything a model needs to know of it are intervals: a token is
seen by the tokens after it within the subtree of its node, and by no other. Rows that share nothing are a trie too.

::

    rows        a b c d         flat      a b c d   x   y z
                a b x           position  0 1 2 3   2   0 1
                y z             nodes    [a b [c d] [x]] [y z]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from evenstep.plan import shared_prefixes
from evenstep.types import Int64Array

__all__ = ["Node", "Trie", "build_trie", "paths"]


class Node(NamedTuple):
    """A run of tokens that no row enters or leaves in between."""

    start: int  # flat index of its first token
    stop: int  # behind its last token
    end: int  # behind the last token of its subtree
    depth: int  # position of its first token in every row that goes through it


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """The prefix trie of some rows; T counts its tokens.

    >>> trie = build_trie([np.array([7, 8, 1, 2]), np.array([7, 8, 3]), np.array([5])])
    >>> [index.tolist() for index in trie.index_R]      # flat: 5 | 7 8 | 1 2 | 3
    [[1, 2, 3, 4], [1, 2, 5], [0]]
    >>> [tuple(node) for node in trie.nodes]
    [(0, 1, 1, 0), (1, 3, 6, 0), (3, 5, 5, 2), (5, 6, 6, 2)]
    """

    index_R: tuple[Int64Array, ...]  # for each row, the flat index of each of its tokens
    nodes: tuple[Node, ...]  # in depth-first order

    @property
    def num_tokens(self) -> int:
        """T: what is computed once for all rows."""
        return self.nodes[-1].stop


def build_trie(keys: Sequence[Int64Array]) -> Trie:
    """Merge rows with equal beginnings.

    Args:
        keys: see ``evenstep.experts.token_keys``; a row may equal another one, or begin it.
    """
    shared = shared_prefixes(keys)
    index_R: list[Int64Array] = [np.zeros(0, dtype=np.int64)] * len(keys)
    closed: list[Node] = []
    open_nodes: list[tuple[int, int, int]] = []  # (start, stop, depth) from the root to the present row
    size = 0

    def close(depth: int) -> None:
        """End what lies deeper; a node that goes on past ``depth`` is cut there."""
        while open_nodes and open_nodes[-1][2] + open_nodes[-1][1] - open_nodes[-1][0] > depth:
            start, stop, first = open_nodes.pop()
            cut = start + max(depth - first, 0)
            closed.append(Node(cut, stop, size, first + cut - start))
            if cut > start:
                open_nodes.append((start, cut, first))

    before = np.zeros(0, dtype=np.int64)
    for row, depth in zip(shared.order_R.tolist(), shared.shared_R.tolist(), strict=True):
        close(depth)
        num_new = len(keys[row]) - depth
        before = np.concatenate([before[:depth], np.arange(size, size + num_new)])
        index_R[row] = before
        if num_new:
            open_nodes.append((size, size + num_new, depth))
            size += num_new
    close(0)
    return Trie(index_R=tuple(index_R), nodes=tuple(sorted(closed)))


@lru_cache(maxsize=8)
def paths(nodes: tuple[Node, ...]) -> tuple[tuple[int, ...], ...]:
    """For each node the indices of the nodes above it, from the root on.

    >>> paths((Node(0, 2, 5, 0), Node(2, 4, 4, 2), Node(4, 5, 5, 2), Node(5, 6, 6, 0)))
    ((), (0,), (0,), ())
    """
    found: list[tuple[int, ...]] = []
    above: list[int] = []
    for i, node in enumerate(nodes):
        while above and nodes[above[-1]].end <= node.start:
            above.pop()
        found.append(tuple(above))
        above.append(i)
    return tuple(found)
