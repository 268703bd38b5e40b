"""Behaviours locked here, on a family that is scripted so that they hold without the extra:

1. An episode has the number of questions asked for, all of its split, equal for equal arguments; the reward is the mean
   of the family's scores, and a question that was never answered counts 0.
2. A family with too few different questions for a split is an error that says so, not a search without end.
"""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from evenstep.errors import ConfigError
from evenstep.rollout.environment import Episode, split_of_text
from evenstep.rollout.reasoning_tasks import ReasoningTasks, ReasoningTasksOptions


class Family:
    """``num_questions`` different questions, drawn by the seed."""

    def __init__(self, seed: int, num_questions: int) -> None:
        self._index = seed % num_questions

    def __getitem__(self, _: int) -> dict[str, Any]:
        return {"question": f"question {self._index}", "answer": str(self._index)}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("reasoning_gym")
    module.create_dataset = lambda name, *, size, seed, num_questions=1000: Family(seed, num_questions)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def episode(split: Any, **settings: Any) -> ReasoningTasks:
    options = ReasoningTasksOptions(num_questions=3, settings=settings)
    return ReasoningTasks.for_task(options, seed=0, split=split, index=5)


def test_questions_of_the_split() -> None:
    async def play(env: ReasoningTasks, answers: list[bool]) -> tuple[list[str], float]:
        asked = [(await env.reset()).observation]
        for is_right in answers:
            found = await env.step(asked[-1].split()[1] if is_right else "no")
            asked += [] if found is None else [found]
        return asked, (await env.score(Episode(num_segments=1, visible_observations=()))).reward

    for split in ("train", "heldout", "warmstart"):
        asked, reward = asyncio.run(play(episode(split), [True, False, True]))
        assert len(asked) == 3
        assert {split_of_text(text) for text in asked} == {split}
        assert reward == pytest.approx(2 / 3)
        assert asyncio.run(play(episode(split), [True]))[1] == pytest.approx(1 / 3)
        assert asyncio.run(play(episode(split), [True, True, True]))[0] == asked


def test_too_few_questions_for_a_split() -> None:
    only = split_of_text("question 0")
    assert episode(only, num_questions=1)
    other = next(split for split in ("train", "heldout", "warmstart") if split != only)
    with pytest.raises(ConfigError, match=rf"must have questions for the split '{other}', found 0 of 3 in 600 draws"):
        episode(other, num_questions=1)
