"""Locks:

1. Experts are an immutable value of integers [tokens, layers, experts per token], equal by content; errors say where.
2. Rows take lists, arrays or the value; the number of tokens must be the row's.
3. Files: calls and rows come back equal, a file without them too, and wrong ones are refused with file, line and field.
4. A call's experts are of its last tokens; segments refuse more than there are, and calls that disagree on the shape.
5. An engine's answer is checked; a cut output loses its experts and no others.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep.errors import EngineError, FileFormatError, RowError, SegmentationError
from evenstep.experts import UNKNOWN, RoutedExperts
from evenstep.files import RowRecord, read_rollouts, read_rows, write_rollouts, write_rows
from evenstep.rollout.calls import recorded_call
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.segments import segments_of
from evenstep.types import Call, Rollout, Row, Sampling

LISTS = [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[-1, -1], [1, 0]], [[-1, -1], [-1, -1]]]
EXPERTS = RoutedExperts.of(LISTS)
CALL = Call(order=0, prompt_ids=(5, 6), output_ids=(7, 2), logprobs=(-0.5, -0.1), routed_experts=EXPERTS)


def rollout(*calls: Call) -> Rollout:
    return Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=1.0, calls=calls)


def row(**fields: Any) -> Row:
    known = {"row_id": "a", "rollout_id": "r", "group_id": "g", "token_ids": [5, 6, 7, 2], "loss_mask": [0, 0, 1, 1]}
    return Row(**(known | fields))


def test_a_value() -> None:
    assert EXPERTS.shape == (4, 2, 2)
    assert EXPERTS.experts_TLX.tolist() == LISTS
    assert EXPERTS.is_known_T.tolist() == [True, True, False, False]
    assert not EXPERTS.experts_TLX.flags.writeable
    assert RoutedExperts.of(np.array(LISTS, dtype=np.int64)) == EXPERTS
    assert hash(RoutedExperts.of(LISTS)) == hash(EXPERTS)
    assert pickle.loads(pickle.dumps(EXPERTS)) == EXPERTS
    assert EXPERTS.part(1, 3).experts_TLX.tolist() == LISTS[1:3]
    assert EXPERTS.part(0, 0).num_tokens == 0


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([[0, 1]], r"found int64 of shape \(1, 2\)"),
        ([[[0, 1]], [[0]]], "lists of unequal lengths"),
        ([[[0.0, 1.0]]], "found float64"),
        ([[[True, False]]], "found bool"),
        ([[[]]], r"of shape \(1, 1, 0\)"),
        ([[[0, 1 << 15]]], "at most 32767, found 0 to 32768"),
        ([[[0, -(1 << 40)]]], "found -1099511627776"),
        ([[[0, -2]]], "found -2"),
        ([[[0, 1]], [[0, -1]]], r"found \[0, -1\] at token 1, layer 0"),
        ([[[0, 1], [2, 2]]], r"once, found \[2, 2\] at token 0, layer 1"),
    ],
)
def test_wrong_values_are_refused(values: Any, match: str) -> None:
    with pytest.raises(RowError, match=match):
        RoutedExperts.of(values)
    with pytest.raises(RowError, match=f"row 'a': .*{match}"):
        row(token_ids=[5, 6][: len(values)], loss_mask=[0, 0][: len(values)], routed_experts=values)


def test_rows_take_lists_arrays_and_the_value() -> None:
    for given in (LISTS, np.array(LISTS), np.array(LISTS, dtype=np.int8), EXPERTS):
        assert row(routed_experts=given).routed_experts == EXPERTS
    assert row(routed_experts=np.full((4, 1, 1), 200, dtype=np.uint8)).routed_experts is not None
    assert replace(row(routed_experts=LISTS), advantage=1.0).routed_experts == EXPERTS
    assert row().routed_experts is None
    with pytest.raises(RowError, match=r"row 'a': .* one entry per token \(4\), found shape \(3, 2, 2\)"):
        row(routed_experts=LISTS[:3])


def test_files_keep_them(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.gz"
    without = replace(CALL, order=1, parent=0, prompt_ids=(5, 6, 7, 2), routed_experts=None)
    write_rollouts(path, [rollout(CALL, without)])
    assert list(read_rollouts(path)) == [rollout(CALL, without)]
    record = RowRecord(
        row_id="a",
        rollout_id="r",
        group_id="g",
        reward=1.0,
        token_ids=(5, 6, 7, 2),
        loss_mask=(0, 0, 1, 1),
        logprobs=(0.0, 0.0, -0.5, -0.1),
        routed_experts=EXPERTS,
    )
    write_rows(tmp_path / "rows.jsonl", [record, replace(record, row_id="b", routed_experts=None)])
    first, second = read_rows(tmp_path / "rows.jsonl")
    assert first == record
    assert first.to_row().routed_experts == EXPERTS
    assert second.to_row().routed_experts is None


def test_files_from_before_have_none(tmp_path: Path) -> None:
    none = rollout(replace(CALL, routed_experts=None))
    write_rollouts(tmp_path / "a.jsonl", [none])
    assert "routed_experts" not in (tmp_path / "a.jsonl").read_text()
    assert list(read_rollouts(tmp_path / "a.jsonl")) == [none]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"base64": "AAA"}, r"calls\[0\]\.routed_experts\.base64`: must be base64"),
        ({"base64": "é"}, "must be base64"),
        ({"base64": ""}, r"calls\[0\]\.routed_experts`: .* found 0 bytes"),
        ({"shape": [3, 2, 2]}, "found 32 bytes"),
        ({"shape": [4, 2]}, r"routed_experts\.shape"),
        ({"shape": [4, 4, 1], "dtype": "int8"}, r"routed_experts\.dtype"),
        ({"shape": [8, 1, 2]}, r"shape\[0\]`: must be at most the 4 tokens of prompt_ids and output_ids, found 8"),
        ({"shape": [4, 1, 4]}, r"found \[-1, -1, 1, 0\] at token 2, layer 0"),
    ],
)
def test_wrong_lines_are_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    path = tmp_path / "a.jsonl"
    write_rollouts(path, [rollout(CALL)])
    line = json.loads(path.read_text())
    line["calls"][0]["routed_experts"] |= changes
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(FileFormatError, match=f"line 1, field `.*{match}"):
        list(read_rollouts(path))


def test_a_file_of_rows_has_one_entry_for_each_token(tmp_path: Path) -> None:
    record = RowRecord(
        row_id="a", rollout_id="r", group_id="g", reward=1.0, token_ids=(5, 6), loss_mask=(0, 1), logprobs=(0.0, -0.5),
        routed_experts=EXPERTS,
    )  # fmt: skip
    with pytest.raises(FileFormatError, match=r"routed_experts\.shape\[0\]`: .* 2 token_ids, found 4"):
        write_rows(tmp_path / "rows.jsonl", [record])


def test_the_next_call_knows_the_last_token() -> None:
    again = RoutedExperts.of([[[3, 2], [3, 2]]] * 5 + [[[-1, -1], [-1, -1]]])
    more = replace(CALL, order=1, prompt_ids=(5, 6, 7, 2, 9), output_ids=(8,), logprobs=(-0.1,), routed_experts=again)
    (one,) = segments_of(rollout(CALL, more))
    # what the first call knew stays, in each layer; what it did not know is the second one's
    assert one.routed_experts is not None
    assert one.routed_experts.experts_TLX.tolist() == [
        *LISTS[:2], [[3, 2], [1, 0]], [[3, 2], [3, 2]], [[3, 2], [3, 2]], [[-1, -1], [-1, -1]],
    ]  # fmt: skip
    first, second = segments_of(rollout(CALL, replace(more, prompt_ids=(5, 6, 9, 9, 9), break_reason="compaction")))
    assert first.routed_experts == EXPERTS
    assert second.routed_experts == again
    (none,) = segments_of(rollout(replace(CALL, routed_experts=None)))
    assert none.routed_experts is None


def test_calls_that_disagree_are_refused() -> None:
    too_many = replace(CALL, routed_experts=RoutedExperts.of([*LISTS, LISTS[0]]))
    with pytest.raises(SegmentationError, match=r"call 0: .* last of its 4 tokens, .* found shape \(5, 2, 2\)"):
        segments_of(rollout(too_many))
    other = RoutedExperts.of([[[0, 1, 2]]])
    more = replace(CALL, order=1, prompt_ids=(5, 6, 7, 2), output_ids=(8,), logprobs=(-0.1,), routed_experts=other)
    with pytest.raises(SegmentationError, match=r"rollout 'r', call 0: .* \(1, 3\), found shape \(4, 2, 2\)"):
        segments_of(rollout(CALL, more))


@pytest.mark.parametrize("experts", [EXPERTS, LISTS, "none"])
def test_an_answer_of_an_engine_is_checked(experts: Any) -> None:
    class Engine:
        max_context_tokens, weight_version = 8, 0

        async def generate(self, request: Request) -> Completion:
            return Completion(
                output_ids=(1,), logprobs=(-1.0,), finish_reason="stop", weight_version=0, routed_experts=experts
            )

    with pytest.raises(EngineError, match=r"rollout r, call 3: .* its last tokens, at most 3, or None, found"):
        asyncio.run(
            recorded_call(
                Engine(),
                order=3,
                prompt_ids=(5, 6),
                sampling=Sampling(),
                rollout_id="r",
                rollout_key=(),
                vocab_size=None,
                parent=None,
                break_reason=None,
            )
        )


def test_a_record_of_the_last_tokens_alone_loses_nothing_behind_it() -> None:
    """An engine that took a prompt's beginning from a cache says nothing of it; the next call may know it."""

    async def made() -> list[Call]:
        class Engine:
            max_context_tokens, weight_version = 20, 0
            num_known = 0

            async def generate(self, request: Request) -> Completion:
                experts = [[[t % 3, 3]] for t in range(len(request.prompt_ids))] + [[[UNKNOWN] * 2]]
                return Completion(
                    output_ids=(1,),
                    logprobs=(-1.0,),
                    finish_reason="stop",
                    weight_version=0,
                    routed_experts=RoutedExperts.of(experts[-self.num_known :]),
                )

        engine, calls = Engine(), list[Call]()
        for order, num_known in enumerate((3, 2, 9)):  # of 3, 6 and 9 tokens
            engine.num_known = num_known
            before = calls[-1] if calls else None
            call = recorded_call(
                engine,
                order=order,
                prompt_ids=(5, 6) if before is None else (*before.prompt_ids, *before.output_ids, 7, 8),
                sampling=Sampling(),
                rollout_id="r",
                rollout_key=(),
                vocab_size=None,
                parent=None if before is None else before.order,
                break_reason=None,
                before=before,
            )
            calls.append(await call)
        return calls

    (segment,) = segments_of(rollout(*asyncio.run(made())))
    assert segment.routed_experts is not None
    assert segment.routed_experts.is_known_T.tolist() == [True] * 8 + [False]
