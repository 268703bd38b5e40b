"""1. Every example in the planner's docstrings runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import evenstep.plan

_MODULES = [f"evenstep.plan.{info.name}" for info in pkgutil.iter_modules(evenstep.plan.__path__)]


@pytest.mark.parametrize("name", _MODULES)
def test_examples_hold(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"np": importlib.import_module("numpy")})
    assert result.failed == 0


def test_the_planner_has_an_example() -> None:
    module = importlib.import_module("evenstep.plan.planner")
    assert doctest.testmod(module).attempted >= 4
