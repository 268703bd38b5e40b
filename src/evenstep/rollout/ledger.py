"""The demo environment: a ledger that is longer than the context.

A task names one account. The ledger arrives page by page, each page a few entries (an account's letter and its digit);
the agent answers every page to read on. After the last page it is asked for the account's entry. The account stands on
a page of the first half, so an agent that keeps only notes and whose context was full twice can no longer see it: it
must have carried it along in its notes.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import ClassVar

from evenstep.errors import ConfigError
from evenstep.rollout.environment import Episode, Score, Split, Start, split_of_text
from evenstep.rollout.seeds import mixed_seed

__all__ = ["Ledger", "LedgerOptions", "LedgerTask", "make_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """Sizes of a ledger.

    Raises:
        ConfigError: an empty or reversed range.
    """

    min_pages: int = 1
    max_pages: int = 8
    min_entries: int = 3  # of a page
    max_entries: int = 5

    def __post_init__(self) -> None:
        for name, low, high in (
            ("pages", self.min_pages, self.max_pages),
            ("entries", self.min_entries, self.max_entries),
        ):
            if not 1 <= low <= high:
                raise ConfigError(
                    f"a ledger needs 1 ≤ min_{name} ≤ max_{name}, found min_{name} = {low} and max_{name} = {high}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTask:
    """One ledger and the account asked for.

    >>> task = LedgerTask(account="c", pages=(("a4", "c7"), ("b1", "d2")), page_of_answer=0)
    >>> task.answer, task.task_text, task.page_text(1)
    ('c7', 'find c', 'b1 d2')
    """

    account: str
    pages: tuple[tuple[str, ...], ...]
    page_of_answer: int

    @property
    def answer(self) -> str:
        return next(entry for entry in self.pages[self.page_of_answer] if entry[0] == self.account)

    @property
    def task_text(self) -> str:
        return f"find {self.account}"

    @property
    def question_text(self) -> str:
        return f"{self.account}?"

    def page_text(self, index: int) -> str:
        return " ".join(self.pages[index])


def make_task(options: LedgerOptions, *, seed: int, split: Split, index: int) -> LedgerTask:
    """The task of a split with this index, a pure function of the arguments.

    Tasks are drawn until one belongs to the split; which one a task belongs to is a hash of its text, so the splits
    are disjoint for any seeds.

    >>> options = LedgerOptions()
    >>> make_task(options, seed=0, split="train", index=5) == make_task(options, seed=0, split="train", index=5)
    True
    """
    rng = random.Random(mixed_seed("ledger", seed, split, index))
    while True:
        task = _drawn_task(options, rng)
        if _split_of(task) == split:
            return task


def _drawn_task(options: LedgerOptions, rng: random.Random) -> LedgerTask:
    letters = string.ascii_lowercase
    account = rng.choice(letters)
    others = letters.replace(account, "")
    num_pages = rng.randint(options.min_pages, options.max_pages)
    pages = [
        [
            rng.choice(others) + rng.choice(string.digits)
            for _ in range(rng.randint(options.min_entries, options.max_entries))
        ]
        for _ in range(num_pages)
    ]
    page_of_answer = rng.randrange((num_pages + 1) // 2)
    page = pages[page_of_answer]
    page[rng.randrange(len(page))] = account + rng.choice(string.digits)
    return LedgerTask(account=account, pages=tuple(tuple(page) for page in pages), page_of_answer=page_of_answer)


def _split_of(task: LedgerTask) -> Split:
    text = "|".join([task.account, *(task.page_text(index) for index in range(len(task.pages)))])
    return split_of_text(text)


class Ledger:
    """One episode: pages until the last, then the question, then the answer.

    Reward: 1 for exactly the account's entry ("c7"), else 0.
    """

    Options: ClassVar[type[LedgerOptions]] = LedgerOptions

    def __init__(self, task: LedgerTask) -> None:
        self._task = task
        self._num_observations = 0
        self._given: str | None = None

    @classmethod
    def for_task(cls, options: LedgerOptions, *, seed: int, split: Split, index: int) -> Ledger:
        return cls(make_task(options, seed=seed, split=split, index=index))

    async def reset(self) -> Start:
        self._num_observations = 1
        self._given = None
        return Start(task=self._task.task_text, observation=self._task.page_text(0))

    async def step(self, action: str) -> str | None:
        """The next page, then the question; None after the answer to it."""
        index = self._num_observations
        self._num_observations += 1
        if index < len(self._task.pages):
            return self._task.page_text(index)
        if index == len(self._task.pages):
            return self._task.question_text
        self._given = action.strip()
        return None

    async def score(self, episode: Episode) -> Score:
        """1 for the right entry; ``was_answer_visible`` says whether it was only read off the last context."""
        task = self._task
        return Score(
            reward=float(self._given == task.answer),
            info={
                "answer": task.answer[1],  # the digit: which account is asked stands in the task
                "given": self._given,
                "num_pages": len(task.pages),
                "page_of_answer": task.page_of_answer,
                "was_answer_visible": task.page_of_answer in episode.visible_observations,
            },
        )
