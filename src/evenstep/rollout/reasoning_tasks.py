"""Questions of a reasoning-gym family, several in one episode: the extra ``envs`` brings the families.

An episode asks ``num_questions`` questions one after the other. With a context too small for all of them the agent's
earlier questions and answers are compacted away while the episode goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from evenstep.errors import ConfigError
from evenstep.rollout.environment import Episode, Score, Split, Start, split_of_text
from evenstep.rollout.seeds import mixed_seed

__all__ = ["ReasoningTasks", "ReasoningTasksOptions"]

MAX_DRAWS = 200  # for each question, in search of one of the split, which has a quarter of all or more


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTasksOptions:
    """Which questions are asked.

    Raises:
        ConfigError: reasoning-gym is not installed, the family is unknown, or a setting is not the family's.
    """

    family: str = "chain_sum"  # a reasoning-gym data set
    num_questions: int = 3  # of an episode
    instruction: str = "Answer with the result only."
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the family

    def __post_init__(self) -> None:
        if self.num_questions < 1:
            raise ConfigError(f"num_questions must be at least 1, found {self.num_questions}")
        _question(self, 0)


def _question(options: ReasoningTasksOptions, seed: int) -> tuple[Any, Mapping[str, Any]]:
    """(scorer, entry) of the one question with this seed."""
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports] -- an extra
    except ImportError as error:
        raise ConfigError("environment 'reasoning_gym' needs the extra: pip install 'evenstep[envs]'") from error
    try:
        dataset = reasoning_gym.create_dataset(options.family, size=1, seed=seed % 2**31, **options.settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym cannot make family {options.family!r} with settings {dict(options.settings)}: {error}; see "
            f"reasoning_gym.factory.DATASETS for the families and their configurations"
        ) from error
    return dataset, dataset[0]


class ReasoningTasks:
    """One episode: questions until the last is answered.

    Reward: the mean of the family's own scores, each between 0 and 1; most families give part of it to an answer that
    is right but wordy.
    """

    Options: ClassVar[type[ReasoningTasksOptions]] = ReasoningTasksOptions

    def __init__(self, options: ReasoningTasksOptions, questions: tuple[tuple[Any, Mapping[str, Any]], ...]) -> None:
        self._options = options
        self._questions = questions
        self._scores: list[float] = []

    @classmethod
    def for_task(cls, options: ReasoningTasksOptions, *, seed: int, split: Split, index: int) -> ReasoningTasks:
        questions: list[tuple[Any, Mapping[str, Any]]] = []
        for draw in range(MAX_DRAWS * options.num_questions):
            dataset, entry = _question(options, mixed_seed("reasoning_gym", seed, split, index, draw))
            if split_of_text(entry["question"]) == split:
                questions.append((dataset, entry))
            if len(questions) == options.num_questions:
                return cls(options, tuple(questions))
        raise ConfigError(
            f"reasoning-gym family {options.family!r} with settings {dict(options.settings)} must have questions for "
            f"the split {split!r}, found {len(questions)} of {options.num_questions} in "
            f"{MAX_DRAWS * options.num_questions} draws; it has too few different ones, so widen its settings or take "
            f"another family"
        )

    async def reset(self) -> Start:
        self._scores = []
        return Start(task=self._options.instruction, observation=self._questions[0][1]["question"])

    async def step(self, action: str) -> str | None:
        """The next question; None after the last answer."""
        dataset, entry = self._questions[len(self._scores)]
        self._scores.append(float(dataset.score_answer(action.strip(), entry)))
        if len(self._scores) == len(self._questions):
            return None
        return self._questions[len(self._scores)][1]["question"]

    async def score(self, episode: Episode) -> Score:
        """Mean score; a question that was never answered counts 0."""
        answers = [entry["answer"] for _, entry in self._questions]
        return Score(reward=sum(self._scores) / len(self._questions), info={"answers": answers, "scores": self._scores})
