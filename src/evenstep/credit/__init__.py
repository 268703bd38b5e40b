"""Who gets how much: one advantage per rollout, one weight per trained token. NumPy only."""

from evenstep.credit.advantages import ESTIMATORS, rollout_advantages, zero_spread_groups
from evenstep.credit.gae import TokenCredit, gae
from evenstep.credit.rows import KL_ESTIMATORS, credit_by_gae, credit_by_rollout, kl_penalties, token_kl
from evenstep.credit.weights import NORMALISERS, WindowCounts, count_window, row_weights

__all__ = [
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "NORMALISERS",
    "TokenCredit",
    "WindowCounts",
    "count_window",
    "credit_by_gae",
    "credit_by_rollout",
    "gae",
    "kl_penalties",
    "rollout_advantages",
    "row_weights",
    "token_kl",
    "zero_spread_groups",
]
