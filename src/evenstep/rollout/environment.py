"""What an environment is, and how a configuration names one: built in, or a class of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from evenstep.errors import ConfigError, EvenstepError
from evenstep.plugins import is_own_class, own_class
from evenstep.rollout.seeds import mixed_seed

if TYPE_CHECKING:
    from evenstep.rollout.conversation import Conversation

__all__ = [
    "ENVIRONMENTS",
    "SPLITS",
    "AsksModel",
    "Environment",
    "Episode",
    "FiniteTasks",
    "Observation",
    "Score",
    "Split",
    "Start",
    "TaskSource",
    "environment_named",
    "split_of_text",
]

Split = Literal["train", "heldout", "warmstart"]
SPLITS: tuple[Split, ...] = ("train", "heldout", "warmstart")
_SPLIT_OF_SHARE: tuple[Split, ...] = ("train", "train", "heldout", "warmstart")


class Observation(str):
    """An observation with images, which stand before its text; everywhere else it is that text.

    >>> import numpy as np
    >>> seen = Observation("which digit?", images=[np.zeros((28, 28, 3), dtype=np.uint8)])
    >>> seen, len(seen.images)
    ('which digit?', 1)

    Args:
        text: what stands behind the images.
        images: arrays of uint8 [height, width, 3], copied; their sides are multiples of what is one token to the model.
    """

    images: tuple[Any, ...]

    def __new__(cls, text: str = "", *, images: Iterable[Any] = ()) -> Observation:
        import numpy as np  # here, so that naming an environment needs no NumPy

        made = super().__new__(cls, text)
        made.images = tuple(np.array(image) for image in images)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: the task, which compaction always keeps, and the first observation, which it may drop."""

    task: str
    observation: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the task's JSON, for programs that play it


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
    """One episode of one task.

    A class has ``Options``, a frozen dataclass with the keys of its configuration, their defaults, and their checks in
    ``__post_init__`` (``ConfigError``), and ``for_task``, which is a pure function of its arguments: equal arguments
    give equal tasks on every rank, and the tasks of two splits are disjoint (`split_of_text` helps).

    Many episodes run at the same time on one event loop, so a method that blocks (``time.sleep``, a synchronous HTTP
    client, a long computation) stops all of them and cannot be interrupted: await, or hand it to
    ``asyncio.to_thread``. Whatever a method raises costs its own rollout, which is then ``failed``.
    """

    Options: ClassVar[type[Any]]

    @classmethod
    def for_task(cls, options: Any, *, seed: int, split: Split, index: int) -> Environment: ...

    async def reset(self) -> Start: ...

    async def step(self, action: str) -> str | None:
        """The next observation (with images: an `Observation`), or None when the episode is over."""
        ...

    async def score(self, episode: Episode) -> Score:
        """The reward, once, after the last step or where the rollout was truncated."""
        ...


@runtime_checkable
class AsksModel(Protocol):
    """What an environment also has when it asks the policy itself: sub-agents, drafts to choose from, a judge."""

    def use_model(self, converse: Callable[[], Conversation]) -> None:
        """Keep ``converse``; each call of it, within reset, step or score, begins a `Conversation`."""
        ...


@runtime_checkable
class FiniteTasks(Protocol):
    """What an environment's class also has when a split has only so many tasks; then they come again, in order."""

    @classmethod
    def num_tasks(cls, options: Any, *, split: Split) -> int: ...


def split_of_text(text: str) -> Split:
    """The split that a task belongs to, by its own text, so that no task can be in two; training has half of all.

    >>> split_of_text("find c|c7 a1")
    'train'
    """
    return _SPLIT_OF_SHARE[mixed_seed("split", text) % len(_SPLIT_OF_SHARE)]


# name in a configuration -> class; looked up when it is used, so that an environment's imports are paid by its users
ENVIRONMENTS: dict[str, Callable[[], type[Environment]]] = {
    "ledger": partial(own_class, "evenstep.rollout.ledger:Ledger"),
    "reasoning_gym": partial(own_class, "evenstep.rollout.reasoning_tasks:ReasoningTasks"),
    "prompts": partial(own_class, "evenstep.rollout.prompts:Prompts"),
    "calculator": partial(own_class, "evenstep.rollout.calculator:Calculator"),
}


def environment_named(name: str) -> type[Environment]:
    """The environment class that a configuration names: built in, or ``path/to/file.py:Class``, ``module:Class``.

    >>> environment_named("ledger").__name__
    'Ledger'
    >>> environment_named("evenstep.rollout.calculator:Calculator").__name__
    'Calculator'

    Raises:
        ConfigError: no environment has this name, or the user's class is none.
    """
    if is_own_class(name):
        return _checked_class(own_class(name), name)
    if name not in ENVIRONMENTS:
        raise ConfigError(
            f"environment {name!r} is not known; known environments: {', '.join(ENVIRONMENTS)}, or a class of "
            f"your own as path/to/file.py:ClassName"
        )
    return ENVIRONMENTS[name]()


def _checked_class(found: type[Any], name: str) -> type[Environment]:
    problems: list[str] = []
    members = dict(inspect.getmembers(found))
    if not isinstance(members.get("Options"), type) or not is_dataclass(members["Options"]):
        problems.append("no Options, a frozen dataclass of its configuration's keys")
    if not inspect.ismethod(members.get("for_task")):
        problems.append("no classmethod for_task(options, *, seed, split, index)")
    for method in ("reset", "step", "score"):
        if not inspect.iscoroutinefunction(members.get(method)):
            problems.append(f"no `async def {method}`")
    if problems:
        raise ConfigError(
            f"environment.name = {name!r} must name an environment, found {', '.join(problems)}; see examples/"
            f"custom_env.py, which is a whole one"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """Tasks of one split by index.

    >>> tasks = TaskSource(name="ledger", options=environment_named("ledger").Options(), seed=0, split="train")
    >>> tasks.prompt_id(3), tasks.num_tasks
    ('ledger/train/0/3', None)
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

    @property
    def num_tasks(self) -> int | None:
        """How many different tasks there are; None where any index is another one."""
        environment = environment_named(self.name)
        if not issubclass(environment, FiniteTasks):
            return None
        return environment.num_tasks(self.options, split=self.split)

    def prompt_id(self, index: int) -> str:
        return f"{self.name}/{self.split}/{self.seed}/{self._task(index)}"

    def environment(self, index: int) -> Environment:
        """A fresh episode of the task with this index; one that cannot be made fails when it is reset.

        Raises:
            ConfigError: a held-out task that does not exist; training tasks come again instead.
        """
        task = self._task(index)
        try:
            return environment_named(self.name).for_task(self.options, seed=self.seed, split=self.split, index=task)
        except EvenstepError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- as in a step: it costs this rollout, not the run
            return cast(Environment, _NotMade(error))

    def _task(self, index: int) -> int:
        num_tasks = self.num_tasks
        if num_tasks is None or index < num_tasks:
            return index
        if self.split != "train":  # a task that came twice would count twice in the mean
            raise ConfigError(
                f"evaluation.num_tasks must be at most the {num_tasks} {self.split} tasks that environment "
                f"{self.name!r} has, found {index + 1} or more; lower it, or give the environment more of them"
            )
        return index % num_tasks


class _NotMade:
    """Stands in for an environment whose ``for_task`` failed: its rollout fails with that very error at the start."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def reset(self) -> Start:
        raise self._error
