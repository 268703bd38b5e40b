"""Routing replay on 1, 2 and 3 gloo ranks: the step of one row at a time with routers written by hand.

1. In float64, replicated and FSDP2, for Qwen3-MoE, Mixtral and gpt-oss: loss, whole gradient, per-row log-probs and the
   load-balancing loss of the replayed choice equal the reference to 1e-12, the same on every rank, for padded, packed,
   tree and fixed layouts; with activation checkpointing, padding and fillers full of other tokens, rows without a record
   beside rows with one, and fewer rows than ranks.
2. The routers' own choice, or the experts of the row's next token, are another step.
3. Ranks that brought other experts are told so before anything runs.
4. A run on two ranks that requires a record: its engine records experts across compaction, rollout files keep each token's
   once, log-probs are the engine's, and with the record the first ratio after scoring is exactly 1. So do servers that
   speak SGLang's protocol.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import evenstep.train
import oracle
from evenstep.config import Config, load_config
from evenstep.errors import DistributedError
from evenstep.files import read_rollouts
from evenstep.rollout.segments import rows_of
from evenstep.train.run import run_training
from evenstep.types import Row
from ranks import once, run_ranks
from routing_cases import COEF, SHAPES, case_of, reference, window
from scripted_server import ScriptedServer, Transformers
from server_runs import config_of, rollouts
from server_runs import windows as metrics_of
from step_cases import CaseOutcome, StepCase, run_cases
from tiny_models import tiny_model

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
WINDOWS = ("usual", "few rows")


def cases() -> dict[str, tuple[str, str, StepCase]]:
    """Name -> (family, window, case); the first four have each shape, family, window and way of sharding."""
    first = (
        ("qwen3_moe", "padded", "usual", True),
        ("gpt_oss", "packed", "usual", False),
        ("mixtral", "tree", "usual", True),
        ("mixtral", "fixed", "few rows", False),
    )
    every = ((f, s, w, d) for f in FAMILIES for s in SHAPES for w in WINDOWS for d in (False, True))
    found: dict[str, tuple[str, str, StepCase]] = {}
    for i, (family, shape, rows, is_sharded) in enumerate((*first, *(each for each in every if each not in first))):
        case = case_of(family, shape, rows=rows, is_sharded=is_sharded, coef=0.0 if i % 4 == 3 else COEF)
        found[case.name] = family, rows, case
    return found


CASES = cases()
QUICK = tuple(CASES)[:4]


@once
def launch(world_size: int, names: tuple[str, ...]) -> dict[str, list[CaseOutcome]]:
    by_rank = run_ranks(run_cases, world_size, [CASES[name][2] for name in names], timeout_s=300)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(names)}


def assert_exact(name: str, outcomes: list[CaseOutcome]) -> None:
    family, rows, case = CASES[name]
    coef = case.trainer["moe_balance_coef"]
    step, balance = reference(family, rows)
    loss = step.loss + coef * balance.loss
    gradient = {key: part + coef * balance.gradient[key] for key, part in step.gradient.items()}
    for outcome in outcomes:
        assert abs(outcome.loss - loss) <= 1e-12 * max(1.0, abs(loss))
        assert oracle.relative_error(outcome.gradient, gradient) <= 1e-12
        assert oracle.relative_error(outcome.logprobs, step.logprobs) <= 1e-12
        assert outcome.metrics.get("moe_balance", 0.0) == pytest.approx(balance.loss * (coef > 0), rel=1e-12)
        assert outcome.metrics == outcomes[0].metrics


@pytest.mark.timeout(330)
@pytest.mark.parametrize("name", QUICK)
def test_the_exact_step(name: str) -> None:
    assert_exact(name, launch(2, QUICK)[name])


@pytest.mark.long
@pytest.mark.timeout(330)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_case(world_size: int, name: str) -> None:
    assert_exact(name, launch(world_size, tuple(CASES))[name])


@pytest.mark.timeout(330)
def test_wrong_choices_differ() -> None:
    _, rows, case = CASES[QUICK[0]]
    right = launch(2, QUICK)[QUICK[0]][0].gradient
    for wrong in (None, 1):
        changed: list[Row] = []
        for row in window(rows):
            experts = row.routed_experts
            if experts is not None:
                other = None if wrong is None else np.roll(experts.experts_TLX, -wrong, axis=0)
                row = dataclasses.replace(row, routed_experts=other)
            changed.append(row)
        (found,) = run_cases([dataclasses.replace(case, rows=changed, is_sharded=False)])
        assert oracle.relative_error(found.gradient, right) > 0.01


def bring_other_experts() -> str:
    rank = torch.distributed.get_rank()
    rows = list(window("few rows"))
    experts = rows[0].routed_experts
    assert experts is not None
    rows[0] = dataclasses.replace(rows[0], routed_experts=np.flip(experts.experts_TLX, axis=2) if rank else experts)
    model = tiny_model("mixtral", dtype=torch.float32)
    settings: dict[str, Any] = {"layout": "padded", "max_tokens_per_gpu": 30}
    trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    with pytest.raises(DistributedError) as found:
        trainer.forward_backward(rows)
    return str(found.value)


def test_ranks_that_disagree_are_told() -> None:
    for message in run_ranks(bring_other_experts, 2, timeout_s=120):
        assert message.startswith("every rank must")
        assert "window" in message


ROOT = Path(__file__).resolve().parents[2]


def make_model(folder: Path) -> None:
    """Random experts behind the demo's tokenizer."""
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / "src" / "evenstep" / "data" / "ledger" / name, folder / name)
    shape = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 49}
    shape |= {"num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**shape, eos_token_id=2, pad_token_id=0, bos_token_id=None)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def train(config: Config) -> None:
    run_training(config)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_on_a_server(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    with ScriptedServer(Transformers(str(tmp_path / "model")), kind="sglang") as server:
        path = config_of(
            tmp_path,
            model={"path": str(tmp_path / "model")},
            engine={"urls": [server.url], "kind": "sglang"},
            train={"routing_replay": "required", "lr": 0.01},
        )
        run_ranks(train, 2, load_config([path]), timeout_s=180)
    lines = metrics_of(tmp_path)
    assert [line["stepped"] for line in lines] == [True] * 3
    assert all(line["engine_logprob_difference_max"] < 1e-4 for line in lines)
    for collection in range(3):
        for rollout in rollouts(tmp_path, collection).values():
            for call in rollout.calls:
                assert call.routed_experts is not None
                assert call.routed_experts.shape[1:] == (2, 2)
            for row in rows_of([rollout]):
                assert row.routed_experts is not None
                assert row.routed_experts.is_known_T[:-1].all()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    run = tmp_path / "run"
    settings = {
        "model.path": tmp_path / "model",
        "run.dir": run,
        "run.num_collections": 2,
        "rollout.num_prompts": 2,
        "train.rollouts_per_window": 8,
        "train.windows_per_collection": 2,
        "train.routing_replay": "required",
        "train.entropy_coef": 0.05,
        "train.lr": 0.01,
        "checkpoint.export": "false",
        "evaluation.every": 10,
    }
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "evenstep", "train", "examples/ledger_tree.toml", "--ranks", "2", *flags]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=190, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in lines if "stepped" in line]
    assert [window["stepped"] for window in windows] == [True] * 4
    assert [window["ratio_max_deviation"] == 0.0 for window in windows] == [True, False, True, False]
    assert all(window["engine_logprob_difference_max"] < 1e-5 for window in windows)
    for path in sorted((run / "rollouts").glob("collection_*")):
        rollouts = list(read_rollouts(path))
        for rollout in rollouts:
            for before, call in zip((None, *rollout.calls), rollout.calls, strict=False):
                num_known = 0
                if before is not None and call.break_reason is None:
                    num_known = len(before.prompt_ids) + len(before.output_ids) - 1
                assert call.routed_experts is not None
                assert call.routed_experts.num_tokens == len(call.prompt_ids) + len(call.output_ids) - num_known
        assert any(call.break_reason for rollout in rollouts for call in rollout.calls)
        for row in rows_of(rollouts):
            assert row.routed_experts is not None
            assert row.routed_experts.is_known_T.tolist() == [True] * (row.num_tokens - 1) + [False]
