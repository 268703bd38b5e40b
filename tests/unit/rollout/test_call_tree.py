"""Locks:

1. a call's parent is the one it names, else the longest completed view that its prompt begins with; order numbers, not
   the places of calls in the tuple, say what is earlier
2. a linear rollout takes the previous call as the parent, whatever longer view an accident offers
3. equal views of siblings are ambiguous: the call that continues them is quarantined; naming the parent, or rejecting
   one of the two, resolves it; an empty output makes no ambiguity
4. a retry of the first prompt forks there; a prompt with all of another's prompt and not its output has drifted
5. realign keeps the closest chain up to the first id that differs; no chain, or several: no parent
6. a rejected call takes part as context alone: its retry, what goes on after it, its undeclared prompt
7. refused: order numbers used twice, parents that are no earlier call, unknown choices, a drift from a named parent
8. equal hashes of unequal views change nothing
9. ten thousand calls take seconds, whether they are linear, fork or interleave
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from evenstep.errors import SegmentationError
from evenstep.rollout import call_tree as module
from evenstep.rollout.call_tree import call_tree
from evenstep.types import Call, Rollout


def call(order: int, prompt: list[int], output: list[int], **fields: Any) -> Call:
    return Call(
        order=order, prompt_ids=tuple(prompt), output_ids=tuple(output), logprobs=(-1.0,) * len(output), **fields
    )


def rollout(*calls: Call) -> Rollout:
    return Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=1.0, calls=calls)


def tree(*calls: Call, **options: Any) -> list[tuple[int | None, str]]:
    return [(node.parent, node.origin) for node in call_tree(rollout(*calls), **options)]


FIRST = call(0, [1, 2], [3])


def test_the_longest_view_is_the_parent() -> None:
    calls = (FIRST, call(1, [1, 2, 3, 5], [6]), call(2, [1, 2, 3, 7], [8]), call(3, [1, 2, 3, 5, 6, 9], [4]))
    assert tree(*calls) == [(None, "start"), (0, "continued"), (0, "continued"), (1, "continued")]
    assert tree(*reversed(calls)) == tree(*calls)


def test_a_named_parent_is_taken() -> None:
    calls = (FIRST, call(1, [1, 2], [3], parent=None), call(4, [1, 2, 3, 5], [6], parent=0))
    assert tree(*calls)[2] == (0, "continued")


def test_a_linear_rollout_takes_the_previous_call() -> None:
    accident = (FIRST, call(1, [1, 2, 3, 5], [6]), call(2, [1, 2], [3], break_reason="compaction"))
    assert tree(*accident, call(3, [1, 2, 3, 5, 6, 7], [8]))[3] == (2, "continued")
    # one fork, and None means found
    forked = (*accident, call(3, [1, 2, 3, 5, 6, 7], [8]), call(4, [1, 2, 3, 5, 6, 9], [8]))
    assert [node[0] for node in tree(*forked)] == [None, 0, None, 1, 1]


SIBLINGS = (FIRST, call(1, [1, 2, 3, 5], [6]), call(2, [1, 2, 3, 5], [6]))


def test_equal_siblings_make_an_ambiguous_parent() -> None:
    after = call(3, [1, 2, 3, 5, 6, 7], [8])
    assert tree(*SIBLINGS, after)[3] == (None, "quarantined")
    assert tree(*SIBLINGS, dataclasses.replace(after, parent=2))[3] == (2, "continued")
    assert tree(*SIBLINGS, dataclasses.replace(after, break_reason="subagent"))[3] == (None, "subagent")
    # what follows the quarantined call continues it
    assert tree(*SIBLINGS, after, call(4, [1, 2, 3, 5, 6, 7, 8], [9]))[4] == (3, "continued")


@pytest.mark.parametrize("rejected", [1, 2])
def test_rejecting_one_of_two_equal_siblings_resolves_them(rejected: int) -> None:
    calls = [dataclasses.replace(c, is_rejected=c.order == rejected) for c in SIBLINGS]
    assert tree(*calls, call(3, [1, 2, 3, 5, 6, 7], [8]))[3] == (3 - rejected, "continued")


def test_an_empty_output_makes_no_ambiguity() -> None:
    calls = (FIRST, call(1, [1, 2], [9]), call(2, [1, 2, 3], []), call(3, [1, 2, 3], []), call(4, [1, 2, 3], [4]))
    assert [parent for parent, _ in tree(*calls)] == [None, None, 0, 2, 3]


def test_a_retry_of_the_first_prompt_forks() -> None:
    assert tree(FIRST, call(1, [1, 2], [4])) == [(None, "start"), (None, "fork")]


@pytest.mark.parametrize(
    ("prompt", "has_drifted"),
    [
        ([1, 2, 3, 5, 9], True),  # the whole prompt of call 1, and another output
        ([1, 2, 3, 5, 6, 9], True),  # half of its output
        ([1, 2, 3, 5], False),  # sampled again
        ([1, 2, 3, 9], False),  # another observation after call 0
    ],
)
def test_a_drift_is_no_fork(prompt: list[int], has_drifted: bool) -> None:
    calls = (FIRST, call(1, [1, 2, 3, 5], [6, 7]), call(2, prompt, [8]))
    if not has_drifted:
        assert tree(*calls)[2] == (0, "continued")
        return
    with pytest.raises(SegmentationError, match=r"call 2: its prompt .* does not continue the 6 tokens up to call 1"):
        tree(*calls)
    assert tree(*calls, on_undeclared="segment")[2] == (None, "undeclared")
    assert tree(*calls, on_undeclared="realign")[2] == (1, "undeclared")
    assert tree(*calls[:2], dataclasses.replace(calls[2], break_reason="template"))[2] == (None, "template")


def test_realign_keeps_what_is_equal() -> None:
    nodes = call_tree(
        rollout(FIRST, call(1, [1, 2, 3, 5], [6, 7]), call(2, [1, 2, 3, 5, 6, 9], [8])), on_undeclared="realign"
    )
    assert [node.num_kept_tokens for node in nodes] == [0, 3, 5]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 9, 9], (None, "undeclared")),  # departs inside the first prompt: nothing sampled comes before
        ([1, 2, 3, 9], (None, "quarantined")),  # in what two branches share
        ([1, 2, 3, 4, 6, 9], (1, "undeclared")),
    ],
)
def test_realign_needs_one_closest_chain(prompt: list[int], expected: tuple[int | None, str]) -> None:
    calls = (call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 6], [7]), call(2, [1, 2, 3, 4, 5], [7]))
    assert tree(*calls, call(3, prompt, [8]), on_undeclared="realign")[3] == expected


def test_two_calls_after_one_drift_are_siblings() -> None:
    calls = (FIRST, call(1, [1, 2, 9], [4]), call(2, [1, 2, 9], [5]))
    assert tree(*calls, on_undeclared="realign") == [(None, "start"), (0, "undeclared"), (0, "undeclared")]


def test_the_retry_of_a_rejected_call() -> None:
    bad = call(1, [1, 2, 3, 5], [6], is_rejected=True)
    assert tree(FIRST, bad, call(2, [1, 2, 3, 5], [7]))[2] == (0, "continued")
    # the harness names the attempt before, which the prompt does not hold
    assert tree(FIRST, bad, call(2, [1, 2, 3, 5], [7], parent=1))[2] == (0, "continued")
    # another text put in the place of a rejected output is no drift
    assert tree(FIRST, bad, call(2, [1, 2, 3, 5, 9], [7]))[2] == (0, "continued")
    assert tree(FIRST, bad, call(2, [1, 2, 3, 5, 6, 9], [7]))[2] == (1, "continued")


def test_a_rejected_first_call_leaves_its_place() -> None:
    bad = call(0, [1, 2], [3], is_rejected=True)
    assert tree(bad, call(1, [8], [4])) == [(None, "start"), (None, "start")]
    sub = call(1, [7, 7], [3], is_rejected=True, break_reason="subagent")
    assert tree(FIRST, sub, call(2, [7, 7], [4]))[2] == (None, "subagent")


def test_there_is_one_start() -> None:
    thrown_away = dataclasses.replace(FIRST, is_rejected=True)
    again, once_more = call(1, [1, 2], [4]), call(2, [1, 2], [5])
    assert tree(thrown_away, again, once_more) == [(None, "start"), (None, "start"), (None, "fork")]
    compacted = call(1, [7, 8], [4], break_reason="compaction")
    assert tree(thrown_away, compacted, once_more) == [(None, "start"), (None, "compaction"), (None, "fork")]


def test_an_undeclared_break_of_a_rejected_call_matters_only_when_something_follows() -> None:
    bad = call(1, [9, 9], [3], is_rejected=True)
    assert tree(FIRST, bad, call(2, [1, 2, 3, 5], [4]))[1] == (None, "undeclared")
    for prompt, named in (([9, 9, 3, 5], "call 1"), ([9, 9], "call 2")):
        with pytest.raises(SegmentationError, match=f"{named}: .* 3 tokens up to call 0: token 0 is 9, expected 1"):
            tree(FIRST, bad, call(2, prompt, [4]))


def test_the_closest_chain_is_named() -> None:
    sub = call(1, [7, 7], [6], break_reason="subagent")
    with pytest.raises(SegmentationError, match="3 tokens up to call 0: token 2 is 9, expected 3"):
        tree(FIRST, sub, call(2, [1, 2, 9], [4]))


def test_refusals() -> None:
    with pytest.raises(SegmentationError, match="two calls of order 0"):
        tree(FIRST, FIRST)
    for parent in (1, 2, 7):
        with pytest.raises(SegmentationError, match=f"found {parent} "):
            tree(FIRST, call(1, [1, 2, 3], [4], parent=parent), call(2, [1, 2, 3, 4], [5]))
    with pytest.raises(SegmentationError, match="error, segment, realign, found 'drop'"):
        tree(FIRST, on_undeclared="drop")
    with pytest.raises(SegmentationError, match="does not continue the 5 tokens up to call 1"):
        tree(FIRST, call(1, [1, 2, 3, 5], [6]), call(2, [1, 2, 3, 7], [8], parent=1))


def test_lists_are_as_good_as_tuples() -> None:
    listed = dataclasses.replace(FIRST, prompt_ids=[1, 2], output_ids=[3])  # type: ignore[arg-type]
    assert tree(listed, call(1, [1, 2, 3, 5], [6]), call(2, [1, 2], [4]))[1:] == [(0, "continued"), (None, "fork")]


def test_a_colliding_hash_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = (FIRST, call(1, [1, 2, 3, 5], [6]), call(2, [1, 2, 3, 7], [8]), call(3, [1, 2, 3, 5, 6, 9], [4]))
    calls += (call(4, [5, 5], [5], break_reason="subagent"), call(5, [1, 2, 3, 7, 8, 8], [4]))
    expected = tree(*calls)
    monkeypatch.setattr(module._Views, "_prefix_hashes", lambda self, ids: module.np.zeros(len(ids) + 1, dtype="u8"))
    assert tree(*calls) == expected


NUM_CALLS = 10_000


def linear() -> list[Call]:
    ids: list[int] = [1] * 8
    calls: list[Call] = []
    for order in range(NUM_CALLS):
        calls.append(call(order, [*ids[: 8 + order % 1000], order], [2, 3], break_reason="compaction"))
        ids += [order % 7]
    return calls


def forks() -> list[Call]:
    """Samples of one long prompt."""
    prompt = list(range(1000))
    return [call(order, prompt, [order, 5]) for order in range(NUM_CALLS)]


def interleaved() -> list[Call]:
    """A hundred agents in turn, each with a history of its own."""
    histories = [[agent + 10] for agent in range(100)]
    calls: list[Call] = []
    for order in range(NUM_CALLS):
        history = histories[order % 100]
        why = "subagent" if order < 100 else None
        calls.append(call(order, [*history, 1, 2, 3], [order % 11, 4], break_reason=why))
        history += [1, 2, 3, order % 11, 4]
    return calls


@pytest.mark.parametrize("make", [linear, forks, interleaved])
def test_ten_thousand_calls(make: Any) -> None:
    calls = make()
    start = time.process_time()
    nodes = call_tree(rollout(*calls))
    assert len(nodes) == NUM_CALLS
    assert time.process_time() - start < 20.0  # measured: 0.5 to 4 s; quadratic in tokens would take minutes
