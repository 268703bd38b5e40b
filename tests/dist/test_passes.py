"""From rollouts to both steps of a run, on one and two gloo ranks, against plain loops written out here.

1. For gae (a truncated rollout's end worth 0 or the critic's value), group estimators, KL in the reward (k1, k2, k3) or
   in the loss, old log-probs detached, scored and of the engine, with the training plan or a budget of its own: every
   field of every row equals the plain loops to 1e-12 by row id, at the row's own length, whatever the ranks; what is
   not asked for is not there.
2. The windows hold rollouts of several segments that were cut by compaction, and one of each status: ok, truncated
   (also with nothing sampled in its last call), failed, without tokens; one window has no row at all.
3. The policy's and the critic's step on these rows are the oracle's on the rows of the plain loops.
4. Wrong credit gives other numbers: a truncated end worth 0, context tokens counted as steps, KL added after the
   baseline.
5. The reference is the policy at step 0 bit for bit, before and after updates: a frozen copy, or the adapters off,
   replicated and with FSDP2. Without KL nothing is loaded twice and no reference pass is made.
6. With scored old log-probs the first window's ratio is exactly 1 in float32 when the training plan is reused,
   replicated and with FSDP2, and within 1e-4 under another budget; after an update it is not 1.
7. Runs write every metric in every line, null where it is off; counts are right; the engine's log-probs are used
   whenever they are asked for; a run with a critic can recompute activations.
8. Ranks with different configurations raise DistributedError on each of them, and none hangs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
import torch.distributed as dist

import evenstep.train
import evenstep.train.setup as run_models
import oracle
from credit_oracle import Credited, advantages
from critic_cases import VALUE_CLIP, tiny_critic
from evenstep.config import Config, load_config
from evenstep.credit import rollout_advantages
from evenstep.errors import EvenstepError
from evenstep.rollout.segments import rows_of
from evenstep.train.distributed import rank_and_size
from evenstep.train.metrics import METRIC_NAMES
from evenstep.train.passes import WindowRows, credited, scored, ship
from evenstep.train.run import run_training
from evenstep.train.setup import Models, load_models
from evenstep.train.scorer import Scorer
from evenstep.train.step import Trainer
from evenstep.types import PER_TOKEN_FIELDS, Call, Group, Rollout, Row, Window
from ranks import once, run_ranks
from step_cases import whole
from tiny_models import VOCAB, tiny_model, true_float64

TOLERANCE = 1e-12
BUDGET, SCORING_BUDGET = 24, 37
GAMMA, LAM, KL_COEF = 0.97, 0.9, 0.3

pytestmark = pytest.mark.timeout(400)  # the first test of a rank count waits for its launch

# ------------------------------------------------------------------------------------------------ rollouts

# rollout id -> (status, reward, segments); a segment is a list of (new context tokens, sampled tokens)
Turns = list[tuple[int, int]]
WINDOWS: list[dict[str, tuple[str, float | None, list[Turns]]]] = [
    {
        "g0/0": ("ok", 0.7, [[(3, 2), (2, 3)], [(4, 1)], [(2, 2), (1, 4)]]),
        "g0/1": ("truncated", 0.35, [[(3, 3)], [(2, 2), (3, 0)]]),  # its last row ends with tokens that were only read
        "g0/2": ("failed", None, [[(3, 2)]]),
        "g0/3": ("ok", 0.15, []),
        "g1/0": ("truncated", -0.45, [[(2, 5)]]),
        "g1/1": ("ok", 0.95, [[(3, 1), (1, 1), (1, 1)], [(6, 2)]]),
        "g1/2": ("truncated", 0.1, []),
    },
    {"g2/0": ("failed", None, []), "g2/1": ("ok", 0.2, [])},
    {"g3/0": ("ok", 1.3, [[(2, 3), (2, 3)]]), "g3/1": ("truncated", 0.55, [[(4, 2)], [(3, 3)], [(2, 1)]])},
]


@dataclasses.dataclass(kw_only=True)
class PlainRow:
    """One segment's tokens, and everything that is said of them, as plain lists."""

    rollout_id: str
    ids: list[int]
    mask: list[int]
    engine: list[float]
    fields: dict[str, list[float]] = dataclasses.field(default_factory=dict[str, list[float]])


def plain_rows(vocab: int = VOCAB, seed: int = 0) -> dict[str, PlainRow]:
    """Row id -> row, of all rollouts, failed ones included."""
    draw = np.random.default_rng(seed)
    rows: dict[str, PlainRow] = {}
    for window in WINDOWS:
        for rollout_id, (_, _, segments) in window.items():
            for s, turns in enumerate(segments):
                row = PlainRow(rollout_id=rollout_id, ids=[], mask=[], engine=[])
                for num_context, num_sampled in turns:
                    num_tokens = num_context + num_sampled
                    row.ids += draw.integers(0, vocab, num_tokens).tolist()
                    row.mask += [0] * num_context + [1] * num_sampled
                    row.engine += [0.0] * num_context + (-2 + 0.3 * draw.normal(size=num_sampled)).tolist()
                rows[f"{rollout_id}/s{s}"] = row
    return rows


def windows_of(rows: dict[str, PlainRow]) -> list[Window]:
    """The same as calls: each prompt is all that came before it in its segment, and some new context."""
    windows = []
    for index, rollouts in enumerate(WINDOWS):
        groups: dict[str, list[Rollout]] = {}
        for rollout_id, (status, reward, segments) in rollouts.items():
            calls: list[Call] = []
            for s, turns in enumerate(segments):
                row, end = rows[f"{rollout_id}/s{s}"], 0
                for i, (num_context, num_sampled) in enumerate(turns):
                    start, end = end + num_context, end + num_context + num_sampled
                    calls.append(
                        Call(
                            order=len(calls),
                            prompt_ids=tuple(row.ids[:start]),
                            output_ids=tuple(row.ids[start:end]),
                            logprobs=tuple(row.engine[start:end]),
                            break_reason="compaction" if s and not i else None,
                        )
                    )
            fields: dict[str, Any] = {"status": status, "reward": reward, "calls": tuple(calls)}
            group_id = rollout_id.split("/")[0]
            rollout = Rollout(rollout_id=rollout_id, group_id=group_id, prompt_id=group_id, **fields)
            groups.setdefault(group_id, []).append(rollout)
        made = tuple(Group(group_id=g, prompt_id=g, rollouts=tuple(members)) for g, members in groups.items())
        windows.append(Window(window=index, collection=0, epoch=0, groups=made))
    return windows


# ------------------------------------------------------------------------------------------------ configurations

BASE: dict[str, dict[str, Any]] = {
    "run": {"dir": "unused", "num_collections": 1},
    "model": {"path": "evenstep:ledger", "max_context_tokens": 64},
    "environment": {"name": "ledger", "max_pages": 3},
    "rollout": {"num_prompts": 2, "num_generations": 2, "max_tokens_per_call": 4},
    "compaction": {"policy": "summary"},
    "plan": {"max_tokens_per_gpu": 512},
    "train": {"rollouts_per_window": 4, "lr": 1e-3},
    "evaluation": {"num_tasks": 0},
    "checkpoint": {"export": False},
}
GAE: dict[str, Any] = {"credit": {"estimator": "gae", "gamma": GAMMA, "lam": LAM}}


def reward_kl(estimator: str, **more: Any) -> dict[str, Any]:
    return {"kl_coef": KL_COEF, "kl_in": "reward", "kl_estimator": estimator} | more


def gae_of(truncated_value: str) -> dict[str, Any]:
    return GAE["credit"] | {"truncated_value": truncated_value}


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "gae": GAE,
    "gae bootstrap": {"credit": gae_of("bootstrap")},
    "gae bootstrap, other cells": {
        "credit": gae_of("bootstrap"),
        "train": {"score_max_tokens_per_gpu": SCORING_BUDGET, "old_logprobs": "scored"},
    },
    "gae k1": GAE | {"train": reward_kl("k1")},
    "gae k2 engine": GAE | {"train": reward_kl("k2", old_logprobs="engine")},
    "gae bootstrap k3, other cells": {
        "credit": gae_of("bootstrap"),
        "train": reward_kl("k3", score_max_tokens_per_gpu=SCORING_BUDGET),
    },
    "gae, KL in the loss": GAE | {"train": {"kl_coef": KL_COEF, "kl_estimator": "k2"}},
    "grpo": {},
    "grpo engine": {"train": {"old_logprobs": "engine"}},
    "grpo k1": {"train": reward_kl("k1")},
    "dr_grpo k2": {"credit": {"estimator": "dr_grpo"}, "train": reward_kl("k2")},
    "rloo k3": {"credit": {"estimator": "rloo"}, "train": reward_kl("k3", score_max_tokens_per_gpu=SCORING_BUDGET)},
    "reinforce_pp_baseline k1 engine": {
        "credit": {"estimator": "reinforce_pp_baseline"},
        "train": reward_kl("k1", old_logprobs="engine"),
    },
    "grpo scored, KL in the loss": {"train": {"kl_coef": KL_COEF, "old_logprobs": "scored"}},
}


QUICK = ("gae bootstrap k3, other cells", "gae k2 engine", "gae, KL in the loss", "grpo", "rloo k3")


def config_of(folder: Path, settings: dict[str, dict[str, Any]], **run: Any) -> Config:
    text = {name: values | settings.get(name, {}) for name, values in BASE.items()}
    text |= {name: values for name, values in settings.items() if name not in BASE}
    text["run"] |= run
    path = folder / f"{abs(hash(repr(text)))}.toml"
    path.write_text(tomli_w.dumps(text))
    return load_config([path])


# ------------------------------------------------------------------------------------------------ plain loops


def kl_of(estimator: str, old: float, ref: float) -> float:
    """KL of old against reference, estimated at a token that was sampled from old."""
    if estimator == "k1":
        return old - ref
    if estimator == "k2":
        return (old - ref) ** 2 / 2
    ratio = math.exp(ref) / math.exp(old)
    return ratio - 1 - math.log(ratio)


def by_hand(config: Config, *, context_is_a_step: bool = False) -> tuple[dict[str, PlainRow], list[float | None]]:
    """(rows of the voting rollouts with all fields, mean KL penalty of each window)."""
    policy, reference = tiny_model(attention="eager"), tiny_model(seed=1, attention="eager")
    critic = tiny_critic(seed=2, attention="eager")
    train, credit = config.train, config.credit
    every, rows, means = plain_rows(), dict[str, PlainRow](), list[float | None]()
    for window in WINDOWS:
        penalties: dict[str, float] = {}
        mine: dict[str, list[PlainRow]] = {}
        for rollout_id, (status, _, segments) in window.items():
            if status == "failed":
                continue
            penalties[rollout_id], mine[rollout_id] = 0.0, []
            for s in range(len(segments)):
                row = every[f"{rollout_id}/s{s}"]
                rows[f"{rollout_id}/s{s}"] = row
                mine[rollout_id].append(row)
                row.fields = {name: [0.0] * len(row.ids) for name in ("old", "ref", "value", "kl")}
                with torch.no_grad():
                    ids = torch.tensor([row.ids])
                    own, other = (torch.log_softmax(m(input_ids=ids).logits[0], -1) for m in (policy, reference))
                    row.fields["output"] = critic(input_ids=ids).logits[0, :, 0].tolist()
                for t, token in enumerate(row.ids):
                    if not row.mask[t]:
                        continue
                    old = row.engine[t] if train.old_logprobs == "engine" else float(own[t - 1, token])
                    ref = float(other[t - 1, token])
                    row.fields["old"][t], row.fields["ref"][t] = old, ref
                    row.fields["value"][t] = row.fields["output"][t - 1]
                    row.fields["kl"][t] = kl_of(train.kl_estimator, old, ref)
                    penalties[rollout_id] += KL_COEF * row.fields["kl"][t]
        has_penalty = train.kl_coef > 0 and train.kl_in == "reward"
        means.append(sum(penalties.values()) / len(penalties) if has_penalty else None)
        if credit.estimator == "gae":
            for rollout_id, members in mine.items():
                status, reward, _ = window[rollout_id]
                assert reward is not None
                ends_open = status == "truncated" and credit.truncated_value == "bootstrap"
                following = members[-1].fields["output"][-1] if members and ends_open else 0.0
                running, is_last = 0.0, True
                for row in reversed(members):
                    row.fields["advantage"], row.fields["return"] = [0.0] * len(row.ids), [0.0] * len(row.ids)
                    for t in reversed(range(len(row.ids))):
                        if not row.mask[t]:
                            running *= GAMMA * LAM if context_is_a_step else 1.0
                            continue
                        own_reward = (reward if is_last else 0.0) - (KL_COEF * row.fields["kl"][t] * has_penalty)
                        delta = own_reward + GAMMA * following - row.fields["value"][t]
                        running = delta + GAMMA * LAM * running
                        row.fields["advantage"][t] = running
                        row.fields["return"][t] = running + row.fields["value"][t]
                        following, is_last = row.fields["value"][t], False
            continue
        found = advantages(
            credit.estimator,
            [
                Credited(
                    rollout_id=rollout_id,
                    group_id=rollout_id.split("/")[0],
                    reward=reward,
                    num_tokens=sum(sum(row.mask) for row in mine.get(rollout_id, [])),
                    is_voter=status != "failed",
                )
                for rollout_id, (status, reward, _) in window.items()
            ],
            penalties if has_penalty else {},
        )
        for rollout_id, members in mine.items():
            for row in members:
                row.fields["advantage"] = [found[rollout_id] * is_trained for is_trained in row.mask]
    return rows, means


def expected_row(row_id: str, row: PlainRow, config: Config) -> Row:
    train = config.train
    has_old = train.old_logprobs in ("scored", "engine") or (train.kl_coef > 0 and train.kl_in == "reward")
    has_critic = config.credit.estimator == "gae"
    return Row(
        row_id=row_id,
        rollout_id=row.rollout_id,
        group_id=row.rollout_id.split("/")[0],
        token_ids=row.ids,
        loss_mask=row.mask,
        advantage=row.fields["advantage"],
        engine_logprobs=row.engine,
        old_logprobs=row.fields["old"] if has_old else None,
        ref_logprobs=row.fields["ref"] if train.kl_coef > 0 else None,
        old_values=row.fields["value"] if has_critic else None,
        returns=row.fields["return"] if has_critic else None,
    )


# ------------------------------------------------------------------------------------------------ on ranks


@dataclasses.dataclass(kw_only=True)
class Found:
    """What rank 0 saw."""

    rows: list[list[Row]]  # of each window
    means: list[float | None]
    gradients: list[tuple[float, dict[str, Any], float | None, dict[str, Any] | None]]  # policy's, critic's; by window


def models_of(config: Config, *, is_sharded: bool) -> Models:
    policy, reference, critic = tiny_model(), tiny_model(seed=1), tiny_critic(seed=2)
    if is_sharded:
        for model in (policy, reference, critic):
            evenstep.train.shard(model)
    plan: dict[str, Any] = {"layout": "packed" if is_sharded else "padded", "max_tokens_per_gpu": BUDGET}
    in_loss = config.train.kl_coef if config.train.kl_in == "loss" else 0.0
    step = {"normaliser": "rollout"} | (
        {"kl_coef": in_loss, "kl_estimator": config.kl_estimator} if in_loss else {}
    )
    value = {"normaliser": "rollout", "loss": "value_clip", "value_clip": VALUE_CLIP}
    return Models(
        policy=Trainer(policy, torch.optim.SGD(policy.parameters(), lr=0.1), **plan, **step),
        tokenizer=None,  # type: ignore[arg-type]
        whole_copy=None,
        frozen_copy=Scorer(reference, **plan) if config.train.kl_coef > 0 else None,
        critic=Trainer(critic, torch.optim.SGD(critic.parameters(), lr=0.1), **plan, **value)
        if config.has_critic
        else None,
    )


def gradient_of(trainer: Trainer) -> dict[str, Any]:
    return {
        name: whole(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in trainer.model.named_parameters()
    }


def pass_through(config: Config, is_sharded: bool) -> Found | None:
    is_first = rank_and_size()[0] == 0
    with true_float64():
        models = models_of(config, is_sharded=is_sharded)
        windows = [WindowRows.of(window) for window in windows_of(plain_rows())] if is_first else None
        after = scored(windows, models, config)
        assert (after is None) != is_first
        done = None
        if after is not None:
            estimate = partial(rollout_advantages, estimator=config.credit.estimator)
            done = [credited(window, config, estimate) for window in after]
            prepared = ship([models.policy.prepare(w.rows, w.voters) if w.rows else None for w in done])
        else:
            prepared = ship(None)
        gradients: list[Any] = []
        for window in prepared:
            if window is None:
                continue
            assert len(window.rows) < window.num_rows or rank_and_size()[1] == 1  # a rank has its own rows only
            policy = models.policy.forward_backward(window).loss, gradient_of(models.policy)
            critic: tuple[Any, Any] = (None, None)
            if models.critic is not None:
                critic = models.critic.forward_backward(window).loss, gradient_of(models.critic)
            gradients.append((*policy, *critic))
            for trainer in (models.policy, models.critic):
                if trainer is not None:
                    trainer.optimizer.param_groups[0]["lr"] = 0.0  # every window at the first weights
                    trainer.optim_step()
    if done is None:
        return None
    return Found(rows=[list(w.rows) for w in done], means=[w.kl_penalty_mean for w in done], gradients=gradients)


def pass_through_all(configs: list[Config], is_sharded: bool) -> list[Found | None]:
    return [pass_through(config, is_sharded) for config in configs]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    folder = tmp_path_factory.mktemp("configs")
    return {name: config_of(folder, settings) for name, settings in SETTINGS.items()}


_known: dict[Any, dict[str, Found]] = {}


def outcomes(configs: dict[str, Config], name: str, world_size: int, is_sharded: bool) -> Found:
    """What rank 0 found: one launch for all quick settings, and one for the others."""
    key = (name in QUICK, world_size, is_sharded)
    if key not in _known:
        mine = {other: config for other, config in configs.items() if (other in QUICK) == (name in QUICK)}
        by_rank = run_ranks(pass_through_all, world_size, [*mine.values()], is_sharded, timeout_s=300)
        assert all(found is None for other in by_rank[1:] for found in other)
        _known[key] = dict(zip(mine, by_rank[0], strict=True))
    return _known[key][name]


def assert_rows(found: Sequence[Row], expected: dict[str, Row]) -> None:
    assert {row.row_id for row in found} == set(expected)
    for row in found:
        other = expected[str(row.row_id)]
        assert (row.rollout_id, row.group_id) == (other.rollout_id, other.group_id)
        assert np.array_equal(row.token_ids, other.token_ids)
        assert np.array_equal(row.loss_mask, other.loss_mask)
        np.testing.assert_allclose(row.advantages_T, other.advantages_T, rtol=TOLERANCE, atol=TOLERANCE)
        for name in PER_TOKEN_FIELDS:
            ours, theirs = getattr(row, name), getattr(other, name)
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                assert ours.shape == row.token_ids.shape, name
                at = row.loss_mask
                np.testing.assert_allclose(ours[at], theirs[at], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in SETTINGS])
@pytest.mark.parametrize(
    "world_size, is_sharded", [pytest.param(1, False, marks=pytest.mark.long), (2, False), (2, True)]
)
def test_rows_and_steps(configs: dict[str, Config], name: str, world_size: int, is_sharded: bool) -> None:
    assert_found(outcomes(configs, name, world_size, is_sharded), name, configs[name])


@pytest.mark.parametrize("name", ["gae bootstrap k3, other cells", "gae k2 engine"])
def test_in_one_process(configs: dict[str, Config], name: str) -> None:
    found = pass_through(configs[name], False)
    assert found is not None
    assert_found(found, name, configs[name])


def assert_found(found: Found, name: str, config: Config) -> None:
    steps = iter(found.gradients)
    for rows, mean, (expected, expected_mean, by_model) in zip(
        found.rows, found.means, expectations(name, config), strict=True
    ):
        assert_rows(rows, expected)
        assert mean == (None if expected_mean is None else pytest.approx(expected_mean, rel=TOLERANCE))
        if expected:
            loss, gradient, value_loss, value_gradient = next(steps)
            pairs = [(loss, gradient), (value_loss, value_gradient)]
            for (ours, our_gradient), theirs in zip(pairs, by_model, strict=True):
                assert (ours is None) == (theirs is None)
                if theirs is not None:
                    assert ours == pytest.approx(theirs.loss, rel=TOLERANCE, abs=TOLERANCE)
                    assert our_gradient is not None
                    assert oracle.relative_error(our_gradient, theirs.gradient) < TOLERANCE
    assert next(steps, None) is None


_expected: dict[str, list[Any]] = {}


def expectations(name: str, config: Config) -> list[tuple[dict[str, Row], float | None, list[Any]]]:
    """Of each window: rows, mean penalty, and the oracle's step of the policy and of the critic, if there is one."""
    if name in _expected:
        return _expected[name]
    found: list[tuple[dict[str, Row], float | None, list[Any]]] = []
    with true_float64():
        plain, means = by_hand(config)
        for rollouts, mean in zip(WINDOWS, means, strict=True):
            rows = {
                row_id: expected_row(row_id, row, config) for row_id, row in plain.items() if row.rollout_id in rollouts
            }
            voters = {o: o.split("/")[0] for o, (status, _, _) in rollouts.items() if status != "failed"}
            settings: dict[str, Any] = {"voters": voters, "normaliser": "rollout"}
            in_loss = config.train.kl_coef if config.train.kl_in == "loss" else 0.0
            kl = {"kl_coef": in_loss, "kl_estimator": config.kl_estimator if in_loss else "k3"}
            steps: list[Any] = [None, None]
            if rows:
                steps[0] = oracle.oracle_step(tiny_model(attention="eager"), [*rows.values()], **settings, **kl)
            if rows and config.has_critic:
                critic = tiny_critic(seed=2, attention="eager")
                steps[1] = oracle.oracle_value_step(critic, [*rows.values()], value_clip=VALUE_CLIP, **settings)
            found.append((rows, mean, steps))
    _expected[name] = found
    return found


def test_wrong_credit_differs(configs: dict[str, Config]) -> None:
    with true_float64():
        right, zero = (by_hand(configs[name])[0] for name in ("gae bootstrap", "gae"))
        steps = by_hand(configs["gae"], context_is_a_step=True)[0]
        plain, penalised = (by_hand(configs[name])[0] for name in ("grpo", "grpo k1"))

    def apart(ours: dict[str, PlainRow], theirs: dict[str, PlainRow], row_id: str) -> float:
        pairs = zip(ours[row_id].fields["advantage"], theirs[row_id].fields["advantage"], strict=True)
        return max(abs(a - b) for a, b in pairs)

    assert apart(right, zero, "g0/1/s0") > 1e-2  # truncated
    assert apart(right, zero, "g0/0/s0") == 0.0  # ok
    assert apart(zero, steps, "g0/0/s0") > 1e-2
    assert apart(plain, penalised, "g0/0/s0") > 1e-3


# ------------------------------------------------------------------------------------------------ reference


LEDGER_VOCAB = 40
KINDS = {"whole": {}, "lora": {"lora": {"rank": 2}}}


def ledger_windows() -> list[Window]:
    return windows_of(plain_rows(LEDGER_VOCAB))


def equal(ours: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def reference_of(config: Config) -> tuple[list[str], dict[str, bool]]:
    """(what was loaded, what is equal to what)."""
    loaded: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_model", "load_critic"):
            original = getattr(run_models, name)

            def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                loaded.append(name)
                return original(*args, **kwargs)

            patch.setattr(run_models, name, counted)
        models = load_models(config)
    if config.train.kl_coef == 0:
        return loaded, {"has a copy": models.frozen_copy is not None}
    draw = np.random.default_rng(1)
    rows = rows_of(rollout for window in ledger_windows() for rollout in window.rollouts)
    rows = [dataclasses.replace(row, advantage=float(draw.normal()), engine_logprobs=None) for row in rows]

    def passes() -> tuple[dict[Any, Any], dict[Any, Any]]:
        own = models.policy.gather(models.policy.score(rows))
        with models.reference() as scorer:
            return own, scorer.gather(scorer.score(rows))

    own, first = passes()
    for _ in range(2):
        models.policy.forward_backward(rows)
        models.policy.optim_step()
    moved, second = passes()
    found = {"first": equal(first, own), "second": equal(second, own), "moved": not equal(moved, own)}
    return loaded, found | {"has a copy": models.frozen_copy is not None}


def references_of(configs: list[Config]) -> list[tuple[list[str], dict[str, bool]]]:
    return [reference_of(config) for config in configs]


def test_the_reference_is_the_policy_at_step_0(tmp_path: Path) -> None:
    found: dict[tuple[str, str, bool], Config] = {}
    for kind, settings in KINDS.items():
        for sharding in ("replicated", "fsdp2"):
            for has_kl in (True, False):
                train = {"sharding": sharding} | (reward_kl("k3") if has_kl else {})
                found[kind, sharding, has_kl] = config_of(tmp_path, settings | {"train": BASE["train"] | train})
    for by_rank in run_ranks(references_of, 2, [*found.values()], timeout_s=150):
        for (kind, _, has_kl), (loaded, equals) in zip(found, by_rank, strict=True):
            needs_copy = has_kl and kind == "whole"
            assert loaded == ["load_model"] * (2 if needs_copy else 1)
            assert equals.pop("has a copy") == needs_copy
            assert equals == (dict.fromkeys(("first", "second", "moved"), True) if has_kl else {})


def test_only_gae_loads_a_critic(tmp_path: Path) -> None:
    config = config_of(tmp_path, GAE)
    assert reference_of(config) == (["load_model", "load_critic"], {"has a copy": False})


# ------------------------------------------------------------------------------------------------ ratio


def first_ratios(config: Config) -> tuple[list[float], bool]:
    """(largest deviation of the ratio from 1 before and after an update, whether old is the engine's)."""
    models = load_models(config)
    is_first = dist.get_rank() == 0
    after = scored([WindowRows.of(w) for w in ledger_windows()] if is_first else None, models, config)
    prepared: Any = None
    if after is not None:
        estimate = partial(rollout_advantages, estimator="grpo")
        done = [credited(window, config, estimate) for window in after]
        prepared = [models.policy.prepare(w.rows, w.voters) if w.rows else None for w in done]
    window = ship(prepared)[0]
    assert window is not None
    deviations = []
    for _ in range(2):
        found = models.policy.forward_backward(window).metrics["ratio_max_deviation"]
        assert isinstance(found, float)
        deviations.append(found)
        models.policy.optim_step()
    rows = [row for row in window.rows.values() if row.old_logprobs is not None]
    return deviations, bool(rows) and all(np.array_equal(r.old_logprobs, r.engine_logprobs) for r in rows)


def all_first_ratios(configs: list[Config]) -> list[tuple[list[float], bool]]:
    return [first_ratios(config) for config in configs]


def test_the_first_ratio_is_one(tmp_path: Path) -> None:
    settings = {
        (sharding, old, budget): config_of(
            tmp_path,
            {
                "train": {"sharding": sharding, "old_logprobs": old} | budget_of(budget),
                "plan": {"max_tokens_per_gpu": BUDGET, "layout": "packed" if sharding == "fsdp2" else "padded"},
            },
        )
        for sharding in ("replicated", "fsdp2")
        for old, budget in (("scored", None), ("scored", SCORING_BUDGET), ("engine", None), ("detached", None))
    }
    for by_rank in run_ranks(all_first_ratios, 2, [*settings.values()], timeout_s=150):
        for (_, old, budget), ((first, second), is_engine) in zip(settings, by_rank, strict=True):
            assert is_engine == (old == "engine")
            if old == "detached":
                assert first == second == 0.0
            elif old == "engine":
                assert first > 0.1  # made up log-probs
            elif budget is None:
                assert first == 0.0 < second
            else:
                assert first < 1e-4 < second


def budget_of(budget: int | None) -> dict[str, Any]:
    return {} if budget is None else {"score_max_tokens_per_gpu": budget}


# ------------------------------------------------------------------------------------------------ runs

RUNS: dict[str, dict[str, Any]] = {
    "gae": {
        "credit": gae_of("bootstrap"),
        "train": reward_kl("k1", sequence_mask=[0.5, 2.0], epochs=2, activation_checkpointing=True),
        "rollout": {"max_calls": 3},  # some are truncated
    },
    "engine": {"train": {"old_logprobs": "engine", "epochs": 2, "lr": 1e-2}},
    "plain": {},
}
OFF = {
    "gae": {"moe_balance"},
    "engine": {"kept_fraction", "kl", "kl_penalty_mean", "moe_balance"},
    "plain": {"kept_fraction", "kl", "kl_penalty_mean", "moe_balance"},
}
OF_CRITIC = {"critic_loss", "critic_grad_norm", "value_error", "value_clip_fraction", "explained_variance"}


def run_all(configs: list[Config]) -> None:
    for config in configs:
        run_training(config)


@once
def lines() -> dict[str, list[dict[str, Any]]]:
    """Name -> the lines of metrics.jsonl."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {run: config_of(folder, settings, dir=str(folder / run)) for run, settings in RUNS.items()}
        run_ranks(run_all, 2, [*runs.values()], timeout_s=150)
        return {
            run: [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
            for run in runs
        }


@pytest.mark.parametrize("run", RUNS)
def test_every_metric_is_in_every_line(run: str) -> None:
    found = lines()[run]
    assert [line["window"] for line in found] == list(range(len(found)))
    assert len(found) == RUNS[run].get("train", {}).get("epochs", 1)
    off = OFF[run] | (set() if run == "gae" else OF_CRITIC) | {"skip_reason", "predicted_memory_bytes"}
    for line in found:
        assert set(METRIC_NAMES) <= set(line)
        nulls = {name for name in METRIC_NAMES if line[name] is None}
        assert nulls - {"explained_variance", "skip_reason"} == off - {"explained_variance", "skip_reason"}
        assert line["num_rollouts"] == 4 == line["num_voters"] + line["num_failed"]
        assert line["num_rows"] >= line["num_rollouts"] - line["num_failed"]
        assert line["num_trained_tokens"] > 0
    assert found[0]["optimizer_step"] == 0
    assert all(b["optimizer_step"] == a["optimizer_step"] + a["stepped"] for a, b in itertools.pairwise(found))


def test_metrics_of_a_run_with_a_critic() -> None:
    first, second = lines()["gae"]
    assert first["ratio_max_deviation"] == 0.0 < second["ratio_max_deviation"]
    assert first["kl_penalty_mean"] == second["kl_penalty_mean"] == 0.0  # the policy at step 0 is the reference
    assert first["kl"] == 0.0 < second["kl"]
    assert first["kept_fraction"] == second["kept_fraction"] == 1.0
    assert first["value_clip_fraction"] == 0.0  # nothing has moved yet
    assert first["critic_grad_norm"] > 0
    assert first["num_truncated"] > 0
    assert second["critic_loss"] < first["critic_loss"]


def test_a_run_uses_the_engines_logprobs() -> None:
    first, second = lines()["engine"]
    assert first["ratio_max_deviation"] < 1e-4
    assert second["ratio_max_deviation"] > 1e-3  # with detached ones it would be exactly 0
    # nothing says what the trainer's log-probs were, so the engine's are compared with its present ones
    assert 0.0 < first["engine_logprob_difference_max"] < 1e-4
    assert second["engine_logprob_difference_max"] > 1e-3
    assert second["engine_trainer_kl"] > first["engine_trainer_kl"]


# ------------------------------------------------------------------------------------------------ disagreement


def disagree(configs: list[Config]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        run_training(configs[dist.get_rank()])
    except EvenstepError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


@pytest.mark.parametrize(
    "other",
    [
        {"run": {"num_collections": 2}},
        {"train": {"epochs": 2}},
        {"train": {"rollouts_per_window": 2, "windows_per_collection": 2}},
        {"train": reward_kl("k3")},
        {"train": {"old_logprobs": "scored"}},
        GAE,
        {"lora": {"rank": 2}},
    ],
    ids=lambda other: str(next(iter(other.values()))),
)
def test_configurations_that_differ(tmp_path: Path, other: dict[str, Any]) -> None:
    merged = {name: BASE.get(name, {}) | values for name, values in other.items()}
    found = run_ranks(disagree, 2, [config_of(tmp_path, {}), config_of(tmp_path, merged)], timeout_s=60)
    for kind, message, seconds in found:
        assert kind == "DistributedError"
        assert "the same configuration" in message
        assert all(f"rank {rank}: " in message for rank in range(2))
        assert seconds < 20
