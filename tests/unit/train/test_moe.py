"""The load-balancing loss of experts is a sum over the window's tokens; models with experts take the exact step.

1. Known fault P33: real tokens on experts 0, 1, 0, 1 and four padding slots on expert 0 give 1.0, not 1.25.
2. On one row of one layer, value and gradient are those of transformers' own loss, for every model type that is
   supported, with its default way of multiplying with experts; routers say which experts were taken.
3. In float64 the step with and without it equals the reference of one row at a time to 1e-12: Qwen3-MoE and Mixtral;
   layouts, budgets, pad multiples, fillers and padding full of other tokens, activation checkpointing, GSPO beside it.
4. Padding counted, fractions by micro-batch, and a division by the number of micro-batches give another number.
5. It does not survive splitting a rollout into rows: context is counted again.
6. There is one pass without gradient, also where GSPO needs one too; none at coefficient 0, and scoring needs none.
7. A window without advantages steps when it has a coefficient.
8. Ways of multiplying with experts agree in float32.
9. Refused: models without experts or with other routers (by the Trainer, and before a model is loaded), a critic's
   loss, a negative coefficient, a loss function with a metric of the same name.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import evenstep.train
import oracle
from evenstep.config import load_config
from evenstep.errors import ConfigError
from evenstep.model_files import SOFTMAX_ROUTER_MODEL_TYPES
from evenstep.preflight import check_model
from evenstep.train.moe import Routing, balance_loss, balance_weights, count_tokens, find_routers, recorded_routing
from evenstep.types import Row
from moe_models import small_model
from moe_oracle import OracleBalance, oracle_balance
from step_cases import CaseOutcome, StepCase, run_case
from tiny_models import EXPERTS_PER_TOKEN, VOCAB, tiny_model, true_float64
from tiny_rows import make_rows, split_at_turns, with_old_logprobs

FAMILIES = ("mixtral", "qwen3_moe")
COEF = 0.7
TOLERANCE = 1e-12
PADDED = {"layout": "padded", "max_tokens_per_gpu": 40}
TRAINERS: dict[str, dict[str, Any]] = {
    "padded-40": PADDED,
    "padded-20": {"layout": "padded", "max_tokens_per_gpu": 20},
    "padded-multiple": {"layout": "padded", "max_tokens_per_gpu": 64, "pad_to_multiple": 8},
    "packed": {"layout": "packed", "max_tokens_per_gpu": 40},
    "tree": {"layout": "tree", "max_tokens_per_gpu": 40},
    "packed-multiple": {"layout": "packed", "max_tokens_per_gpu": 50, "pad_to_multiple": 4},
    "fixed": {"layout": "fixed", "micro_batch_rows": 2},
    "fixed-fillers": {"layout": "fixed", "micro_batch_rows": 5},
    "checkpointing": {"layout": "packed", "max_tokens_per_gpu": 40, "activation_checkpointing": True},
}


@functools.cache
def window() -> list[Row]:
    return make_rows(((1, 3), (2, 1)))


@functools.cache
def reference(family: str) -> OracleBalance:
    with true_float64():
        return oracle_balance(tiny_model(family), window(), EXPERTS_PER_TOKEN)


def case_of(family: str, rows: list[Row] | None = None, **trainer: Any) -> StepCase:
    return StepCase(
        name=family, rows=window() if rows is None else rows, model={"family": family}, trainer=PADDED | trainer
    )


@functools.cache
def plain_reference(family: str) -> oracle.OracleStep:
    return case_of(family).oracle()


def assert_exact(case: StepCase, found: CaseOutcome, expected: oracle.OracleStep, balance: OracleBalance) -> None:
    coef = case.trainer.get("moe_balance_coef", 0.0)
    gradient = {name: part + coef * balance.gradient[name] for name, part in expected.gradient.items()}
    loss = expected.loss + coef * balance.loss
    assert abs(found.loss - loss) <= TOLERANCE * max(1.0, abs(loss))
    assert oracle.relative_error(found.gradient, gradient) <= TOLERANCE
    assert oracle.relative_error(found.logprobs, expected.logprobs) <= TOLERANCE
    if coef:
        assert abs(found.metrics["moe_balance"] - balance.loss) <= TOLERANCE * balance.loss
    else:
        assert "moe_balance" not in found.metrics


def hard_routing(experts: list[int], num_experts: int = 2) -> Routing:
    """Top-1 routers that are sure of each token's expert."""
    experts_TX = torch.tensor(experts)[:, None]
    logits_TE = torch.where(experts_TX == torch.arange(num_experts), 0.0, -1e4).double()
    return Routing(logits_TE=logits_TE, experts_TX=experts_TX)


def test_p33() -> None:
    slots = hard_routing([0, 1, 0, 1, 0, 0, 0, 0])  # four tokens, four padding slots
    real = slots.at(torch.arange(4))
    assert count_tokens([real]).tolist() == [[2, 2]]
    weights_LE = balance_weights(count_tokens([real]), 4)
    assert float(balance_loss([real], weights_LE)) == 1.0
    # the same in two micro-batches, of which each alone is not balanced
    parts = [slots.at(torch.tensor([0, 2])), slots.at(torch.tensor([1, 3]))]
    assert sum(float(balance_loss([part], weights_LE)) for part in parts) == 1.0
    assert float(balance_loss([slots], balance_weights(count_tokens([slots]), 8))) == 1.25  # padding counted


def test_two_layers_two_experts_by_hand() -> None:
    # softmax of (log 3, 0) is (3/4, 1/4); of (0, 0, 0) thirds
    logits = torch.tensor([[np.log(3.0), 0.0, -1e4], [0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    experts = torch.tensor([[0, 1], [2, 0]])
    one = Routing(logits_TE=logits, experts_TX=experts)
    weights_LE = balance_weights(count_tokens([one, one]), 2)
    # f = (1, 1/2, 1/2), E / T = 3/2; p sums to (3/4 + 1/3, 1/4 + 1/3, 1/3)
    expected = 2 * 1.5 * ((3 / 4 + 1 / 3) + 0.5 * (1 / 4 + 1 / 3) + 0.5 / 3)
    loss = balance_loss([one, one], weights_LE)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-14)
    loss.backward()
    p, f = np.array([3 / 4, 1 / 4, 0.0]), np.array([1.0, 0.5, 0.5])
    by_hand = 2 * 1.5 * p * (f - (p * f).sum())  # f is a constant
    assert logits.grad is not None
    assert logits.grad[0].numpy() == pytest.approx(by_hand, rel=1e-14)


@pytest.mark.parametrize("model_type", sorted(SOFTMAX_ROUTER_MODEL_TYPES))
def test_supported_types_give_transformers_own_loss(model_type: str) -> None:
    model = small_model(model_type)
    random = np.random.default_rng(0)
    row = Row(
        row_id=0,
        rollout_id=0,
        group_id=0,
        token_ids=random.integers(0, VOCAB, 13),
        loss_mask=[0] * 8 + [1] * 5,
        advantage=0.0,
    )
    ids = torch.tensor(row.token_ids)[None]
    with recorded_routing(find_routers(model)) as routing:
        theirs = model(input_ids=ids, use_cache=False, output_router_logits=True)
    assert len(routing) == 1
    assert torch.equal(routing[0].logits_TE, theirs.router_logits[0])
    best = torch.topk(routing[0].logits_TE, EXPERTS_PER_TOKEN).indices
    assert torch.equal(routing[0].experts_TX.sort().values, best.sort().values)
    assert len(routing[0].experts_TX.unique()) > EXPERTS_PER_TOKEN

    theirs.aux_loss.backward()
    aux_loss = float(theirs.aux_loss.detach())
    expected = {name: torch.zeros(()) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    trainer = evenstep.train.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        pad_to_multiple=8,
        max_tokens_per_gpu=16,
        moe_balance_coef=2.0,
    )
    result = trainer.forward_backward([row])
    assert result.metrics["moe_balance"] == pytest.approx(aux_loss, rel=1e-6)
    assert result.loss == pytest.approx(2 * aux_loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * expected[name].expand_as(parameter), rtol=1e-4, atol=1e-6)
    assert trainer.optim_step().stepped


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("coef", [0.0, COEF])
@pytest.mark.parametrize("name", TRAINERS)
def test_the_exact_step(family: str, coef: float, name: str) -> None:
    case = case_of(family, **TRAINERS[name], moe_balance_coef=coef)
    if TRAINERS[name]["layout"] == "fixed":
        case = dataclasses.replace(case, trainer={k: v for k, v in case.trainer.items() if k != "max_tokens_per_gpu"})
    case = dataclasses.replace(case, has_dirty_fillers=True, forbids_float32=name == "packed")
    found = run_case(case)
    assert_exact(case, found, plain_reference(family), reference(family))
    if name == "fixed-fillers":
        assert found.metrics["num_fillers"] >= 3


def test_many_micro_batches_with_several_of_everything() -> None:
    found = run_case(case_of("mixtral", max_tokens_per_gpu=20, moe_balance_coef=COEF))
    assert found.metrics["num_microbatches"] >= 5
    fractions = [[float(f) for f in layer] for layer in reference("mixtral").fractions]
    assert all(sum(layer) == pytest.approx(EXPERTS_PER_TOKEN) for layer in fractions)
    assert max(max(layer) - min(layer) for layer in fractions) > 0.1  # far from balanced, so that f matters


def test_wrong_formulas_differ() -> None:
    rows = window()
    found = run_case(case_of("mixtral", max_tokens_per_gpu=20, moe_balance_coef=1.0))
    right = found.metrics["moe_balance"]
    width = max(row.num_tokens for row in rows)
    rectangle = [
        dataclasses.replace(
            row,
            token_ids=np.append(row.token_ids, np.zeros(width - row.num_tokens, dtype=np.int64)),
            loss_mask=np.append(row.loss_mask, np.zeros(width - row.num_tokens, dtype=bool)),
        )
        for row in rows
    ]
    with true_float64():
        model = tiny_model("mixtral")
        with_padding = oracle_balance(model, rectangle, EXPERTS_PER_TOKEN).loss
        cells = [[rows[i] for i in cell] for cell in found.cells[0]]
        own_fractions = [oracle_balance(model, cell, EXPERTS_PER_TOKEN).loss for cell in cells]
    assert abs(right - reference("mixtral").loss) < 1e-12
    for wrong in (with_padding, float(np.mean(own_fractions)), right / len(cells)):
        assert abs(right - wrong) > 0.01, wrong


def test_splitting_changes_it() -> None:
    split = [part for row in window() for part in split_at_turns(row)]
    assert len(split) > len(window())
    case = case_of("qwen3_moe", split, moe_balance_coef=COEF)
    found = run_case(case)
    with true_float64():
        balance = oracle_balance(tiny_model("qwen3_moe"), split, EXPERTS_PER_TOKEN)
    assert_exact(case, found, case.oracle(), balance)
    assert abs(balance.loss - reference("qwen3_moe").loss) > 0.01
    without = run_case(case_of("qwen3_moe", split)), run_case(case_of("qwen3_moe"))
    assert oracle.relative_error(without[0].gradient, without[1].gradient) < TOLERANCE


@pytest.mark.parametrize("coef", [0.0, COEF])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_one_pass_without_gradient(coef: float, loss: str) -> None:
    with true_float64():
        model = tiny_model("qwen3_moe")
        rows = with_old_logprobs(window(), model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = evenstep.train.Trainer(model, optimizer, **PADDED, loss=loss, moe_balance_coef=coef)
        has_gradient: list[bool] = []
        model.register_forward_pre_hook(lambda *_: has_gradient.append(torch.is_grad_enabled()))
        trainer.score(rows)
        num_cells = len(has_gradient)
        has_gradient.clear()
        trainer.forward_backward(rows)
        assert has_gradient == [False] * num_cells * (coef > 0 or loss == "gspo") + [True] * num_cells


def test_beside_gspo_and_kl() -> None:
    with true_float64():
        rows = with_old_logprobs(window(), tiny_model("mixtral"), names=("old_logprobs", "ref_logprobs"))
    case = case_of("mixtral", rows, loss="gspo", kl_coef=0.1, entropy_coef=0.05, moe_balance_coef=COEF)
    assert_exact(case, run_case(case), case.oracle(), reference("mixtral"))


@pytest.mark.parametrize("coef", [0.0, COEF])
def test_a_window_without_advantages(coef: float) -> None:
    rows = [dataclasses.replace(row, advantage=0.0) for row in window()]
    found = run_case(case_of("mixtral", rows, moe_balance_coef=coef))
    assert found.stepped == (coef > 0,)
    assert (found.grad_norms[0] > 0) == (coef > 0)


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_ways_of_multiplying_agree(experts: str) -> None:
    case = case_of("qwen3_moe", moe_balance_coef=COEF)
    settings = {"family": "qwen3_moe", "dtype": torch.float32, "scale": 0.15}
    eager, other = (
        run_case(dataclasses.replace(case, model=settings | {"experts": name})) for name in ("eager", experts)
    )
    assert oracle.relative_error(other.gradient, eager.gradient) < 1e-6
    assert other.loss == pytest.approx(eager.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("llama", {}), ("glm4_moe", {}), ("qwen3_moe", {"mlp_only_layers": [0]})],
)
def test_other_models_are_refused(model_type: str, settings: dict[str, Any]) -> None:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    match = "found none" if settings else f"'{model_type}' is not one of .* mixtral, olmoe, qwen2_moe, qwen3_moe"
    with pytest.raises(ConfigError, match=match):
        evenstep.train.Trainer(model, optimizer, moe_balance_coef=0.1)


def test_other_models_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "ledger.toml"
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).touch()
    for model_type, is_refused in (("llama", True), ("mixtral", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "max_position_embeddings": 4096}))
        config = load_config([example], [f"model.path={tmp_path}", "train.moe_balance_coef=0.01"])
        if is_refused:
            with pytest.raises(ConfigError, match=r"train\.moe_balance_coef = 0\.01 .* 'llama'"):
                check_model(config)
        else:
            check_model(config)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"moe_balance_coef": -0.1}, "at least 0, found -0.1"),
        ({"moe_balance_coef": float("nan")}, "at least 0, found nan"),
        ({"moe_balance_coef": 0.1, "loss": "value_clip"}, "a policy's loss"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    model = tiny_model("mixtral")
    with pytest.raises(ConfigError, match=match):
        evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_its_name_is_taken() -> None:
    def loss(batch: Any) -> Any:
        return -batch.advantages_N * batch.logprobs_N, {"moe_balance": batch.logprobs_N.detach()}

    model = tiny_model("llama")
    with true_float64():
        trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
        with pytest.raises(ConfigError, match="moe_balance"):
            trainer.forward_backward(window())
