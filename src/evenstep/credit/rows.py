"""From credit to rows: advantages and returns at each row's own trained tokens, and KL as part of the reward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from evenstep.credit.gae import gae
from evenstep.errors import CreditError
from evenstep.types import Float64Array, Rollout, Row

__all__ = ["KL_ESTIMATORS", "credit_by_gae", "credit_by_rollout", "kl_penalties", "token_kl"]

KL_ESTIMATORS = ("k1", "k2", "k3")


def token_kl(row: Row, estimator: str) -> Float64Array:
    """[M] KL estimate of old policy against reference at a row's trained tokens, with x = old - ref.

    k1 = x (unbiased, may be negative), k2 = x²/2, k3 = exp(-x) - 1 + x (Schulman 2020).

    Raises:
        CreditError: the row lacks old or reference log-probs, or the estimator is unknown.

    >>> row = Row(row_id="r", rollout_id="o", group_id="g", token_ids=[5, 6, 7], loss_mask=[0, 1, 1],
    ...           old_logprobs=[0.0, -1.0, -0.5], ref_logprobs=[0.0, -1.5, -0.5])
    >>> token_kl(row, "k1").tolist()
    [0.5, 0.0]
    """
    if row.old_logprobs is None or row.ref_logprobs is None:
        raise CreditError(f"row {row.row_id!r}: KL in the reward needs old_logprobs and ref_logprobs; score both first")
    apart = row.old_logprobs[row.loss_mask] - row.ref_logprobs[row.loss_mask]
    if estimator == "k1":
        return apart
    if estimator == "k2":
        return 0.5 * apart**2
    if estimator == "k3":
        return np.expm1(-apart) + apart
    raise CreditError(f"unknown KL estimator {estimator!r}; choose one of {', '.join(KL_ESTIMATORS)}")


def kl_penalties(rows: Iterable[Row], coef: float, estimator: str) -> dict[Any, float]:
    """Rollout id -> coef · Σ KL over the trained tokens of all its rows: what its reward is lowered by."""
    penalties: dict[Any, float] = {}
    for row in rows:
        penalty = coef * float(token_kl(row, estimator).sum())
        penalties[row.rollout_id] = penalties.get(row.rollout_id, 0.0) + penalty
    return penalties


def credit_by_rollout(rows: Iterable[Row], advantages: Mapping[Any, float]) -> list[Row]:
    """The rows with the advantage of their rollout, at each row's own trained tokens.

    Raises:
        CreditError: a row whose rollout has none.
    """
    credited: list[Row] = []
    for row in rows:
        if row.rollout_id not in advantages:
            raise CreditError(
                f"row {row.row_id!r}: rollout {row.rollout_id!r} has no advantage; give one for every rollout that has "
                f"rows, or leave its rows out"
            )
        credited.append(replace(row, advantage=advantages[row.rollout_id]))
    return credited


def credit_by_gae(
    rollouts: Iterable[Rollout],
    rows: Iterable[Row],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    terminal_values: Mapping[Any, float] | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
) -> list[Row]:
    """The rows with a generalised advantage and a return at each trained token, over the whole rollout.

    Rows of a rollout follow each other in the order given, which is that of its calls. See ``gae`` for the formula.

    Args:
        rollouts: of the window.
        rows: of the voting ones, with ``old_values``.
        gamma: discount per trained token.
        lam: λ.
        terminal_values: rollout id -> V after its last token; absent: 0.
        kl_coef: each token's reward is lowered by this times its KL estimate.
        kl_estimator: k1, k2 or k3.

    Raises:
        CreditError: a row without values or of a rollout that is not given, a rollout without a reward, or one whose
            calls fork: its tokens have no single order.

    >>> row = Row(row_id="r", rollout_id="o", group_id="g", token_ids=[5, 6, 7], loss_mask=[0, 1, 1],
    ...           old_values=[0.0, 0.5, 0.25])
    >>> found = credit_by_gae([Rollout(rollout_id="o", group_id="g", prompt_id="p", reward=1.0)], [row])
    >>> found[0].advantages_T.tolist(), found[0].returns.tolist()
    ([0.0, 0.5, 0.75], [0.0, 1.0, 1.0])
    """
    by_rollout: dict[Hashable, list[Row]] = {}
    rows = list(rows)
    for row in rows:
        if row.old_values is None:
            raise CreditError(f"row {row.row_id!r}: gae needs old_values, a critic's values at its trained tokens")
        by_rollout.setdefault(row.rollout_id, []).append(row)
    rollouts = list(rollouts)
    if unknown := by_rollout.keys() - {rollout.rollout_id for rollout in rollouts}:
        raise CreditError(
            f"every row's rollout must be given, because it has the reward; found rows of {len(unknown)} others, such "
            f"as {next(iter(unknown))!r}"
        )
    credited: dict[Hashable, Row] = {}
    for rollout in rollouts:
        mine = by_rollout.get(rollout.rollout_id, [])
        if not mine:
            continue
        _refuse_forks(rollout)
        if rollout.reward is None:
            raise CreditError(f"rollout {rollout.rollout_id!r} has rows but no reward; give it one, or leave it out")
        values = np.concatenate([row.old_values[row.loss_mask] for row in mine if row.old_values is not None])
        token_rewards = None
        if kl_coef:
            token_rewards = np.concatenate([-kl_coef * token_kl(row, kl_estimator) for row in mine])
        credit = gae(
            values,
            rollout.reward,
            gamma=gamma,
            lam=lam,
            terminal_value=(terminal_values or {}).get(rollout.rollout_id, 0.0),
            token_rewards=token_rewards,
        )
        ends = np.cumsum([row.num_trained_tokens for row in mine])[:-1]
        parts = zip(np.split(credit.advantages, ends), np.split(credit.returns, ends), strict=True)
        for row, (advantages_M, returns_M) in zip(mine, parts, strict=True):
            credited[row.row_id] = replace(row, advantage=_spread(row, advantages_M), returns=_spread(row, returns_M))
    return [credited[row.row_id] for row in rows]


def _spread(row: Row, values_M: Float64Array) -> Float64Array:
    values_T = np.zeros(row.num_tokens)
    values_T[row.loss_mask] = values_M
    return values_T


def _refuse_forks(rollout: Rollout) -> None:
    previous: int | None = None
    kept: dict[int, int | None] = {}  # order of a call -> itself or, where it was rejected, the call that it continued
    for call in sorted(rollout.calls, key=lambda call: call.order):
        parent = None if call.parent is None else kept.get(call.parent, call.parent)
        kept[call.order] = parent if call.is_rejected else call.order
        if call.is_rejected:
            continue
        if (parent is not None and parent != previous) or call.break_reason == "subagent":
            raise CreditError(
                f"rollout {rollout.rollout_id!r}: call {call.order} continues call {call.parent}, not the one before "
                f"it ({previous}); gae needs one order of tokens, so use an estimator by rollout where rollouts fork"
            )
        previous = call.order
