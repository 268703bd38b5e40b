"""Images on real ranks. What is locked here:

1. Loss and gradient of rows with and without images equal the model's own forward row by row, in float64, on 1 and 2
   ranks, padded and packed, replicated and sharded: also where all images are on one rank, where a rank has fillers
   alone, and where no row has an image.
2. A rank that left its vision tower out would wait for ever: it runs a blank image instead, whose weight is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny_vision as tiny
import torch
from ranks import RanksError, once, run_ranks
from step_cases import whole

import evenstep.train
from evenstep import Row
from evenstep.train import executor as executor_module
from evenstep.train.collate import Cell, collate

# a block of the tower returns a view, which nobody changes in place
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

ROWS = {
    "mixed": tiny.mixed_rows,
    "one image": lambda: [row for row in tiny.mixed_rows() if row.row_id in ("one", "text", "short")],
    "a filler": lambda: tiny.mixed_rows()[:1],
    "text": lambda: [row for row in tiny.mixed_rows() if not row.media],
}
QUICK = [  # family, layout, sharded, rows
    ("qwen2_vl", "padded", False, "mixed"),
    ("qwen2_vl", "packed", True, "mixed"),
    ("qwen2_vl", "packed", False, "one image"),
    ("qwen2_vl", "padded", True, "one image"),
    ("qwen2_vl", "packed", True, "a filler"),
    ("qwen2_vl", "packed", True, "text"),
    ("qwen2_5_vl", "packed", True, "mixed"),
]
EVERY = [
    (family, layout, is_sharded, kind)
    for family in tiny.FAMILIES
    for layout in ("padded", "packed", "fixed")
    for is_sharded in (False, True)
    for kind in ROWS
]
Case = tuple[str, str, bool, str]
Outcome = tuple[float, dict[str, torch.Tensor], tuple[Any, ...]]


def steps_on_a_rank(cases: Sequence[Case]) -> list[Outcome]:
    return [one_step(*case) for case in cases]


def one_step(family: str, layout: str, is_sharded: bool, kind: str) -> Outcome:
    with tiny.true_float64():
        model = tiny.tiny_vision_model(family)
        if is_sharded:
            evenstep.train.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        budget = {} if layout == "fixed" else {"max_tokens_per_gpu": 48}
        trainer = evenstep.train.Trainer(model, optimizer, layout=layout, **budget)
        result = trainer.forward_backward(ROWS[kind]())
        gradient = {
            name: whole(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in model.named_parameters()
        }
        assert trainer.optim_step().stepped
    return result.loss, gradient, result.plan.cells


@once
def launched(num_ranks: int, cases: tuple[Case, ...]) -> list[list[Outcome]]:
    return run_ranks(steps_on_a_rank, num_ranks, cases, timeout_s=400.0)


@once
def reference(family: str, kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    with tiny.true_float64():
        return tiny.own_step(tiny.tiny_vision_model(family), ROWS[kind]())


def require_equal_steps(num_ranks: int, cases: tuple[Case, ...]) -> None:
    for rank, outcomes in enumerate(launched(num_ranks, cases)):
        for case, (loss, gradient, _) in zip(cases, outcomes, strict=True):
            family, _, _, kind = case
            expected_loss, expected = reference(family, kind)
            assert loss == pytest.approx(expected_loss, abs=1e-12), (case, rank)
            apart = sum(float((gradient[name] - expected[name]).square().sum()) for name in expected) ** 0.5
            size = sum(float(each.square().sum()) for each in expected.values()) ** 0.5
            assert apart <= 1e-12 * size, (case, rank)
            tower = sum(float(each.abs().sum()) for name, each in gradient.items() if "visual" in name)
            assert (tower > 0) == (kind != "text"), case


def test_gradients_are_those_of_one_row_at_a_time_on_one_rank() -> None:
    require_equal_steps(1, tuple(QUICK[:2]))


def test_gradients_are_those_of_one_row_at_a_time_on_two_ranks() -> None:
    require_equal_steps(2, tuple(QUICK))


@pytest.mark.long
def test_gradients_in_every_layout() -> None:
    require_equal_steps(2, tuple(EVERY))


def test_the_cases_have_ranks_without_an_image() -> None:
    for case, (_, _, cells) in zip(QUICK, launched(2, tuple(QUICK))[0], strict=True):
        rows = ROWS[case[3]]()
        with_images = [any(rows[i].media for cell in per_rank for i in cell) for per_rank in cells]
        if case[3] in ("one image", "a filler"):
            assert sorted(with_images) == [False, True], case
        if case[3] == "mixed":
            assert len(cells[0]) > 1, case


def without_blanks(rows: Sequence[Row], *args: Any, **settings: Any) -> Cell:
    """The wrong way: a cell runs the tower only where it has an image."""
    has_images = any(row.media for row in rows)
    return collate(rows, *args, **settings | ({} if has_images else {"vision": None}))


def step_without_blanks() -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_module, "collate", without_blanks)
        return one_step("qwen2_vl", "packed", True, "one image")


def test_a_rank_that_leaves_the_tower_out_is_waited_for() -> None:
    with pytest.raises(RanksError):
        run_ranks(step_without_blanks, 2, timeout_s=20.0, group_timeout_s=4.0)
