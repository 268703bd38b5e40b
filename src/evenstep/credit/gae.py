"""Generalised advantage estimation over a rollout, whatever segments it was split into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evenstep.errors import CreditError
from evenstep.types import Float64Array

__all__ = ["TokenCredit", "gae"]


class TokenCredit(NamedTuple):
    """What a token is trained towards; M trained tokens of a rollout in call order."""

    advantages: Float64Array  # [M]
    returns: Float64Array  # [M] target of the value function


def gae(
    values: Sequence[float] | npt.NDArray[np.floating],
    reward: float,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    terminal_value: float = 0.0,
    token_rewards: Sequence[float] | npt.NDArray[np.floating] | None = None,
) -> TokenCredit:
    """Advantages and returns of a rollout's trained tokens.

    ``δ_m = r_m + γ·V_{m+1} - V_m`` and ``A_m = δ_m + γλ·A_{m+1}``, with V read where a token is predicted. Context
    tokens are not steps: the value after a segment's last trained token is the one at the next segment's first, so
    splitting a rollout changes nothing.

    Args:
        values: [M] V at each trained token, over all segments in call order.
        reward: the rollout's, paid at its last trained token.
        gamma: discount per trained token.
        lam: λ.
        terminal_value: V after the last token: 0 when the episode ended, a bootstrap where it was truncated.
        token_rewards: [M] added to each token's reward, e.g. minus beta times its KL.

    Raises:
        CreditError: unequal lengths, a value that is not finite, gamma or lam outside [0, 1].

    >>> found = gae([0.5, 0.25], 1.0, gamma=1.0, lam=1.0)
    >>> found.advantages.tolist(), found.returns.tolist()
    ([0.5, 0.75], [1.0, 1.0])

    Source: Schulman et al. 2016.
    """
    values_M = np.asarray(values, dtype=np.float64)
    rewards_M = np.zeros_like(values_M) if token_rewards is None else np.asarray(token_rewards, dtype=np.float64).copy()
    if values_M.ndim != 1 or rewards_M.shape != values_M.shape:
        raise CreditError(
            f"gae needs one value and one reward per trained token, found shapes {values_M.shape} and {rewards_M.shape}"
        )
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise CreditError(f"{name} must be between 0 and 1, found {number}")
    if not (
        np.isfinite(values_M).all() and np.isfinite(rewards_M).all() and np.isfinite([reward, terminal_value]).all()
    ):
        raise CreditError(f"gae needs finite values and rewards, found {values_M}, {rewards_M}, {reward}")
    if values_M.size == 0:
        return TokenCredit(values_M, values_M.copy())
    rewards_M[-1] += reward
    deltas_M = rewards_M + gamma * np.append(values_M[1:], terminal_value) - values_M
    advantages_M = np.empty_like(deltas_M)
    running = 0.0
    for m in range(len(deltas_M) - 1, -1, -1):
        running = float(deltas_M[m]) + gamma * lam * running
        advantages_M[m] = running
    return TokenCredit(advantages_M, advantages_M + values_M)
