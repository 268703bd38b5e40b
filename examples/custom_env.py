"""An environment of your own: the agent guesses a number and hears whether it is higher or lower.

From the repository's root, on the demo's tiny policy, whose alphabet is a-z, 0-9 and a few signs:

    evenstep train examples/ledger.toml --run-dir runs/guess \\
        --set environment.name=examples/custom_env.py:GuessNumber

``GuessOptions`` are the keys that ``[environment]`` takes beside ``name``; they are checked like all others. Every
method is ``async``: await what takes long, because all rollouts share one event loop.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from evenstep.errors import ConfigError
from evenstep.rollout.environment import Episode, Score, Split, Start, split_of_text


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessOptions:
    max_number: int = 99
    max_guesses: int = 5

    def __post_init__(self) -> None:
        if self.max_number < 20 or self.max_guesses < 1:
            raise ConfigError(
                f"a guessing game needs max_number ≥ 20 and max_guesses ≥ 1, found {self.max_number} and "
                f"{self.max_guesses}"
            )


class GuessNumber:
    """Reward: 1 for a hit at the first guess, less for each further one, 0 without a hit."""

    Options: ClassVar[type[GuessOptions]] = GuessOptions

    def __init__(self, options: GuessOptions, number: int) -> None:
        self._options = options
        self._number = number
        self._guesses: list[str] = []

    @classmethod
    def for_task(cls, options: GuessOptions, *, seed: int, split: Split, index: int) -> GuessNumber:
        """The same arguments give the same number on every machine; no number is in two splits."""
        draw = random.Random(f"{seed}/{split}/{index}")
        number = draw.randint(0, options.max_number)
        while split_of_text(f"number {number}") != split:
            number = draw.randint(0, options.max_number)
        return cls(options, number)

    async def reset(self) -> Start:
        self._guesses = []
        return Start(task=f"guess a number from 0 to {self._options.max_number}", observation="?")

    async def step(self, action: str) -> str | None:
        """What the agent said -> what it hears next, or None at the end."""
        self._guesses.append(action.strip())
        if self._has_hit or len(self._guesses) == self._options.max_guesses:
            return None
        if not self._guesses[-1].isdecimal():
            return "a number"
        return "higher" if int(self._guesses[-1]) < self._number else "lower"

    async def score(self, episode: Episode) -> Score:
        """Called once, also when the rollout was truncated; ``info`` is kept beside the reward in the run's files."""
        reward = 1 - (len(self._guesses) - 1) / self._options.max_guesses if self._has_hit else 0.0
        return Score(reward=reward, info={"number": self._number, "guesses": self._guesses})

    @property
    def _has_hit(self) -> bool:
        return self._guesses[-1:] == [str(self._number)]
