"""What is locked here:

1. The calculator is exact, refuses everything but bounded arithmetic, and never runs what it is given.
2. Tool calls come back as observations, errors too; what follows the last one allowed is the answer.
3. Tasks are a pure function of their arguments, their splits are disjoint, and an empty split is refused.
4. The example configuration loads, and its environment plays in the agent loop.
"""

from __future__ import annotations

import ast
import random
import time
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.config import load_config
from evenstep.errors import ConfigError
from evenstep.rollout.calculator import (
    MAX_BITS,
    CalculationError,
    Calculator,
    CalculatorOptions,
    calculate,
    number_text,
)
from evenstep.rollout.environment import SPLITS, TaskSource, split_of_text
from scripted import played

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "expression, value",
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("2 ** 10", 1024),
        ("2 ** -2", Fraction(1, 4)),
        ("-2 ** 2", -4),
        ("1 / 3 * 3", 1),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("1e3 + 1_000", 2000),
        (" + 5 ", 5),
        ("\n3 - 1\n", 2),
        ("2 ** (6 / 3)", 4),
    ],
)
def test_values(expression: str, value: Fraction | int) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression, message",
    [
        ("__import__('os').system('true')", "only numbers"),
        ("().__class__", "only numbers"),
        ("e", "only numbers"),
        ("_", "only numbers"),
        ("[1, 2]", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1, 2", "only numbers"),
        ("True", "only numbers"),
        ("1j", "only numbers"),
        ("0x10", "only numbers"),
        ("1 << 99", "only numbers"),
        ("2(3)", "only numbers"),
        ("1\x00", "only numbers"),
        ("٣ + ٤", "only numbers"),
        ("", "only numbers"),
        ("1 +", "not an arithmetic expression"),
        ("(1", "not an arithmetic expression"),
        ("1 + 2)", "not an arithmetic expression"),
        ("007", "not an arithmetic expression"),
        ("()", "only numbers"),
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "an exponent is a whole number from -64 to 64"),
        ("4 ** 0.5", "an exponent is a whole number"),
        ("(9 ** 64) ** 64", "too large"),
        ("1e999", "too large"),
        ("1e308 * 1e308", "too large"),
        ("1 * " * 50 + "1", "at most 200 characters"),
    ],
)
def test_refusals(expression: str, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what a model writes must not print warnings either
        with pytest.raises(CalculationError, match=message):
            calculate(expression)


def test_nothing_takes_long() -> None:
    started = time.process_time()
    for expression in ("(" * 199 + "1", "-" * 199 + "1", "*".join(["99**64"] * 28), "9**64//7**64%" * 15 + "1"):
        try:
            calculate(expression)
        except CalculationError:
            continue
    assert calculate("-" * 199 + "1") == -1
    assert time.process_time() - started < 1


@given(st.text(alphabet="0123456789+-*/%(). e_", max_size=30))
def test_anything_arithmetic_is_exact_or_refused(expression: str) -> None:
    """Python's own value of the same tree, with every number made exact first."""
    try:
        value = calculate(expression)
    except CalculationError:
        return
    assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS

    class Exact(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.expr:
            return ast.parse(f"Fraction({str(node.value)!r})", mode="eval").body

    tree = ast.fix_missing_locations(Exact().visit(ast.parse(expression.strip(), mode="eval")))
    assert value == eval(compile(tree, "expression", "eval"), {"Fraction": Fraction})


def test_numbers_as_texts() -> None:
    texts = [number_text(value) for value in (Fraction(-57), Fraction(1, 4), Fraction(2, 3), Fraction(10**40))]
    assert texts == ["-57", "0.25", "0.6666666667", "1" + "0" * 40]


# ------------------------------------------------------------------------------------------------ episodes


def calculator(max_tool_calls: int = 2) -> Calculator:
    return Calculator("12 + 7 * 3", max_tool_calls)


@pytest.mark.parametrize(
    "answers, reward, observations, num_errors",
    [
        (["33"], 1.0, [], 0),
        ([" 33 \n"], 1.0, [], 0),
        (["57"], 0.0, [], 0),
        (["33!"], 0.0, [], 0),
        (["<tool>7 * 3</tool>", "<tool>12 + 21</tool>", "33"], 1.0, ["result: 21", "result: 33"], 0),
        (["I try <tool>1/0</tool>", "33"], 1.0, ["error: division by zero"], 1),
        (["<tool>exit()</tool>", "33"], 1.0, ["error: only numbers, brackets and + - * / // % ** are allowed"], 1),
        (["<tool>1</tool>", "<tool>2</tool>", "<tool>33</tool>"], 0.0, ["result: 1", "result: 2"], 0),
        (["<tool>33", "never asked"], 0.0, [], 0),
    ],
)
def test_episodes(answers: list[str], reward: float, observations: list[str], num_errors: int) -> None:
    rollout = played(calculator(), *answers)
    assert (rollout.status, rollout.reward) == ("ok", reward)
    assert len(rollout.calls) == len(observations) + 1
    text = "".join(map(chr, rollout.calls[-1].prompt_ids))
    assert all(f"<{observation}\x01" in text for observation in observations)
    info = rollout.info
    assert (info["answer"], info["num_tool_calls"], info["num_tool_errors"]) == ("33", len(observations), num_errors)
    assert info["given"] == answers[len(observations)].strip()


def test_one_cut_off_before_its_answer_gets_nothing() -> None:
    rollout = played(calculator(max_tool_calls=9), "<tool>33</tool>", max_calls=3)
    assert (rollout.status, rollout.reward, rollout.info["given"]) == ("truncated", 0.0, None)


# ------------------------------------------------------------------------------------------------ tasks


def expressions(split: str, seed: int = 0, num_tasks: int = 40, **options: int | str) -> list[str]:
    tasks = TaskSource(name="calculator", options=CalculatorOptions(**options), seed=seed, split=split)
    found = []
    for index in range(num_tasks):
        environment = tasks.environment(index)
        assert isinstance(environment, Calculator)
        found.append(environment._expression)
    return found


def test_tasks_are_pure_and_their_splits_disjoint() -> None:
    found = {split: set(expressions(split)) for split in SPLITS}
    random.seed(5)
    assert found == {split: set(expressions(split)) for split in SPLITS}
    assert not found["train"] & found["heldout"]
    assert not found["train"] & found["warmstart"]
    assert expressions("train") != expressions("train", seed=1)
    assert len(found["train"]) > 30
    for text in found["train"]:
        numbers = [int(word) for word in text.split()[::2]]
        assert 2 <= len(numbers) <= 4
        assert all(1 <= number <= 99 for number in numbers)
    assert all(set(text.split()[1::2]) == {"-"} for text in expressions("train", operators="-"))


def test_a_split_without_sums_is_refused() -> None:
    lucky = split_of_text("1 + 1")  # the only sum there is
    for split in SPLITS:
        if split != lucky:
            with pytest.raises(ConfigError, match=f"must have sums for the split '{split}', found none in 10000 draws"):
                expressions(split, min_numbers=2, max_numbers=2, max_number=1, operators="+", num_tasks=1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"min_numbers": 1}, "2 ≤ min_numbers"),
        ({"min_numbers": 5}, "min_numbers = 5 and max_numbers = 4"),
        ({"max_number": 0}, "max_number must be from 1"),
        ({"operators": "+/"}, "operators must be some of"),
        ({"operators": ""}, "operators must be some of"),
        ({"max_tool_calls": -1}, "max_tool_calls must be at least 0, found -1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CalculatorOptions(**options)


def test_the_example_loads() -> None:
    config = load_config([ROOT / "examples" / "calculator.toml"])
    assert config.environment_options == CalculatorOptions(max_numbers=3, max_tool_calls=2)
