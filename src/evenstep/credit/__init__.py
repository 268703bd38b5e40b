"""Who gets how much: one advantage per rollout, one weight per trained token. NumPy only."""

from evenstep.credit.advantages import ESTIMATORS, group_advantages
from evenstep.credit.weights import NORMALISERS, WindowCounts, count_window, row_weights

__all__ = ["ESTIMATORS", "NORMALISERS", "WindowCounts", "count_window", "group_advantages", "row_weights"]
