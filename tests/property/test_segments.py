"""Locks, for any calls: every sampled token is trained exactly once, in order, and context never is; segments are
maximal append-only chains."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from evenstep.rollout.segments import segments_of
from evenstep.types import Call, Rollout

ids = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Calls that extend, rewrite or truncate the history, over few ids so that accidents happen."""
    history: list[int] = []
    calls: list[Call] = []
    for order in range(draw(st.integers(1, 8))):
        prompt = history + draw(ids) if draw(st.booleans()) else draw(ids)
        prompt = prompt or [0]
        output = draw(ids)
        calls.append(
            Call(
                order=order,
                prompt_ids=tuple(prompt),
                output_ids=tuple(output),
                logprobs=tuple(-1.0 - order - i for i in range(len(output))),
                break_reason="compaction",
            )
        )
        history = prompt + output
    return Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=0.0, calls=tuple(calls))


@given(rollouts())
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


@given(rollouts())
def test_segments_are_the_maximal_chains(rollout: Rollout) -> None:
    segments = segments_of(rollout)
    assert [order for s in segments for order in s.call_orders] == [c.order for c in rollout.calls]
    for s in segments:
        last = rollout.calls[s.call_orders[-1]]
        assert s.token_ids == last.prompt_ids + last.output_ids
    for before, after in itertools.pairwise(segments):
        first = rollout.calls[after.call_orders[0]].prompt_ids
        assert first[: before.num_tokens] != before.token_ids
