"""Locks:

1. a prompt that extends everything so far (prompt and output) continues the segment; the new prompt tokens are context
2. a declared break starts a segment whose whole prompt is context, for each reason
3. an undeclared break is an error that names rollout, call, token and both ids
4. a declared reason on a prompt that does extend the history does not break it
5. each sampled token is trained exactly once; log-probs stand at their tokens
6. an empty output adds no trained token; an empty prompt or a missing log-prob is an error
7. calls are taken in their order number, not in file order
8. rows: ids, one advantage on every row of a rollout, none for a rollout that does not vote
"""

from __future__ import annotations

import dataclasses

import pytest

from evenstep.errors import SegmentationError
from evenstep.rollout.segments import rows_of, segments_of
from evenstep.types import BREAK_REASONS, Call, Rollout


def call(order: int, prompt: list[int], output: list[int], why: str | None = None) -> Call:
    logprobs = tuple(-0.01 * (order + 1) * (i + 1) for i in range(len(output)))
    return Call(order=order, prompt_ids=tuple(prompt), output_ids=tuple(output), logprobs=logprobs, break_reason=why)


def rollout(*calls: Call, **fields: object) -> Rollout:
    return Rollout(
        **({"rollout_id": "r", "group_id": "g", "prompt_id": "p", "reward": 1.0, "calls": calls} | fields)  # type: ignore[arg-type]
    )


TURNS = (call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6]))


def test_a_prompt_that_extends_the_completed_view_continues_the_row() -> None:
    (only,) = segments_of(rollout(*TURNS, call(2, [1, 2, 3, 4, 5, 6, 7], [8])))
    assert only.token_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert only.loss_mask == (0, 0, 1, 1, 0, 1, 0, 1)
    assert only.call_orders == (0, 1, 2)


@pytest.mark.parametrize("reason", BREAK_REASONS)
def test_a_declared_break_opens_a_row_and_trains_only_what_it_sampled(reason: str) -> None:
    first, second = segments_of(rollout(*TURNS, call(2, [1, 2, 9, 7], [8], reason)))
    assert (first.token_ids, first.loss_mask) == ((1, 2, 3, 4, 5, 6), (0, 0, 1, 1, 0, 1))
    assert (second.token_ids, second.loss_mask) == ((1, 2, 9, 7, 8), (0, 0, 0, 0, 1))
    assert (first.break_reason, second.break_reason) == (None, reason)
    assert first.num_trained_tokens + second.num_trained_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "found"), [([1, 2, 9, 7], "token 2 is 9, expected 3"), ([1, 2, 3], "token 3 is the prompt's end")]
)
def test_an_undeclared_break_is_an_error_with_the_place(prompt: list[int], found: str) -> None:
    with pytest.raises(SegmentationError, match=r"rollout 'r', call 2") as error:
        segments_of(rollout(*TURNS, call(2, prompt, [8])))
    assert found in str(error.value)
    assert "break_reason" in str(error.value)


def test_a_declared_reason_does_not_break_what_continues() -> None:
    (only,) = segments_of(rollout(*TURNS, call(2, [1, 2, 3, 4, 5, 6, 7], [8], "compaction")))
    assert only.num_tokens == 8


def test_logprobs_stand_at_their_tokens() -> None:
    (only,) = segments_of(rollout(*TURNS))
    assert only.logprobs == (0.0, 0.0, -0.01, -0.02, 0.0, -0.02)


def test_an_empty_output_adds_nothing_to_train() -> None:
    (only,) = segments_of(rollout(call(0, [1, 2], []), call(1, [1, 2, 3], [4])))
    assert only.loss_mask == (0, 0, 0, 1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(SegmentationError, match="prompt is empty"):
        segments_of(rollout(call(0, [], [3])))


def test_a_missing_logprob_is_refused() -> None:
    with pytest.raises(SegmentationError, match="1 log-probs for 2 tokens"):
        segments_of(rollout(dataclasses.replace(TURNS[0], logprobs=(-0.1,))))


def test_calls_are_taken_by_order_number() -> None:
    assert segments_of(rollout(TURNS[1], TURNS[0])) == segments_of(rollout(*TURNS))


def test_a_rollout_without_calls_has_no_segments() -> None:
    assert segments_of(rollout()) == ()


def test_rows_share_the_rollouts_advantage_through_their_own_masks() -> None:
    rows = rows_of([rollout(*TURNS, call(2, [1, 2, 9, 7], [8], "compaction"))], {"r": 2.0})
    assert [row.row_id for row in rows] == ["r/s0", "r/s1"]
    assert [row.advantages_T.tolist() for row in rows] == [[0, 0, 2, 2, 0, 2], [0, 0, 0, 0, 2]]


def test_a_rollout_that_does_not_vote_has_no_rows() -> None:
    assert rows_of([rollout(*TURNS, status="failed", reward=None)], {}) == []
