"""Windows for every loss × normaliser × estimator: credited rollouts over several rows, some without any."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credit_oracle import Credited, advantages, gae_by_segment
from evenstep.credit import gae, rollout_advantages
from evenstep.train.losses import TokenBatch
from evenstep.types import Call, Rollout, Row
from oracle import oracle_step
from step_cases import StepCase
from step_matrix import NORMALISERS
from tiny_models import tiny_model, true_float64
from tiny_rows import make_rows, with_garbage

SEGMENTS = ((1, 2), (2, 1), (1,))  # 7 rows; g2 has one voter only
REWARDS: dict[str, float | None] = {
    "g0/r0": 0.7,
    "g0/r1": 0.35,
    "g0/r2": 0.15,  # votes without a trained token
    "g1/r0": 0.95,
    "g1/r1": -0.45,
    "g1/r2": None,  # failed
    "g2/r0": 1.3,
}
GAE = {"gamma": 0.97, "lam": 0.9}
# clip ranges so near to 1 that about half of the tokens meet them
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.1, "clip_high": 0.28},
    "ppo-dual": {"clip_high": 0.15, "dual_clip": 1.2},
    "gspo-rollout": {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "gspo-segment": {"loss": "gspo", "ratio_unit": "segment", "clip_low": 0.04, "clip_high": 0.05, "dual_clip": 1.1},
    "cispo": {"loss": "cispo", "clip_high": 0.1},
}
TERMS: dict[str, dict[str, Any]] = {
    "none": {},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.2},
    "entropy": {"entropy_coef": 0.05},
    "capped": {"importance_cap": 1.1},
    "masked": {"sequence_mask": (0.9, 1.2)},
    "all": {"kl_coef": 0.1, "entropy_coef": -0.02, "importance_cap": 0.9},
    "all masked": {"kl_coef": 0.1, "entropy_coef": 0.03, "importance_cap": 1.2, "sequence_mask": (0.85, 1.17)},
}
SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded", "max_tokens_per_gpu": 22},
    "packed": {"layout": "packed", "max_tokens_per_gpu": 22},
    "tree": {"layout": "tree", "max_tokens_per_gpu": 22},
    "fixed": {"layout": "fixed", "micro_batch_rows": 2},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "loss": tuple(LOSSES),
    "normaliser": tuple(NORMALISERS),
    "estimator": ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"),
    "terms": tuple(TERMS),
    "shape": tuple(SHAPES),
    "is_sharded": (False, True),
    "has_old": (True, False),
    "is_dirty": (False, True),
    "temperature": (1.0, 0.7),
    "chunk": (1024, 3),
}


def rollouts_of(rows: Sequence[Row]) -> list[Rollout]:
    """The rollouts that the rows were made from, and those without rows."""
    found = []
    for rollout_id, reward in REWARDS.items():
        outputs = [row.token_ids[row.loss_mask].tolist() for row in rows if row.rollout_id == rollout_id]
        calls = tuple(
            Call(order=i, prompt_ids=(1,), output_ids=tuple(ids), logprobs=(0.0,) * len(ids), break_reason="compaction")
            for i, ids in enumerate(outputs)
        )
        fields: dict[str, Any] = {"rollout_id": rollout_id, "group_id": rollout_id[:2], "prompt_id": "p"}
        status: Any = "failed" if reward is None else "ok"
        found.append(Rollout(**fields, calls=calls, reward=reward, status=status))
    return found


def values_of(rows: Sequence[Row]) -> dict[Any, Any]:
    """Row id -> [T] what a critic might say of each token."""
    random = np.random.default_rng(11)
    return {row.row_id: random.normal(0.5, 0.4, row.num_tokens) for row in rows}


def with_credit(rows: Sequence[Row], estimator: str) -> list[Row]:
    """Rows with the advantages of ``evenstep.credit``."""
    if estimator != "gae":
        found = rollout_advantages(rollouts_of(rows), estimator)
        return [dataclasses.replace(row, advantage=found[str(row.rollout_id)]) for row in rows]
    values, credited = values_of(rows), []
    for rollout_id in dict.fromkeys(row.rollout_id for row in rows):
        mine = [row for row in rows if row.rollout_id == rollout_id]
        reward = REWARDS[str(rollout_id)]
        assert reward is not None
        left = gae(np.concatenate([values[row.row_id][row.loss_mask] for row in mine]), reward, **GAE).advantages
        for row in mine:
            advantage = np.zeros(row.num_tokens)
            advantage[row.loss_mask], left = left[: row.num_trained_tokens], left[row.num_trained_tokens :]
            credited.append(dataclasses.replace(row, advantage=advantage))
    return credited


def with_oracle_credit(rows: Sequence[Row], estimator: str) -> list[Row]:
    """Rows with the advantages of the reference."""
    if estimator != "gae":
        credited = [
            Credited(
                rollout_id=rollout_id,
                group_id=rollout_id[:2],
                reward=reward,
                num_tokens=sum(row.num_trained_tokens for row in rows if row.rollout_id == rollout_id),
                is_voter=reward is not None,
            )
            for rollout_id, reward in REWARDS.items()
        ]
        found = advantages(estimator, credited)
        return [dataclasses.replace(row, advantage=found[str(row.rollout_id)]) for row in rows]
    values, by_row = values_of(rows), {}
    for rollout_id, reward in REWARDS.items():
        mine = [row for row in rows if row.rollout_id == rollout_id]
        segments = [(row.loss_mask.tolist(), values[row.row_id].tolist()) for row in mine]
        if mine and reward is not None:
            by_row |= zip([row.row_id for row in mine], gae_by_segment(segments, reward, **GAE), strict=True)
    return [dataclasses.replace(row, advantage=by_row[row.row_id][0]) for row in rows]


def near_policies(rows: Sequence[Row], *, temperature: float = 1.0) -> list[Row]:
    """The rows with old, reference and engine log-probs that differ from the model's own by some tenths."""
    with true_float64():
        own = oracle_step(tiny_model(attention="eager"), rows, temperature=temperature).logprobs
    random = np.random.default_rng(7)
    spreads = {"old_logprobs": 0.3, "ref_logprobs": 0.5, "engine_logprobs": 0.2}
    near = []
    for row in rows:
        fields: dict[str, Any] = {
            name: own[row.row_id].numpy() + random.normal(0, spread, row.num_tokens) for name, spread in spreads.items()
        }
        near.append(dataclasses.replace(row, **fields))
    return near


@functools.cache
def policy_rows(temperature: float) -> list[Row]:
    return near_policies(make_rows(SEGMENTS, seed=2, max_tokens=10), temperature=temperature)


def build_case(point: Mapping[str, Any]) -> StepCase:
    """The case of one point of the product, its rows credited by ``evenstep.credit``."""
    rows = with_credit(policy_rows(point["temperature"]), point["estimator"])
    if not point["has_old"]:
        rows = [dataclasses.replace(row, old_logprobs=None) for row in rows]
    settings = NORMALISERS[point["normaliser"]] | LOSSES[point["loss"]] | TERMS[point["terms"]] | SHAPES[point["shape"]]
    return StepCase(
        name=" ".join(f"{name}={value}" for name, value in point.items()),
        rows=with_garbage(rows) if point["is_dirty"] else rows,
        voters={rollout_id: rollout_id[:2] for rollout_id, reward in REWARDS.items() if reward is not None},
        trainer=settings | {"temperature": point["temperature"], "logprob_chunk_tokens": point["chunk"]},
        is_sharded=point["is_sharded"],
    )


def oracle_case(point: Mapping[str, Any]) -> StepCase:
    """The same case, its rows credited by the reference."""
    case = build_case(point | {"is_dirty": False})
    return dataclasses.replace(case, rows=with_oracle_credit(case.rows, point["estimator"]))


def split_row(row: Row, cut: int) -> list[Row]:
    """The row as two segments of its rollout: up to ``cut``, and all of it with what was trained before as context."""
    is_late = np.arange(row.num_tokens) >= cut
    names = ("token_ids", "loss_mask", "old_logprobs", "ref_logprobs", "engine_logprobs")
    early: dict[str, Any] = {name: getattr(row, name)[:cut] for name in names}
    return [
        dataclasses.replace(row, row_id=f"{row.row_id}/early", **early),
        dataclasses.replace(row, row_id=f"{row.row_id}/late", loss_mask=row.loss_mask & is_late),
    ]


def own_ppo_clip(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """What a user may write: the same loss in other words, and a metric of their own."""
    ratio_N = (batch.logprobs_N - batch.old_logprobs_N).exp()
    bounded_N = torch.clip(ratio_N, 1 - batch.clip_low, 1 + batch.clip_high)
    loss_N = torch.maximum(-batch.advantages_N * ratio_N, -batch.advantages_N * bounded_N)
    return loss_N, {"squared_advantage": batch.advantages_N**2}
