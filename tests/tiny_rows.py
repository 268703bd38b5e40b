"""Windows of rows with many segments: random, seeded, and dirty where nothing may look."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from evenstep.types import Row
from oracle import grpo_advantages, oracle_step
from tiny_models import VOCAB

REWARDS = (0.7, 0.35, 0.95, 0.1, 0.55, 1.3, -0.45, 0.15)  # not exact in binary
LOGPROB_FIELDS = ("old_logprobs", "ref_logprobs", "engine_logprobs")
SEED_A_SEGMENTS = ((1, 3), (2, 5), (1, 1))  # segments of each rollout of each group: 13 rows


def make_rows(
    segments: Sequence[Sequence[int]] = SEED_A_SEGMENTS,
    *,
    seed: int = 0,
    min_tokens: int = 4,
    max_tokens: int = 14,
    has_uneven_advantages: bool = False,
) -> list[Row]:
    """Rows of ``segments[group][rollout]`` segments each: random ids, one to three trained stretches, GRPO advantages.

    ``has_uneven_advantages`` gives every token an advantage of its own instead of one per rollout.
    """
    random = np.random.default_rng(seed)
    rollouts: list[tuple[str, str, float | None, bool]] = []
    for g, counts in enumerate(segments):
        for r in range(len(counts)):
            rollouts.append((f"g{g}/r{r}", f"g{g}", REWARDS[len(rollouts) % len(REWARDS)], True))
    advantages = grpo_advantages(rollouts)
    rows = []
    for g, counts in enumerate(segments):
        for r, num_segments in enumerate(counts):
            for s in range(num_segments):
                num_tokens = int(random.integers(min_tokens, max_tokens + 1))
                mask = (random.random(num_tokens) < 0.6).astype(int)
                mask[0], mask[-1] = 0, 1
                advantage: Any = advantages[f"g{g}/r{r}"]
                if has_uneven_advantages:
                    advantage = advantage + random.normal(size=num_tokens)
                rows.append(
                    Row(
                        row_id=f"g{g}/r{r}/s{s}",
                        rollout_id=f"g{g}/r{r}",
                        group_id=f"g{g}",
                        token_ids=random.integers(0, VOCAB, num_tokens),
                        loss_mask=mask,
                        advantage=advantage,
                    )
                )
    return rows


def with_shared_beginnings(rows: Sequence[Row], *, num_tokens: int = 3, seed: int = 0) -> list[Row]:
    """The rows of a group begin with up to ``num_tokens`` of the same tokens; nothing else changes."""
    random = np.random.default_rng(seed)
    groups = sorted({str(row.group_id) for row in rows})
    prompts = {group: random.integers(0, VOCAB, num_tokens) for group in groups}
    shared = []
    for row in rows:
        length = int(random.integers(1, num_tokens + 1))
        ids = row.token_ids.copy()
        ids[:length] = prompts[str(row.group_id)][: min(length, row.num_tokens)]
        shared.append(dataclasses.replace(row, token_ids=ids))
    return shared


def with_old_logprobs(
    rows: Sequence[Row], model: Any, *, seed: int = 0, spread: float = 0.3, names: Sequence[str] = ("old_logprobs",)
) -> list[Row]:
    """The rows with old log-probs near the model's own, so that about half of the tokens leave the clip range.

    ``names`` are the fields that get such values, each its own.
    """
    random = np.random.default_rng(seed)
    logprobs = oracle_step(model, rows).logprobs
    near = []
    for row in rows:
        own = logprobs[row.row_id].double().numpy()
        fields: dict[str, Any] = {name: own + random.normal(0, spread, row.num_tokens) for name in names}
        near.append(dataclasses.replace(row, **fields))
    return near


def split_at_turns(row: Row) -> list[Row]:
    """One row for each trained stretch of the row: all that came before it is context, trained stretches too."""
    mask = row.loss_mask
    ends = (np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1).tolist()
    if len(ends) < 2:
        return [row]
    parts = []
    for i, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        fields: dict[str, Any] = {"loss_mask": (mask & (np.arange(row.num_tokens) >= start))[:end]}
        for name in ("token_ids", "advantage", *LOGPROB_FIELDS):
            values = getattr(row, name)
            fields[name] = values[:end] if isinstance(values, np.ndarray) else values
        parts.append(dataclasses.replace(row, row_id=f"{row.row_id}#{i}", **fields))
    return parts


def filler_rows(rows: Sequence[Row], count: int, *, seed: int = 0) -> list[Row]:
    """Rows of the same rollouts that train nothing: all masked, other tokens, garbage in every per-token field."""
    random = np.random.default_rng(seed)
    fillers = []
    for i in range(count):
        owner, num_tokens = rows[i % len(rows)], int(random.integers(2, 6))
        fields: dict[str, Any] = {
            name: np.zeros(num_tokens) for name in LOGPROB_FIELDS if getattr(owner, name) is not None
        }
        fields |= {"token_ids": random.integers(0, VOCAB, num_tokens), "loss_mask": np.zeros(num_tokens)}
        fields |= {"rollout_id": owner.rollout_id, "group_id": owner.group_id}
        fillers.append(Row(row_id=f"filler/{i}", **fields))
    return with_garbage(fillers)


def with_garbage(rows: Sequence[Row]) -> list[Row]:
    """The rows with NaN, infinities and huge values in every per-token field wherever the mask is 0."""
    junk = np.asarray([np.nan, np.inf, -np.inf, 1e30, -1e30, -150.0])
    dirty = []
    for i, row in enumerate(rows):
        fields: dict[str, Any] = {"advantage": np.broadcast_to(row.advantage, row.num_tokens)}
        for name in LOGPROB_FIELDS:
            values = getattr(row, name)
            if values is not None:
                fields[name] = values
        shifts = {"advantage": 0, "old_logprobs": 1, "ref_logprobs": 2, "engine_logprobs": 3}
        for name, values in fields.items():
            garbage = junk[(np.arange(row.num_tokens) + i + shifts[name]) % len(junk)]
            fields[name] = np.where(row.loss_mask, values, garbage)
        dirty.append(dataclasses.replace(row, **fields))
    return dirty
