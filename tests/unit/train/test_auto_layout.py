"""Layout "auto": the cheapest layout that the model does exactly, for each window.

1. Groups with long prompts run as tries, ragged rows packed, even rows padded; loss and gradient are the padded ones.
2. A pass under another budget has the layout of the training pass.
3. What a model does not do exactly is left out with its reason, or never tried; a window of such a layout is refused.
   Models that run each other's windows choose from what all of them do.
4. Explicit layouts keep the plans they had: the planner's default cost.
5. Context parallelism is refused by name.
"""

import logging
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evenstep.errors import ConfigError
from evenstep.plan import CostModel
from evenstep.train import Trainer
from evenstep.train.scorer import share_layouts
from evenstep.types import Row

NUM_IDS = 97


def _model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": NUM_IDS}
    return Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2)).double()


def _trainer(model, **options) -> Trainer:
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **({"max_tokens_per_gpu": 300} | options))


def _rows(prompts: Sequence[int], outputs: Sequence[int]) -> list[Row]:
    """One group for each prompt length; each has rollouts of these outputs."""
    draw = np.random.default_rng(0)
    rows = []
    for g, num_prompt in enumerate(prompts):
        prompt = draw.integers(NUM_IDS, size=num_prompt)
        for i, num_output in enumerate(outputs):
            ids = np.concatenate([prompt, draw.integers(NUM_IDS, size=num_output)])
            mask = np.arange(len(ids)) >= num_prompt
            row_id = f"{g}/{i}"
            rows.append(
                Row(row_id=row_id, rollout_id=row_id, group_id=g, token_ids=ids, loss_mask=mask, advantage=i - 1.0)
            )
    return rows


GROUPS, RAGGED, EVEN = _rows([60, 70], [3, 5, 9]), _rows([1, 1], [9, 40, 120, 200]), _rows([1] * 8, [40])


@pytest.fixture(scope="module")
def auto() -> Trainer:
    return _trainer(_model(), layout="auto")


@pytest.mark.parametrize(("rows", "layout"), [(GROUPS, "tree"), (RAGGED, "packed"), (EVEN, "padded")])
def test_the_cheapest_layout_runs_and_is_exact(auto: Trainer, rows: list[Row], layout: str) -> None:
    window = auto.prepare(rows)
    assert window.layout_reason is not None
    assert window.layout_reason.startswith(f"{layout} computes ")
    auto.model.zero_grad()
    result = auto.forward_backward(window)
    assert result.plan.layout == layout
    padded = _trainer(_model(), layout="padded")
    expected = padded.forward_backward(rows)
    assert result.loss == pytest.approx(expected.loss, rel=1e-12)
    ours, theirs = (torch.cat([p.grad.ravel() for p in each.parameters]) for each in (auto, padded))
    assert float((ours - theirs).norm() / theirs.norm()) <= 1e-6  # the model's norms compute in float32
    auto._pending = None  # no step: the next case starts from the same weights


@pytest.mark.parametrize(("rows", "layout"), [(GROUPS, "tree"), (RAGGED, "packed"), (EVEN, "padded")])
def test_a_pass_with_more_room_has_the_same_layout(auto: Trainer, rows: list[Row], layout: str) -> None:
    for budget in (None, 300, 100_000):
        plan = auto.prepare(rows, max_tokens_per_gpu=budget).plan
        assert plan.layout == layout
        assert plan.max_tokens_per_gpu == (budget or 300)


def test_what_a_model_does_not_do_exactly_is_left_out(auto: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    bloom = BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=NUM_IDS))
    with caplog.at_level(logging.WARNING):
        trainer = _trainer(bloom, layout="auto")
    assert "layout 'auto' leaves packed out" in caplog.text
    assert "layout 'auto' leaves tree out" in caplog.text
    assert trainer.prepare(GROUPS).plan.layout == "padded"
    with pytest.raises(ConfigError, match="planned in layout 'tree', which this Trainer's model does not do exactly"):
        trainer.forward_backward(auto.prepare(GROUPS))


def test_models_that_share_windows_choose_from_what_all_do() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": NUM_IDS, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    bloom = _trainer(BloomForCausalLM(BloomConfig(**shape)).double(), layout="auto")
    other = _trainer(_model(), layout="auto")
    with pytest.raises(ConfigError, match="it does padded: prepare"):
        bloom.score(other.prepare(GROUPS))
    share_layouts(other, bloom)
    window = other.prepare(GROUPS)
    assert window.plan.layout == "padded"
    assert bloom.score(window).keys() == {row.row_id for row in GROUPS}


def test_explicit_layouts_have_the_default_cost(auto: Trainer) -> None:
    assert auto.prepare(GROUPS).plan.cost != CostModel()
    assert _trainer(_model(), layout="packed").prepare(GROUPS).plan.cost == CostModel()


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match="training does no context parallelism, every rank runs whole rows: Trainer"):
        _trainer(_model(), cp=2)
