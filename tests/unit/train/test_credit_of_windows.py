"""Credit of a window's rows, as a run asks for it:

1. gae refuses a rollout whose calls branch, also where only their ids say so, and takes one that was compacted
2. an estimator by rollout takes both
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from evenstep.config import Config, load_config
from evenstep.errors import CreditError
from evenstep.train.passes import WindowRows, credited
from evenstep.types import Call, Group, Rollout, Window

CONFIG = """
run = {dir = "unused", num_collections = 1}
model = {path = "evenstep:ledger", max_context_tokens = 64}
environment = {name = "ledger"}
rollout = {num_prompts = 1, num_generations = 2, max_tokens_per_call = 4}
plan = {max_tokens_per_gpu = 64}
train = {rollouts_per_window = 2, lr = 1e-3}
"""


def config_of(folder: Path, estimator: str) -> Config:
    path = folder / "config.toml"
    path.write_text(CONFIG)
    return load_config([path], [f"credit.estimator={estimator}"])


def call(order: int, prompt: tuple[int, ...], output: int, reason: str | None = None) -> Call:
    return Call(order=order, prompt_ids=prompt, output_ids=(output,), logprobs=(-1.0,), break_reason=reason)  # type: ignore[arg-type]


COMPACTED = (call(0, (1,), 2), call(1, (1, 2, 3), 4), call(2, (1, 9), 6, "compaction"))
FORKED = (call(0, (1,), 2), call(1, (1, 2, 3), 4), call(2, (1, 2, 5), 6))  # both continue call 0, by their ids


def window_of(calls: tuple[Call, ...]) -> WindowRows:
    rollouts = tuple(
        Rollout(rollout_id=name, group_id="g", prompt_id="p", reward=reward, calls=calls)
        for name, reward in (("a", 1.0), ("b", 0.25))
    )
    group = Group(group_id="g", prompt_id="p", rollouts=rollouts)
    found = WindowRows.of(Window(window=0, collection=0, epoch=0, groups=(group,)))
    rows = tuple(dataclasses.replace(row, old_values=np.zeros(row.num_tokens)) for row in found.rows)
    return dataclasses.replace(found, rows=rows)


def test_gae_needs_one_order(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gae")

    def unused(*_: object) -> dict[str, float]:
        raise AssertionError

    with pytest.raises(CreditError, match=r"rollout 'a': gae needs one order of tokens, found calls that branch"):
        credited(window_of(FORKED), config, unused)
    rows = credited(window_of(COMPACTED), config, unused).rows
    assert [row.returns[row.loss_mask].tolist() for row in rows if row.returns is not None] == [
        *([1.0, 1.0], [1.0]),
        *([0.25, 0.25], [0.25]),
    ]


def test_an_estimator_by_rollout_takes_branches(tmp_path: Path) -> None:
    for calls in (FORKED, COMPACTED):
        rows = credited(window_of(calls), config_of(tmp_path, "grpo"), lambda rollouts: {"a": 0.5, "b": -0.5}).rows
        assert {(row.rollout_id, float(row.advantages_T.sum())) for row in rows} >= {("a", 0.5), ("b", -0.5)}
        assert sum(row.num_trained_tokens for row in rows) == 6
