"""Ranks that disagree raise on every rank within seconds; none hangs, and the next agreed window runs exactly.

1. Other rows, another order, one token, mask bit, advantage, old log-prob, id or voter on one rank: DistributedError on
   every rank, in training and in scoring.
2. Other settings on one rank (layout, budget, normaliser, clip, temperature, loss, clipping norm): the same.
3. A malformed window on one rank: its own error there, DistributedError on the others.
4. Replicas with other weights: DistributedError before the first step.
5. A NaN that appears on one rank only (in its model output) raises on all ranks.
6. After a refused window the same Trainer runs the agreed one, and its gradient is exact.
7. So in every pass: scoring of a policy, of a reference and of a critic, the look-ahead of GSPO and of a sequence mask,
   and training of a critic; other rows, other returns or a window prepared for another budget.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import evenstep.train
import oracle
from critic_cases import tiny_critic
from evenstep.errors import DistributedError, EvenstepError
from evenstep.types import Row
from ranks import run_ranks
from step_cases import StepCase, build, run_cases, whole
from tiny_models import tiny_model, true_float64
from tiny_rows import make_rows, with_old_logprobs

LIMIT_S = 20.0


def window() -> list[Row]:
    with true_float64():
        return with_old_logprobs(make_rows(), tiny_model())


def changed(rows: Sequence[Row], index: int, **fields: Any) -> list[Row]:
    return [dataclasses.replace(row, **fields) if i == index else row for i, row in enumerate(rows)]


def with_value(values: Any, t: int, value: Any) -> Any:
    values = [*values]
    values[t] = value
    return values


def with_other_token(ids: Any, t: int) -> Any:
    return with_value(ids, t, (ids[t] + 1) % 9)


def trained(row: Row) -> int:
    return int(row.loss_mask.nonzero()[0][0])


def context(row: Row) -> int:
    return int((~row.loss_mask).nonzero()[0][-1])


ROW_CHANGES: dict[str, Callable[[list[Row]], list[Row]]] = {
    "order": lambda rows: rows[::-1],
    "one row fewer": lambda rows: rows[:-1],
    "one row twice as long": lambda rows: changed(
        rows, 1, **{n: [*getattr(rows[1], n)] * 2 for n in ("token_ids", "loss_mask", "old_logprobs")}
    ),
    "trained token": lambda rows: changed(
        rows,
        2,
        token_ids=with_value(rows[2].token_ids, trained(rows[2]), (rows[2].token_ids[trained(rows[2])] + 1) % 9),
    ),
    "context token": lambda rows: changed(
        rows,
        2,
        token_ids=with_value(rows[2].token_ids, context(rows[2]), (rows[2].token_ids[context(rows[2])] + 1) % 9),
    ),
    "mask": lambda rows: changed(rows, 3, loss_mask=with_value(rows[3].loss_mask, trained(rows[3]), 0)),
    "advantage": lambda rows: changed(rows, 4, advantage=rows[4].advantage + 1e-9),
    "old log-prob": lambda rows: changed(
        rows, 5, old_logprobs=with_value(rows[5].old_logprobs, trained(rows[5]), -1.25)
    ),
    "no old log-probs": lambda rows: [dataclasses.replace(row, old_logprobs=None) for row in rows],
    "row id": lambda rows: changed(rows, 6, row_id="another"),
    "rollout id": lambda rows: changed(rows, 0, rollout_id="another"),
    "group id": lambda rows: [dataclasses.replace(row, group_id="g7") if row.group_id == "g2" else row for row in rows],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "layout": {"layout": "packed"},
    "budget": {"max_tokens_per_gpu": 31},
    "multiple": {"pad_to_multiple": 4},
    "normaliser": {"normaliser": "rollout"},
    "clip_low": {"clip_low": 0.1},
    "clip_high": {"clip_high": 0.1},
    "temperature": {"temperature": 0.5},
    "max_grad_norm": {"max_grad_norm": 0.25},
}
MALFORMED: dict[str, Callable[[list[Row]], list[Row]]] = {
    "row id twice": lambda rows: [rows[0], *rows],
    "no rows": lambda rows: [],
    "half of the old log-probs": lambda rows: changed(rows, 0, old_logprobs=None),
    "rollout in two groups": lambda rows: changed(rows, 1, rollout_id=rows[-1].rollout_id),
}


def case(is_sharded: bool, **settings: Any) -> StepCase:
    trainer = {"layout": "padded", "max_tokens_per_gpu": 30} | settings
    return StepCase(name="agreement", rows=[], is_sharded=is_sharded, trainer=trainer)


def attempt(act: Callable[[], Any]) -> tuple[str, str, float]:
    """(error class or "", message, seconds)."""
    start = time.monotonic()
    try:
        act()
    except EvenstepError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def disagree_about_rows(is_sharded: bool, odd_rank: int) -> tuple[dict[str, tuple[str, str, float]], float]:
    is_odd = dist.get_rank() == odd_rank
    found = {}
    with true_float64():
        model, trainer = build(case(is_sharded))
        rows = window()
        for name, change in (ROW_CHANGES | MALFORMED).items():
            other = change(list(rows)) if is_odd else rows
            found[name] = attempt(functools.partial(trainer.forward_backward, other))
            found[f"{name} (score)"] = attempt(functools.partial(trainer.score, other))
        voters = {row.rollout_id: row.group_id for row in rows} | ({"extra": "g0"} if is_odd else {})
        rollout_trainer = build(case(is_sharded, normaliser="rollout"))[1]
        found["voters"] = attempt(lambda: rollout_trainer.forward_backward(rows, voters=voters))
        trainer.forward_backward(rows)
        gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        expected = oracle.oracle_step(tiny_model(attention="eager"), rows).gradient
    return found, oracle.relative_error(gradient, expected)


def disagree_about_settings(is_sharded: bool) -> dict[str, tuple[str, str, float]]:
    found = {}
    rows = window()
    with true_float64():
        for name, settings in SETTINGS.items():
            mine = settings if dist.get_rank() == 1 else {}

            def act(mine: dict[str, Any] = mine) -> None:
                _, trainer = build(case(is_sharded, **mine))
                trainer.forward_backward(rows)
                trainer.optim_step()

            found[name] = attempt(act)
    return found


@pytest.mark.parametrize(("is_sharded", "odd_rank"), [(False, 0), (True, 2)])
def test_rows(is_sharded: bool, odd_rank: int) -> None:
    by_rank = run_ranks(disagree_about_rows, 3, is_sharded, odd_rank)
    for rank, (found, error) in enumerate(by_rank):
        assert len(found) == 2 * len(ROW_CHANGES | MALFORMED) + 1
        for name, (kind, message, seconds) in found.items():
            is_own = rank == odd_rank and name.removesuffix(" (score)") in MALFORMED
            assert kind == "DistributedError" if not is_own else kind in ("RowError", "CreditError"), (name, kind)
            assert seconds < LIMIT_S
            if not is_own:
                assert all(f"rank {other}" in message for other in range(3)), (name, message)
        assert error < 1e-12


@pytest.mark.parametrize("is_sharded", [False, True])
def test_settings(is_sharded: bool) -> None:
    by_rank = run_ranks(disagree_about_settings, 2, is_sharded)
    kinds = {name: [found[name][0] for found in by_rank] for name in SETTINGS}
    assert kinds == dict.fromkeys(SETTINGS, ["DistributedError"] * 2)
    assert all(seconds < LIMIT_S for found in by_rank for _, _, seconds in found.values())


def other_weights() -> str:
    model = tiny_model(seed=dist.get_rank())
    with pytest.raises(DistributedError) as error:
        evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(error.value)


def test_replicas_with_other_weights() -> None:
    for message in run_ranks(other_weights, 2):
        assert "rank 0" in message
        assert "rank 1" in message


def overflow_on_one_rank(is_sharded: bool) -> tuple[tuple[str, str, float], bool]:
    """An old log-prob so small that exp(logprob - old) overflows at one trained token: only its rank computes inf."""
    rows = window()
    bad = changed(rows, 3, old_logprobs=with_value(rows[3].old_logprobs, trained(rows[3]), -1e4), advantage=-1.0)
    with true_float64():
        model, trainer = build(case(is_sharded))
        before = {name: whole(parameter) for name, parameter in model.named_parameters()}
        found = attempt(lambda: trainer.forward_backward(bad))
        trainer.forward_backward(rows)  # the refused window is not pending
        after = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return found, all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_overflow_on_one_rank_raises_everywhere(is_sharded: bool) -> None:
    for (kind, message, seconds), is_unchanged in run_ranks(overflow_on_one_rank, 2, is_sharded):
        assert kind == "NumericsError"
        assert "g0/r1/s2" in message
        assert seconds < LIMIT_S
        assert is_unchanged


PASSES: dict[str, dict[str, Any]] = {
    "old log-probs": {},
    "reference": {"is_scorer": True},
    "values": {"is_critic": True},
    "look-ahead of gspo": {"loss": "gspo"},
    "look-ahead of a sequence mask": {"sequence_mask": (0.5, 2.0)},
    "critic": {"is_critic": True},
}
SCORED = ("old log-probs", "reference", "values")
PASS_CHANGES: dict[str, Callable[[list[Row]], list[Row]]] = {
    "one row fewer": lambda rows: rows[:-1],
    "engine log-prob": lambda rows: changed(
        rows, 5, engine_logprobs=with_value(rows[5].engine_logprobs, trained(rows[5]), -1.25)
    ),
    "return": lambda rows: changed(rows, 5, returns=with_value(rows[5].returns, trained(rows[5]), -1.25)),
}


def disagree_in_every_pass(
    is_sharded: bool,
) -> tuple[dict[str, tuple[str, str, float]], dict[str, tuple[str, str, float]]]:
    """(what became of windows that differ, of one that does not) by pass."""
    is_odd = dist.get_rank() == 1
    rows = [
        dataclasses.replace(
            row, engine_logprobs=row.old_logprobs, returns=row.old_logprobs, old_values=row.old_logprobs
        )
        for row in window()
    ]
    found, same = {}, {}
    with true_float64():
        for name, options in PASSES.items():
            settings = {"layout": "padded", "max_tokens_per_gpu": 30} | options
            is_scorer, is_critic = settings.pop("is_scorer", False), settings.pop("is_critic", False)
            settings |= {"loss": "value_clip", "value_clip": 0.2} if is_critic else {}
            model = tiny_critic() if is_critic else tiny_model()
            if is_sharded:
                evenstep.train.shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            runner: Any = (
                evenstep.train.Scorer(model, **settings)
                if is_scorer
                else evenstep.train.Trainer(model, optimizer, **settings)
            )
            act = runner.score if name in SCORED else runner.forward_backward
            for change_name, change in PASS_CHANGES.items():
                mine = change(list(rows)) if is_odd else rows
                found[f"{name}: {change_name}"] = attempt(functools.partial(act, mine))
            other = runner.prepare(rows, max_tokens_per_gpu=60 if is_odd else 30)
            found[f"{name}: plan"] = attempt(functools.partial(act, other))
            same[name] = attempt(functools.partial(act, rows))
    return found, same


@pytest.mark.parametrize("is_sharded", [False, True])
def test_every_pass(is_sharded: bool) -> None:
    for found, same in run_ranks(disagree_in_every_pass, 2, is_sharded):
        assert len(found) == len(PASSES) * (len(PASS_CHANGES) + 1)
        for name, (kind, message, seconds) in found.items():
            assert kind == "DistributedError", name
            assert all(f"rank {rank}: " in message for rank in range(2)), name
            assert seconds < LIMIT_S
        assert {name: kind for name, (kind, _, _) in same.items()} == dict.fromkeys(PASSES, "")


def other_options() -> dict[str, tuple[str, str, float]]:
    """A reference and a critic whose options differ by rank."""
    odd, found = dist.get_rank() == 1, {}
    scorer: dict[str, Any] = {"temperature": 0.5} if odd else {}
    found["reference"] = attempt(lambda: evenstep.train.Scorer(tiny_model(), **scorer))
    critic = tiny_critic()
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    clip = 0.1 if odd else 0.2
    found["critic"] = attempt(lambda: evenstep.train.Trainer(critic, optimizer, loss="value_clip", value_clip=clip))
    return found


def test_options_of_other_models() -> None:
    for found in run_ranks(other_options, 2):
        for name, (kind, message, seconds) in found.items():
            assert kind == "DistributedError", name
            assert "options" in message
            assert all(f"rank {rank}: " in message for rank in range(2))
            assert seconds < LIMIT_S


def test_same_rows_run() -> None:
    """The changes above are what is refused, not the window."""
    found = run_ranks(run_cases, 2, [dataclasses.replace(case(False), rows=window())])
    assert found[0][0].loss == found[1][0].loss
