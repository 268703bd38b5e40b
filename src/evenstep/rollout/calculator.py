"""Tool calling: sums that the agent may work out with a calculator.

The agent asks for a calculation with ``<tool>(12 + 7) * 3</tool>`` and gets ``result: 57``, or ``error: ...`` when it
cannot be done, as its next observation. An answer without a tool call ends the episode. The tags are plain text, so any
tokenizer will do; a chat template's own format of tool calls is not used.

Nothing that a model writes is ever run: `calculate` reads numbers and the operators + - * / // % ** with brackets from
the expression's syntax tree, exactly, and refuses everything else.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from evenstep.errors import ConfigError
from evenstep.rollout.environment import Episode, Score, Split, Start, split_of_text
from evenstep.rollout.seeds import mixed_seed

__all__ = ["CalculationError", "Calculator", "CalculatorOptions", "calculate", "number_text"]

MAX_CHARACTERS = 200  # of an expression; bounds the depth of its tree, too
MAX_BITS = 1024  # of a value's numerator and of its denominator
MAX_EXPONENT = 64
MAX_DRAWS = 10_000  # tasks that are drawn in search of one of the split

# all that numbers and operators are written with; names, strings and keywords do not even reach the parser
_ARITHMETIC = re.compile(r"[0-9eE_.+\-*/%() \t]+")
_TOOL_CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
_ALLOWED = "only numbers, brackets and + - * / // % ** are allowed"
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class CalculationError(Exception):
    """An expression that the calculator refuses; the message is for the model."""


def calculate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression.

    >>> calculate("(12 + 7) * 3"), calculate("0.1 + 0.2"), calculate("7 // 2 - 2 ** -1")
    (Fraction(57, 1), Fraction(3, 10), Fraction(5, 2))
    >>> calculate("__import__('os')")
    Traceback (most recent call last):
        ...
    evenstep.rollout.calculator.CalculationError: only numbers, brackets and + - * / // % ** are allowed

    Raises:
        CalculationError: anything but numbers, brackets and + - * / // % **; too long an expression, too large a value
            or exponent; a division by zero.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError(f"an expression has at most {MAX_CHARACTERS} characters")
    if _ARITHMETIC.fullmatch(expression.strip()) is None:
        raise CalculationError(_ALLOWED)
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CalculationError("this is not an arithmetic expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(_literal(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_applied(op, _value(left), _value(right)))
        case _:
            raise CalculationError(_ALLOWED)


def _literal(number: int | float) -> Fraction:
    try:
        return Fraction(str(number))  # through its digits, so that 0.1 is a tenth
    except ValueError:  # 1e999
        raise CalculationError("a number is too large") from None


def _applied(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(op, ast.Pow):
        if right.denominator != 1 or abs(right) > MAX_EXPONENT:
            raise CalculationError(f"an exponent is a whole number from -{MAX_EXPONENT} to {MAX_EXPONENT}")
        right = Fraction(int(right))
    try:
        return Fraction(_BINARY[type(op)](left, right))
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculationError("a number is too large")
    return value


def number_text(value: Fraction) -> str:
    """A value as the calculator shows it: whole numbers in full, others to ten digits.

    >>> number_text(Fraction(57)), number_text(Fraction(1, 3))
    ('57', '0.3333333333')
    """
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorOptions:
    """How hard the sums are, and how often the calculator may be used.

    Raises:
        ConfigError: a number out of range, or an unknown operator.
    """

    min_numbers: int = 2  # of a sum
    max_numbers: int = 4
    max_number: int = 99
    operators: str = "+-*"  # drawn from; each one of + - *
    max_tool_calls: int = 4  # what comes after so many is the answer, whatever it says

    def __post_init__(self) -> None:
        if not 2 <= self.min_numbers <= self.max_numbers <= 16:
            raise ConfigError(
                f"a sum needs 2 ≤ min_numbers ≤ max_numbers ≤ 16, found min_numbers = {self.min_numbers} and "
                f"max_numbers = {self.max_numbers}"
            )
        if not 1 <= self.max_number <= 10**9:
            raise ConfigError(f"max_number must be from 1 to {10**9}, found {self.max_number}")
        if not self.operators or set(self.operators) - set("+-*"):
            raise ConfigError(f"operators must be some of + - *, found {self.operators!r}")
        if self.max_tool_calls < 0:
            raise ConfigError(f"max_tool_calls must be at least 0, found {self.max_tool_calls}")


def _expression(options: CalculatorOptions, *, seed: int, split: Split, index: int) -> str:
    rng = random.Random(mixed_seed("calculator", seed, split, index))
    for _ in range(MAX_DRAWS):
        num_numbers = rng.randint(options.min_numbers, options.max_numbers)
        numbers = [rng.randint(1, options.max_number) for _ in range(num_numbers)]
        text = str(numbers[0]) + "".join(f" {rng.choice(options.operators)} {number}" for number in numbers[1:])
        if split_of_text(text) == split:
            return text
    raise ConfigError(
        f"environment 'calculator' must have sums for the split {split!r}, found none in {MAX_DRAWS} draws; raise "
        f"environment.max_number or environment.max_numbers"
    )


class Calculator:
    """One sum, as many tool calls as are allowed, and the answer.

    Reward: 1 for exactly the right number, else 0; spaces around it do not count.
    """

    Options: ClassVar[type[CalculatorOptions]] = CalculatorOptions

    def __init__(self, expression: str, max_tool_calls: int) -> None:
        self._expression = expression
        self._max_tool_calls = max_tool_calls
        self._num_tool_calls = 0
        self._num_tool_errors = 0
        self._given: str | None = None

    @classmethod
    def for_task(cls, options: CalculatorOptions, *, seed: int, split: Split, index: int) -> Calculator:
        return cls(_expression(options, seed=seed, split=split, index=index), options.max_tool_calls)

    async def reset(self) -> Start:
        self._num_tool_calls = self._num_tool_errors = 0
        self._given = None
        return Start(
            task="Work out the sum. To use the calculator write only <tool>EXPRESSION</tool>, for example "
            "<tool>(2 + 3) * 4</tool>. When you know the result write only that number.",
            observation=self._expression,
        )

    async def step(self, action: str) -> str | None:
        """What the calculator says; None after the answer."""
        call = _TOOL_CALL.search(action)
        if call is None or self._num_tool_calls == self._max_tool_calls:
            self._given = action.strip()
            return None
        self._num_tool_calls += 1
        try:
            return f"result: {number_text(calculate(call.group(1)))}"
        except CalculationError as error:
            self._num_tool_errors += 1
            return f"error: {error}"

    async def score(self, episode: Episode) -> Score:
        """1 for the right number; a rollout that was cut off before its answer has none, and gets 0."""
        answer = number_text(calculate(self._expression))
        return Score(
            reward=float(self._given == answer),
            info={
                "expression": self._expression,
                "answer": answer,
                "given": self._given,
                "num_tool_calls": self._num_tool_calls,
                "num_tool_errors": self._num_tool_errors,
            },
        )
