"""Credit of a window's rows, as a run asks for it:

1. gae refuses a rollout whose calls branch, also where only their ids say so, and takes one that was compacted
2. an estimator by rollout takes both
3. undeclared breaks: an error that names rollout, call, place, ids and key; a segment; or realigned, and counted
4. whitening weighs a rollout by its trained tokens, not by the sampled ones of which some were realigned
5. log-probs of tokens drawn with top-p, top-k, penalties, masks, greedily or at another temperature are not compared
   with the trainer's: rows go without them, and what needs them is refused by name
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evenstep.config import Config, load_config
from evenstep.errors import CreditError, SegmentationError
from evenstep.files import write_rollouts
from evenstep.rollout.call_tree import OnUndeclared
from evenstep.rollout.segments import rows_of
from evenstep.train.passes import WindowRows, credited, scored
from evenstep.train.run import run_training
from evenstep.types import Call, Group, Rollout, Sampling, Window

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


def window_of(
    calls: tuple[Call, ...], others: tuple[Call, ...] | None = None, on_undeclared: OnUndeclared = "error"
) -> WindowRows:
    """Rollout a with reward 1 and these calls, rollout b with reward 0.25 and the same or other ones."""
    rollouts = tuple(
        Rollout(rollout_id=name, group_id="g", prompt_id="p", reward=reward, calls=made)
        for name, reward, made in (("a", 1.0, calls), ("b", 0.25, calls if others is None else others))
    )
    group = Group(group_id="g", prompt_id="p", rollouts=rollouts)
    found = WindowRows.of(Window(window=0, collection=0, epoch=0, groups=(group,)), on_undeclared)
    rows = tuple(dataclasses.replace(row, old_values=np.zeros(row.num_tokens)) for row in found.rows)
    return dataclasses.replace(found, rows=rows)


RETRIED = (  # call 1 was thrown away
    call(0, (1,), 2),
    dataclasses.replace(call(1, (1, 2, 3), 4), parent=0, is_rejected=True),
    dataclasses.replace(call(2, (1, 2, 3), 6), parent=0),
)


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
    rows = credited(window_of(RETRIED), config, unused).rows
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 6]] * 2


def test_an_estimator_by_rollout_takes_branches(tmp_path: Path) -> None:
    for calls in (FORKED, COMPACTED):
        rows = credited(window_of(calls), config_of(tmp_path, "grpo"), lambda rollouts: {"a": 0.5, "b": -0.5}).rows
        assert {(row.rollout_id, float(row.advantages_T.sum())) for row in rows} >= {("a", 0.5), ("b", -0.5)}
        assert sum(row.num_trained_tokens for row in rows) == 6


# call 1 names call 0 as its parent, and its prompt has 7 where call 0 sampled 2
DRIFTED = (call(0, (1,), 2), dataclasses.replace(call(1, (1, 7, 3), 4), parent=0))


def test_undeclared_breaks() -> None:
    with pytest.raises(
        SegmentationError,
        match=r"rollout 'a', call 1: .* token 1 is 7, expected 2; .* set rollout\.on_undeclared to segment or realign",
    ):
        window_of(DRIFTED, COMPACTED)
    window = window_of(DRIFTED, COMPACTED, "segment")
    assert [row.num_trained_tokens for row in window.rows] == [1, 1, 2, 1]
    assert window.metrics == {
        "kl_penalty_mean": None,
        "num_realigned_tokens": 0,
        "num_undeclared_breaks": 1,
        "num_quarantined_calls": 0,
    }
    window = window_of(DRIFTED, COMPACTED, "realign")
    assert [row.num_trained_tokens for row in window.rows] == [1, 2, 1]
    assert window.metrics["num_realigned_tokens"] == window.metrics["num_undeclared_breaks"] == 1
    same = (call(0, (1,), 2), call(1, (1,), 2), call(2, (1, 2, 3), 4))  # which of the two it continues, nobody can say
    assert window_of(same, COMPACTED).metrics["num_quarantined_calls"] == 1


def test_whitening_weighs_by_trained_tokens(tmp_path: Path) -> None:
    """a: 2 sampled, 1 of them realigned, so 1 trained; b: 3. Rewards 1 and 0.25."""
    config = config_of(tmp_path, "reinforce_pp")
    rows = credited(window_of(DRIFTED, COMPACTED, "realign"), config).rows
    found = {row.rollout_id: float(row.advantages_T[row.loss_mask][0]) for row in rows}

    def whitened(tokens: tuple[int, int]) -> tuple[float, float]:
        values = np.repeat([1.0, 0.25], tokens)
        return tuple((np.asarray([1.0, 0.25]) - values.mean()) / (values.std() + 1e-6))

    assert (found["a"], found["b"]) == pytest.approx(whitened((1, 3)), rel=1e-12)
    assert found["a"] != pytest.approx(whitened((2, 3))[0], rel=0.05)  # by sampled tokens: another number
    tokens_a, tokens_b = (sum(row.num_trained_tokens for row in rows if row.rollout_id == name) for name in "ab")
    assert abs(tokens_a * found["a"] + tokens_b * found["b"]) < 1e-12  # mean 0 over what is trained


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_ends_at_an_undeclared_break_and_goes_on_as_chosen(tmp_path: Path) -> None:
    """The rollouts are those that an interrupted run left on disk, so nothing is generated."""
    stored = tmp_path / "run" / "rollouts" / "collection_000000.jsonl.gz"
    stored.parent.mkdir(parents=True)
    write_rollouts(
        stored,
        [
            Rollout(rollout_id=f"c0/p0/g{i}", group_id="c0/p0", prompt_id="p", reward=reward, calls=calls)
            for i, (reward, calls) in enumerate([(1.0, DRIFTED), (0.25, COMPACTED)])
        ],
    )
    (tmp_path / "config.toml").write_text(CONFIG)

    def train(*settings: str) -> None:
        changes = [f"run.dir={tmp_path / 'run'}", "evaluation.num_tasks=0", "credit.estimator=reinforce_pp"]
        changes += ["rollout.max_staleness=1"]  # invented log-probs are nobody's
        run_training(load_config([tmp_path / "config.toml"], [*changes, *settings]), resume=True)

    with pytest.raises(SegmentationError, match=r"rollout 'c0/p0/g0', call 1: .* set rollout\.on_undeclared"):
        train()
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    for choice, num_realigned, num_rows in (("segment", 0, 4), ("realign", 1, 3)):
        train(f"rollout.on_undeclared={choice}")
        (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert (line["num_undeclared_breaks"], line["num_realigned_tokens"], line["num_rows"]) == (
            1,
            num_realigned,
            num_rows,
        )
        assert line["num_trained_tokens"] == 5 - num_realigned
        assert line["stepped"]
        shutil.rmtree(tmp_path / "run" / "checkpoints")


NO_MODELS: Any = SimpleNamespace(critic=None)  # nothing is scored
OTHERS = {
    "top_p = 0.9": Sampling(top_p=0.9),
    "top_k = 20": Sampling(top_k=20),
    "min_p = 0.1": Sampling(extra={"min_p": 0.1}),
    "repetition_penalty = 1.1": Sampling(extra={"repetition_penalty": 1.1, "top_a": 3}),
    "min_tokens = 8": Sampling(extra={"min_tokens": 8}),
    "allowed_token_ids = (3, 4)": Sampling(extra={"allowed_token_ids": (3, 4)}),
    "regex = a+": Sampling(extra={"regex": "a+"}),
    "temperature = 0": Sampling(temperature=0.0),
}
WHOLE = Sampling(
    temperature=0.7,
    top_k=-1,
    extra={"min_p": 0, "frequency_penalty": 0.0, "presence_penalty": None, "min_tokens": 0, "bad_words": [], "n": 2},
)


def sampled_as(sampling: Sampling, **fields: object) -> Rollout:
    made = dataclasses.replace(call(0, (1,), 2), sampling=sampling, **fields)  # type: ignore[arg-type]
    return Rollout(rollout_id="b", group_id="g", prompt_id="p", reward=0.0, calls=(made,))


@pytest.mark.parametrize("other", OTHERS)
def test_rows_of_another_distribution_have_no_engine_logprobs(other: str) -> None:
    first = Rollout(rollout_id="a", group_id="g", prompt_id="p", reward=1.0, calls=COMPACTED)
    cut = sampled_as(OTHERS[other])
    assert all(row.engine_logprobs is None for row in rows_of([first, cut]))
    # what is not trained does not count
    for plain in (sampled_as(WHOLE), dataclasses.replace(cut, status="failed", reward=None)):
        assert all(row.engine_logprobs is not None for row in rows_of([first, plain]))
    assert all(row.engine_logprobs is not None for row in rows_of([first, sampled_as(OTHERS[other], is_rejected=True)]))


@pytest.mark.parametrize(
    "setting", ["train.importance_cap=2.0", "train.sequence_mask=[0.5, 2.0]", "train.old_logprobs=engine"]
)
@pytest.mark.parametrize("other", [*OTHERS, "temperature = 0.7"])
def test_another_distribution_is_not_compared(tmp_path: Path, setting: str, other: str) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    plain = Rollout(rollout_id="a", group_id="g", prompt_id="p", reward=1.0, calls=COMPACTED)
    cut = sampled_as(OTHERS.get(other, WHOLE))
    group = Group(group_id="g", prompt_id="p", rollouts=(plain, cut))
    window = WindowRows.of(Window(window=0, collection=0, epoch=0, groups=(group,)))
    name = setting.split("=")[0]
    expected = rf"{name} compares .* found {re.escape(other)} in rollout 'b', call 0; .* leave {name} out"
    with pytest.raises(CreditError, match=expected):
        scored([window], NO_MODELS, load_config([tmp_path / "config.toml"], [setting]))
    assert scored([window], NO_MODELS, load_config([tmp_path / "config.toml"])) == [window]
