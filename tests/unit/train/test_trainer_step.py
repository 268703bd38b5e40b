"""What optim_step does with the final gradient, when it does nothing, and which calls are refused.

1. One clip by the global norm, of the final gradient; the norm before clipping is reported; SGD and AdamW weights after
   one and several steps equal the written-out optimizers, at every number of micro-batches.
2. Clipping per micro-batch, or before the last division, gives other weights.
3. A window without trained tokens, or with all advantages exactly 0, does not step: weights and Adam state stay
   bit-equal, skip_reason says why, gradients are gone, and the next window steps as if nothing had been.
4. On 2 ranks all of this holds on every rank, replicated and sharded.
5. forward_backward twice, or optim_step without it, is a StateError that leaves the pending gradient alone.
6. NaN or infinity at a trained token is a RowError when the row is made; a model that yields NaN, or a ratio that
   overflows, is a NumericsError that names the row.
7. Dropout is off, the caller's hooks, attention and grad mode are left as they were, ``.grad`` is final and unclipped.
8. Unknown options are refused with what was found and what can be chosen.
9. Parameters that are frozen or thawed after the Trainer was built are a StateError that names them.
10. Rows may come as a list, a tuple or a generator.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

import evenstep.train
import oracle
from evenstep.errors import ConfigError, CreditError, EvenstepError, NumericsError, RowError, StateError
from evenstep.types import Row
from ranks import once, run_ranks
from step_cases import StepCase, build, run_case, run_cases, whole, whole_weights
from tiny_models import tiny_model, true_float64
from tiny_rows import make_rows, with_old_logprobs

ADAMW: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
BUDGETS = (14, 40, 400)


@functools.cache
def _window() -> list[Row]:
    with true_float64():
        return with_old_logprobs(make_rows(), tiny_model())


def window() -> list[Row]:
    return list(_window())


def untrained(rows: list[Row]) -> list[Row]:
    return [dataclasses.replace(row, loss_mask=[0] * row.num_tokens) for row in rows]


def without_signal(rows: list[Row]) -> list[Row]:
    return [dataclasses.replace(row, advantage=0.0) for row in rows]


def trainer_of(**settings: Any) -> tuple[Any, evenstep.train.Trainer]:
    with true_float64():
        return build(StepCase(name="unit", rows=[], trainer={"max_tokens_per_gpu": 40, **settings}))


@pytest.mark.parametrize("max_grad_norm", [None, 0.3, 1e6])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_sgd(layout: str, budget: int, max_grad_norm: float | None) -> None:
    case = StepCase(
        name="sgd",
        rows=window(),
        trainer={"layout": layout, "max_tokens_per_gpu": budget, "max_grad_norm": max_grad_norm},
        optimizer_args={"lr": 0.1},
        keeps_weights=True,
    )
    found, expected = run_case(case), case.oracle()
    norm = oracle.gradient_norm(expected.gradient)
    assert norm > 0.3
    assert found.grad_norms == (pytest.approx(norm, rel=1e-12),)
    weights = oracle.sgd_step(found.weights[0], expected.gradient, lr=0.1, max_norm=max_grad_norm)
    assert oracle.relative_error(found.weights[1], weights) < 1e-12
    update = {name: found.weights[1][name] - found.weights[0][name] for name in weights}
    expected_update = {name: weights[name] - found.weights[0][name] for name in weights}
    assert oracle.relative_error(update, expected_update) < 1e-11


def test_clipping_each_micro_batch_differs() -> None:
    rows = window()
    case = StepCase(
        name="clip", rows=rows, trainer={"max_tokens_per_gpu": 14, "max_grad_norm": 0.3}, keeps_weights=True
    )
    found = run_case(case)
    num_tokens = sum(row.num_trained_tokens for row in rows)
    with true_float64():
        parts = []
        for cell in found.cells[0]:
            own = [rows[i] for i in cell]
            share = sum(row.num_trained_tokens for row in own) / num_tokens
            part = oracle.oracle_step(tiny_model(attention="eager"), own).gradient
            parts.append(oracle.clipped({name: share * g for name, g in part.items()}, 0.3))
    assert len(parts) > 4
    each = {name: sum(part[name] for part in parts) for name in parts[0]}
    unscaled = oracle.clipped({name: num_tokens * g for name, g in found.gradient.items()}, 0.3)
    before_division = {name: g / num_tokens for name, g in unscaled.items()}
    update = {name: (found.weights[0][name] - found.weights[1][name]) / 0.1 for name in each}
    assert oracle.relative_error(update, oracle.clipped(found.gradient, 0.3)) < 1e-11
    assert oracle.relative_error(update, each) > 1e-2
    assert oracle.relative_error(update, before_division) > 1e-2


def adamw_case(is_sharded: bool) -> StepCase:
    return StepCase(
        name="adamw",
        rows=window(),
        trainer={"max_tokens_per_gpu": 30, "max_grad_norm": 0.3 if is_sharded else None, "layout": "packed"},
        is_sharded=is_sharded,
        optimizer="AdamW",
        optimizer_args=ADAMW,
        num_steps=3,
        keeps_weights=True,
    )


@functools.cache
def adamw_reference(max_grad_norm: float | None) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """(norm before clipping, weights after) of three steps."""
    reference, steps = oracle.AdamW(**ADAMW), []
    with true_float64():
        model = tiny_model(attention="eager")
        for _ in range(3):
            gradient = oracle.oracle_step(model, window()).gradient
            weights = reference.step(whole_weights(model), gradient, max_grad_norm)
            steps.append((oracle.gradient_norm(gradient), weights))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])
    return steps


@pytest.mark.parametrize(("world_size", "is_sharded"), [(1, False), (3, False), (3, True)])
def test_adamw_three_steps(world_size: int, is_sharded: bool) -> None:
    case = adamw_case(is_sharded)
    by_rank = [run_case(case)] if world_size == 1 else [found[0] for found in run_ranks(run_cases, world_size, [case])]
    for found in by_rank:
        for step, (norm, weights) in enumerate(adamw_reference(case.trainer["max_grad_norm"])):
            assert found.grad_norms[step] == pytest.approx(norm, rel=1e-10)
            assert oracle.relative_error(found.weights[step + 1], weights) < 1e-11  # g / (√v + eps) amplifies
        assert found.stepped == (True, True, True)
        assert found.skip_reasons == (None, None, None)


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all weights and of the whole optimizer state."""
    state = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return [whole(tensor) for tensor in [*model.parameters(), *state] if isinstance(tensor, torch.Tensor)]


def skip_windows(is_sharded: bool) -> list[dict[str, Any]]:
    """A real step, then windows that may not step, then a real step; and the two real steps alone."""
    rows = window()
    voters = {row.rollout_id: row.group_id for row in rows}
    found = []
    case = StepCase(name="skip", rows=rows, is_sharded=is_sharded, optimizer="AdamW", optimizer_args=ADAMW)
    with true_float64():
        model, trainer = build(case)
        plain_model, plain_trainer = build(case)
        for other in (trainer, plain_trainer):
            other.forward_backward(rows)
            other.optim_step()
        for name, skipped in (("untrained", untrained(rows)), ("no signal", without_signal(rows))):
            before = snapshot(model, trainer.optimizer)
            result = trainer.forward_backward(skipped, voters=voters)
            step = trainer.optim_step()
            after = snapshot(model, trainer.optimizer)
            found.append(
                {
                    "name": name,
                    "loss": result.loss,
                    "metrics": dict(result.metrics),
                    "num_tensors": len(before),
                    "is_unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
                    "stepped": step.stepped,
                    "skip_reason": step.skip_reason,
                    "grad_norm": step.grad_norm,
                    "is_zeroed": all(p.grad is None or not whole(p.grad).any() for p in model.parameters()),
                }
            )
        for other in (trainer, plain_trainer):
            other.forward_backward(rows)
            assert other.optim_step().stepped
        found.append(
            {
                "is_same": all(
                    torch.equal(a, b)
                    for a, b in zip(
                        snapshot(model, trainer.optimizer),
                        snapshot(plain_model, plain_trainer.optimizer),
                        strict=True,
                    )
                )
            }
        )
    return found


@once
def skip_outcomes(is_sharded: bool) -> list[list[dict[str, Any]]]:
    return run_ranks(skip_windows, 2, is_sharded)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_window_without_signal_does_not_step(is_sharded: bool) -> None:
    for found in [*skip_outcomes(is_sharded), *([] if is_sharded else [skip_windows(False)])]:
        untrained_window, no_signal, last = found
        for skipped in (untrained_window, no_signal):
            assert skipped["stepped"] is False
            assert skipped["num_tensors"] > 20
            assert skipped["is_unchanged"]
            assert skipped["is_zeroed"]
            assert skipped["loss"] == 0.0
            assert skipped["grad_norm"] == 0.0
        assert "no trained token" in untrained_window["skip_reason"]
        assert "advantage" in no_signal["skip_reason"]
        assert untrained_window["metrics"]["num_trained_tokens"] == 0
        assert no_signal["metrics"]["num_trained_tokens"] > 0
        assert last["is_same"]


def test_order_of_calls() -> None:
    rows = window()
    with true_float64():
        model, trainer = trainer_of()
        with pytest.raises(StateError, match="forward_backward"):
            trainer.optim_step()
        trainer.forward_backward(rows)
        gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        with pytest.raises(StateError, match="optim_step"):
            trainer.forward_backward(rows[:2])
        assert all(torch.equal(gradient[name], p.grad) for name, p in model.named_parameters())
        assert trainer.optim_step().stepped
        with pytest.raises(StateError):
            trainer.optim_step()


def test_refused_window_is_not_pending() -> None:
    rows = window()
    with true_float64():
        model, trainer = trainer_of()
        with pytest.raises(EvenstepError):
            trainer.forward_backward([rows[0], rows[0]])
        trainer.forward_backward(rows)
        gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        expected = oracle.oracle_step(tiny_model(attention="eager"), rows).gradient
    assert oracle.relative_error(gradient, expected) < 1e-12


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["advantage", "old_logprobs", "ref_logprobs", "engine_logprobs"])
def test_trained_garbage_is_a_row_error(name: str, value: float) -> None:
    row = window()[0]
    values = np.full(row.num_tokens, -1.0)
    t = int(np.flatnonzero(row.loss_mask)[-1])
    values[t] = value
    with pytest.raises(RowError, match=f"{row.row_id}.*{name}.*token {t}"):
        dataclasses.replace(row, **{name: values})


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_nan_from_the_model_names_the_rows(layout: str) -> None:
    """Token 7 has a NaN embedding: exactly the rows in which it stands before a trained token are named."""
    rows = window()
    bad = [r.row_id for r in rows if 7 in r.token_ids[: int(np.flatnonzero(r.loss_mask)[-1])]]
    assert 0 < len(bad) < len(rows)
    with true_float64():
        model, trainer = trainer_of(layout=layout, max_tokens_per_gpu=400)
        with torch.no_grad():
            model.model.embed_tokens.weight[7] = float("nan")
        with pytest.raises(NumericsError) as error:
            trainer.forward_backward(rows)
    for row in rows:
        assert (repr(row.row_id) in str(error.value)) == (row.row_id in bad) or "…" in str(error.value)
    with pytest.raises(StateError):
        trainer.optim_step()


def test_overflowing_ratio_is_a_numerics_error() -> None:
    rows = window()
    old = np.array(rows[2].old_logprobs)
    old[rows[2].loss_mask] = -1e4
    rows[2] = dataclasses.replace(rows[2], old_logprobs=old, advantage=-1.0)
    with true_float64(), pytest.raises(NumericsError, match=str(rows[2].row_id)):
        trainer_of()[1].forward_backward(rows)


@pytest.mark.parametrize("layout", ["fixed", "padded", "packed", "tree"])
def test_model_is_left_as_it_was(layout: str) -> None:
    rows = window()
    settings = {"micro_batch_rows": 2, "max_tokens_per_gpu": None} if layout == "fixed" else {}
    with true_float64():
        model, trainer = trainer_of(layout=layout, **settings)
        hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
        attention = model.config._attn_implementation
        result = trainer.forward_backward(rows)
        assert torch.is_grad_enabled()
        assert hooks == [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
        assert model.config._attn_implementation == attention
        expected = oracle.oracle_step(tiny_model(attention="eager"), rows)
        again = oracle.oracle_step(model, rows)
    assert oracle.relative_error(again.gradient, expected.gradient) < 1e-12
    for values in result.logprobs.values():
        assert not values.requires_grad
        assert values.device.type == "cpu"


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_dropout_is_off(layout: str) -> None:
    rows = window()
    with true_float64():
        model, trainer = trainer_of(layout=layout)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        model.train()
        trainer.forward_backward(rows)
        gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        expected = oracle.oracle_step(tiny_model(attention="eager"), rows).gradient
    assert oracle.relative_error(gradient, expected) < 1e-12


@pytest.mark.parametrize("max_grad_norm", [None, 1e-3])
def test_grad_is_final_and_not_clipped(max_grad_norm: float | None) -> None:
    rows = window()
    with true_float64():
        model, trainer = trainer_of(max_grad_norm=max_grad_norm)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)  # left over from the caller
        trainer.forward_backward(rows)
        gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        expected = oracle.oracle_step(tiny_model(attention="eager"), rows).gradient
    assert oracle.relative_error(gradient, expected) < 1e-12


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_logits_in_chunks(chunk: int, is_tied: bool) -> None:
    rows = window()
    case = StepCase(
        name="chunks",
        rows=rows,
        model={"is_tied": is_tied},
        trainer={"max_tokens_per_gpu": 60, "logprob_chunk_tokens": chunk, "layout": "packed"},
    )
    found, expected = run_case(case), case.oracle()
    assert oracle.relative_error(found.gradient, expected.gradient) < 1e-12
    assert found.metrics["entropy"] == pytest.approx(expected.metrics["entropy"], rel=1e-12)


def test_frozen_parameters_stay() -> None:
    rows = window()
    with true_float64():
        model = tiny_model()
        model.model.embed_tokens.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        trainer = evenstep.train.Trainer(model, optimizer, max_tokens_per_gpu=40)
        trainer.forward_backward(rows)
        expected = oracle.oracle_step(tiny_model(attention="eager"), rows).gradient
        frozen = "model.embed_tokens.weight"
        gradient = {name: whole(p.grad) for name, p in model.named_parameters() if name != frozen}
        assert model.model.embed_tokens.weight.grad is None
    del expected[frozen]
    assert oracle.relative_error(gradient, expected) < 1e-12


@pytest.mark.parametrize("is_thawed", [True, False])
def test_parameters_thawed_or_frozen_later_are_refused(is_thawed: bool) -> None:
    with true_float64():
        model = tiny_model()
        weight = model.model.embed_tokens.weight
        weight.requires_grad_(not is_thawed)
        trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        weight.requires_grad_(is_thawed)
        with pytest.raises(StateError, match=r"found 1 parameters .*model\.embed_tokens\.weight"):
            trainer.forward_backward(window())
        weight.requires_grad_(not is_thawed)
        trainer.forward_backward(window())
        assert trainer.optim_step().stepped


@pytest.mark.parametrize("kind", [tuple, iter])
def test_rows_need_not_be_a_list(kind: Any) -> None:
    with true_float64():
        losses = [trainer_of()[1].forward_backward(rows).loss for rows in (window(), kind(window()))]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "no_such_loss"},
        {"layout": "no_such_layout"},
        {"normaliser": "no_such_normaliser"},
        {"normaliser": "constant"},
        {"normaliser": "token", "normaliser_constant": 3.0},
        {"normaliser": "row"},
        {"max_tokens_per_gpu": 0},
        {"temperature": 0.0},
        {"clip_low": -0.1},
        {"clip_high": -0.1},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": -1.0},
        {"pad_to_multiple": 0},
        {"logprob_chunk_tokens": 0},
    ],
    ids=repr,
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(EvenstepError) as error, true_float64():
        trainer_of(**settings)[1].forward_backward(window())
    found = next(iter(settings.values()))
    assert isinstance(error.value, ValueError)
    assert str(found) in str(error.value)


def test_half_precision_parameters_are_refused() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="bfloat16"):
        evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: ([], None),
        lambda rows: ([*rows, rows[0]], None),
        lambda rows: (rows, {"g0/r0": "g0"}),
        lambda rows: (rows, {row.rollout_id: "g0" for row in rows}),
        lambda rows: ([dataclasses.replace(rows[0], old_logprobs=None), *rows[1:]], None),
    ],
    ids=["no rows", "row id twice", "not all vote", "voters in other groups", "some without old log-probs"],
)
def test_bad_windows_are_refused(change: Any) -> None:
    rows, voters = change(window())
    with pytest.raises((RowError, CreditError)), true_float64():
        trainer_of()[1].forward_backward(rows, voters=voters)
