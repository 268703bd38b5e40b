"""Locks: a row, a call and a rollout are what they were made of, whatever the caller does with the lists and arrays
later, and those stay the caller's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Call, Rollout, Row
from evenstep.errors import RowError
from evenstep.files import read_rollouts, write_rollouts
from evenstep.rollout.segments import segments_of
from evenstep.types import PER_TOKEN_FIELDS


def values_of(row: Row, name: str) -> list[Any]:
    return np.asarray(getattr(row, name)).tolist()


@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "advantage", *PER_TOKEN_FIELDS])
def test_a_buffer_that_is_filled_again_changes_no_row(name: str) -> None:
    dtype = {"token_ids": np.int64, "loss_mask": np.bool_}.get(name, np.float64)
    buffer = np.array([0, 0, 1, 1, 0, 0], dtype=dtype)
    given: dict[str, Any] = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]} | {name: buffer[:4]}
    row = Row(row_id="a", rollout_id="r", group_id="g", **given)
    before = values_of(row, name)
    buffer[:] = np.array([1, 1, 0, 0, 1, 1], dtype=dtype)  # the next row's
    assert values_of(row, name) == before == [0, 0, 1, 1]
    assert buffer[:4].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        getattr(row, name)[0] = 1


@pytest.mark.parametrize("name", ["advantage", *PER_TOKEN_FIELDS])
def test_the_callers_array_stays_writable(name: str) -> None:
    given = np.array([0.0, 0.0, 0.5, 0.25])
    Row(row_id="a", rollout_id="r", group_id="g", token_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1, 1], **{name: given})
    given[2] = 1.0


def test_tensors_are_lists_but_for_those_with_a_gradient() -> None:
    tensor: Any = torch.tensor([0.0, -0.5])
    fields: dict[str, Any] = {"row_id": "r", "rollout_id": "o", "group_id": "g", "token_ids": [5, 6]}
    assert values_of(Row(**fields, loss_mask=[0, 1], old_logprobs=tensor), "old_logprobs") == [0.0, -0.5]
    with pytest.raises(RowError, match=r"row 'r': old_logprobs must hold one number per token .*detach"):
        Row(**fields, loss_mask=[0, 1], old_logprobs=tensor.requires_grad_())


def test_minus_one_of_an_unsigned_type_is_no_token() -> None:
    ids = np.array([5, 6, -1], dtype=np.int64).astype(np.uint64)
    with pytest.raises(RowError, match="token_ids must be below 9223372036854775808, found 18446744073709551615"):
        Row(row_id="a", rollout_id="r", group_id="g", token_ids=ids, loss_mask=[0, 0, 1])


def test_a_history_that_goes_on_changes_no_call() -> None:
    history, calls = [1, 2], list[Call]()
    rollout = Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=1.0, calls=calls)  # type: ignore[arg-type]
    for order, (output, tool) in enumerate([([3, 4], [5]), ([6], [7]), ([8], [])]):
        logprobs = [-0.5] * len(output)
        calls.append(Call(order=order, prompt_ids=history, output_ids=output, logprobs=logprobs))  # type: ignore[arg-type]
        history += output  # in place, as an agent does
        history += tool
        output.clear()
        logprobs.clear()
    assert rollout.calls == ()
    rollout = Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=1.0, calls=calls)  # type: ignore[arg-type]
    (segment,) = segments_of(rollout)
    assert segment.token_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert segment.loss_mask == (0, 0, 1, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("kind", [list, np.array, iter, torch.tensor])
def test_a_call_of_other_sequences_is_the_same_call(tmp_path: Path, kind: Any) -> None:
    plain = Call(order=0, prompt_ids=(1, 2), output_ids=(3, 4), logprobs=(-0.5, -0.25))
    made = Call(order=0, prompt_ids=kind([1, 2]), output_ids=kind([3, 4]), logprobs=kind([-0.5, -0.25]))
    assert made == plain
    rollout = Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=1.0, calls=(made,))
    write_rollouts(tmp_path / "a.jsonl", [rollout])
    assert list(read_rollouts(tmp_path / "a.jsonl")) == [rollout]
