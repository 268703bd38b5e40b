"""From credit to rows.

1. GAE over rows equals plain loops over the rollout's tokens, whatever the number of segments, rows without trained
   tokens included; rows come back in the order given, each with its own length, 0.0 where nothing is trained.
2. Rows of two rollouts that are interleaved in the list, or of many windows' worth, keep to their own rollouts.
3. The reward is paid once, at the rollout's last trained token; a terminal value counts where it is given.
4. KL by token: k1, k2, k3 by hand; in gae it lowers each token's reward, for group estimators the sum over all rows of
   a rollout lowers its reward before the baseline.
5. Garbage at masked tokens reaches neither credit nor KL.
6. A rollout whose calls fork, one without a reward, rows without values, without log-probs or of an unknown rollout,
   and an unknown estimator are refused by name.
7. Groups without spread: exact equality of raw rewards, lone voters, failed and masked rollouts, groups in order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from credit_oracle import gae_by_segment
from evenstep.credit import credit_by_gae, credit_by_rollout, kl_penalties, rollout_advantages, zero_spread_groups
from evenstep.credit.rows import token_kl
from evenstep.errors import CreditError
from evenstep.types import Call, Rollout, Row

GAE = {"gamma": 0.9, "lam": 0.8}
KL_COEF = 0.25


def rollout(rollout_id: str, reward: float | None = 1.0, **fields: Any) -> Rollout:
    return Rollout(rollout_id=rollout_id, group_id=rollout_id[0], prompt_id="p", reward=reward, **fields)


def row(row_id: str, mask: Sequence[int], *, seed: int = 0, garbage: float = 0.0, **fields: Any) -> Row:
    draw = np.random.default_rng([seed, *row_id.encode()])
    values = {name: draw.normal(-1, 0.5, len(mask)) for name in ("old_logprobs", "ref_logprobs", "old_values")}
    given: dict[str, Any] = {name: np.where(np.asarray(mask) == 1, v, garbage) for name, v in values.items()}
    rollout_id = row_id.split("/")[0]
    return Row(
        row_id=row_id,
        rollout_id=rollout_id,
        group_id=rollout_id[0],
        token_ids=[1] * len(mask),
        loss_mask=mask,
        **given | fields,
    )


ROWS = [
    row("a0/s0", [0, 1, 1, 0, 1]),
    row("a0/s1", [0, 0, 0]),
    row("a0/s2", [0, 0, 1]),
    row("a1/s0", [0, 1]),
    row("b0/s0", [0, 0, 1, 1, 1, 0]),
    row("b0/s1", [0, 1, 0, 1]),
]
ROLLOUTS = [rollout("a0", 0.7), rollout("a1", -0.2), rollout("b0", 1.3), rollout("b1", 0.4)]  # b1 has no rows
REWARDS = {r.rollout_id: r.reward for r in ROLLOUTS}
ENDS = {"a1": 0.6, "b0": -0.3}


def expected(rows: Sequence[Row], ends: dict[str, float]) -> dict[Any, tuple[list[float], list[float]]]:
    found: dict[Any, tuple[list[float], list[float]]] = {}
    for rollout_id, reward in REWARDS.items():
        mine = [r for r in rows if r.rollout_id == rollout_id]
        segments = [(r.loss_mask.tolist(), r.old_values.tolist()) for r in mine if r.old_values is not None]
        assert reward is not None
        credit = gae_by_segment(segments, reward, terminal_value=ends.get(rollout_id, 0.0), **GAE)
        found |= zip([r.row_id for r in mine], credit, strict=True)
    return found


def assert_credited(found: Sequence[Row], rows: Sequence[Row], ends: dict[str, float]) -> None:
    assert [r.row_id for r in found] == [r.row_id for r in rows]
    for r in found:
        advantages, returns = expected(ROWS, ends)[r.row_id]
        assert isinstance(r.advantage, np.ndarray)
        assert r.returns is not None
        assert r.advantage.tolist() == pytest.approx(advantages, rel=1e-12, abs=1e-14)
        assert r.returns.tolist() == pytest.approx(returns, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("ends", [{}, ENDS], ids=["ended", "bootstrapped"])
def test_gae_by_rows(ends: dict[str, float]) -> None:
    assert_credited(credit_by_gae(ROLLOUTS, ROWS, terminal_values=ends, **GAE), ROWS, ends)


def test_interleaved_rows_keep_to_their_rollouts() -> None:
    mixed = [ROWS[i] for i in (4, 0, 3, 1, 5, 2)]
    assert_credited(credit_by_gae(ROLLOUTS[::-1], mixed, terminal_values=ENDS, **GAE), mixed, ENDS)
    assert_credited(credit_by_gae(iter(ROLLOUTS), iter(mixed), terminal_values=ENDS, **GAE), mixed, ENDS)


def test_rows_in_another_order_than_the_calls_are_another_credit() -> None:
    swapped = [ROWS[5], *ROWS[:5]]
    found = {r.row_id: r for r in credit_by_gae(ROLLOUTS, swapped, **GAE)}
    assert not np.allclose(found["b0/s0"].advantages_T, expected(ROWS, {})["b0/s0"][0])


def test_the_reward_is_paid_once() -> None:
    flat = [dataclasses.replace(r, old_values=np.zeros(r.num_tokens)) for r in ROWS[:3]]
    found = credit_by_gae([rollout("a0", 2.0)], flat)
    assert [r.returns.tolist() for r in found if r.returns is not None] == [[0, 2, 2, 0, 2], [0, 0, 0], [0, 0, 2]]
    found = credit_by_gae([rollout("a0", 2.0)], flat, lam=0.0)
    assert [r.advantages_T.tolist() for r in found] == [[0] * 5, [0] * 3, [0, 0, 2]]


def plain_kl(estimator: str, old: float, ref: float) -> float:
    if estimator == "k1":
        return math.log(math.exp(old) / math.exp(ref))
    if estimator == "k2":
        return (old - ref) * (old - ref) / 2
    return math.exp(ref) / math.exp(old) - 1 - (ref - old)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_by_hand(estimator: str) -> None:
    by_row = {}
    for r in ROWS:
        assert r.old_logprobs is not None
        assert r.ref_logprobs is not None
        at = r.loss_mask.nonzero()[0]
        by_row[r.row_id] = [plain_kl(estimator, float(r.old_logprobs[t]), float(r.ref_logprobs[t])) for t in at]
        assert token_kl(r, estimator).tolist() == pytest.approx(by_row[r.row_id], rel=1e-12)
    penalties = kl_penalties(ROWS, KL_COEF, estimator)
    assert set(penalties) == {"a0", "a1", "b0"}
    for rollout_id, penalty in penalties.items():
        total = math.fsum(kl for row_id, kls in by_row.items() if row_id.startswith(rollout_id) for kl in kls)
        assert penalty == pytest.approx(KL_COEF * total, rel=1e-12)

    # before the baseline: the same as other rewards
    lowered = [dataclasses.replace(r, reward=(r.reward or 0) - penalties.get(r.rollout_id, 0.0)) for r in ROLLOUTS]
    found = rollout_advantages(ROLLOUTS, "rloo", penalties=penalties)
    assert found == pytest.approx(rollout_advantages(lowered, "rloo"))
    assert found != pytest.approx(rollout_advantages(ROLLOUTS, "rloo"))
    for r in credit_by_rollout(ROWS, found):
        assert r.advantages_T.tolist() == [found[str(r.rollout_id)] * m for m in r.loss_mask.tolist()]

    # gae: each token's own, so that with λ = γ = 1 the return of a token lacks the KL of it and of all later ones
    found_rows = credit_by_gae(ROLLOUTS, ROWS, kl_coef=KL_COEF, kl_estimator=estimator)
    later = [*by_row["a0/s0"], *by_row["a0/s2"]]
    returns = np.concatenate([r.returns[r.loss_mask] for r in found_rows[:3] if r.returns is not None])
    assert returns.tolist() == pytest.approx([0.7 - KL_COEF * math.fsum(later[m:]) for m in range(len(later))])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e300])
def test_garbage_at_masked_tokens(garbage: float) -> None:
    dirty = [row(str(r.row_id), r.loss_mask.astype(int).tolist(), garbage=garbage) for r in ROWS]
    settings = {"kl_coef": KL_COEF, "kl_estimator": "k3", **GAE}
    clean = credit_by_gae(ROLLOUTS, ROWS, **settings)
    for ours, theirs in zip(credit_by_gae(ROLLOUTS, dirty, **settings), clean, strict=True):
        assert np.array_equal(ours.advantages_T, theirs.advantages_T)
        assert np.array_equal(ours.returns, theirs.returns)  # type: ignore[arg-type]
    assert kl_penalties(dirty, KL_COEF, "k2") == kl_penalties(ROWS, KL_COEF, "k2")


def call(order: int, parent: int | None = None, reason: Any = "compaction") -> Call:
    return Call(order=order, prompt_ids=(1,), output_ids=(2,), logprobs=(-1.0,), parent=parent, break_reason=reason)


def test_forks_are_refused() -> None:
    chain = (call(3, parent=1), call(0), call(1, parent=0))  # in any order; no call has to be numbered next
    assert credit_by_gae([rollout("a1", calls=chain)], [ROWS[3]])[0].returns is not None
    fork = (call(0), call(1, parent=0), call(2, parent=0))
    with pytest.raises(CreditError, match=r"'a1': call 2 continues call 0, not the one before it \(1\)"):
        credit_by_gae([rollout("a1", calls=fork)], [ROWS[3]])
    thrown_away = Call(order=1, prompt_ids=(1,), output_ids=(2,), logprobs=(-1.0,), parent=0, is_rejected=True)
    for parent in (0, 1):  # the next one was tried again, or was told what is wrong with what was thrown away
        assert credit_by_gae([rollout("a1", calls=(call(0), thrown_away, call(2, parent)))], [ROWS[3]])
    with pytest.raises(CreditError, match=r"call 3 continues call 1, not the one before it \(2\)"):
        credit_by_gae([rollout("a1", calls=(call(0), thrown_away, call(2, 0), call(3, 1)))], [ROWS[3]])
    with pytest.raises(CreditError, match=r"call 0 continues call 7, not the one before it \(None\)"):
        credit_by_gae([rollout("a1", calls=(call(0, parent=7),))], [ROWS[3]])
    with pytest.raises(CreditError, match=r"call 1 continues call None, not the one before it \(0\)"):
        credit_by_gae([rollout("a1", calls=(call(0), call(1, reason="subagent")))], [ROWS[3]])
    with pytest.raises(CreditError, match=r"row 'a1/s0': rollout 'a1' has no advantage"):
        credit_by_rollout([ROWS[3]], {"b0": 1.0})
    credit_by_rollout([ROWS[3]], {"a1": 1.0})  # one advantage for all needs no order


def test_what_is_missing_is_named() -> None:
    without = [dataclasses.replace(r, old_values=None) if r.row_id == "b0/s1" else r for r in ROWS]
    with pytest.raises(CreditError, match=r"row 'b0/s1': gae needs old_values"):
        credit_by_gae(ROLLOUTS, without)
    with pytest.raises(CreditError, match=r"rollout 'a0' has rows but no reward"):
        credit_by_gae([dataclasses.replace(ROLLOUTS[0], reward=None), *ROLLOUTS[1:]], ROWS)
    with pytest.raises(CreditError, match=r"every row's rollout must be given.* rows of 1 others, such as 'b0'"):
        credit_by_gae(ROLLOUTS[:2], ROWS)
    for name in ("old_logprobs", "ref_logprobs"):
        lacking = [*ROWS[:2], dataclasses.replace(ROWS[2], **{name: None})]
        with pytest.raises(CreditError, match=r"row 'a0/s2': KL in the reward needs old_logprobs and ref_logprobs"):
            kl_penalties(lacking, KL_COEF, "k1")
        with pytest.raises(CreditError, match=r"row 'a0/s2': KL in the reward"):
            credit_by_gae(ROLLOUTS, lacking, kl_coef=KL_COEF)
        credit_by_gae(ROLLOUTS, lacking)  # not needed without a KL
    with pytest.raises(CreditError, match="unknown KL estimator 'k4'; choose one of k1, k2, k3"):
        kl_penalties(ROWS, KL_COEF, "k4")


def test_groups_without_spread() -> None:
    def group(name: str, rewards: Sequence[float | None], **fields: Any) -> list[Rollout]:
        return [
            Rollout(
                rollout_id=f"{name}{i}",
                group_id=name,
                prompt_id="p",
                reward=reward,
                status="failed" if reward is None else "ok",
                **fields,
            )
            for i, reward in enumerate(rewards)
        ]

    groups = {
        "z": group("z", [0.1 + 0.2, 0.3]),  # nearly equal is not equal
        "y": group("y", [0.7] * 8),
        "x": group("x", [None, None]),  # without voters
        "w": group("w", [None, 0.4]),  # a lone voter
        "v": group("v", [None, 0.4, 0.5]),
        "u": [*group("u", [0.2, 0.2]), *group("u!", [0.9], is_masked=True)],
        "t": group("t", [0.0, -0.0]),
    }
    groups["u"] = [dataclasses.replace(r, group_id="u") for r in groups["u"]]
    every = [r for members in groups.values() for r in members]
    assert zero_spread_groups(every) == ["y", "w", "u", "t"]
    assert zero_spread_groups(every[::-1]) == ["t", "u", "w", "y"]
    flat = rollout_advantages(every, "grpo")
    for name in ("y", "w", "u", "t"):
        assert {flat[r.rollout_id] for r in groups[name] if r.is_voter} == {0.0}
    assert zero_spread_groups([]) == []
    for kind in (torch.tensor, np.array, np.float32, float, bool):  # numbers of any type are compared as numbers
        assert zero_spread_groups(group("e", [kind(1.0), kind(1.0)])) == ["e"]
        assert zero_spread_groups(group("o", [kind(1.0), kind(0.0)])) == []
