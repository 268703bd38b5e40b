"""Locks: experts from calls to rows, over random trees of calls (one continues any earlier one, or breaks).

1. A row's experts are, for each token, those of the first call on its way that had the token as an input; of the last
   token of a row no call had any.
2. What a call keeps of an engine's record, the tokens that the calls before it did not know, loses nothing.
3. Kept so, a chain's experts grow with its tokens and not with their square.
4. Rows of one rollout that share tokens share a trie node exactly as far as ids and experts are equal.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstep.experts import UNKNOWN, RoutedExperts
from evenstep.rollout.call_tree import call_tree
from evenstep.rollout.calls import recorded_call
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.segments import rows_of
from evenstep.train.trie import build_trie
from evenstep.train.window import prefix_keys
from evenstep.types import Call, Rollout, Sampling

SHAPE = (2, 2)  # layers with experts, experts per token
NUM_EXPERTS = 5


def chosen(order: int, view: tuple[int, ...], t: int) -> list[list[int]]:
    """Where call ``order`` sent token t: engines differ from call to call, as rounding does."""
    draw = random.Random(f"{view[: t + 1]} {order if t % 3 == 0 else 0}")
    return [draw.sample(range(NUM_EXPERTS), SHAPE[1]) for _ in range(SHAPE[0])]


class Recording:
    """An engine that answers with what a call shall have sampled, and records experts."""

    max_context_tokens, weight_version = 1000, 0

    def __init__(self, order: int, output_ids: tuple[int, ...]) -> None:
        self.order, self.output_ids = order, output_ids

    async def generate(self, request: Request) -> Completion:
        view = request.prompt_ids + self.output_ids
        experts = [chosen(self.order, view, t) for t in range(len(view) - 1)]
        return Completion(
            output_ids=self.output_ids,
            logprobs=(-1.0,) * len(self.output_ids),
            finish_reason="stop",
            weight_version=0,
            routed_experts=RoutedExperts.of([*experts, np.full(SHAPE, UNKNOWN).tolist()]),
        )


def called(calls: list[Call], parent: int | None, more: list[int], output: list[int], *, is_trimmed: bool) -> Call:
    before = None if parent is None else calls[parent]
    start = () if before is None else before.prompt_ids + before.output_ids
    return asyncio.run(
        recorded_call(
            Recording(len(calls), tuple(output)),
            order=len(calls),
            prompt_ids=(*start, *more),
            sampling=Sampling(),
            rollout_id="r",
            rollout_key=(),
            vocab_size=None,
            parent=parent,
            break_reason=None if calls and before is not None else "compaction",
            before=before if is_trimmed else None,
        )
    )


steps = st.lists(
    st.tuples(
        st.integers(-1, 5),
        st.lists(st.integers(0, 2), min_size=1, max_size=3),
        st.lists(st.integers(0, 2), max_size=3),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=7,
)


@given(steps)
def test_experts_of_rows(plan: list[tuple[int, list[int], list[int], int]]) -> None:
    trimmed: list[Call] = []
    whole: list[Call] = []
    for index, (parent, more, output, rejects) in enumerate(plan):
        at = None if parent < 0 or not index else parent % index
        for calls, is_trimmed in ((trimmed, True), (whole, False)):
            call = called(calls, at, more, output, is_trimmed=is_trimmed)
            calls.append(replace(call, is_rejected=rejects == 0))
    fields = {"rollout_id": "r", "group_id": "g", "prompt_id": "p", "reward": 0.0}
    rows, same = (rows_of([Rollout(calls=tuple(calls), **fields)]) for calls in (trimmed, whole))
    assert [row.routed_experts for row in rows] == [row.routed_experts for row in same]
    for row in rows:
        view = tuple(row.token_ids.tolist())
        # where several calls have this view, as siblings that sampled the same, the row is one of theirs
        ends = [call for call in whole if call.prompt_ids + call.output_ids == view]
        found = [] if row.routed_experts is None else row.routed_experts.experts_TLX.tolist()
        assert found in [expected(whole, end) for end in ends]
    keys = prefix_keys(rows)
    if rows:
        known = [np.full((row.num_tokens, *SHAPE), UNKNOWN).tolist() for row in rows]
        known = [
            k if r.routed_experts is None else r.routed_experts.experts_TLX.tolist()
            for k, r in zip(known, rows, strict=True)
        ]
        beginnings = {
            (tuple(row.token_ids[: t + 1].tolist()), str(k[: t + 1]))
            for row, k in zip(rows, known, strict=True)
            for t in range(row.num_tokens)
        }
        assert build_trie(keys).num_tokens == len(beginnings)


def expected(calls: list[Call], end: Call) -> list[list[list[int]]]:
    view = end.prompt_ids + end.output_ids
    # over few ids a prompt may begin, by accident, with what another call left: the tree says which it continues
    nodes = call_tree(Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=0.0, calls=tuple(calls)))
    chain, parent = [end], nodes[end.order].parent
    while parent is not None:
        chain, parent = [calls[parent], *chain], nodes[parent].parent
    experts: list[list[list[int]]] = []
    for t in range(len(view)):
        first = next((call for call in chain if t < len(call.prompt_ids) + len(call.output_ids) - 1), None)
        experts.append(np.full(SHAPE, UNKNOWN).tolist() if first is None else chosen(first.order, view, t))
    return experts


def test_a_chain_keeps_each_token_once() -> None:
    calls: list[Call] = []
    for index in range(20):
        calls.append(called(calls, index - 1 if index else None, [1, 2], [0, 1], is_trimmed=True))
    kept = sum(call.routed_experts.num_tokens for call in calls if call.routed_experts is not None)
    assert kept == 4 * 20 + 19  # and each call's last token once more: only the next call knows its experts
