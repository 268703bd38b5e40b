"""Who gets how much: one advantage per rollout, one weight per trained token. NumPy only."""

from evenstep.credit.advantages import ESTIMATORS, rollout_advantages
from evenstep.credit.gae import TokenCredit, gae
from evenstep.credit.weights import NORMALISERS, WindowCounts, count_window, row_weights

__all__ = [
    "ESTIMATORS",
    "NORMALISERS",
    "TokenCredit",
    "WindowCounts",
    "count_window",
    "gae",
    "rollout_advantages",
    "row_weights",
]
