"""Locks, over few ids so that accidents happen:

1. linear rollouts: every sampled token is trained exactly once, in order, and context never is; segments are the
   maximal append-only chains; this is what a plain loop over the calls gives
2. any tree of calls (forks, sub-agents, drifts, retries, rejected and empty outputs, named and unnamed parents):
   parents are those of a search over all pairs of calls
3. Σ loss_mask == Σ sampled - realigned; each sampled token is trained once, with exactly the ids before it that it was
   sampled after; only ``realign`` leaves tokens out, and only those that no segment holds
4. the branch with the lowest order numbers trains a shared token
5. the order in which calls arrive changes nothing
6. sub-agents may come before the agent's first call, which is then no undeclared break
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenstep.errors import SegmentationError
from evenstep.rollout.call_tree import CallNode, call_tree, has_kept
from evenstep.rollout.segments import segmentation_of, segments_of
from evenstep.types import Call, Rollout, Segment

ids = st.lists(st.integers(0, 3), max_size=4)


def make_call(order: int, prompt: list[int], output: list[int], **fields: Any) -> Call:
    return Call(
        order=order,
        prompt_ids=tuple(prompt),
        output_ids=tuple(output),
        logprobs=tuple(-1.0 - order - i / 16 for i in range(len(output))),  # each token is known by its own
        **fields,
    )


def make_rollout(calls: list[Call]) -> Rollout:
    return Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=0.0, calls=tuple(calls))


def view(call: Call) -> tuple[int, ...]:
    return call.prompt_ids + call.output_ids


@st.composite
def linear_rollouts(draw: st.DrawFn) -> Rollout:
    """Calls that extend, rewrite or truncate the history, each break declared."""
    history: list[int] = []
    calls: list[Call] = []
    for order in range(draw(st.integers(1, 8))):
        prompt = history + draw(ids) if draw(st.booleans()) else draw(ids)
        prompt = prompt or [0]
        output = draw(ids)
        calls.append(make_call(order, prompt, output, break_reason="compaction"))
        history = prompt + output
    return make_rollout(calls)


@st.composite
def trees(draw: st.DrawFn) -> Rollout:
    """Calls that continue, fork, drift from, retry or ignore any earlier one."""
    first: dict[str, Any] = {"break_reason": "subagent"} if draw(st.integers(0, 3)) == 0 else {}
    first["is_rejected"] = draw(st.integers(0, 5)) == 0
    calls = [make_call(draw(st.integers(0, 2)), [0, *draw(ids)], draw(ids), **first)]
    for _ in range(draw(st.integers(0, 8))):
        order = calls[-1].order + draw(st.integers(1, 3))
        before = draw(st.sampled_from(calls))
        kind = draw(st.sampled_from(["continue", "continue", "continue", "drift", "retry", "new", "sub"]))
        fields: dict[str, Any] = {"is_rejected": draw(st.integers(0, 5)) == 0}
        prompt = list(view(before)) + draw(ids)
        if kind == "drift":
            at = draw(st.integers(0, len(view(before)) - 1))
            prompt[at] = 3 - prompt[at]
        elif kind == "retry":
            prompt = list(before.prompt_ids)
        elif kind in ("new", "sub"):
            prompt = draw(ids) or [1]
        if kind in ("continue", "drift") and draw(st.booleans()):
            fields["parent"] = before.order
        if kind == "sub" or draw(st.integers(0, 5)) == 0:
            fields["break_reason"] = draw(st.sampled_from(["compaction", "template", "subagent"]))
        calls.append(make_call(order, prompt, draw(ids), **fields))
    return make_rollout(calls)


# ------------------------------------------------------------------------------------------------ the linear rollout


def plain_loop(rollout: Rollout) -> list[Segment]:
    """Segments of a linear rollout whose breaks are all declared."""
    segments: list[Segment] = []
    for call in rollout.calls:
        before = segments[-1] if segments else None
        if before is not None and call.prompt_ids[: before.num_tokens] == before.token_ids:
            segments.pop()
        else:
            reason = None if before is None else call.break_reason
            before = Segment(
                index=len(segments), token_ids=(), loss_mask=(), logprobs=(), break_reason=reason, call_orders=()
            )
        num_context = len(call.prompt_ids) - before.num_tokens
        segments.append(
            dataclasses.replace(
                before,
                token_ids=view(call),
                loss_mask=(*before.loss_mask, *[0] * num_context, *[1] * len(call.output_ids)),
                logprobs=(*before.logprobs, *[0.0] * num_context, *call.logprobs),
                call_orders=(*before.call_orders, call.order),
            )
        )
    return segments


@given(linear_rollouts())
def test_each_sampled_token_is_trained_once_in_order(rollout: Rollout) -> None:
    segments = segments_of(rollout)
    trained = [
        (token, logprob)
        for s in segments
        for token, mask, logprob in zip(s.token_ids, s.loss_mask, s.logprobs, strict=True)
        if mask
    ]
    sampled = [pair for c in rollout.calls for pair in zip(c.output_ids, c.logprobs, strict=True)]
    assert trained == sampled
    assert all(s.loss_mask[0] == 0 for s in segments)


@given(linear_rollouts())
def test_segments_are_the_maximal_chains(rollout: Rollout) -> None:
    segments = segments_of(rollout)
    assert list(segments) == plain_loop(rollout)
    for before, after in itertools.pairwise(segments):
        first = next(c for c in rollout.calls if c.order == after.call_orders[0]).prompt_ids
        assert first[: before.num_tokens] != before.token_ids


# ------------------------------------------------------------------------------------------------ any tree


def holds(prompt: tuple[int, ...], start: tuple[int, ...]) -> bool:
    return prompt[: len(start)] == start


def searched_parents(nodes: tuple[CallNode, ...]) -> None:
    """Compare each node that found its own parent with a search over all calls before it."""
    if all(
        not n.call.is_rejected
        and (i == 0 or holds(n.call.prompt_ids, view(nodes[i - 1].call)) or n.call.break_reason is not None)
        and (n.call.parent is None or (i > 0 and n.call.parent == nodes[i - 1].call.order))
        for i, n in enumerate(nodes)
    ):
        return  # linear
    for index, node in enumerate(nodes):
        prompt = node.call.prompt_ids
        if node.call.parent is not None:
            continue
        fits = [i for i in range(index) if holds(prompt, view(nodes[i].call))]
        length = max((nodes[i].num_tokens for i in fits), default=0)
        longest = [i for i in fits if nodes[i].num_tokens == length]
        tips = [
            i for i in longest if not any(nodes[j].parent == i and nodes[j].num_kept_tokens == length for j in longest)
        ]
        tips = [i for i in tips if not nodes[i].call.is_rejected] or tips
        has_drifted = any(
            len(prompt) > len(n.call.prompt_ids) > length and holds(prompt, n.call.prompt_ids)
            for n in nodes[:index]
            if not n.call.is_rejected
        )
        if has_drifted or not tips:
            assert node.origin != "continued"
        elif len(tips) == 1:
            assert (node.parent, node.origin) == (tips[0], "continued")
        else:
            assert node.parent is None
            assert node.origin == (node.call.break_reason or "quarantined")


def check_starts(nodes: tuple[CallNode, ...]) -> None:
    """The agent's first call comes first, but for rejected calls and sub-agents that it was not made from."""
    is_aside: list[bool] = []
    for index, node in enumerate(nodes):
        is_first = index == 0 or all(
            n.call.is_rejected or (aside and not holds(node.call.prompt_ids, n.call.prompt_ids))
            for n, aside in zip(nodes[:index], is_aside, strict=True)
        )
        if node.parent is None and node.call.parent is None and node.call.break_reason is None:
            assert (node.origin == "start") == is_first or node.origin in ("quarantined", "fork")
        is_aside.append(node.origin == "subagent" or (node.parent is not None and is_aside[node.parent]))


def chain(nodes: tuple[CallNode, ...], leaf: int) -> list[tuple[int, int]]:
    """(node, how many of its view's tokens the segment that ends at ``leaf`` holds), from the first node on."""
    found: list[tuple[int, int]] = []
    at, limit = leaf, nodes[leaf].num_tokens
    while at is not None:
        found.append((at, min(limit, nodes[at].num_tokens)))
        limit = min(limit, nodes[at].num_kept_tokens)
        at = nodes[at].parent  # type: ignore[assignment]
    return found[::-1]


def check(rollout: Rollout, mode: Any) -> None:
    nodes = call_tree(rollout, on_undeclared=mode)
    searched_parents(nodes)
    check_starts(nodes)
    found = segmentation_of(rollout, on_undeclared=mode)
    kept = [n.call for n in nodes if not n.call.is_rejected]
    by_order = {n.call.order: i for i, n in enumerate(nodes)}
    place = {lp: (c, i) for c in kept for i, lp in enumerate(c.logprobs)}
    trained: dict[float, int] = {}
    for s in found.segments:
        for t in (t for t, mask in enumerate(s.loss_mask) if mask):
            call, i = place[s.logprobs[t]]
            assert s.logprobs[t] not in trained
            trained[s.logprobs[t]] = s.index
            # the model saw exactly this before it sampled the token
            assert s.token_ids[: t + 1] == call.prompt_ids + call.output_ids[: i + 1]
        assert all(lp == 0.0 for lp, mask in zip(s.logprobs, s.loss_mask, strict=True) if not mask)
        assert s.token_ids == view(nodes[by_order[s.call_orders[-1]]].call)
    # every call belongs to one segment, and segments come in the order of their first calls
    assert sorted(order for s in found.segments for order in s.call_orders) == [c.order for c in kept]
    assert [s.index for s in found.segments] == list(range(len(found.segments)))
    firsts = [s.call_orders[0] for s in found.segments]
    assert firsts == sorted(firsts)

    report = found.report
    assert report.num_trained_tokens == len(trained) == sum(s.num_trained_tokens for s in found.segments)
    assert report.num_sampled_tokens == sum(len(c.output_ids) for c in kept) == rollout.num_sampled_tokens
    assert report.num_trained_tokens + report.num_realigned_tokens == report.num_sampled_tokens
    assert mode == "realign" or report.num_realigned_tokens == 0
    assert sum(report.num_segments_by_origin.values()) == report.num_segments == len(found.segments)

    chains = {s.index: chain(nodes, by_order[s.call_orders[-1]]) for s in found.segments}
    num_held = 0
    for lp, (call, i) in place.items():
        end = len(call.prompt_ids) + i + 1
        holders = [
            s for s, nodes_of in chains.items() if any(n == by_order[call.order] and h >= end for n, h in nodes_of)
        ]
        num_held += len(holders)
        assert trained.get(lp) == min(holders, default=None)
        if mode != "realign":
            assert trained[lp] == min(holders, key=lambda s: [n for n, _ in chains[s]])
    assert report.num_shared_tokens == num_held - len(trained)


@given(trees(), st.randoms(use_true_random=False))
@pytest.mark.parametrize("mode", ["segment", "realign"])
def test_any_tree(mode: Any, rollout: Rollout, random: Any) -> None:
    check(rollout, mode)
    shuffled = list(rollout.calls)
    random.shuffle(shuffled)
    again = dataclasses.replace(rollout, calls=tuple(shuffled))
    assert segmentation_of(again, on_undeclared=mode) == segmentation_of(rollout, on_undeclared=mode)


RETRIED_AFTER_ALL = make_rollout(  # the rejected first call was gone on with before its prompt was asked again
    [
        make_call(0, [0], [0], is_rejected=True),
        make_call(1, [0, 0], [1]),
        make_call(2, [0], [2], is_rejected=True),
        make_call(3, [0], [3]),
    ]
)


@given(trees())
@example(RETRIED_AFTER_ALL)
def test_error_refuses_what_the_others_count(rollout: Rollout) -> None:
    nodes = call_tree(rollout, on_undeclared="segment")
    if any(n.origin == "undeclared" and kept for n, kept in zip(nodes, has_kept(nodes), strict=True)):
        with pytest.raises(SegmentationError, match="does not continue"):
            segmentation_of(rollout)
        return
    check(rollout, "error")
    assert segmentation_of(rollout) == segmentation_of(rollout, on_undeclared="segment")
    if not any(c.is_rejected for c in rollout.calls):  # those may drift, and nothing may follow
        assert segmentation_of(rollout) == segmentation_of(rollout, on_undeclared="realign")
