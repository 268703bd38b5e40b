"""Behaviours locked here:

1. `recency` keeps the last turns, `sliding_window` as many as its budget holds, `summary` a note that is trained; a
   marker stands once for each run of dropped turns.
2. Schedules: `when_full` waits for the guard, `rolling` plans before each action, `chunked` leaves what a plan kept
   alone for `chunk_actions` actions, `threshold_tokens` plans from that many prompt tokens on; a plan that drops
   nothing starts no segment.
3. For any lengths, policy, schedule and limits: every prompt and its reserved generation fit, or the rollout is
   truncated with a reason; task and newest observation are in every prompt; every break is declared and nothing else
   is; every sampled token is trained exactly once.
4. After one recompaction a rollout is truncated; a policy that drops the task or mixes up turns is refused.
5. The ledger is scored under any policy and schedule.
6. Options that contradict each other are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.errors import ConfigError, StateError
from evenstep.rollout.agent import AgentOptions, RolloutIdentity, run_rollout
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import (
    Compaction,
    CompactionPolicy,
    Context,
    Guard,
    NoCompaction,
    Recency,
    SlidingWindow,
    Summary,
    compaction_named,
)
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.environment import Episode, Score, Start
from evenstep.rollout.ledger import Ledger, LedgerOptions
from evenstep.rollout.segments import rows_of, segments_of
from evenstep.types import Rollout

USER, ANSWER, END = "<", ">", "|"  # one token each, like every character


class Characters:
    """A tokenizer of characters whose messages are <text| and answers >text|."""

    eos_token_id = ord(END)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        starts = {"user": USER, "assistant": ANSWER}
        return "".join(starts[m["role"]] + m["content"] + END for m in conversation) + ANSWER * add_generation_prompt

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids).replace(END, "")


class Pages:
    """Shows o0, o1, … of the given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._index = 0
        self.episode: Episode | None = None

    def _page(self) -> str:
        return f"o{self._index}".ljust(self._lengths[self._index], "_")

    async def reset(self) -> Start:
        return Start(task="task", observation=self._page())

    async def step(self, action: str) -> str | None:
        self._index += 1
        return self._page() if self._index < len(self._lengths) else None

    async def score(self, episode: Episode) -> Score:
        self.episode = episode
        return Score(reward=1.0)


class Writer:
    """An engine whose answers have drawn lengths, letters a to d, and mostly an end."""

    weight_version = 0
    max_context_tokens = 10_000

    def __init__(self, seed: int | None) -> None:
        self._rng = None if seed is None else random.Random(seed)

    async def generate(self, request: Request) -> Completion:
        text = "a" + END
        if self._rng is not None:
            text = "".join(self._rng.choices("abcd", k=self._rng.randint(1, request.sampling.max_tokens)))
            text = text[:-1] + END if self._rng.random() < 0.7 else text
        ids = tuple(map(ord, text[: request.sampling.max_tokens]))
        return Completion(output_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop", weight_version=0)


def play(
    compaction: Compaction, lengths: list[int] | Any, *, seed: int | None = None, **options: Any
) -> tuple[Rollout, list[str]]:
    """The rollout and its prompts as text; answers are "a|" without a seed."""
    environment = Pages(lengths) if isinstance(lengths, list) else lengths
    rollout = asyncio.run(
        run_rollout(
            identity=RolloutIdentity(
                rollout_id="r", group_id="g", prompt_id="p", key=(0,), seed_of_call=lambda order: order
            ),
            environment=environment,
            engine=Writer(seed),
            renderer=ChatRenderer(Characters()),
            compaction=compaction,
            options=AgentOptions(**({"max_context_tokens": 1_000, "max_tokens_per_call": 2} | options)),
        )
    )
    return rollout, ["".join(map(chr, call.prompt_ids)) for call in rollout.calls]


def seen(prompt: str) -> list[int]:
    """Indices of the observations in a prompt."""
    return [int(index) for index in re.findall(r"o(\d+)", prompt)]


def breaks(rollout: Rollout) -> list[int]:
    return [call.order for call in rollout.calls if call.break_reason is not None]


# ------------------------------------------------------------------------------------------------ policies


def test_recency_rolling() -> None:
    rollout, prompts = play(Recency(keep_last=2, schedule="rolling"), [2] * 6)
    assert [seen(prompt) for prompt in prompts] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert prompts[4] == "<task\n...\no2|>a|<o3|>a|<o4|>"
    assert breaks(rollout) == [3, 4, 5]
    assert [segment.call_orders for segment in segments_of(rollout)] == [(0, 1, 2), (3,), (4,), (5,)]


def test_recency_chunked() -> None:
    """Plans before actions 2, 4, 6 and 8; the first finds nothing to drop."""
    rollout, prompts = play(Recency(keep_last=2, schedule="chunked", chunk_actions=2), [2] * 10)
    assert [seen(prompt) for prompt in prompts] == [
        [0], [0, 1],
        [0, 1, 2], [0, 1, 2, 3],
        [2, 3, 4], [2, 3, 4, 5],
        [4, 5, 6], [4, 5, 6, 7],
        [6, 7, 8], [6, 7, 8, 9],
    ]  # fmt: skip
    assert breaks(rollout) == [4, 6, 8]
    assert rollout.info["num_segments"] == len(segments_of(rollout)) == 4


def test_a_full_context_does_not_wait_for_the_chunk() -> None:
    chunked, prompts = play(Recency(keep_last=1, schedule="chunked", chunk_actions=50), [9] * 6, max_context_tokens=50)
    when_full, _ = play(Recency(keep_last=1), [9] * 6, max_context_tokens=50)
    assert breaks(chunked) == breaks(when_full) != []
    assert all(len(prompt) + 2 <= 50 for prompt in prompts)


def test_threshold() -> None:
    """The first prompt of 30 tokens or more is the fourth: 9 + 3 · 7 = 30."""
    rollout, prompts = play(Summary(threshold_tokens=30), [2] * 5)
    lengths = [len(call.prompt_ids) for call in rollout.calls]
    assert prompts[:5] == [
        "<task\no0|>",
        "<task\no0|>a|<o1|>",
        "<task\no0|>a|<o1|>a|<o2|>",
        "<task\no0|>a|<o1|>a|<o2|>a|<note|>",
        "<task\nnote a\no3|>",
    ]
    assert (lengths[0], lengths[1]) == (10, 17)
    later, _ = play(Summary(threshold_tokens=31), [2] * 5)
    later_still, _ = play(Summary(threshold_tokens=32), [2] * 5)
    assert (breaks(rollout), breaks(later), breaks(later_still)) == ([4], [4], [5])


def test_a_rolling_summary_writes_a_note_after_every_turn() -> None:
    rollout, prompts = play(Summary(schedule="rolling"), [2] * 3)
    assert prompts == [
        "<task\no0|>",
        "<task\no0|>a|<note|>",
        "<task\nnote a\no1|>",
        "<task\nnote a\no1|>a|<note|>",
        "<task\nnote a\no2|>",
    ]
    assert breaks(rollout) == [2, 4]
    segment = segments_of(rollout)[0]
    assert segment.token_ids[-2:] == tuple(map(ord, "a|"))
    assert segment.loss_mask[-2:] == (1, 1)  # the note


def test_sliding_window_keeps_what_its_budget_holds() -> None:
    """A marker and one turn need 14 + 7 = 21 tokens of prompt, each turn 7 more."""
    for budget, num_kept in ((20, 0), (21, 1), (27, 1), (28, 2), (35, 3)):
        policy = SlidingWindow(max_tokens=budget, schedule="rolling")
        _, prompts = play(policy, [2] * 9)
        assert seen(prompts[-1]) == list(range(8 - num_kept, 9))
        assert len(prompts[-1]) == 14 + 7 * num_kept
    by_share, prompts = play(SlidingWindow(share=0.28), [2] * 15, max_context_tokens=100)
    by_tokens, _ = play(SlidingWindow(max_tokens=28), [2] * 15, max_context_tokens=100)
    assert by_share.calls == by_tokens.calls
    assert [seen(prompt) for prompt in prompts[-3:]] == [list(range(13)), [12, 13], [12, 13, 14]]
    too_large, prompts = play(SlidingWindow(max_tokens=500), [2] * 15, max_context_tokens=100)
    assert too_large.status == "ok"
    assert [seen(prompt) for prompt in prompts[-2:]] == [list(range(2, 14)), list(range(3, 15))]


def test_a_marker_stands_for_each_run_of_dropped_turns() -> None:
    renderer = ChatRenderer(Characters())
    context = Context(task="task", marker="...")
    for index in range(7):
        context = context.with_turn(f"o{index}", (ord("a"), ord(END)))

    def shown(*kept: int, marker: str = "...") -> str:
        shorter = replace(context, turns=tuple(context.turns[index] for index in kept), marker=marker)
        return "".join(map(chr, shorter.prompt_ids(renderer, "o7")))

    assert shown(*range(7)).count("...") == 0
    assert shown() == "<task\n...\no7|>"
    assert shown(0, 3, 4) == "<task\no0|>a|<...\no3|>a|<o4|>a|<...\no7|>"
    assert shown(2, 6) == "<task\n...\no2|>a|<...\no6|>a|<o7|>"
    assert shown(2, 6, marker="") == "<task\no2|>a|<o6|>a|<o7|>"


# ------------------------------------------------------------------------------------------------ promises

SCHEDULES: list[dict[str, Any]] = [
    {},
    {"schedule": "rolling"},
    {"schedule": "chunked", "chunk_actions": 1},
    {"schedule": "chunked", "chunk_actions": 3},
    {"threshold_tokens": 25},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd(CompactionPolicy):
    """Keeps odd turns, whatever they take."""

    name: ClassVar[str] = "odd"

    async def compact(self, context: Context, guard: Guard) -> Context | None:
        return replace(context, turns=tuple(turn for turn in context.turns if turn.index % 2), marker="...")


@st.composite
def policies(draw: st.DrawFn) -> Compaction:
    schedule = draw(st.sampled_from(SCHEDULES))
    marker = draw(st.sampled_from(["", "..."]))
    return draw(
        st.sampled_from(
            [
                NoCompaction(),
                Odd(**schedule),
                Recency(keep_last=draw(st.integers(0, 4)), marker=marker, **schedule),
                SlidingWindow(max_tokens=draw(st.integers(1, 60)), marker=marker, **schedule),
                SlidingWindow(share=draw(st.sampled_from([0.3, 1.0])), marker=marker, **schedule),
                Summary(max_note_tokens=draw(st.integers(1, 5)), **schedule),
            ]
        )
    )


@settings(max_examples=150)
@given(
    policy=policies(),
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=9),
    seed=st.integers(0, 99),
    max_context_tokens=st.integers(10, 90),
    max_tokens_per_call=st.integers(1, 8),
    max_calls=st.sampled_from([4, 64]),
    max_segments=st.sampled_from([2, 64]),
)
def test_promises(
    policy: Compaction,
    lengths: list[int],
    seed: int,
    max_context_tokens: int,
    max_tokens_per_call: int,
    max_calls: int,
    max_segments: int,
) -> None:
    rollout, prompts = play(
        policy,
        lengths,
        seed=seed,
        max_context_tokens=max_context_tokens,
        max_tokens_per_call=max_tokens_per_call,
        max_calls=max_calls,
        max_segments=max_segments,
    )
    assert rollout.status in ("ok", "truncated")
    if rollout.status == "truncated":
        assert rollout.status_reason is not None
        assert re.match(r"the context is full: |max_calls = |max_segments = ", rollout.status_reason)
    newest = -1
    for call, prompt in zip(rollout.calls, prompts, strict=True):
        assert call.sampling.max_tokens is not None
        assert len(prompt) + call.sampling.max_tokens <= max_context_tokens
        assert prompt.startswith(USER + "task")
        indices = seen(prompt)
        if not prompt.endswith("<note|>"):
            newest += 1
            assert indices[-1] == newest
            assert re.search(rf"o{newest}_*\|>$", prompt)
        assert indices == sorted(set(indices))
        if not isinstance(policy, Summary):
            shown = [-1, *indices]
            num_runs = sum(after > before + 1 for before, after in itertools.pairwise(shown))
            assert prompt.count("...") == (num_runs if getattr(policy, "marker", "...") else 0)
    if rollout.status == "ok":
        assert newest == len(lengths) - 1
    segments = segments_of(rollout)  # an undeclared break would be an error
    assert len(segments) == (rollout.info["num_segments"] if rollout.calls else 0) <= max_segments
    assert [segment.call_orders[0] for segment in segments[1:]] == breaks(rollout)
    trained = [
        token for row in rows_of([rollout]) for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask
    ]
    assert trained == [token for call in rollout.calls for token in call.output_ids]


@settings(max_examples=60)
@given(
    keep_last=st.integers(0, 4),
    chunk_actions=st.integers(1, 4),
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=9),
)
def test_what_is_frozen_stays_for_at_most_a_chunk(keep_last: int, chunk_actions: int, lengths: list[int]) -> None:
    rollout, prompts = play(
        Recency(keep_last=keep_last, schedule="chunked", chunk_actions=chunk_actions), lengths, seed=1
    )
    assert all(len(seen(prompt)) - 1 <= keep_last + chunk_actions - 1 for prompt in prompts)
    assert all(order % chunk_actions == 0 for order in breaks(rollout))
    rolling, _ = play(Recency(keep_last=keep_last, schedule="rolling"), lengths, seed=1)
    if chunk_actions == 1:
        assert rollout.calls == rolling.calls


# ------------------------------------------------------------------------------------------------ refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Careless(CompactionPolicy):
    """Changes what it likes."""

    name: ClassVar[str] = "careless"
    change: str = "nothing"

    async def compact(self, context: Context, guard: Guard) -> Context | None:
        if self.change == "task":
            return replace(context, task="another task")
        if self.change == "order":
            return replace(context, turns=context.turns[::-1])
        if self.change == "lead":
            return replace(context, lead=context.lead + "more ")
        if self.change == "fresh":
            return Context(task=context.task, turns=context.turns[-1:])
        if self.change == "note":
            await guard.write_note("tell me all", 5)
        return context


def test_one_recompaction_then_truncated() -> None:
    rollout, prompts = play(Careless(change="lead"), [9] * 4, max_context_tokens=40)
    assert rollout.status == "truncated"
    assert "compaction 'careless' made too little room in two attempts" in str(rollout.status_reason)
    assert "prompt and reserved generation take 58 tokens" in str(rollout.status_reason)
    assert len(prompts) == 2
    assert breaks(rollout) == []
    assert (rollout.reward, rollout.is_voter) == (1.0, True)


def test_a_plan_that_changes_nothing_starts_no_segment() -> None:
    rollout, _ = play(Careless(schedule="rolling"), [2] * 6, max_segments=1)
    assert (rollout.status, rollout.info["num_segments"], breaks(rollout)) == ("ok", 1, [])


def test_a_fresh_context_goes_on_counting() -> None:
    rollout, prompts = play(Careless(change="fresh", schedule="rolling"), [2] * 5)
    assert [seen(prompt) for prompt in prompts] == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert rollout.status == "ok"


def test_a_note_without_room_truncates() -> None:
    rollout, _ = play(Careless(change="note"), [9] * 4, max_context_tokens=40)
    assert rollout.status == "truncated"
    assert "num_reserved_tokens of compaction 'careless'" in str(rollout.status_reason)


@pytest.mark.parametrize("change", ["task", "order"])
def test_a_careless_policy_is_refused(change: str) -> None:
    with pytest.raises(StateError, match="'careless' must keep the task and the order of turns"):
        play(Careless(change=change, schedule="rolling"), [2] * 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "policy", [{"name": "recency", "keep_last": 3}, {"name": "sliding_window"}, {"name": "summary"}, {"name": "none"}]
)
def test_the_ledger_is_scored_under_any_policy(policy: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Also where three and more segments leave the page of the answer in the last context."""
    has_kept_answer = False
    options = policy if policy["name"] == "none" else policy | schedule
    for index in range(30):
        ledger = Ledger.for_task(LedgerOptions(), seed=3, split="train", index=index)
        rollout, _ = play(compaction_named(**options), ledger, max_context_tokens=80, max_tokens_per_call=4)
        assert rollout.status == "ok" or policy["name"] == "none"
        assert rollout.reward == 0.0
        has_kept_answer |= rollout.info["num_segments"] >= 3 and rollout.info["was_answer_visible"]
    if policy["name"] == "recency":
        assert has_kept_answer
    if policy["name"] == "summary":
        assert not has_kept_answer


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("recency", {"schedule": "chunked"}, "chunk_actions belongs to .* found None with schedule 'chunked'"),
        ("recency", {"chunk_actions": 3}, "found 3 with schedule 'when_full'"),
        ("summary", {"schedule": "chunked", "chunk_actions": 0}, "chunk_actions must be at least 1, found 0"),
        ("summary", {"threshold_tokens": 0}, "threshold_tokens must be at least 1, found 0"),
        ("sliding_window", {"share": 0.0}, "share must be above 0 and at most 1, found 0.0"),
        ("sliding_window", {"max_tokens": 0}, "max_tokens is a budget of at least 1 token"),
        ("sliding_window", {"max_tokens": 9, "share": 0.4}, "found 9 with share 0.4; give one of them"),
        ("none", {"schedule": "rolling"}, "compaction 'none' has no option 'schedule'; it has: none"),
        ("collections:Counter", {}, "must be a dataclass that extends .*CompactionPolicy, found Counter"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compaction_named(name, **options)
