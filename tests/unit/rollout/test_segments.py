"""Locks:

1. a prompt that extends everything so far (prompt and output) continues the segment; the new prompt tokens are context
2. a declared break starts a segment whose whole prompt is context, for each reason
3. an undeclared break is an error that names rollout, call, token and both ids
4. a declared reason on a prompt that does extend the history does not break it
5. each sampled token is trained exactly once; log-probs stand at their tokens
6. an empty output adds no trained token; an empty prompt or a missing log-prob is an error
7. calls are taken in their order number, not in file order
8. rows: ids, one advantage on every row of a rollout, none for a rollout that does not vote
9. forks and sub-agents: a row for each branch; the first one trains what they share, the others hold it with mask 0
10. rejected outputs, declared ones only, are not trained; one that a later prompt holds is context there
11. undeclared breaks as ``on_undeclared`` chooses; realigned tokens are those that no row holds, and are counted
12. the report: why segments began, what was sampled, trained, shared, realigned, rejected, quarantined; it adds up
13. a call that continues several equal chains stands alone
14. files keep what segments need
15. docs/rollouts.md shows what happens
"""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path

import pytest

from evenstep.errors import FileFormatError, SegmentationError
from evenstep.files import read_rollouts, write_rollouts
from evenstep.rollout.segments import SegmentationReport, rows_of, segmentation_of, segments_of
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


# ------------------------------------------------------------------------------------------------ trees of calls


def shown(*calls: Call, **options: object) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    segments = segments_of(rollout(*calls), **options)  # type: ignore[arg-type]
    return [(s.token_ids, s.loss_mask, s.call_orders) for s in segments]


FORK = (*TURNS, call(2, [1, 2, 3, 4, 7], [8, 9]))


def test_the_first_branch_trains_what_a_fork_shares() -> None:
    assert shown(*FORK) == [
        ((1, 2, 3, 4, 5, 6), (0, 0, 1, 1, 0, 1), (0, 1)),
        ((1, 2, 3, 4, 7, 8, 9), (0, 0, 0, 0, 0, 1, 1), (2,)),
    ]
    assert shown(*FORK[::-1]) == shown(*FORK)
    second = segments_of(rollout(*FORK))[1]
    assert second.logprobs == (0.0, 0.0, 0.0, 0.0, 0.0, -0.03, -0.06)
    assert second.break_reason is None
    report = segmentation_of(rollout(*FORK)).report
    assert report.num_segments_by_origin == {"start": 1, "fork": 1}
    assert (report.num_sampled_tokens, report.num_trained_tokens, report.num_shared_tokens) == (5, 5, 2)


def test_a_subagent_between_two_turns_leaves_the_row_whole() -> None:
    calls = (TURNS[0], call(1, [50, 51], [52], "subagent"), call(2, [1, 2, 3, 4, 52], [6]))
    assert shown(*calls) == [
        ((1, 2, 3, 4, 52, 6), (0, 0, 1, 1, 0, 1), (0, 2)),
        ((50, 51, 52), (0, 0, 1), (1,)),
    ]
    assert [s.break_reason for s in segments_of(rollout(*calls))] == [None, "subagent"]


def test_only_declared_rejections_are_taken_out() -> None:
    retried = (TURNS[0], call(1, [1, 2, 3, 4, 5], [7]), call(2, [1, 2, 3, 4, 5], [6]), call(3, [1, 2, 3, 4, 5, 6], [8]))
    # one of two is continued, but nobody says that the other was thrown away
    assert [mask for _, mask, _ in shown(*retried)] == [(0, 0, 1, 1, 0, 1), (0, 0, 0, 0, 0, 1, 1)]
    declared = [dataclasses.replace(c, is_rejected=c.order == 1) for c in retried]
    assert shown(*declared) == [((1, 2, 3, 4, 5, 6, 8), (0, 0, 1, 1, 0, 1, 1), (0, 2, 3))]
    report = segmentation_of(rollout(*declared)).report
    assert (report.num_rejected_calls, report.num_rejected_tokens, report.num_sampled_tokens) == (1, 1, 4)
    assert rollout(*declared).num_sampled_tokens == 4


def test_a_rejected_output_that_a_prompt_holds_is_context() -> None:
    calls = [dataclasses.replace(TURNS[0], is_rejected=True), TURNS[1]]
    assert shown(*calls) == [((1, 2, 3, 4, 5, 6), (0, 0, 0, 0, 0, 1), (1,))]
    assert shown(dataclasses.replace(TURNS[0], is_rejected=True)) == []


DRIFT = (*TURNS, call(2, [1, 2, 3, 9, 5, 6, 7], [8]))  # the history was tokenised again: 4 became 9


@pytest.mark.parametrize("drift", [DRIFT, tuple(dataclasses.replace(c, parent=(None, 0, 1)[c.order]) for c in DRIFT)])
def test_an_undeclared_break_as_chosen(drift: tuple[Call, ...]) -> None:
    with pytest.raises(SegmentationError, match="token 3 is 9, expected 4"):
        segments_of(rollout(*drift))
    assert shown(*drift, on_undeclared="segment") == [
        ((1, 2, 3, 4, 5, 6), (0, 0, 1, 1, 0, 1), (0, 1)),
        ((1, 2, 3, 9, 5, 6, 7, 8), (0, 0, 0, 0, 0, 0, 0, 1), (2,)),
    ]
    assert shown(*drift, on_undeclared="realign") == [((1, 2, 3, 9, 5, 6, 7, 8), (0, 0, 1, 0, 0, 0, 0, 1), (0, 1, 2))]
    reports = [segmentation_of(rollout(*drift), on_undeclared=mode).report for mode in ("segment", "realign")]  # type: ignore[arg-type]
    assert [r.num_undeclared_calls for r in reports] == [1, 1]
    assert [(r.num_sampled_tokens, r.num_trained_tokens, r.num_realigned_tokens) for r in reports] == [
        (4, 4, 0),
        (4, 2, 2),
    ]
    assert reports[0].num_segments_by_origin == {"start": 1, "undeclared": 1}


def test_a_drift_in_the_only_output_is_realigned() -> None:
    assert shown(TURNS[0], call(1, [1, 2, 34, 5], [6]), on_undeclared="realign") == [
        ((1, 2, 34, 5, 6), (0, 0, 0, 0, 1), (0, 1))
    ]


def test_another_branch_keeps_what_a_realigned_one_lost() -> None:
    calls = (*TURNS, call(2, [1, 2, 3, 4, 5, 6], [7]), call(3, [1, 2, 3, 4, 5, 8], [9], None))
    named = (*calls[:3], dataclasses.replace(calls[3], parent=1))
    found = segmentation_of(rollout(*named), on_undeclared="realign")
    assert [s.loss_mask for s in found.segments] == [(0, 0, 1, 1, 0, 1, 1), (0, 0, 0, 0, 0, 0, 1)]
    assert found.report.num_realigned_tokens == 0
    # the drifted call comes first: it trains what it kept, the other the rest
    first = (*TURNS, dataclasses.replace(named[3], order=2), dataclasses.replace(calls[2], order=3, parent=1))
    found = segmentation_of(rollout(*first), on_undeclared="realign")
    assert [s.loss_mask for s in found.segments] == [(0, 0, 1, 1, 0, 0, 1), (0, 0, 0, 0, 0, 1, 1)]
    assert found.report.num_realigned_tokens == 0


def test_an_ambiguous_call_stands_alone_and_is_counted() -> None:
    same = (TURNS[0], TURNS[1], dataclasses.replace(TURNS[1], order=2), call(3, [1, 2, 3, 4, 5, 6, 7], [8]))
    found = segmentation_of(rollout(*same))
    assert [s.loss_mask for s in found.segments] == [(0, 0, 1, 1, 0, 1), (0, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 0, 0, 1)]
    assert found.report.num_quarantined_calls == 1
    assert found.report.num_segments_by_origin == {"start": 1, "fork": 1, "quarantined": 1}
    assert found.report.num_trained_tokens == found.report.num_sampled_tokens == 5


def test_a_segment_that_sampled_nothing_is_there() -> None:
    assert shown(TURNS[0], call(1, [9], [], "compaction"))[1] == ((9,), (0,), (1,))


def test_reports_add_up() -> None:
    one, two = segmentation_of(rollout(*FORK)).report, segmentation_of(rollout(*TURNS)).report
    both = one + two
    assert both.num_segments_by_origin == {"start": 2, "fork": 1}
    for name in SegmentationReport.__dataclass_fields__:
        if name != "num_segments_by_origin":
            assert getattr(both, name) == getattr(one, name) + getattr(two, name)


def test_rows_of_trees() -> None:
    rows = rows_of([rollout(*FORK)], {"r": 2.0})
    assert [row.row_id for row in rows] == ["r/s0", "r/s1"]
    assert [row.advantages_T.tolist() for row in rows] == [[0, 0, 2, 2, 0, 2], [0, 0, 0, 0, 0, 2, 2]]
    assert [row.num_trained_tokens for row in rows_of([rollout(*DRIFT)], on_undeclared="realign")] == [2]
    with pytest.raises(SegmentationError):
        rows_of([rollout(*DRIFT)])


def test_the_file_keeps_what_segments_need(tmp_path: Path) -> None:
    calls = tuple(dataclasses.replace(c, is_rejected=c.order == 1) for c in FORK)
    write_rollouts(tmp_path / "a.jsonl", [rollout(*calls[::-1])])
    (read,) = read_rollouts(tmp_path / "a.jsonl")
    assert segments_of(read) == segments_of(rollout(*calls))
    text = (tmp_path / "a.jsonl").read_text().replace('"is_rejected":true', '"is_rejected":1')
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(FileFormatError, match=r"is_rejected`: must be true or false, found 1"):
        list(read_rollouts(tmp_path / "a.jsonl"))


def test_the_page_about_rollouts_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    # long errors are written on two lines
    test = doctest.DocTestParser().get_doctest(code.replace("\\\n", ""), {}, "rollouts.md", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    results = runner.run(test)
    assert results.failed == 0
    assert results.attempted > 20
