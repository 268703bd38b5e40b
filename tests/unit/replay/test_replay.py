"""What is locked here, on real gloo ranks that share one recording of three windows:

1. Right arms pass: every row once, every step, equal gradients; the figures have their promised names; the noise floor
   is at least 1e-7 and comes from the first arm; nothing is left on disk.
2. A wrong normaliser is seen in the gradient and fails; the step, a parameter, a row and its cell are named.
3. A lost row, a crash in one rank, memory that runs out, and a step that hangs are lines of the result, and fail.
4. Every arm is near the float64 oracle.
5. What was scored for the run is scored once, by the first arm, and all arms see the same rows.
6. Credit is the run's, also where a drifted history leaves sampled tokens untrained.
7. A first arm that cannot start, too little disk, and wrong arms are the user's errors.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
from evenstep.config import load_config
from evenstep.errors import ConfigError
from evenstep.files import write_rollouts
from evenstep.replay.session import ReplayOptions, replay, write_result
from evenstep.replay.show import make_progress, print_result
from evenstep.types import Call, Rollout
from replay_faults import Fault, be_rank

NUM_STEPS = 3
SEGMENTS = (1, 2, 1, 3)  # of the rollouts of a window: seven rows
CONFIG = """
run = {dir = "unused", num_collections = 3}
model = {path = "evenstep:ledger", max_context_tokens = 64}
environment = {name = "ledger"}
rollout = {num_prompts = 2, num_generations = 2, max_tokens_per_call = 8}
plan = {max_tokens_per_gpu = 64}
train = {rollouts_per_window = 4, lr = 1e-3, max_grad_norm = 0.1}
"""
FIGURES = {
    "steps_completed", "rows_consumed", "step_seconds_median", "peak_memory_bytes", "padding_efficiency",
    "speedup_paired_median", "loss_max_abs_difference", "gradient_cosine_min", "gradient_relative_difference_max",
    "update_cosine_min", "weight_max_abs_difference",
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    stop_signal: int | None = None
    exit_codes: Mapping[int, int] = field(default_factory=dict)


def launcher(fault: Fault | None = None) -> Callable[..., Ended]:
    """Starts ranks as the launcher does, from a server process that has torch already."""

    def run(arguments: Sequence[str], *, num_ranks: int) -> Ended:
        try:
            ranks.run_ranks(be_rank, num_ranks, arguments[-1], fault)
        except ranks.RanksError:
            return Ended(exit_codes={0: 1})
        return Ended()

    return run


def rollouts() -> list[Rollout]:
    draw = np.random.default_rng(0)
    found: list[Rollout] = []
    for index in range(NUM_STEPS * len(SEGMENTS)):
        calls = []
        for order in range(SEGMENTS[index % len(SEGMENTS)]):
            prompt, output = (tuple(int(x) for x in draw.integers(3, 49, draw.integers(2, 20))) for _ in range(2))
            calls.append(
                Call(
                    order=order,
                    prompt_ids=prompt,
                    output_ids=output,
                    logprobs=(-1.0,) * len(output),
                    break_reason="compaction" if order else None,
                )
            )
        group = f"g{index // 2}"
        name, reward = f"{group}/r{index % 2}", float(draw.normal())
        found.append(
            Rollout(rollout_id=name, group_id=group, prompt_id=group, reward=reward, status="ok", calls=tuple(calls))
        )
    return found


def options(folder: Path, *arms: str, settings: Sequence[str] = (), **others: Any) -> ReplayOptions:
    write_rollouts(folder / "rollouts.jsonl", rollouts())
    (folder / "config.toml").write_text(CONFIG)
    (folder / "scratch").mkdir()
    return ReplayOptions(
        source=folder / "rollouts.jsonl",
        config=load_config([folder / "config.toml"], settings),
        arms=arms,
        **({"num_ranks": 2, "max_rel": 1e-5, "scratch": folder / "scratch"} | others),
    )


def run(asked: ReplayOptions, fault: Fault | None = None) -> tuple[dict[str, Any], str]:
    said = io.StringIO()
    with make_progress(said) as progress:
        result = replay(asked, run_ranks=launcher(fault), progress=progress)
    print_result(result, said)
    assert asked.scratch is not None
    assert list(asked.scratch.iterdir()) == []
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    return result, said.getvalue()


def drifted(rollout: Rollout) -> Rollout:
    """With a second call, whose prompt holds another id than the second one that the first call sampled."""
    first = rollout.calls[0]
    prompt_ids = (*first.prompt_ids, first.output_ids[0], 3 + (first.output_ids[1] == 3))
    second = Call(order=1, parent=0, prompt_ids=prompt_ids, output_ids=(7, 8), logprobs=(-1.0, -1.0))
    return replace(rollout, calls=(first, second))


def test_whitening_weighs_by_trained_tokens(tmp_path: Path) -> None:
    """With a ratio of 1 the loss is minus the mean advantage of a trained token, which whitening makes 0."""
    settings = ("credit.estimator=reinforce_pp", "rollout.on_undeclared=realign")
    asked = options(tmp_path, "padded", settings=settings, num_ranks=1, max_rel=None)
    write_rollouts(asked.source, [drifted(one) if len(one.calls) == 1 else one for one in rollouts()])
    result, _ = run(asked)
    steps = result["arms"]["padded"]["steps"]
    assert [step["loss"] for step in steps] == pytest.approx([0.0] * NUM_STEPS, abs=1e-6)
    assert all(step["grad_norm"] > 1e-3 for step in steps)


def test_a_single_step_is_timed(tmp_path: Path) -> None:
    result, _ = run(options(tmp_path, "padded", num_ranks=1, num_steps=1))
    assert result["warmup"] == 0
    assert result["arms"]["padded"]["step_seconds_median"] > 0


def test_equal_arms_and_a_wrong_normaliser(tmp_path: Path) -> None:
    wrong = "padded,credit.normaliser=rollout"
    result, said = run(options(tmp_path, "fixed", "packed,max_tokens_per_gpu=48", "auto", wrong))
    assert not result["passed"]
    fixed, packed = result["arms"]["fixed"], result["arms"]["packed,max_tokens_per_gpu=48"]
    for arm in (fixed, packed, result["arms"]["auto"]):
        assert arm.keys() >= FIGURES
        assert (arm["status"], arm["passed"]) == ("ok", True)
        assert (arm["steps_completed"], arm["rows_consumed"]) == (NUM_STEPS, NUM_STEPS * sum(SEGMENTS))
    assert 0 < packed["gradient_relative_difference_max"] <= 1e-5
    assert packed["gradient_cosine_min"] >= 1 - 1e-9
    assert 0 < packed["weight_max_difference_lr"] < 0.1
    assert packed["num_tokens_computed"] == packed["num_tokens"]
    assert fixed["gradient_relative_difference_max"] == 0.0
    assert fixed["speedup_paired_median"] == 1.0
    floor = result["noise_floor"]
    assert floor.keys() >= FIGURES
    assert 1e-7 <= floor["gradient_relative_difference_max"] < 1e-5
    again, permuted = result["noise_arms"].values()
    assert again["gradient_relative_difference_max"] == 0.0
    assert permuted["gradient_relative_difference_max"] > 0.0

    found = result["arms"][wrong]
    assert found["status"] == "ok"
    assert found["gradient_relative_difference_max"] > 0.01
    assert "its gradient differs by" in found["problem"]
    first = found["first_deviation"]
    assert first["step"] == 0
    assert first["worst_parameter"].startswith("model.")
    assert first["worst_row"].startswith("g")
    assert first["logprob_max_abs_difference"] < 1e-4  # the weights were still the same
    assert f"{wrong} failed: its gradient differs" in said
    assert f"{wrong} first left the limit in step 0" in said
    write_result(tmp_path / "replay" / "out.json", result)
    assert [path.name for path in (tmp_path / "replay").iterdir()] == ["out.json"]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, status, reason",
    [
        ("lose_row", "lost_rows", "of 7 rows exactly once; not g"),
        ("crash", "crashed", "in step 1: rank 1: RuntimeError: the arm broke"),
        ("oom", "oom", "in step 1: rank 1: OutOfMemoryError: not enough"),
        ("hang", "hung", "in step 1: no progress in 20 s; "),
    ],
)
def test_faults_are_results(tmp_path: Path, kind: str, status: str, reason: str) -> None:
    fault = Fault(arm="padded", rank=1, kind=kind)
    timeout = {"step_timeout_s": 20.0} if kind == "hang" else {}
    result, said = run(options(tmp_path, "fixed", "padded", "packed", **timeout), fault)
    arm = result["arms"]["padded"]
    assert (arm["status"], arm["passed"]) == (status, False)
    assert reason in arm["reason"]
    assert f"padded failed: {status}" in said
    assert arm["steps_completed"] == (NUM_STEPS if kind == "lose_row" else 1)
    assert (arm["num_oom"], arm["num_hung"]) == (int(kind == "oom"), int(kind == "hang"))
    if kind == "hang":
        assert "replay_faults.py" in arm["reason"]
    # the arms beside it go on
    assert result["arms"]["packed"]["passed"]
    assert not result["passed"]
    if kind == "lose_row":
        assert arm["rows_consumed"] == arm["rows_expected"] - NUM_STEPS


@pytest.mark.long
def test_scored_once_and_the_oracle(tmp_path: Path) -> None:
    settings = ["train.epochs=2", "run.num_collections=1", "train.kl_coef=0.1", "train.windows_per_collection=1"]
    asked = options(tmp_path, "fixed", "packed", settings=settings, num_steps=4, has_oracle=True)
    result, said = run(asked)
    assert result["passed"], said
    for name, arm in result["arms"].items():
        oracle = arm["against_oracle"]
        assert 0 < oracle["gradient_relative_difference_max"] < 1e-4, name
    assert result["arms"]["packed"]["steps_completed"] == 4
    assert "against float64, one row at a time" in said
    # the second epoch's ratio is not 1, so it was taken against what was scored before the first
    assert result["arms"]["packed"]["steps"][1]["loss"] != result["arms"]["packed"]["steps"][0]["loss"]


@pytest.mark.long
def test_a_first_arm_that_crashes_later(tmp_path: Path) -> None:
    result, said = run(options(tmp_path, "fixed", "packed"), Fault(arm="fixed", rank=0, kind="crash"))
    assert not result["passed"]
    assert result["arms"]["fixed"]["status"] == "crashed"
    packed = result["arms"]["packed"]
    assert packed["steps_completed"] == NUM_STEPS
    # compared as far as there is something to compare with
    assert ["gradient_relative_difference" in step["against"]["reference"] for step in packed["steps"]] == [
        True,
        False,
        False,
    ]
    assert "the first arm, fixed, did not finish" in said


@pytest.mark.parametrize(
    "arms, others, expected",
    [
        (["padded,max_tokens=3"], {}, "did you mean `max_tokens_per_gpu`"),
        (["padded,credit.estimator=rloo"], {}, "an arm cannot set `credit.estimator`"),
        (["ragged"], {}, "`plan.layout` must be"),
        (["padded,"], {}, "separated by commas"),
        (["padded", "padded"], {}, "given once"),
        (["padded,plan.layout=fixed"], {}, "given twice"),
        ([], {}, "at least one --arm"),
        (["fixed"], {"warmup": 3}, "--warmup must leave a step to be timed"),
        (["fixed"], {"num_steps": 4}, "found 3 windows"),
        (["fixed"], {"repeats": 0}, "--repeats must be at least 1"),
        (["fixed"], {"max_rel": 0.0}, "--max-rel must be a number above 0"),
    ],
)
def test_mistakes(tmp_path: Path, arms: list[str], others: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("(", r"\(")):
        run(options(tmp_path, *arms, **others))


@pytest.mark.long
def test_the_first_arm_must_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the first arm, fixed, made no step: .*RuntimeError: the arm broke"):
        run(options(tmp_path, "fixed"), Fault(arm="fixed", rank=0, kind="crash_at_once"))
