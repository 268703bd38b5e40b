"""Locks:

1. a model whose attention cannot be told where a row ends, or is not, is refused in layouts packed and tree and
   accepted in padded, which is then what ``auto`` has
2. a model that changes its logits in an unknown way is refused in every layout
3. what is supported is accepted in every layout, in float64, float32 and bfloat16 compute, with frozen parameters and
   adapters, and the model is left as it was, gradients included
4. wrong attention is refused with the parameter's name and both numbers: looking ahead, into the neighbour, at wrong
   positions, with a window off by one, without sinks; right outputs whose gradient is not theirs: sinks or a value
   bias without gradient, a shared beginning that learns from one of its rows only
5. wrong options, an optimizer of another model and ids outside the vocabulary are refused by name; ids that are
   embedded and not in the output head are context, and refused where they are trained
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    NemotronConfig,
    NemotronForCausalLM,
)

import evenstep
from evenstep.errors import ConfigError, PlanError, RowError
from evenstep.train import Trainer, verify
from evenstep.train.attention import NODES_KWARG, by_flash, by_flex, by_node
from evenstep.train.collate import Cell, collate
from evenstep.train.lora import add_lora
from evenstep.train.trie import Node
from evenstep.train.verify import verify_layout
from tiny_models import FAMILIES, VOCAB, tiny_model

LAYOUTS = ("fixed", "padded", "packed", "tree")
GRADIENT = r"the gradient of {name}, of norm \d[\d.e-]* alone, differs by \d"


def bloom() -> Any:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def test_attention_without_rows_is_refused_when_packed() -> None:
    verify_layout(bloom(), "padded", trained=dict(bloom().named_parameters()))
    for layout in ("packed", "tree"):
        words = rf"'{layout}' must give each row .* BloomForCausalLM they differ by .*'padded'"
        with pytest.raises(PlanError, match=words):
            verify_layout(bloom(), layout)


@pytest.mark.parametrize("backend", [by_node, by_flex, by_flash])
def test_a_model_that_keeps_arguments_from_its_attention_is_refused_when_packed(backend: Any) -> None:
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = NemotronForCausalLM(NemotronConfig(**shape, num_attention_heads=4, num_key_value_heads=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = "'packed' and 'tree' must tell .* hands NemotronAttention none of .*'padded'"
    for layout in ("packed", "tree"):
        with pytest.raises(PlanError, match=words):
            Trainer(model, optimizer, layout=layout)
    assert tuple(Trainer(model, optimizer, layout="auto", max_tokens_per_gpu=64).backends) == ("padded",)
    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(PlanError, match=words):
        backend(model.model.layers[0].self_attn, query, query, query, None)


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_known_models_pass_and_stay_as_they_were(layout: str, family: str, dtype: torch.dtype) -> None:
    shape = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(**shape)).to(dtype) if family == "gpt2" else tiny_model(family, dtype=dtype)
    model.train()
    trained = dict(list(model.named_parameters())[:5])
    before = {name: torch.ones_like(parameter) for name, parameter in trained.items()}
    for name, parameter in trained.items():
        parameter.grad = before[name]
    attention, random_state = model.config._attn_implementation, torch.get_rng_state()
    verify_layout(model, layout, trained=dict(model.named_parameters()))
    assert all(parameter.grad is before.get(name) for name, parameter in model.named_parameters())
    assert all(bool((gradient == 1).all()) for gradient in before.values())
    assert model.training
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_frozen_parameters_and_adapters_pass(layout: str) -> None:
    """Anything with a Trainer, which verifies: no gradient stays behind."""
    adapted = add_lora(tiny_model(dtype=torch.float32), rank=2, alpha=4.0, seed=0)
    frozen = tiny_model(dtype=torch.float32)
    frozen.get_input_embeddings().requires_grad_(False)
    for model, compute_dtype in ((adapted, None), (frozen, None), (tiny_model(dtype=torch.float32), "bfloat16")):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        Trainer(model, torch.optim.SGD(trained), layout=layout, compute_dtype=compute_dtype)
        assert all(parameter.grad is None for parameter in model.parameters())


def _one_document(attend: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
    size = kwargs[NODES_KWARG][-1].stop
    return attend(*args, **kwargs | {NODES_KWARG: (Node(0, size, size, 0),)})


def _look_ahead(attend: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
    """The last token of each node stands in front of it, where all of them see it."""
    module, *tensors, mask = args
    order = [t for node in kwargs[NODES_KWARG] for t in (node.stop - 1, *range(node.start, node.stop - 1))]
    out, _ = attend(module, *(tensor[:, :, order] for tensor in tensors), mask, **kwargs)
    return out[:, torch.argsort(torch.tensor(order))], None


def _wide_window(attend: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
    window = kwargs.get("sliding_window")
    return attend(*args, **kwargs | {"sliding_window": None if window is None else window + 1})


def _no_sinks(attend: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
    return attend(*args, **kwargs | {"s_aux": None})


def _fixed_sinks(attend: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
    return attend(*args, **kwargs | {"s_aux": kwargs["s_aux"].detach()})


def _one_row_learns(attend: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
    """Right outputs; but keys and values of a shared beginning get a gradient from the first row through it alone."""
    module, query, key, value, mask = args
    nodes: tuple[Node, ...] = kwargs[NODES_KWARG]
    fixed, _ = attend(module, query, key.detach(), value.detach(), mask, **kwargs)
    free, _ = attend(module, query, key, value, mask, **kwargs)
    # a node right behind the one that it continues
    is_first = [
        node.depth == 0 or nodes[i - 1].depth + nodes[i - 1].stop - nodes[i - 1].start == node.depth
        for i, node in enumerate(nodes)
    ]
    parts = [torch.full((node.stop - node.start,), keep) for node, keep in zip(nodes, is_first, strict=True)]
    keeps = torch.cat(parts)
    return torch.where(keeps[None, :, None, None], free, fixed), None


WRONG: dict[str, tuple[str, str, Any, str]] = {
    "look ahead": ("packed", "qwen3", _look_ahead, r"they differ by \d"),
    "look ahead on a trie": ("tree", "llama", _look_ahead, r"they differ by \d"),
    "neighbours": ("packed", "llama", _one_document, r"they differ by \d"),
    "neighbours on a trie": ("tree", "gemma2", _one_document, r"they differ by \d"),
    "window": ("tree", "gemma3", _wide_window, r"they differ by \d"),
    "no sinks": ("packed", "gpt_oss", _no_sinks, r"they differ by \d"),
    "fixed sinks": ("tree", "gpt_oss", _fixed_sinks, GRADIENT.format(name=r"model\.layers\.\d\.self_attn\.sinks")),
    "one row learns": ("tree", "qwen3", _one_row_learns, GRADIENT.format(name=r"[\w.]+")),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_attention_is_refused(what: str) -> None:
    layout, family, wrong, words = WRONG[what]
    model = tiny_model(family, dtype=torch.float32)
    trained = dict(model.named_parameters())
    verify_layout(model, layout, trained=trained)
    AttentionInterface.register("evenstep_nodes", lambda *args, **kwargs: wrong(by_node, kwargs, args))
    try:
        with pytest.raises(PlanError, match=words):
            verify_layout(model, layout, trained=trained)
        if "gradient" in words:
            verify_layout(model, layout)  # the outputs are right
    finally:
        AttentionInterface.register("evenstep_nodes", by_node)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_wrong_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(dtype=torch.float32)

    def counted_through(*args: Any, **kwargs: Any) -> Cell:
        cell = collate(*args, **kwargs)
        if cell.position_ids_BT is None:
            return cell
        return dataclasses.replace(cell, position_ids_BT=torch.arange(cell.input_ids_BT.numel())[None])

    monkeypatch.setattr(verify, "collate", counted_through)
    with pytest.raises(PlanError, match=r"they differ by \d"):
        verify_layout(model, "tree")


def test_a_gradient_that_is_not_that_of_the_output_is_refused() -> None:
    """A value bias that stops learning when rows share a micro-batch."""
    model = tiny_model(dtype=torch.float32)
    projection = model.model.layers[1].self_attn.v_proj
    forward = projection.forward
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))

    def without_bias_gradient(hidden: torch.Tensor) -> torch.Tensor:
        return forward(hidden) if hidden.shape[1] < 20 else forward(hidden) - projection.bias + projection.bias.detach()

    verify_layout(model, "packed", trained=dict(model.named_parameters()))
    projection.forward = without_bias_gradient
    words = GRADIENT.format(name=r"model\.layers\.1\.self_attn\.v_proj\.bias")
    with pytest.raises(PlanError, match=words):
        Trainer(model, torch.optim.SGD(model.parameters()), layout="packed")
    verify_layout(model, "packed")


def test_wrong_options_and_optimizers_are_refused() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="no option 'normalizer'; it has: layout"):
        Trainer(model, optimizer, normalizer="token")
    with pytest.raises(ConfigError, match="layout must be one of fixed, padded, packed, tree, auto, found 'banana'"):
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_that_a_model_embeds_and_never_samples_are_context_alone(layout: str) -> None:
    model = tiny_model()
    model.set_input_embeddings(torch.nn.Embedding(VOCAB + 8, model.config.hidden_size, dtype=torch.float64))
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), layout=layout)  # its own rows have such ids nowhere
    ids = [1, VOCAB + 7, 2]
    row = evenstep.Row(row_id="r", rollout_id="r", group_id="g", token_ids=ids, loss_mask=[0, 0, 1], advantage=1.0)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, 1], dim=-1)
    assert float(trainer.forward_backward([row]).logprobs["r"][2]) == pytest.approx(float(logprobs[2]), abs=1e-6)
    trainer.optim_step()
    with pytest.raises(RowError, match=rf"row 'r': a trained token must be one of the {VOCAB} .* id {VOCAB + 7}"):
        trainer.forward_backward([dataclasses.replace(row, loss_mask=[0, 1, 1])])
