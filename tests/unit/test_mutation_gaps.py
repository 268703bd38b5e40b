"""What a wrong formula in the production code once went unnoticed by. Locks:

1. the learning rate by hand: a warm-up that ends at the peak, then constant, a line or half a cosine down to 0
2. reward mean, deviation and counts take each voting rollout once, however many calls it has, and no failed one
3. a cell of layout ``fixed`` is measured by its shape, fillers included
4. a plan whose padded rectangle exceeds the budget is refused, also where the rows' sum is within it
5. chunks of logits are not all kept for the backward pass
6. a window without trained tokens does not step, also when a KL term has a coefficient
7. a window steps when a single one of its rows has an advantage
8. gspo by rollout: rows of a rollout on two ranks have one ratio
9. a rollout that the sequence mask rejects sends no gradient, also when the ratio of its tokens overflows
10. KL in the reward and credit by GAE of a rollout of two rows, and the clipped value loss, by hand
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import numpy as np
import pytest
import torch

import evenstep.train
import oracle
from evenstep.credit.rows import credit_by_gae, kl_penalties
from evenstep.errors import PlanError
from evenstep.plan import plan_step
from evenstep.plan.footprint import Room
from evenstep.train.losses import ValueBatch, value_clip
from evenstep.train.metrics import rollout_metrics
from evenstep.train.schedule import learning_rate
from evenstep.types import Call, Group, Rollout, Row, Window
from loss_matrix import near_policies
from ranks import run_ranks
from step_cases import StepCase, build, run_case, run_cases
from tiny_models import VOCAB, tiny_model
from tiny_rows import make_rows


@pytest.mark.parametrize(
    ("schedule", "after_warmup"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0, 0.0]),
    ],
    ids=["constant", "linear", "cosine"],
)
def test_learning_rate_by_hand(schedule: str, after_warmup: list[float]) -> None:
    found = [learning_rate(step, peak=0.02, schedule=schedule, warmup_steps=2, total_steps=6) for step in range(2 + 6)]
    assert found == pytest.approx([0.02 * share for share in [0.5, 1.0, *after_warmup]], abs=1e-17)
    assert learning_rate(0, peak=0.02, schedule=schedule, warmup_steps=0, total_steps=1) == 0.02


def rollout(name: str, reward: float | None, num_calls: int, status: str = "ok", group_id: str = "g") -> Rollout:
    calls = tuple(Call(order=i, prompt_ids=(1,), output_ids=(2,), logprobs=(-1.0,)) for i in range(num_calls))
    return Rollout(rollout_id=name, group_id=group_id, prompt_id="p", reward=reward, calls=calls, status=status)  # type: ignore[arg-type]


def test_rollouts_are_counted_once() -> None:
    members = (
        rollout("a", 1.0, 1),
        rollout("b", 0.0, 4),
        rollout("c", 0.5, 2, status="truncated"),
        rollout("d", None, 0, status="failed"),
    )
    group = Group(group_id="g", prompt_id="p", rollouts=members)
    lone = Group(group_id="h", prompt_id="p", rollouts=(rollout("e", 0.5, 3, group_id="h"),))
    found = rollout_metrics(Window(window=0, collection=0, epoch=0, groups=(group, lone)), optimizer_step=3)
    expected = {
        "num_rollouts": 5,
        "num_voters": 4,
        "num_failed": 1,
        "num_truncated": 1,
        "reward_mean": 0.5,
        "reward_std": pytest.approx(math.sqrt(0.5 / 3), rel=1e-14),
        "zero_spread_fraction": 0.5,
        "staleness_max": 3,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_fixed_cell_is_measured_with_its_fillers() -> None:
    room = Room(layout="fixed", budget=24, multiple=4, cell_rows=3)
    assert room.cell_footprint(np.array([7])) == room.cell_footprint(np.array([7, 2])) == 3 * 8
    assert room.filler_footprint == 3 * 4


def test_the_rectangle_is_checked() -> None:
    plan = plan_step([6, 6, 4, 4], num_ranks=1, max_tokens_per_gpu=10)
    smaller = dataclasses.replace(plan, cells=(((0, 2), (1, 3)),))
    with pytest.raises(PlanError, match=r"'budget': a micro-batch occupies at most 10 tokens, found 12"):
        smaller.check([6, 6, 4, 4])


def test_chunks_of_logits_are_not_saved() -> None:
    rows, saved = make_rows(((2, 1),)), []
    model, trainer = build(StepCase(name="saved", rows=rows, trainer={"logprob_chunk_tokens": 1}))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.forward_backward(rows)
    assert len(saved) > 10
    assert sum(shape[0] for shape in saved if shape[-1:] == (VOCAB,)) < sum(row.num_trained_tokens for row in rows)


def test_no_trained_token_no_step() -> None:
    rows = [
        dataclasses.replace(row, loss_mask=[0] * row.num_tokens, ref_logprobs=[-1.0] * row.num_tokens)
        for row in make_rows(((1, 1),))
    ]
    case = StepCase(name="none", rows=rows, trainer={"kl_coef": 0.1}, optimizer="AdamW", keeps_weights=True)
    found = run_case(dataclasses.replace(case, optimizer_args={"lr": 0.1, "weight_decay": 0.1}))
    assert found.stepped == (False,)
    assert found.skip_reasons == ("no trained tokens in the window",)
    assert all(torch.equal(found.weights[1][name], before) for name, before in found.weights[0].items())


def test_one_row_with_an_advantage_is_enough() -> None:
    rows = [dataclasses.replace(row, advantage=0.5 * (i == 1)) for i, row in enumerate(make_rows(((1, 1), (1,))))]
    found = run_case(StepCase(name="one", rows=rows))
    assert found.stepped == (True,)
    assert found.grad_norms[0] > 1e-3


def test_rollouts_across_ranks_have_one_ratio() -> None:
    rows = near_policies(make_rows(((2, 2),)))
    case = StepCase(name="gspo", rows=rows, trainer={"loss": "gspo", "ratio_unit": "rollout"})
    by_rank = run_ranks(run_cases, 2, [case])
    ranks_of = {row_id: rank for rank, (found,) in enumerate(by_rank) for row_id in found.own_logprobs}
    assert any(len({ranks_of[row.row_id] for row in rows if row.rollout_id == o}) == 2 for o in ("g0/r0", "g0/r1"))
    for (found,) in by_rank:
        assert oracle.relative_error(found.gradient, case.oracle().gradient) < 1e-12


def split_rollout() -> list[Row]:
    """Tokens with V = 0.5, 0.25 | 1.0 and old - ref = 0.5, 0 | -1."""
    shape = {"rollout_id": "o", "group_id": "g"}
    first = Row(
        row_id="a",
        token_ids=[5, 6, 7],
        loss_mask=[0, 1, 1],
        old_values=[9.0, 0.5, 0.25],
        old_logprobs=[9.0, -1.0, -2.0],
        ref_logprobs=[9.0, -1.5, -2.0],
        **shape,
    )
    second = Row(
        row_id="b",
        token_ids=[5, 6],
        loss_mask=[0, 1],
        old_values=[9.0, 1.0],
        old_logprobs=[9.0, -2.0],
        ref_logprobs=[9.0, -1.0],
        **shape,
    )
    return [first, second]


def test_kl_in_the_reward_by_hand() -> None:
    rows = split_rollout()
    assert kl_penalties(rows, 0.1, "k1") == {"o": pytest.approx(0.1 * (0.5 + 0.0 - 1.0), abs=1e-15)}
    assert kl_penalties(rows, 0.1, "k2") == {"o": pytest.approx(0.1 * (0.125 + 0.5), abs=1e-15)}
    k3 = (math.exp(-0.5) - 1 + 0.5) + (math.exp(1.0) - 1 - 1.0)
    assert kl_penalties(rows, 0.1, "k3") == {"o": pytest.approx(0.1 * k3, abs=1e-15)}


def test_credit_of_a_split_rollout_by_hand() -> None:
    found = credit_by_gae(
        [rollout("o", 2.0, 1)], split_rollout(), gamma=0.5, lam=0.5, terminal_values={"o": 4.0}, kl_coef=0.1
    )
    # δ = -0.05 + 0.5·0.25 - 0.5, 0.5·1 - 0.25, 2 + 0.1 + 0.5·4 - 1; γλ = 0.25
    last = 3.1
    middle = 0.25 + 0.25 * last
    first = -0.425 + 0.25 * middle
    assert [row.row_id for row in found] == ["a", "b"]
    assert found[0].advantages_T.tolist() == pytest.approx([0.0, first, middle], abs=1e-15)
    assert found[1].advantages_T.tolist() == pytest.approx([0.0, last], abs=1e-15)
    returns = [row.returns for row in found]
    assert returns[0] == pytest.approx([0.0, first + 0.5, middle + 0.25], abs=1e-15)
    assert returns[1] == pytest.approx([0.0, last + 1.0], abs=1e-15)


def test_value_clip_by_hand() -> None:
    """Towards 2 from 0 with clip 0.5: a value past the clip has the error of 0.5; one that moved away keeps its own."""
    values_N = torch.tensor([1.0, 0.25, -1.0], dtype=torch.float64, requires_grad=True)
    zeros_N = torch.zeros(3, dtype=torch.float64)
    batch = ValueBatch(values_N=values_N, old_values_N=zeros_N, returns_N=zeros_N + 2.0, clip=0.5)
    loss_N, metrics = value_clip(batch)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), values_N)
    assert loss_N.tolist() == [0.5 * 1.5**2, 0.5 * 1.75**2, 0.5 * 3.0**2]
    assert gradient_N.tolist() == [0.0, -1.75, -3.0]
    assert metrics["value_clip_fraction"].tolist() == [1.0, 0.0, 0.0]
    free_N, _ = value_clip(dataclasses.replace(batch, clip=None))
    assert free_N.tolist() == [0.5, 0.5 * 1.75**2, 4.5]


def test_a_rejected_ratio_may_overflow() -> None:
    rows = [
        dataclasses.replace(
            row,
            advantage=-1.0,
            old_logprobs=np.full(row.num_tokens, -150.0 if row.rollout_id == "g0/r0" else -3.0),
            engine_logprobs=np.full(row.num_tokens, -3.0),
        )
        for row in make_rows(((1, 1),))
    ]
    model = tiny_model(dtype=torch.float32)
    settings: dict[str, Any] = {"max_tokens_per_gpu": 40, "sequence_mask": (0.5, 2.0)}
    trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    metrics = trainer.forward_backward(rows).metrics
    assert 0 < cast(float, metrics["kept_fraction"]) < 1
    assert math.isfinite(trainer.optim_step().grad_norm)
