"""Cells that others chose, the public planners, and the shapes of models.

1. A plan's own cells measure as the plan says, in every layout; foreign cells by hand.
2. Cells that lose a row, hold one twice, or differ in number between ranks are refused.
3. Every public planner places every row once, or refuses by name; some break the budget, which is counted.
4. Presets have the published numbers of parameters; a config.json gives the same shape.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from evenstep.errors import PlanError
from evenstep.plan import CostModel, plan_step, shared_prefixes
from evenstep.plan.foreign import measure_cells
from evenstep.plan.public import PACKED, PADDED, RefusedError
from evenstep.plan.shape import PRESETS, ModelShape

LENGTHS = [50, 40, 31, 30, 22, 20, 18, 9, 7, 5, 3, 2]


@pytest.mark.parametrize("layout", ["padded", "packed", "fixed", "tree"])
@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_own_cells_measure_as_the_plan_says(layout, sync) -> None:
    prefixes = shared_prefixes([[1] * (n // 2) + [i + 2] * (n - n // 2) for i, n in enumerate(LENGTHS)])
    given = prefixes if layout == "tree" else None
    plan = plan_step(LENGTHS, num_ranks=2, max_tokens_per_gpu=64, layout=layout, sync=sync, prefixes=given)
    measured = measure_cells(plan.request, LENGTHS, plan.cells, prefixes=given)
    assert measured.stats == plan.stats
    assert measured.num_over_budget == 0
    lockstep = measured.costs_WK.max(axis=0).sum()
    assert lockstep == pytest.approx(plan.stats.lockstep_cost)


def test_foreign_cells_by_hand() -> None:
    plan = plan_step(
        [6, 4, 3, 1], num_ranks=2, max_tokens_per_gpu=8, layout="padded", cost=CostModel(c0=10, c1=1, c2=0)
    )
    measured = measure_cells(plan.request, [6, 4, 3, 1], [[[0, 1], []], [[2, 3], []]])
    assert measured.footprints_WK.tolist() == [[12, 2], [6, 2]]
    assert measured.costs_WK.tolist() == [[22.0, 10.0], [16.0, 10.0]]
    assert (measured.num_over_budget, measured.stats.num_fillers) == (1, 2)
    assert measured.stats.step_cost == 32.0


@pytest.mark.parametrize(
    "cells, message",
    [
        ([[[0, 1]], [[2]]], "found row 3 in 0"),
        ([[[0, 1]], [[2, 3, 0]]], "found row 0 in 2"),
        ([[[0, 1], [2]], [[3]]], r"found 2 ranks with \[1, 2\] cells"),
        ([[[0, 1, 2, 3]]], "found 1 ranks"),
    ],
)
def test_cells_that_are_none(cells, message: str) -> None:
    plan = plan_step([6, 4, 3, 1], num_ranks=2, max_tokens_per_gpu=8)
    with pytest.raises(PlanError, match=message):
        measure_cells(plan.request, [6, 4, 3, 1], cells)


@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_public_planners_place_every_row_once(name: str) -> None:
    planner, layout = (PACKED[name], "packed") if name in PACKED else (PADDED[name], "padded")
    draw = random.Random(5)
    num_planned = 0
    for _ in range(60):
        num_ranks = draw.choice((1, 2, 3, 8))
        lengths = [draw.randint(1, 90) for _ in range(draw.randint(1, 40))]
        request = plan_step(lengths, num_ranks=num_ranks, max_tokens_per_gpu=100, layout=layout).request
        try:
            cells = planner(lengths, CostModel().row_costs(np.array(lengths)), num_ranks, 100)
        except RefusedError as error:
            assert "must divide by" in str(error)  # noqa: PT017
            continue
        measure_cells(request, lengths, cells)  # refuses lost and doubled rows
        num_planned += 1
    assert num_planned >= 10


def test_a_public_planner_that_breaks_the_budget_is_counted() -> None:
    lengths = [60, 60, 60]  # 180 tokens make two even parts, one of them of two rows
    cells = PACKED["verl balanced"](lengths, CostModel().row_costs(np.array(lengths)), 1, 100)
    request = plan_step(lengths, num_ranks=1, max_tokens_per_gpu=100, layout="packed").request
    assert measure_cells(request, lengths, cells).num_over_budget == 1


def test_a_row_over_the_budget_is_refused_where_it_is_not_taken() -> None:
    with pytest.raises(RefusedError, match="no row may exceed the budget of 100 tokens, found one of 120"):
        PACKED["AReaL first-fit"]([120, 3], CostModel().row_costs(np.array([120, 3])), 2, 100)


@pytest.mark.parametrize(
    "name, billions",
    [
        ("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53), ("llama-3.1-8b", 8.03), ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.21), ("smollm2-135m", 0.1345),
    ],
)  # fmt: skip
def test_presets_have_their_published_size(name: str, billions: float) -> None:
    assert PRESETS[name].num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_preset_has_a_published_size() -> None:
    assert len(PRESETS) == 11


def test_a_shape_by_hand() -> None:
    shape = ModelShape(
        hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, ffn_size=8, vocab_size=10, is_tied=True
    )  # fmt: skip
    attention, ffn = 4 * 4 * 2 + 2 * (4 * 2), 3 * 4 * 8
    assert shape.layer_parameters == attention + ffn + 8
    assert shape.num_parameters == 2 * (attention + ffn + 8) + 40 + 4
    assert shape.token_flops == 2 * (2 * (attention + ffn) + 40)
    assert shape.pair_flops == 4 * 2 * 2 * 2
    assert shape.layer_values == 6 * 4 + 2 * 3 * 2 + 3 * 8


def test_a_mixture_counts_all_experts_and_computes_with_some() -> None:
    config = {
        "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
        "moe_intermediate_size": 8, "vocab_size": 10, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    shape = ModelShape.from_hf_config(config)
    assert shape.layer_parameters == 48 + 4 * 96 + 16 + 8
    assert shape.token_flops == 2 * (2 * (48 + 2 * 96) + 40)
    silent = ModelShape.from_hf_config({k: v for k, v in config.items() if k != "num_experts"})
    with pytest.raises(PlanError, match="need the number of experts"):
        _ = silent.num_parameters
