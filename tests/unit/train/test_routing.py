"""Locks, of routing replay on one rank:

1. Replayed where the router goes anyway, the step is the free one to the last bit, for every type that is supported.
2. In float64 it is that of a reference with routers written by hand, one row at a time, to 1e-12, in every layout, with
   padding and fillers full of other tokens; the load-balancing loss counts the replayed choice. (Ranks: dist.)
3. A changed record changes the gradient, the routers' too; an expert that no token is sent to has none.
4. Padding and fillers are spread evenly over the experts. Rows take their own experts to their own positions.
5. Tokens are one node of a trie where ids and experts are equal, whatever the order of the rows.
6. Scoring replays as training does, so that the first ratio is exactly 1; the same in every budget.
7. ``off`` leaves records aside; ``required`` refuses the token that is missing; a critic routes freely, and no policy
   runs a window that was prepared without its rows' experts, or with those of another model.
8. Refused: experts of another model, models without experts or known routers, routers that choose otherwise.
9. The engine in this process records what its model does in a forward over the whole row.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import evenstep.train
import oracle
from critic_cases import tiny_critic
from evenstep.config import load_config
from evenstep.errors import ConfigError, RowError, StateError
from evenstep.experts import UNKNOWN
from evenstep.model_files import SOFTMAX_ROUTER_MODEL_TYPES
from evenstep.preflight import check_model
from evenstep.rollout.engine import Request
from evenstep.rollout.in_process import InProcessEngine
from evenstep.rollout.segments import rows_of
from evenstep.train.collate import collate
from evenstep.train.moe import find_routers, recorded_routing
from evenstep.train.routing import PADDING, RouterShape, experts_of_cell, replayed_routing
from evenstep.train.trie import build_trie
from evenstep.train.window import prefix_keys
from evenstep.types import Call, Rollout, Row, Sampling
from moe_models import small_model
from routing_cases import COEF, SHAPES, case_of, reference, window, with_experts
from step_cases import run_case
from tiny_models import EXPERTS_PER_TOKEN, NUM_EXPERTS, VOCAB, tiny_model, true_float64

SHAPE = RouterShape(num_layers=2, num_experts=NUM_EXPERTS, experts_per_token=EXPERTS_PER_TOKEN)


def experts_taken(model: Any, ids: Any) -> np.ndarray:
    """[T, L, X] by the model itself, in a forward over a whole row."""
    with torch.no_grad(), recorded_routing(find_routers(model)) as routing:
        model(input_ids=torch.tensor(ids)[None], use_cache=False)
    return torch.stack([one.experts_TX for one in routing], dim=1).numpy()


def trainer_of(model: Any, **options: Any) -> evenstep.train.Trainer:
    return evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def gradients(trainer: evenstep.train.Trainer, rows: Any) -> dict[str, Tensor]:
    trainer.forward_backward(rows)
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trainer.model.named_parameters()
    }
    trainer.optimizer.zero_grad()
    trainer._pending = None
    return found


@pytest.mark.parametrize("model_type", sorted(SOFTMAX_ROUTER_MODEL_TYPES))
def test_the_routers_own_choice_changes_nothing(model_type: str) -> None:
    model = small_model(model_type)
    row = Row(
        row_id=0,
        rollout_id=0,
        group_id=0,
        token_ids=np.random.default_rng(0).integers(0, VOCAB, 13),
        loss_mask=[0] * 8 + [1] * 5,
        advantage=1.0,
    )
    own = experts_taken(model, row.token_ids)
    own[-1] = UNKNOWN
    trainer = trainer_of(model)
    free = gradients(trainer, [row])
    replayed = gradients(trainer, [dataclasses.replace(row, routed_experts=own)])
    assert all(torch.equal(free[name], replayed[name]) for name in free)
    other = np.where(own == UNKNOWN, UNKNOWN, NUM_EXPERTS - 1 - own)
    moved = gradients(trainer, [dataclasses.replace(row, routed_experts=other)])
    router = next(name for name in free if name.endswith(("gate.weight", "router.weight")))
    for name in (router, next(iter(free))):
        assert float((moved[name] - free[name]).norm()) > 0.01 * float(free[name].norm()) > 0


@pytest.mark.parametrize(
    ("family", "shape"), [("qwen3_moe", "padded"), ("gpt_oss", "packed"), ("mixtral", "tree"), ("mixtral", "fixed")]
)
def test_the_exact_step(family: str, shape: str) -> None:
    found = run_case(case_of(family, shape))
    step, balance = reference(family, "usual")
    gradient = {name: part + COEF * balance.gradient[name] for name, part in step.gradient.items()}
    assert abs(found.loss - step.loss - COEF * balance.loss) <= 1e-12
    assert oracle.relative_error(found.gradient, gradient) <= 1e-12
    assert oracle.relative_error(found.logprobs, step.logprobs) <= 1e-12
    assert found.metrics["moe_balance"] == pytest.approx(balance.loss, rel=1e-12)
    assert found.metrics["num_microbatches"] >= 3


def test_experts_that_nobody_is_sent_to_have_no_gradient() -> None:
    rows = [dataclasses.replace(row, routed_experts=np.tile([1, 3], (row.num_tokens, 2, 1))) for row in window()]
    with true_float64():
        trainer = trainer_of(tiny_model("mixtral"), **SHAPES["packed"])
        found = gradients(trainer, rows)
    stacked = {name: part for name, part in found.items() if part.shape[0] == NUM_EXPERTS and part.ndim == 3}
    assert len(stacked) == 4
    for part in stacked.values():
        assert [bool(one.any()) for one in part] == [False, True, False, True]


@pytest.mark.parametrize("layout", ["padded", "packed", "tree", "fixed"])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_cells(layout: str, num_rows: int) -> None:
    rows = window()[:num_rows]
    cell = collate(
        rows,
        [0.1] * num_rows,
        layout=layout,
        multiple=17,
        num_shape_rows=7 if layout == "fixed" else 0,
        dtype=torch.float64,
        device=torch.device("cpu"),
        router_shape=SHAPE,
    )
    assert cell.experts_TLX is not None
    experts = cell.experts_TLX.numpy()
    assert experts.shape == (cell.input_ids_BT.numel(), 2, EXPERTS_PER_TOKEN)
    is_padding = np.ones(len(experts), dtype=bool)
    for row, index_T in zip(rows, cell.index_by_row, strict=True):
        is_padding[index_T] = False
        expected = row.routed_experts
        assert (experts[index_T] == (UNKNOWN if expected is None else expected.experts_TLX)).all()
    assert is_padding.any()
    assert (experts[is_padding] <= PADDING).all()
    experts = np.where(experts <= PADDING, PADDING - experts, experts)
    for layer in range(2):
        load = np.bincount(experts[is_padding, layer].ravel(), minlength=NUM_EXPERTS)
        assert load.max() <= is_padding.sum() * EXPERTS_PER_TOKEN / 2 + 2
        assert (load > 0).all()
    assert all(
        len(set(token)) == EXPERTS_PER_TOKEN for token in experts[is_padding].reshape(-1, EXPERTS_PER_TOKEN).tolist()
    )


def test_padding_goes_round() -> None:
    for num_tokens, num_experts, each in itertools.product((1, 3, 8), (4, 5, 8), (1, 2, 4)):
        shape = RouterShape(num_layers=1, num_experts=num_experts, experts_per_token=each)
        load = np.bincount((PADDING - experts_of_cell([], [], num_tokens, shape)).ravel(), minlength=num_experts)
        assert load.max() - load.min() <= 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_padding_where_its_experts_have_no_score_is_harmless(layout: str) -> None:
    """A router so sure that softmax gives exactly 0 to the experts that padding is sent to."""
    model = small_model("qwen3_moe", norm_topk_prob=True)
    with torch.no_grad():
        find_routers(model)[0].weight.mul_(150)
    trainer = trainer_of(model, layout=layout, max_tokens_per_gpu=60, pad_to_multiple=8)
    rows = [
        Row(row_id=i, rollout_id=i, group_id=0, advantage=1.0, token_ids=ids, loss_mask=[0] + [1] * (len(ids) - 1))
        for i, ids in enumerate(([1, 2, 3, 4], [1, 2, 3, 5, 5, 5, 5, 5, 5, 5]))
    ]
    free = gradients(trainer, rows)
    unknown = np.full((4, 1, EXPERTS_PER_TOKEN), UNKNOWN)
    replayed = gradients(trainer, [dataclasses.replace(rows[0], routed_experts=unknown), rows[1]])
    assert oracle.relative_error(replayed, free) < 1e-5


def test_nodes_of_a_trie_have_one_record() -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        rows: list[Row] = []
        for i in range(int(draw.integers(1, 7))):
            num_tokens = int(draw.integers(1, 6))
            ids = draw.integers(0, 2, num_tokens)
            experts = draw.permuted(np.tile(np.arange(2), (num_tokens, 1, 1)), axis=2)
            experts[draw.random(num_tokens) < 0.2] = UNKNOWN
            fields: dict[str, Any] = {"rollout_id": i, "group_id": 0, "token_ids": ids, "loss_mask": ids * 0}
            rows.append(Row(row_id=i, routed_experts=None if draw.random() < 0.2 else experts, **fields))
        known = [
            np.full((row.num_tokens, 1, 2), UNKNOWN) if row.routed_experts is None else row.routed_experts.experts_TLX
            for row in rows
        ]
        beginnings = {
            (bytes(row.token_ids[: t + 1].astype(np.uint8)), str(experts[: t + 1].tolist()))
            for row, experts in zip(rows, known, strict=True)
            for t in range(row.num_tokens)
        }
        keys = prefix_keys(rows)
        assert build_trie(keys).num_tokens == len(beginnings)
        order = draw.permutation(len(rows)).tolist()
        assert [key.tolist() for key in prefix_keys([rows[i] for i in order])] == [keys[i].tolist() for i in order]
        plain = [dataclasses.replace(row, routed_experts=None) for row in rows]
        assert all(key is row.token_ids for key, row in zip(prefix_keys(plain), plain, strict=True))


def test_the_tree_is_planned_with_them() -> None:
    rows = window()
    plain = [dataclasses.replace(row, routed_experts=None) for row in rows]
    trainer = trainer_of(tiny_model("mixtral", dtype=torch.float32), layout="tree")
    footprints = [trainer.prepare(each).plan.stats.footprint for each in (plain, rows)]
    assert footprints[0] < footprints[1] < sum(row.num_tokens for row in rows)


def test_scoring_replays_as_well() -> None:
    with true_float64():
        trainer = trainer_of(tiny_model("qwen3_moe"), **SHAPES["padded"])
        window_of = trainer.prepare(window())
        scored = trainer.score(window_of)
        other = trainer.score(trainer.prepare(window(), max_tokens_per_gpu=60))
        free = trainer.score([dataclasses.replace(row, routed_experts=None) for row in window()])
        rows = [dataclasses.replace(row, old_logprobs=scored[row.row_id].numpy()) for row in window()]
        result = trainer.forward_backward(rows)
    assert result.metrics["ratio_max_deviation"] == 0.0
    assert max(float((scored[name] - other[name]).abs().max()) for name in scored) < 1e-12
    assert max(float((scored[name] - free[name]).abs().max()) for name in scored) > 0.01


def test_off_leaves_them_aside() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    plain = [dataclasses.replace(row, routed_experts=None) for row in window()]
    off, replaying = (trainer_of(model, **SHAPES["tree"], routing_replay=name) for name in ("off", "recorded"))
    assert off.prepare(window()).digest == off.prepare(plain).digest
    assert replaying.prepare(window()).digest != replaying.prepare(plain).digest
    assert off.prepare(window()).router_shape is None
    one, other = gradients(off, window()), gradients(off, plain)
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ConfigError, match="must have the settings of the Trainer that runs it"):
        replaying.forward_backward(off.prepare(window()))


def test_required_refuses_what_is_missing() -> None:
    trainer = trainer_of(tiny_model("mixtral", dtype=torch.float32), routing_replay="required")
    with pytest.raises(RowError, match=r"row 'g0/r1/s0': .*'required' needs .* found none; have"):
        trainer.prepare([window()[1]])
    (whole,) = with_experts(window()[:1], unknown=0.0)
    assert trainer.prepare([whole]).router_shape == SHAPE
    assert whole.routed_experts is not None
    assert whole.loss_mask[-1]
    experts = whole.routed_experts.experts_TLX.copy()
    experts[2, 1] = UNKNOWN
    missing = dataclasses.replace(whole, routed_experts=experts)
    with pytest.raises(RowError, match=rf"last trained one \(token {whole.num_tokens - 1}\), found none at token 2"):
        trainer.prepare([missing])
    # what no trained token depends on may be unknown
    first = np.arange(whole.num_tokens) == 1
    trainer.prepare([dataclasses.replace(missing, loss_mask=first)])


def test_a_critic_routes_freely() -> None:
    critic = tiny_critic("qwen3")
    rows = [dataclasses.replace(row, returns=np.ones(row.num_tokens)) for row in window()]
    plain = [dataclasses.replace(row, routed_experts=None) for row in rows]
    with true_float64():
        values = trainer_of(critic, **SHAPES["padded"])
        policy = trainer_of(tiny_model("mixtral"), **SHAPES["padded"])
        free, own = gradients(values, plain), gradients(values, rows)
        shared = gradients(values, policy.prepare(rows))  # which a run trains both on
    assert oracle.relative_error(own, free) == 0.0
    assert oracle.relative_error(shared, free) < 1e-12


def test_a_window_that_another_model_prepared_is_refused() -> None:
    model, rows = tiny_model("qwen3_moe", dtype=torch.float32), window("usual")
    policy = trainer_of(model, **SHAPES["padded"])
    by_critic = trainer_of(tiny_critic("qwen3", dtype=torch.float32), **SHAPES["padded"]).prepare(rows)
    with pytest.raises(ConfigError, match="that its rows carry, found that they were left aside, as a critic does"):
        policy.forward_backward(by_critic)
    prepared = policy.prepare(rows)
    others = {"3": tiny_model("qwen3_moe", num_layers=3), "none": tiny_model("qwen3")}
    for other in others.values():
        with pytest.raises(ConfigError, match=r"must have the experts of the model that runs it, found RouterShape\("):
            evenstep.train.Scorer(other, **SHAPES["padded"]).score(prepared)
    policy.forward_backward(prepared)


@pytest.mark.parametrize(
    ("experts", "match"),
    [
        (
            np.tile([0, 1], (3, 1, 1)),
            r"row 'a': .* 2 layers with experts and 2 experts per token, found shape \(3, 1, 2\)",
        ),
        (np.tile([0, 1, 2], (3, 2, 1)), r"found shape \(3, 2, 3\)"),
        (np.tile([[0, 1], [4, 2]], (3, 1, 1)), "below the model's 4 experts, found 4 at token 0, layer 1"),
    ],
)
def test_experts_of_another_model_are_refused(experts: np.ndarray, match: str) -> None:
    trainer = trainer_of(tiny_model("mixtral", dtype=torch.float32))
    row = Row(
        row_id="a", rollout_id=0, group_id=0, token_ids=[1, 2, 3], loss_mask=[0, 0, 1], routed_experts=experts
    )  # fmt: skip
    with pytest.raises(RowError, match=match):
        trainer.prepare([row])


def test_other_models_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "ledger.toml"
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).touch()
    for model_type, is_refused in (("llama", True), ("gpt_oss", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "max_position_embeddings": 4096}))
        config = load_config([example], [f"model.path={tmp_path}", "train.routing_replay=recorded"])
        if is_refused:
            with pytest.raises(ConfigError, match=r"train\.routing_replay = 'recorded' needs .* 'llama'"):
                check_model(config)
        else:
            check_model(config)


def test_other_models_are_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"routing_replay = 'required' needs .* 'llama' is not one of those"):
        trainer_of(model, routing_replay="required")
    with pytest.raises(RowError, match=r"row 'g0/r0/s0': routed_experts needs .* 'llama' .* or set routing_replay to"):
        trainer_of(model).prepare(window())
    trainer_of(model, routing_replay="off").prepare(window())
    with pytest.raises(ConfigError, match="routing_replay must be one of off, recorded, required"):
        trainer_of(model, routing_replay="always")
    dense = small_model("qwen3_moe", mlp_only_layers=[0])
    assert trainer_of(dense).routers == ()


class OtherRouter(nn.Module):
    """Chooses by sorting."""

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, experts = scores.sort(dim=-1, descending=True)
        return scores, values[:, :1], experts[:, :1]


def test_routers_that_choose_otherwise_are_noticed() -> None:
    router, experts = OtherRouter(), torch.zeros(3, 1, 1, dtype=torch.int64)
    with pytest.raises(StateError, match="with one topk, found 0 in OtherRouter"), replayed_routing([router], experts):
        router(torch.ones(3, 2))
    with pytest.raises(StateError, match="found 1 of 1 that did not"), replayed_routing([router], experts):
        pass
    router(torch.ones(3, 2))  # nothing of it is left


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_engine_records_what_its_model_does(family: str) -> None:
    with true_float64():
        model = tiny_model(family)
        engine = InProcessEngine(
            model, eos_token_ids=[0], max_context_tokens=40, routers=find_routers(model), weight_version=0
        )
        prompts = ((3,), (4, 5, 6, 7, 8, 9, 10), (1, 2), (9, 9, 9, 9), (20, 3, 11))
        requests = [
            Request(prompt_ids=ids, sampling=Sampling(seed=i, max_tokens=(2, 9, 4, 12, 1)[i]))
            for i, ids in enumerate(prompts)
        ]
        completions = engine.generate_batch(requests)
        calls: list[Call] = []
        for i, (asked, got) in enumerate(zip(requests, completions, strict=True)):
            ids = asked.prompt_ids + got.output_ids
            expected = experts_taken(model, ids)
            expected[-1] = UNKNOWN
            assert got.routed_experts is not None
            assert got.routed_experts.experts_TLX.tolist() == expected.tolist()
            fields: dict[str, Any] = {"prompt_ids": asked.prompt_ids, "output_ids": got.output_ids}
            calls.append(Call(order=i, logprobs=got.logprobs, routed_experts=got.routed_experts, **fields))
        # what it recorded is all that training requires, and its log-probs are then the trainer's
        rollouts = [
            Rollout(rollout_id=str(i), group_id="g", prompt_id="p", reward=0.0, calls=(call,))
            for i, call in enumerate(calls)
        ]
        rows = rows_of(rollouts)
        scorer = evenstep.train.Scorer(model, layout="packed", max_tokens_per_gpu=20, routing_replay="required")
        for row_id, scored in scorer.score(rows).items():
            row = next(row for row in rows if row.row_id == row_id)
            assert row.engine_logprobs is not None
            assert np.abs(scored.numpy() - row.engine_logprobs)[row.loss_mask].max() < 1e-12
