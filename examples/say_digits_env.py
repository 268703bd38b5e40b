"""A task that a policy with random weights can begin to learn: say digits.

    python scripts/make_tiny_model.py gpt_oss runs/models/gpt_oss
    evenstep train examples/gpt_oss.toml --ranks 2

In each of ``num_turns`` turns the agent is asked for digits; the reward is the share of digits among all that it said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from evenstep.errors import ConfigError
from evenstep.rollout.environment import Episode, Score, Split, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class SayDigitsOptions:
    num_turns: int = 3

    def __post_init__(self) -> None:
        if self.num_turns < 1:
            raise ConfigError(f"num_turns must be at least 1, found {self.num_turns}")


class SayDigits:
    """Reward: digits said / characters said; 0 for silence."""

    Options: ClassVar[type[SayDigitsOptions]] = SayDigitsOptions

    def __init__(self, options: SayDigitsOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._said: list[str] = []

    @classmethod
    def for_task(cls, options: SayDigitsOptions, *, seed: int, split: Split, index: int) -> SayDigits:
        return cls(options, f"{split} {index}")

    async def reset(self) -> Start:
        self._said = []
        return Start(task=f"digits {self._name}", observation="go on")

    async def step(self, action: str) -> str | None:
        self._said.append(action)
        return None if len(self._said) == self._options.num_turns else "go on"

    async def score(self, episode: Episode) -> Score:
        text = "".join(self._said)
        num_digits = sum(character.isdigit() for character in text)
        return Score(reward=num_digits / max(1, len(text)), info={"said": self._said})
