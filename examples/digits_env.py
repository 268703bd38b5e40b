"""An environment that shows images: a digit a turn, drawn in NumPy, to be answered with that digit.

From the repository's root, on a tiny random policy that sees images:

    python scripts/make_vision_policy.py runs/vision-policy
    evenstep train examples/digits.toml --ranks 2

An observation with images is an ``Observation``: text, and arrays of uint8 [height, width, 3] that stand before it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evenstep.errors import ConfigError
from evenstep.rollout.environment import Episode, Observation, Score, Split, Start, split_of_text

# a glyph is 7 rows of 5 pixels, a row a number in binary
GLYPHS = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)
SIDE = 16  # pixels of an image's side


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsOptions:
    num_digits: int = 3  # turns of an episode
    num_kinds: int = 10  # digits from 0 on that are shown

    def __post_init__(self) -> None:
        if self.num_digits < 1 or not 2 <= self.num_kinds <= len(GLYPHS):
            raise ConfigError(
                f"digits need num_digits ≥ 1 and num_kinds from 2 to {len(GLYPHS)}, found {self.num_digits} and "
                f"{self.num_kinds}"
            )


def picture(digit: int, draw: random.Random) -> np.ndarray:
    """[SIDE, SIDE, 3] A digit twice its glyph's size, in a colour and a place of its own."""
    glyph = np.array([[row >> shift & 1 for shift in (4, 3, 2, 1, 0)] for row in GLYPHS[digit]], dtype=np.uint8)
    large = glyph.repeat(2, axis=0).repeat(2, axis=1)
    image = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    top, left = draw.randint(0, SIDE - large.shape[0]), draw.randint(0, SIDE - large.shape[1])
    colour = np.array([draw.randint(128, 255) for _ in range(3)], dtype=np.uint8)
    image[top : top + large.shape[0], left : left + large.shape[1]] = large[:, :, None] * colour
    return image


class Digits:
    """Reward: for each turn 1 for the right digit, a fifth for another one; their mean."""

    Options: ClassVar[type[DigitsOptions]] = DigitsOptions

    def __init__(self, digits: list[int], images: list[np.ndarray]) -> None:
        self._digits = digits
        self._images = images
        self._answers: list[str] = []

    @classmethod
    def for_task(cls, options: DigitsOptions, *, seed: int, split: Split, index: int) -> Digits:
        """The same arguments give the same pictures on every machine; no row of pictures is in two splits."""
        draw = random.Random(f"{seed}/{split}/{index}")
        while True:
            digits = [draw.randrange(options.num_kinds) for _ in range(options.num_digits)]
            images = [picture(digit, draw) for digit in digits]
            if split_of_text("".join(image.tobytes().hex() for image in images)) == split:
                return cls(digits, images)

    async def reset(self) -> Start:
        self._answers = []
        return Start(task="read", observation=self._observation())

    async def step(self, action: str) -> str | None:
        """What the agent said -> the next picture, or None at the end."""
        self._answers.append(action.strip())
        return None if len(self._answers) == len(self._digits) else self._observation()

    async def score(self, episode: Episode) -> Score:
        """``info`` is kept beside the reward in the run's files."""
        return Score(
            reward=sum(map(self._reward, self._answers, self._digits)) / len(self._digits),
            info={"digits": self._digits, "answers": self._answers},
        )

    def _observation(self) -> Observation:
        return Observation("?", images=[self._images[len(self._answers)]])

    @staticmethod
    def _reward(answer: str, digit: int) -> float:
        return 1.0 if answer == str(digit) else 0.2 if answer.isdecimal() and len(answer) == 1 else 0.0
