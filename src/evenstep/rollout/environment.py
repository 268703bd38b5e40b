"""What an environment is, and the registry that a configuration names them by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol

from evenstep.errors import ConfigError
from evenstep.rollout.seeds import mixed_seed

__all__ = [
    "ENVIRONMENTS",
    "SPLITS",
    "Environment",
    "Episode",
    "Score",
    "Split",
    "Start",
    "TaskSource",
    "environment_named",
]

Split = Literal["train", "heldout", "warmstart"]
SPLITS: tuple[Split, ...] = ("train", "heldout", "warmstart")
_SPLIT_OF_SHARE: tuple[Split, ...] = ("train", "train", "heldout", "warmstart")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: the task, which compaction always keeps, and the first observation, which it may drop."""

    task: str
    observation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What the agent knows at the end of a rollout and an environment may need for its score."""

    num_segments: int
    visible_observations: tuple[int, ...]  # indices (0: the first) of those in the context of the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of an episode and the environment's JSON about it.

    ``info["answer"]``, where an environment gives it, is the one right answer of the task; evaluation takes the floor
    of the most common answer from it.
    """

    reward: float
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Environment(Protocol):
    """One episode of one task; a class of this kind is registered in ``ENVIRONMENTS``.

    A class has ``Options``, a frozen dataclass with the keys of its configuration, their defaults, and their checks in
    ``__post_init__`` (``ConfigError``), and ``for_task``, which is a pure function of its arguments: equal arguments
    give equal tasks on every rank, and the tasks of two splits are disjoint.
    """

    Options: ClassVar[type[Any]]

    @classmethod
    def for_task(cls, options: Any, *, seed: int, split: Split, index: int) -> Environment: ...

    async def reset(self) -> Start: ...

    async def step(self, action: str) -> str | None:
        """The next observation, or None when the episode is over."""
        ...

    async def score(self, episode: Episode) -> Score: ...


def split_of_text(text: str) -> Split:
    """The split that a task belongs to, by its own text, so that no task can be in two; training has half of all.

    >>> split_of_text("find c|c7 a1")
    'train'
    """
    return _SPLIT_OF_SHARE[mixed_seed("split", text) % len(_SPLIT_OF_SHARE)]


def _ledger() -> type[Environment]:
    from evenstep.rollout.ledger import Ledger

    return Ledger


def _reasoning_gym() -> type[Environment]:
    from evenstep.rollout.reasoning_tasks import ReasoningTasks

    return ReasoningTasks


# name in a configuration -> class; looked up when it is used, so that an environment's imports are paid by its users
ENVIRONMENTS = {"ledger": _ledger, "reasoning_gym": _reasoning_gym}


def environment_named(name: str) -> type[Environment]:
    """The environment class that a configuration names.

    >>> environment_named("ledger").__name__
    'Ledger'

    Raises:
        ConfigError: no environment has this name.
    """
    if name not in ENVIRONMENTS:
        raise ConfigError(f"environment {name!r} is not known; known environments: {', '.join(sorted(ENVIRONMENTS))}")
    return ENVIRONMENTS[name]()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """Tasks of one split by index.

    >>> tasks = TaskSource(name="ledger", options=environment_named("ledger").Options(), seed=0, split="train")
    >>> tasks.prompt_id(3)
    'ledger/train/0/3'
    """

    name: str  # of the environment
    options: Any  # the environment's Options
    seed: int
    split: Split

    def __post_init__(self) -> None:
        expected = environment_named(self.name).Options
        if not isinstance(self.options, expected):
            raise ConfigError(
                f"environment {self.name!r} takes {expected.__qualname__} "
                f"({', '.join(f.name for f in fields(expected))}), found {type(self.options).__qualname__}"
            )
        if self.split not in SPLITS:
            raise ConfigError(f"split must be one of {', '.join(SPLITS)}, found {self.split!r}")

    def prompt_id(self, index: int) -> str:
        return f"{self.name}/{self.split}/{self.seed}/{index}"

    def environment(self, index: int) -> Environment:
        """A fresh episode of the task with this index."""
        return environment_named(self.name).for_task(self.options, seed=self.seed, split=self.split, index=index)
