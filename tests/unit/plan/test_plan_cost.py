"""The cost model.

1. Attended pairs by counting, with and without sliding windows.
2. From a shape: FLOPs of a dense model by hand; experts and windows count as they should.
3. From Hugging Face configs of several families; a missing key is named.
4. Fitting recovers known coefficients and never returns a negative one.
5. Bad coefficients are refused; a model survives the plan's JSON.
"""

import math

import numpy as np
import pytest

from evenstep.errors import PlanError
from evenstep.plan import CostModel, StepPlan, plan_step

SHAPE = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "ffn_size": 128, "vocab_size": 1000}


@pytest.mark.parametrize("width", [1, 2, 5, 9, 40])
def test_pairs_by_counting(width: int) -> None:
    full = sum(t + 1 for t in range(width))
    assert CostModel().pairs(np.array([width]))[0] == full
    sliding = sum(min(t + 1, 6) for t in range(width))
    model = CostModel(sliding_window=6, sliding_share=0.25)
    assert model.pairs(np.array([width]))[0] == 0.75 * full + 0.25 * sliding


def test_from_shape_by_hand() -> None:
    attention, ffn, head = 4 * 64 * 64, 3 * 64 * 128, 64 * 1000
    linear = 2 * (4 * (attention + ffn) + head)
    assert CostModel.from_shape(**SHAPE).c2 == pytest.approx(4 * 4 * 64 / linear)
    experts = CostModel.from_shape(**SHAPE, experts_per_token=3)
    assert experts.c2 == pytest.approx(4 * 4 * 64 / (2 * (4 * (attention + 3 * ffn) + head)))
    window = CostModel.from_shape(**SHAPE, sliding_window=8, num_sliding_layers=1)
    assert (window.sliding_window, window.sliding_share) == (8, 0.25)
    grouped = CostModel.from_shape(**SHAPE, num_kv_heads=1)
    assert grouped.c2 > CostModel.from_shape(**SHAPE).c2


def test_from_shape_refuses() -> None:
    with pytest.raises(PlanError, match="num_layers must be ≥ 1, found 0"):
        CostModel.from_shape(**{**SHAPE, "num_layers": 0})
    with pytest.raises(PlanError, match="num_sliding_layers"):
        CostModel.from_shape(**SHAPE, sliding_window=8, num_sliding_layers=5)


def test_from_hf_configs() -> None:
    llama = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 1000, "sliding_window": None,
    }  # fmt: skip
    assert CostModel.from_hf_config(llama) == CostModel.from_shape(**SHAPE, num_kv_heads=2)
    gemma = {**llama, "sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    assert CostModel.from_hf_config({"text_config": gemma}).sliding_share == 0.75
    assert CostModel.from_hf_config({**llama, "sliding_window": 16, "use_sliding_window": False}).sliding_share == 0
    assert CostModel.from_hf_config({**llama, "sliding_window": 16}).sliding_share == 1
    moe = {**llama, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    expected = CostModel.from_shape(**{**SHAPE, "ffn_size": 32}, num_kv_heads=2, experts_per_token=3)
    assert CostModel.from_hf_config(moe) == expected
    gpt2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": None, "vocab_size": 1000}
    assert CostModel.from_hf_config(gpt2) == CostModel.from_shape(**{**SHAPE, "ffn_size": 256}, gated_ffn=False)
    with pytest.raises(PlanError, match="vocab_size"):
        CostModel.from_hf_config({k: v for k, v in llama.items() if k != "vocab_size"})


def test_fit() -> None:
    draw = np.random.default_rng(0)
    points = [(f, p, 0.01 + 2e-5 * f + 3e-9 * p) for f, p in draw.uniform(1, 1e5, (40, 2))]
    model = CostModel.fit(points)
    assert (model.c0, model.c1, model.c2) == pytest.approx((0.01, 2e-5, 3e-9), rel=1e-6)
    falling = CostModel.fit([(1, 1, 5.0), (2, 4, 6.0), (3, 9, 6.5), (4, 16, 6.6)])
    assert min(falling.c0, falling.c1, falling.c2) >= 0
    with pytest.raises(PlanError, match="at least 3"):
        CostModel.fit([(1, 1, 1.0)])
    with pytest.raises(PlanError, match="finite"):
        CostModel.fit([(1, 1, 1.0), (2, 2, math.nan), (3, 3, 3.0)])


@pytest.mark.parametrize(
    "bad",
    [
        {"c0": -1.0},
        {"c1": math.inf},
        {"c2": math.nan},
        {"c1": 0.0, "c2": 0.0},
        {"sliding_share": 0.5},
        {"sliding_share": 2.0, "sliding_window": 4},
        {"sliding_window": 0},
    ],
)
def test_bad_coefficients(bad) -> None:
    with pytest.raises(PlanError, match="cost"):
        CostModel(**bad)


def test_the_model_travels_with_the_plan() -> None:
    model = CostModel.from_shape(**SHAPE, sliding_window=8, num_sliding_layers=2)
    plan = plan_step([30, 20, 10], num_ranks=2, max_tokens_per_gpu=40, cost=model)
    assert StepPlan.from_json(plan.to_json()).cost == model


def test_the_cost_decides_the_plan() -> None:
    """Without overhead a column more is cheap; with a large one K stays at its bound."""
    lengths = [100, 60, 60, 40, 40, 30, 20, 10, 10, 5]
    cheap = plan_step(lengths, num_ranks=2, max_tokens_per_gpu=200, cost=CostModel(c0=0.0))
    dear = plan_step(lengths, num_ranks=2, max_tokens_per_gpu=200, cost=CostModel(c0=1e6))
    assert dear.num_microbatches == dear.stats.num_microbatches_lower_bound
    assert cheap.num_microbatches > dear.num_microbatches
