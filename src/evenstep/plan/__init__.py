"""The planner: from row lengths to an exact step plan under a token budget. NumPy only."""

from evenstep.plan.bounds import Bounds, lower_bounds
from evenstep.plan.build import reuse_plan
from evenstep.plan.choose import LayoutChoice, plan_cheapest
from evenstep.plan.cost import CostModel
from evenstep.plan.measure import PlanStats
from evenstep.plan.planner import plan_step
from evenstep.plan.prefixes import SharedPrefixes, shared_prefixes
from evenstep.plan.refine import refine_plan
from evenstep.plan.request import Request
from evenstep.plan.step_plan import Cells, Overlong, StepPlan

__all__ = [
    "Bounds",
    "Cells",
    "CostModel",
    "LayoutChoice",
    "Overlong",
    "PlanStats",
    "Request",
    "SharedPrefixes",
    "StepPlan",
    "lower_bounds",
    "plan_cheapest",
    "plan_step",
    "refine_plan",
    "reuse_plan",
    "shared_prefixes",
]
