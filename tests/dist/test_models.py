"""Models that other trainers leave to one layout: gpt-oss, Qwen3-MoE and hybrids on one and two gloo ranks.

1. gpt-oss (sinks, alternating windows, experts) and Qwen3-MoE in padded, packed and tree, models that carry a state in
   padded and fixed; replicated and FSDP2, with and without activation checkpointing, balanced experts, old log-probs
   scored in the training cells and in others: loss, gradient of all parameters, log-probs of the scoring pass, of the
   training pass and of a reference model equal one row at a time to 1e-12 in float64, the same on every rank.
2. In float32 they are within 1e-6 of a float32 one-row run and 5e-6 of float64.
3. Adapters on all of them (those of stacked experts and routers included): loss, gradient of every adapter parameter
   and log-probs equal the oracle on the same adapted model, in the first step and when B is not zero any more; with the
   adapters off, log-probs are the base model's to 1e-14 (torch multiplies by a frozen weight in another way).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import evenstep.train
import oracle
from evenstep.train import Scorer, Trainer
from evenstep.train.lora import adapters_off, add_lora
from evenstep.types import Row
from moe_oracle import OracleBalance, oracle_balance
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, build, run_built, run_case
from tiny_hybrids import HYBRIDS
from tiny_models import EXPERTS_PER_TOKEN, tiny_model, true_float64
from tiny_rows import make_rows, with_shared_beginnings

peft = pytest.importorskip("peft")

Values = dict[Hashable, torch.Tensor]
KL, BALANCE = 0.1, 0.7
REFERENCE_SEED = 1
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded", "max_tokens_per_gpu": 30, "pad_to_multiple": 2},
    "packed": {"layout": "packed", "max_tokens_per_gpu": 24},
    "tree": {"layout": "tree", "max_tokens_per_gpu": 24},
    "fixed": {"layout": "fixed", "micro_batch_rows": 2},
}
LAYOUTS = {"gpt_oss": ("padded", "packed", "tree"), "qwen3_moe": ("padded", "packed", "tree")}
LAYOUTS |= dict.fromkeys(HYBRIDS, ("padded", "fixed"))
LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0, "seed": 11}


@functools.cache
def window(family: str, scale: float = 0.4) -> tuple[Row, ...]:
    """Groups that begin alike, each with log-probs of a reference model."""
    rows = with_shared_beginnings(make_rows(((1, 2), (2, 1)), max_tokens=12))
    with true_float64(family):
        model = tiny_model(family, seed=REFERENCE_SEED, attention="eager", scale=scale)
        logprobs = oracle.oracle_step(model, rows).logprobs
    return tuple(dataclasses.replace(row, ref_logprobs=logprobs[row.row_id].numpy()) for row in rows)


def cases() -> dict[str, StepCase]:
    """By name: the full product of family, layout and sharding; the other settings alternate."""
    found: dict[str, StepCase] = {}
    for i, (family, layouts) in enumerate(LAYOUTS.items()):
        for j, layout in enumerate(layouts):
            for is_sharded in (False, True):
                is_odd = bool((i + j + is_sharded) % 2)
                name = f"{family}-{layout}-{'fsdp2' if is_sharded else 'replicated'}"
                has_balance = layout != "fixed" and family not in HYBRIDS and is_odd
                found[name] = StepCase(
                    name=name,
                    rows=window(family),
                    model={"family": family},
                    trainer=SHAPES[layout]
                    | {"kl_coef": KL, "activation_checkpointing": bool((i + j) % 2)}
                    | ({"moe_balance_coef": BALANCE} if has_balance else {}),
                    is_sharded=is_sharded,
                    scoring="other cells" if is_odd else "reused plan",
                    has_dirty_fillers=True,
                    forbids_float32=layout == layouts[-1] and is_sharded,
                )
    for family, layout in (("gpt_oss", "tree"), ("gpt_oss", "padded"), ("qwen3_moe", "packed"), ("lfm2", "padded")):
        name = f"float32-{family}-{layout}"
        found[name] = StepCase(
            name=name,
            rows=window(family, 0.15),
            model={"family": family, "dtype": torch.float32, "scale": 0.15},
            trainer=SHAPES[layout] | {"kl_coef": KL},
            is_sharded=layout == "tree",
        )
    return found


CASES = cases()
# every family, gpt-oss in every layout, half of them sharded; the others are long
QUICK_SHAPES = {"gpt_oss": LAYOUTS["gpt_oss"], "qwen3_moe": ("packed",)} | dict.fromkeys(HYBRIDS, ("padded",))
QUICK = [
    name
    for i, (name, case) in enumerate(CASES.items())
    if case.is_float64
    and case.trainer["layout"] in QUICK_SHAPES[case.model["family"]]
    and case.is_sharded == bool(i // 2 % 2)
]


def adapted_cases() -> dict[str, StepCase]:
    layouts = {"gpt_oss": "tree", "qwen3_moe": "packed"} | dict.fromkeys(HYBRIDS, "padded")
    found: dict[str, StepCase] = {}
    for i, (family, layout) in enumerate(layouts.items()):
        for is_sharded in (False, True):
            name = f"{family}-{'fsdp2' if is_sharded else 'replicated'}"
            checkpointing = bool((i + is_sharded) % 2)
            found[name] = StepCase(
                name=name,
                rows=window(family)[:4],
                model={"family": family},
                trainer=SHAPES[layout] | {"kl_coef": KL, "activation_checkpointing": checkpointing},
                is_sharded=is_sharded,
                keeps_weights=True,
            )
    return found


ADAPTED = adapted_cases()
QUICK_ADAPTED = [name for i, (name, case) in enumerate(ADAPTED.items()) if case.is_sharded == bool(i // 2 % 2)]


# ------------------------------------------------------------------------------------------------ on ranks


def run_all(chosen: Sequence[StepCase]) -> list[tuple[CaseOutcome, Values]]:
    """What each case gives, and the log-probs of a reference model in its layout."""
    found: list[tuple[CaseOutcome, Values]] = []
    for case in chosen:
        outcome = run_case(case)
        with case.precision():
            frozen = tiny_model(**dict(case.model) | {"seed": REFERENCE_SEED}).requires_grad_(False)
            if case.is_sharded:
                evenstep.train.shard(frozen)
            scorer = Scorer(frozen, **SHAPES[case.trainer["layout"]])
            found.append((outcome, scorer.gather(scorer.score(case.rows))))
    return found


def run_adapted(chosen: Sequence[StepCase]) -> list[tuple[CaseOutcome, CaseOutcome, float]]:
    """(first step, second step, how far log-probs with the adapters off in between are from the base model's)."""
    found: list[tuple[CaseOutcome, CaseOutcome, float]] = []
    for case in chosen:
        with case.precision():
            _, base = build(case)
            expected = base.gather(base.score(case.rows))
            model: Any = add_lora(tiny_model(**case.model), **LORA)
            if case.is_sharded:
                evenstep.train.shard(model)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            trainer = Trainer(model, torch.optim.SGD(trained, lr=0.1), **case.trainer)
            first = run_built(case, model, trainer)
            with adapters_off(model):
                off = trainer.gather(trainer.score(case.rows))
            second = run_built(case, model, trainer)
        found.append((first, second, oracle.relative_error(off, expected)))
    return found


@once
def launch(world_size: int, names: tuple[str, ...]) -> dict[str, list[tuple[CaseOutcome, Values]]]:
    by_rank = run_ranks(run_all, world_size, [CASES[name] for name in names], timeout_s=400, group_timeout_s=100)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(names)}


@once
def launch_adapted(world_size: int, names: tuple[str, ...]) -> dict[str, list[tuple[CaseOutcome, CaseOutcome, float]]]:
    by_rank = run_ranks(run_adapted, world_size, [ADAPTED[name] for name in names], timeout_s=400, group_timeout_s=100)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(names)}


# ------------------------------------------------------------------------------------------------ the step


@functools.cache
def reference(family: str, dtype: torch.dtype, scale: float) -> tuple[oracle.OracleStep, OracleBalance | None]:
    """Of the family's window: the step, and the balance of its experts."""
    settings: dict[str, Any] = {"family": family, "dtype": dtype, "scale": scale, "attention": "eager"}
    case = StepCase(name=family, rows=window(family, scale), model=settings, trainer={"kl_coef": KL})
    with case.precision():
        has_balance = family in ("gpt_oss", "qwen3_moe") and case.is_float64
        balance = oracle_balance(tiny_model(**settings), case.rows, EXPERTS_PER_TOKEN) if has_balance else None
    return case.oracle(), balance


LONG = [name for name in CASES if name not in QUICK]
WHERE = [
    *((2, tuple(QUICK), name) for name in QUICK),
    *(pytest.param(2, tuple(LONG), name, marks=pytest.mark.long) for name in LONG),
    *(pytest.param(1, tuple(CASES), name, marks=pytest.mark.long) for name in CASES),
]


@pytest.mark.timeout(450)
@pytest.mark.parametrize(("world_size", "names", "name"), WHERE)
def test_the_exact_step(world_size: int, names: tuple[str, ...], name: str) -> None:
    case, by_rank = CASES[name], launch(world_size, names)[name]
    family, scale = case.model["family"], case.model.get("scale", 0.4)
    dtype = case.model.get("dtype", torch.float64)
    bounds = [(dtype, 1e-12)] if case.is_float64 else [(torch.float32, 1e-6), (torch.float64, 5e-6)]
    coef = case.trainer.get("moe_balance_coef", 0.0)
    for reference_dtype, tolerance in bounds:
        expected, balance = reference(family, reference_dtype, scale)
        loss, gradient = expected.loss, expected.gradient
        if coef:
            assert balance is not None
            loss += coef * balance.loss
            gradient = {key: part + coef * balance.gradient[key] for key, part in gradient.items()}
        for found, frozen in by_rank:
            assert found.loss == pytest.approx(loss, rel=tolerance, abs=tolerance)
            assert found.gradient.keys() == gradient.keys()
            assert oracle.relative_error(found.gradient, gradient) <= tolerance
            assert oracle.relative_error(found.logprobs, expected.logprobs) <= tolerance
            if coef:
                assert balance is not None
                assert found.metrics["moe_balance"] == pytest.approx(balance.loss, rel=tolerance)
            if case.scoring is not None:  # a scoring pass at these weights gives what the training pass gives
                assert found.metrics["ratio_max_deviation"] <= 1e-11
            recorded = {row.row_id: torch.tensor(np.where(row.loss_mask, row.ref_logprobs, 0.0)) for row in case.rows}
            assert oracle.relative_error(frozen, recorded) <= (tolerance if case.is_float64 else 5e-6)
    assert len({found.loss for found, _ in by_rank}) == 1


def test_what_is_special_takes_part() -> None:
    """Sinks, routers, scans and convolutions have gradients that matter, and cells are of several kinds."""
    for family, words in (
        ("gpt_oss", ("sinks", "router.weight", "router.bias", "experts.down_proj_bias")),
        ("qwen3_moe", ("gate.weight", "experts.gate_up_proj")),
        ("lfm2", ("conv.conv.weight", "self_attn.q_proj.weight")),
        ("mamba", ("A_log", "mixer.D", "dt_proj.weight", "conv1d.weight")),
        ("qwen3_next", ("A_log", "dt_bias", "conv1d.weight", "gate.weight", "shared_expert_gate.weight")),
    ):
        gradient = reference(family, torch.float64, 0.4)[0].gradient
        whole = sum(float(part.square().sum()) for part in gradient.values()) ** 0.5
        for word in words:
            parts = [part for name, part in gradient.items() if name.endswith(word)]
            assert parts, (family, word)
            assert max(float(part.norm()) for part in parts) > 1e-4 * whole, (family, word)
    plans = {name: CASES[name].plan(2) for name in QUICK}
    assert sum(len(plan.cells[0]) > 1 for plan in plans.values()) > len(plans) // 2


# ------------------------------------------------------------------------------------------------ adapters


def assert_oracle(case: StepCase, model: Any, found: CaseOutcome) -> None:
    with case.precision():
        expected = oracle.oracle_step(model, case.rows, kl_coef=KL)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-12)
    names = [name for name in expected.gradient if "lora_" in name]
    assert names
    ours, theirs = ({name: part[name] for name in names} for part in (found.gradient, expected.gradient))
    assert oracle.relative_error(ours, theirs) <= 1e-12
    assert oracle.relative_error(found.logprobs, expected.logprobs) <= 1e-12


LONG_ADAPTED = [name for name in ADAPTED if name not in QUICK_ADAPTED]
ADAPTED_WHERE = [
    *((2, tuple(QUICK_ADAPTED), name) for name in QUICK_ADAPTED),
    *(pytest.param(2, tuple(LONG_ADAPTED), name, marks=pytest.mark.long) for name in LONG_ADAPTED),
    *(pytest.param(1, tuple(ADAPTED), name, marks=pytest.mark.long) for name in ADAPTED),
]


@pytest.mark.timeout(450)
@pytest.mark.parametrize(("world_size", "names", "name"), ADAPTED_WHERE)
def test_adapters(world_size: int, names: tuple[str, ...], name: str) -> None:
    case = ADAPTED[name]
    for first, second, deviation in launch_adapted(world_size, names)[name]:
        assert deviation <= 1e-14
        with case.precision():
            model: Any = add_lora(tiny_model(**dict(case.model) | {"attention": "eager"}), **LORA)
        assert_oracle(case, model, first)
        model.load_state_dict(first.weights[1], strict=False)
        assert all(float(part.abs().max()) > 0 for key, part in first.weights[1].items() if "lora_B" in key)
        assert_oracle(case, model, second)
        for key, part in second.weights[1].items():
            assert "lora_" in key or torch.equal(part, first.weights[0][key])
    if "moe" in name or "next" in name:
        assert any("experts" in key and "lora_B" in key for key in first.gradient)
