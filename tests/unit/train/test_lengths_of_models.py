"""What a model does only with long rows, found with short ones.

1. a sliding window that a model puts into a mask alone, where backends do not see it, is refused in packed and tree,
   and layout "auto" leaves them out; the model keeps its window
2. windows that backends do see pass, also where no row of the check would reach them; so do layers of different heads
3. rotary angles that depend on the longest row of a micro-batch: refused where they would, exact where they do not
4. padding behind the rows stays within the positions that a model knows, whatever widths are rounded up to; a row that
   does not is refused by name, also in a window that was prepared for another model
5. layers that attend to chunks are refused also inside a model of several parts
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from evenstep.errors import PlanError, RowError
from evenstep.model_files import layout_problem, rotary_limit
from evenstep.train import Trainer
from evenstep.train.collate import collate
from evenstep.types import Row

VOCAB = 50
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FACTORS: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def rows() -> list[Row]:
    """9, 13 and 18 tokens, of which the first 4 are the same."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(VOCAB, size=4)
    return [
        Row(
            row_id=i,
            rollout_id=i,
            group_id=0,
            token_ids=np.concatenate([prompt, draw.integers(VOCAB, size=size)]),
            loss_mask=np.arange(4 + size) >= 4,
            advantage=i - 0.5,
        )
        for i, size in enumerate((5, 9, 14))
    ]


def make(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def trainer(model: Any, **options: Any) -> Trainer:
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def gradient(model: Any, **options: Any) -> torch.Tensor:
    each = trainer(model, **options)
    each.forward_backward(rows())
    return torch.cat([p.grad.ravel() if p.grad is not None else torch.zeros(p.numel()) for p in each.parameters])


def assert_exact(model: Any, **options: Any) -> None:
    expected = gradient(model, layout="fixed")
    assert float((gradient(model, **options) - expected).norm() / expected.norm()) <= 1e-5


def test_a_window_in_a_mask_alone_is_refused() -> None:
    shape: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}
    model = make(Qwen2MoeForCausalLM, Qwen2MoeConfig(**SHAPE, **EXPERTS, **shape))
    for layout in ("packed", "tree"):
        with pytest.raises(PlanError, match=r"they differ by \d"):
            trainer(model, layout=layout)
        assert model.config.sliding_window == 12
        assert [vars(layer.self_attn).get("sliding_window") for layer in model.model.layers] == [12, None]
    assert_exact(model, layout="padded")
    assert list(trainer(model, layout="auto").backends) == ["padded"]
    without = make(Qwen2MoeForCausalLM, Qwen2MoeConfig(**SHAPE, **EXPERTS))
    assert_exact(without, layout="tree")


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_windows_that_backends_see_pass(layout: str) -> None:
    model = make(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=12))
    assert_exact(model, layout=layout)
    assert model.config.sliding_window == 12
    shape: dict[str, Any] = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4}
    shape |= {"vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "sliding_window": 12}
    shape["layer_types"] = ["sliding_attention", "full_attention"]
    assert_exact(make(Gemma4ForCausalLM, Gemma4TextConfig(**SHAPE, **shape)), layout=layout)


def dynamic(limit: int) -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    return make(LlamaForCausalLM, LlamaConfig(**SHAPE, max_position_embeddings=limit, rope_parameters=rope))


def longrope(limit: int) -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **FACTORS, "original_max_position_embeddings": limit}
    shape = {"max_position_embeddings": 64, "original_max_position_embeddings": limit}
    return make(Phi3ForCausalLM, Phi3Config(**SHAPE, **shape, rope_parameters=rope))


@pytest.mark.parametrize("layout", ["padded", "packed", "tree", "auto"])
@pytest.mark.parametrize("kind", [dynamic, longrope])
def test_angles_are_a_row_s_own(kind: Any, layout: str) -> None:
    assert_exact(kind(18), layout=layout)  # the longest row ends just where they begin to depend on it
    words = r"beyond 17 positions, found 18 in micro-batch 0 of rank 0, with row \d of \d+ tokens"
    with pytest.raises(PlanError, match=words):
        trainer(kind(17), layout=layout).prepare(rows())


@pytest.mark.parametrize("layout", ["fixed", "padded", "packed"])
def test_padding_counts_as_positions(layout: str) -> None:
    for kind in (dynamic, longrope):
        with pytest.raises(PlanError, match="beyond 18 positions, found 32"):
            trainer(kind(18), layout=layout, pad_to_multiple=16).prepare(rows())


def test_rows_alone_have_the_angles_of_longrope() -> None:
    trainer(longrope(12), layout="fixed").prepare(rows())
    trainer(longrope(12), layout="packed", max_tokens_per_gpu=18).prepare(rows())
    with pytest.raises(PlanError, match=r"row 0 of 9 tokens: .*'fixed'"):
        trainer(longrope(12), layout="packed").prepare(rows())
    with pytest.raises(PlanError, match=r"'dynamic'.* row 2 of 18 tokens"):  # they outlast a micro-batch
        trainer(dynamic(12), layout="fixed").prepare(rows())


def test_limits_of_angles_are_read_wherever_they_stand() -> None:
    nested = {"text_config": {"max_position_embeddings": 9, "rope_scaling": {"type": "dynamic"}}}
    assert rotary_limit(nested) == ("dynamic", 9)
    by_layer = {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 7}}
    assert rotary_limit({"max_position_embeddings": 9, "rope_parameters": by_layer}) == ("longrope", 7)
    assert rotary_limit({"max_position_embeddings": 9, "rope_parameters": {"rope_type": "yarn"}}) is None
    assert rotary_limit({}) is None


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_padding_behind_the_rows_is_in_short_pieces(layout: str) -> None:
    shape: dict[str, Any] = {"multiple": 1, "num_shape_rows": 1, "dtype": torch.float64, "device": torch.device("cpu")}
    cell = collate(rows(), [0.0] * 3, layout=layout, width=lambda _: 400, **shape)
    assert cell.nodes is not None
    assert cell.position_ids_BT is not None
    assert cell.nodes[-1].stop == 400 == cell.input_ids_BT.shape[1]
    assert int(cell.position_ids_BT.max()) < 64
    model = make(GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    assert_exact(model, layout=layout, bucket=0.9, max_tokens_per_gpu=200)


LEARNED: dict[str, Any] = {
    "gpt2": lambda limit: make(
        GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=limit)
    ),
    "opt": lambda limit: make(
        OPTForCausalLM,
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=limit,
        ),
    ),
}


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("layout", ["fixed", "padded", "packed", "tree"])
@pytest.mark.parametrize("widths", [{"pad_to_multiple": 16}, {"bucket": 0.9}], ids=str)
def test_padding_stays_within_learned_positions(kind: str, layout: str, widths: dict[str, Any]) -> None:
    size = {"micro_batch_rows": 3} if layout == "fixed" else {"max_tokens_per_gpu": 400}
    assert_exact(LEARNED[kind](18), layout=layout, **size, **widths)


@pytest.mark.parametrize("kind", LEARNED)
def test_a_row_beyond_learned_positions_is_refused(kind: str) -> None:
    shorter = trainer(LEARNED[kind](17))
    with pytest.raises(RowError, match=r"at most the 17 positions .* found 18 tokens in row 2 \(1 rows"):
        shorter.forward_backward(rows())
    with pytest.raises(RowError, match="found 18 tokens in row 2"):
        shorter.score(trainer(LEARNED[kind](18)).prepare(rows()))
    assert shorter.forward_backward(rows()[:2]).loss


def test_layer_types_are_read_in_the_text_part_too() -> None:
    text = {"model_type": "llama4_text", "layer_types": ["chunked_attention", "full_attention"]}
    settings = {"model_type": "llama4", "text_config": text}
    assert layout_problem(settings, "packed") == "layers of type chunked_attention cannot be told where a row ends"
    assert layout_problem(settings, "padded") is None
