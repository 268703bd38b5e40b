"""Locks:

1. a model whose attention cannot be told where a row ends is refused in layout packed and accepted in padded
2. a model that changes its logits in an unknown way is refused in every layout
3. what is supported is accepted in every layout, and the model is left as it was
4. wrong options, an optimizer of another model and ids outside the vocabulary are refused by name
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

import evenstep
from evenstep.errors import ConfigError, PlanError, RowError
from evenstep.train import Trainer
from evenstep.train.verify import verify_layout
from tiny_models import VOCAB, tiny_model

LAYOUTS = ("fixed", "padded", "packed")


def bloom() -> Any:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def test_attention_without_rows_is_refused_when_packed() -> None:
    verify_layout(bloom(), "padded")
    with pytest.raises(PlanError, match=r"'packed' must give each row .* BloomForCausalLM they differ by .*'padded'"):
        verify_layout(bloom(), "packed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unknown_logits_are_refused(layout: str) -> None:
    model = tiny_model(dtype=torch.float32)
    forward = type(model).forward

    class Scaled(type(model)):  # a head followed by something evenstep has never heard of
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = forward(self, *args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    scaled = Scaled(model.config)
    scaled.load_state_dict(model.state_dict())
    with pytest.raises(PlanError, match="they differ by"):
        verify_layout(scaled, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_known_models_pass_and_stay_as_they_were(layout: str, family: str) -> None:
    shape = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model: Any = GPT2LMHeadModel(GPT2Config(**shape)) if family == "gpt2" else tiny_model(family)
    model.train()
    attention, random_state = model.config._attn_implementation, torch.get_rng_state()
    verify_layout(model, layout)
    assert model.training
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), random_state)


def test_wrong_options_and_optimizers_are_refused() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="no option 'normalizer'; it has: layout"):
        Trainer(model, optimizer, normalizer="token")
    with pytest.raises(ConfigError, match="layout must be one of fixed, padded, packed, found 'banana'"):
        Trainer(model, optimizer, layout="banana")
    with pytest.raises(ConfigError, match=r"found (\d+) of \1 that are not among its \d+"):
        Trainer(model, torch.optim.SGD(tiny_model().parameters()))
    with pytest.raises(ConfigError, match=r"found 1 of \d+ .*\(lm_head.weight\)"):
        Trainer(model, torch.optim.SGD(p for n, p in model.named_parameters() if n != "lm_head.weight"))


def test_ids_outside_the_vocabulary_are_refused() -> None:
    model = tiny_model()
    trainer = Trainer(model, torch.optim.SGD(model.parameters()))
    row = evenstep.Row(row_id="r", rollout_id="r", group_id="g", token_ids=[1, VOCAB], loss_mask=[0, 1])
    with pytest.raises(RowError, match=f"row 'r': token id {VOCAB} is outside the model's vocabulary of {VOCAB}"):
        trainer.forward_backward([row])
