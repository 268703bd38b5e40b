"""A trie is what its rows say, and attention along its paths is attention of each row by itself.

1. For random groups, segments, branches, duplicates, rows that begin others and rows of one token, a trie has exactly
   one place for each distinct beginning; each row's places hold its tokens at their positions; the planner's count of
   nodes is the same.
2. Nodes cover the flat order, ends nest, and the interval rule (key ≤ query < end of the key's node) is the relation
   "is on my path": no token of another row, none that comes later.
3. Fused calls and blocks give the outputs and gradients of a dense softmax over each token's path, with windows, sinks,
   soft caps and grouped heads, whatever the size of a block.
4. The same on bfloat16, whose sums are float32; under autocast too.
5. Blocks never hold the square of a long row: the largest tensor they make stays below a bound that does not grow.
6. A wide trie is not computed by copying its beginning for each branch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenstep.plan import shared_prefixes
from evenstep.train import attention, blocks
from evenstep.train.attention import NODES_KWARG, by_node
from evenstep.train.trie import Node, Trie, build_trie, paths

Rows = list[np.ndarray]


@st.composite
def tries(draw: st.DrawFn, max_rows: int = 9) -> Rows:
    """Rows of few ids, most of which begin as an earlier one does."""
    ids = st.integers(0, 2)
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_rows))):
        begin = draw(st.sampled_from(rows)) if rows and draw(st.integers(0, 3)) else []
        begin = begin[: draw(st.integers(0, len(begin)))]
        rows.append([*begin, *draw(st.lists(ids, min_size=0 if begin else 1, max_size=6))])
    return [np.array(row, dtype=np.int64) for row in rows]


def sees(trie: Trie) -> np.ndarray:
    """[T, T] Whether a token (row of the matrix) sees another one, by the interval rule."""
    end_T = np.concatenate([np.full(node.stop - node.start, node.end) for node in trie.nodes])
    query, key = np.ogrid[: len(end_T), : len(end_T)]
    return (key <= query) & (query < end_T[None, :])


@settings(max_examples=300)
@given(tries())
def test_a_trie_is_its_rows(rows: Rows) -> None:
    trie = build_trie(rows)
    beginnings = {tuple(row[: t + 1].tolist()) for row in rows for t in range(len(row))}
    assert trie.num_tokens == len(beginnings)
    assert trie.num_tokens == shared_prefixes(rows).num_nodes(np.array([len(row) for row in rows]))
    place: dict[tuple[int, ...], int] = {}
    for row, index in zip(rows, trie.index_R, strict=True):
        assert len(index) == len(row)
        for t, at in enumerate(index.tolist()):
            assert place.setdefault(tuple(row[: t + 1].tolist()), at) == at
    assert sorted(place.values()) == list(range(trie.num_tokens))


@settings(max_examples=300)
@given(tries())
def test_intervals_are_paths(rows: Rows) -> None:
    trie = build_trie(rows)
    assert [node.start for node in trie.nodes] == [0, *[node.stop for node in trie.nodes[:-1]]]
    on_path = np.zeros((trie.num_tokens, trie.num_tokens), dtype=bool)
    position_T = np.full(trie.num_tokens, -1)
    for index in trie.index_R:
        on_path[index[:, None], index[None, :]] |= np.tril(np.ones((len(index), len(index)), dtype=bool))
        position_T[index] = np.arange(len(index))
    assert np.array_equal(sees(trie), on_path)
    for node, path in zip(trie.nodes, paths(trie.nodes), strict=True):
        assert position_T[node.start : node.stop].tolist() == list(
            range(node.depth, node.depth + node.stop - node.start)
        )
        above = [t for i in path for t in range(trie.nodes[i].start, trie.nodes[i].stop)]
        assert above == np.flatnonzero(on_path[node.start])[: node.depth].tolist()


def dense(query: Tensor, key: Tensor, value: Tensor, trie: Trie, sinks: Tensor | None, **how: Any) -> Tensor:
    """[1, T, H, D] Softmax over the whole square."""
    num_groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(num_groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * how["scaling"]
    if how["softcap"] is not None:
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    position_T = np.empty(trie.num_tokens, dtype=np.int64)
    for index in trie.index_R:
        position_T[index] = np.arange(len(index))
    is_seen = sees(trie)
    if how["sliding_window"] is not None:
        is_seen &= position_T[:, None] - position_T[None, :] < how["sliding_window"]
    scores = scores.masked_fill(~torch.from_numpy(is_seen), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], dim=-1)
    return (torch.softmax(scores, dim=-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64, num_heads: int = 4, num_keys: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(1, num_heads, num_tokens, 3), (1, num_keys, num_tokens, 3), (1, num_keys, num_tokens, 5)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (*shapes, (num_heads,))]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def outputs_and_gradients(out: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad((out.double() * factors).sum(), tensors, allow_unused=True)
    return [out.detach(), *[torch.zeros(1) if grad is None else grad for grad in grads]]


@settings(max_examples=60)
@given(
    rows=tries(),
    window=st.sampled_from([None, 1, 2, 4]),
    softcap=st.sampled_from([None, 1.5]),
    has_sinks=st.booleans(),
    num_keys=st.sampled_from([1, 2, 4]),
    piece=st.sampled_from([1, 2, 128]),
    max_copies=st.sampled_from([0, 100]),
)
def test_attention_is_that_of_a_dense_softmax(
    rows: Rows, window: int | None, softcap: float | None, has_sinks: bool, num_keys: int, piece: int, max_copies: int
) -> None:
    trie = build_trie(rows)
    tensors = inputs(trie.num_tokens, num_keys=num_keys)
    how = {"scaling": 0.7, "sliding_window": window, "softcap": softcap}
    sinks = tensors[3] if has_sinks else None
    expected = outputs_and_gradients(dense(*tensors[:3], trie, sinks, **how), tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "PIECE", piece)
        patch.setattr(blocks, "MAX_SCORES", piece)  # blocks of few rows, too
        patch.setattr(attention, "MAX_COPIES", max_copies)
        blocks.blocks_of.cache_clear()
        try:
            out, _ = by_node(None, *tensors[:3], None, s_aux=sinks, **how, **{NODES_KWARG: trie.nodes})  # type: ignore[arg-type]
            found = outputs_and_gradients(out, tensors)
        finally:
            blocks.blocks_of.cache_clear()
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_half_precision_adds_up_in_float32(is_autocast: bool) -> None:
    trie = build_trie([np.arange(40) % 7, np.arange(60) % 7, np.arange(20) % 5])
    tensors = inputs(trie.num_tokens, torch.bfloat16)
    how = {"scaling": 0.7, "sliding_window": 9, "softcap": None}
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = outputs_and_gradients(dense(*exact[:3], trie, exact[3], **how), exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        out, _ = by_node(None, *tensors[:3], None, s_aux=tensors[3], **how, **{NODES_KWARG: trie.nodes})  # type: ignore[arg-type]
    found = outputs_and_gradients(out, tensors)
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=2**-7, atol=2**-8 * float(other.abs().max()))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return out


def largest(nodes: tuple[Node, ...], **how: Any) -> int:
    tensors = inputs(nodes[-1].stop, torch.float32, num_heads=2, num_keys=1)
    with Largest() as seen:
        out, _ = by_node(None, *tensors[:3], None, **how, **{NODES_KWARG: nodes})  # type: ignore[arg-type]
        out.sum().backward()
    return seen.num_elements


def test_long_rows_make_no_square() -> None:
    found = [largest((Node(0, n, n, 0),), sliding_window=300) for n in (6000, 12000)]
    bound = max(blocks.MAX_SCORES, 12000 * 2 * 5)
    assert max(found) <= bound < 6000 * 6000


def test_a_wide_trie_is_not_copied() -> None:
    """64 branches of 4 tokens behind 1,000: the keys of all their paths would be 60 times those of the trie."""
    branches = [Node(at, at + 4, at + 4, 1000) for at in range(1000, 1256, 4)]
    nodes = (Node(0, 1000, 1256, 0), *branches)
    kept: list[int] = []
    tensors = inputs(1256, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        by_node(None, *tensors[:3], None, **{NODES_KWARG: nodes})  # type: ignore[arg-type]
    own = sum(tensor.numel() for tensor in tensors[:3])
    assert sum(kept) < 4 * own
    few = (Node(0, 1000, 1008, 0), *itertools.islice(branches, 2))
    assert attention._is_cheap_by_node(few)
    assert not attention._is_cheap_by_node(nodes)
