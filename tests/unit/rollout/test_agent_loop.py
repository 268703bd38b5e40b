"""Behaviours locked here:

1. Calls are recorded in order with exact ids, parent, sampling with its own seed, and weight version; every prompt
   extends the last one until compaction, and segments follow from the calls alone (prefix rule).
2. The guard: prompt + reserved generation never exceed the limit; at the limit exactly nothing is compacted.
3. `none` truncates, `recency` keeps the task, one marker and the last turns with their exact outputs, `summary` puts
   the note of a real, recorded call behind the task; `blank_notes` drops its text and nothing else.
4. What does not fit after two attempts, too many calls and too many segments make a truncated rollout with a reason,
   which keeps its calls and is scored.
5. An environment's exception makes a failed rollout with the traceback; an evenstep error goes through.
"""

import asyncio
import itertools

import pytest

from evenstep.errors import ConfigError, EngineError, StateError
from evenstep.model_files import model_folder
from evenstep.rollout.agent import AgentOptions, RolloutIdentity, run_rollout
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import Recency, Summary, compaction_named
from evenstep.rollout.engine import Completion
from evenstep.rollout.environment import Score, Start
from evenstep.rollout.segments import segments_of

PAGES = ("a4 b2", "c7 d9", "e1 f0", "g3 h5")
TASK = "find c"


class Book:
    """Reads PAGES; optionally crashes at a step."""

    def __init__(self, crash_at: int | None = None, error: Exception | None = None) -> None:
        self.actions: list[str] = []
        self.episode = None
        self._crash_at = crash_at
        self._error = error or RuntimeError("the book is on fire")

    async def reset(self):
        return Start(task=TASK, observation=PAGES[0])

    async def step(self, action):
        self.actions.append(action)
        if len(self.actions) == self._crash_at:
            raise self._error
        return PAGES[len(self.actions)] if len(self.actions) < len(PAGES) else None

    async def score(self, episode):
        self.episode = episode
        return Score(reward=0.25, info={"mood": "calm"})


class Script:
    """An engine that says what it is told, in order; its outputs end with the end of turn."""

    max_context_tokens = 1000
    weight_version = 6

    def __init__(self, tokenizer, *texts):
        self._tokenizer = tokenizer
        self._texts = itertools.chain(texts, itertools.repeat(">"))
        self.prompts: list[str] = []

    async def generate(self, request):
        self.prompts.append(self._tokenizer.decode(list(request.prompt_ids)))
        ids = tuple(self._tokenizer.encode(next(self._texts) + "<|end|>", add_special_tokens=False))
        return Completion(output_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop", weight_version=6)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder("evenstep:ledger"))


def play(tokenizer, *, compaction, script=(), book=None, **options):
    engine = Script(tokenizer, *script)
    identity = RolloutIdentity(
        rollout_id="c0/p1/g2", group_id="c0/p1", prompt_id="book", key=(5,), seed_of_call=lambda order: 100 + order
    )
    rollout = asyncio.run(
        run_rollout(
            identity=identity,
            environment=book or Book(),
            engine=engine,
            renderer=ChatRenderer(tokenizer),
            compaction=compaction,
            options=AgentOptions(**({"max_context_tokens": 200, "max_tokens_per_call": 4} | options)),
        )
    )
    return rollout, engine.prompts


def test_one_segment_when_everything_fits(tokenizer):
    book = Book()
    rollout, prompts = play(tokenizer, compaction=compaction_named("none"), script=["one", "two"], book=book)
    assert (rollout.status, rollout.reward, rollout.status_reason) == ("ok", 0.25, None)
    assert (rollout.rollout_id, rollout.group_id, rollout.prompt_id) == ("c0/p1/g2", "c0/p1", "book")
    assert book.actions == ["one", "two", ">", ">"]
    assert prompts[0] == "<|user|>find c\na4 b2<|end|><|assistant|>"
    assert prompts[2] == (
        "<|user|>find c\na4 b2<|end|><|assistant|>one<|end|><|user|>c7 d9<|end|><|assistant|>two<|end|>"
        "<|user|>e1 f0<|end|><|assistant|>"
    )
    assert [call.order for call in rollout.calls] == [0, 1, 2, 3]
    assert [call.parent for call in rollout.calls] == [None, 0, 1, 2]
    assert [call.sampling.seed for call in rollout.calls] == [100, 101, 102, 103]
    assert {call.weight_version for call in rollout.calls} == {6}
    assert {call.break_reason for call in rollout.calls} == {None}
    assert {(call.sampling.max_tokens, call.sampling.temperature) for call in rollout.calls} == {(4, 1.0)}
    (segment,) = segments_of(rollout)
    assert segment.num_trained_tokens == rollout.num_sampled_tokens
    assert rollout.info == {"mood": "calm", "num_segments": 1}
    assert book.episode.visible_observations == (0, 1, 2, 3)


def test_the_guard_counts_prompt_and_reserve(tokenizer):
    """The second prompt has 15 + 2 + 8 = 25 tokens; with 4 reserved it fits 29 and not 28."""
    rollout, _ = play(tokenizer, compaction=Recency(keep_last=0), max_context_tokens=200)
    lengths = [len(call.prompt_ids) for call in rollout.calls]
    assert lengths[:2] == [15, 25]
    exact, _ = play(tokenizer, compaction=Recency(keep_last=0), max_context_tokens=lengths[1] + 4)
    short, _ = play(tokenizer, compaction=Recency(keep_last=0), max_context_tokens=lengths[1] + 3)
    assert [call.break_reason for call in exact.calls][:3] == [None, None, "compaction"]
    assert [call.break_reason for call in short.calls][:2] == [None, "compaction"]
    for played, limit in ((exact, lengths[1] + 4), (short, lengths[1] + 3)):
        assert all(len(call.prompt_ids) + 4 <= limit for call in played.calls)


def test_none_truncates(tokenizer):
    rollout, _ = play(tokenizer, compaction=compaction_named("none"), max_context_tokens=40)
    assert rollout.status == "truncated"
    assert "take 49 tokens" in rollout.status_reason  # the fourth prompt has 45
    assert "max_context_tokens is 40" in rollout.status_reason
    assert "'none' can drop nothing more" in rollout.status_reason
    assert len(rollout.calls) == 3
    assert rollout.reward == 0.25


def test_recency_keeps_task_marker_and_last_turns(tokenizer):
    book = Book()
    rollout, prompts = play(
        tokenizer, compaction=Recency(keep_last=1), script=["one", "two", "thr"], max_context_tokens=42, book=book
    )
    assert rollout.status == "ok"
    assert prompts[2] == ("<|user|>find c\n...\nc7 d9<|end|><|assistant|>two<|end|><|user|>e1 f0<|end|><|assistant|>")
    assert [call.break_reason for call in rollout.calls] == [None, None, "compaction", "compaction"]
    assert "..." in prompts[3]
    assert prompts[3].count("...") == 1
    segments = segments_of(rollout)
    assert [segment.call_orders for segment in segments] == [(0, 1), (2,), (3,)]
    assert sum(segment.num_trained_tokens for segment in segments) == rollout.num_sampled_tokens
    # the kept output stands there exactly as it was sampled, as context
    assert rollout.calls[1].output_ids == tuple(tokenizer.encode("two<|end|>", add_special_tokens=False))
    assert book.episode.num_segments == 3
    assert book.episode.visible_observations == (2, 3)


def test_summary_puts_the_note_of_a_recorded_call_behind_the_task(tokenizer):
    book = Book()
    compaction = Summary(max_note_tokens=4)
    rollout, prompts = play(
        tokenizer, compaction=compaction, script=[">", ">", "c7", ">", "c9"], max_context_tokens=48, book=book
    )
    assert rollout.status == "ok"
    assert prompts[2] == (
        "<|user|>find c\na4 b2<|end|><|assistant|>><|end|><|user|>c7 d9<|end|><|assistant|>><|end|>"
        "<|user|>note<|end|><|assistant|>"
    )
    assert prompts[3] == "<|user|>find c\nnote c7\ne1 f0<|end|><|assistant|>"
    assert [call.break_reason for call in rollout.calls[:4]] == [None, None, None, "compaction"]
    assert rollout.calls[2].sampling.max_tokens == 4
    assert book.actions[:3] == [">", ">", ">"]  # the note is no action
    segments = segments_of(rollout)
    assert segments[0].call_orders == (0, 1, 2)
    assert segments[0].token_ids[-3:] == rollout.calls[2].output_ids
    assert segments[0].loss_mask[-3:] == (1, 1, 1)  # the note is trained
    assert len(segments) == rollout.info["num_segments"]


def test_blank_notes_write_and_drop_them(tokenizer):
    script = [">", ">", "c7"]
    plain, _ = play(tokenizer, compaction=Summary(), script=script, max_context_tokens=48)
    blank, prompts = play(tokenizer, compaction=Summary(blank_notes=True), script=script, max_context_tokens=48)
    assert prompts[3] == "<|user|>find c\nnote \ne1 f0<|end|><|assistant|>"
    assert blank.calls[:3] == plain.calls[:3]


@pytest.mark.parametrize(
    "compaction, limit, num_calls, num_segments, text",
    [
        (Recency(keep_last=2), 18, 0, 1, "take 19 tokens"),  # not even the first page
        (Summary(max_note_tokens=4), 29, 0, 1, "can drop nothing more"),
        (Recency(keep_last=0, marker="." * 30), 29, 2, 1, "can drop nothing more"),  # no room after compaction
    ],
)
def test_what_never_fits_is_truncated(tokenizer, compaction, limit, num_calls, num_segments, text):
    rollout, _ = play(tokenizer, compaction=compaction, max_context_tokens=limit)
    assert rollout.status == "truncated"
    assert text in rollout.status_reason
    assert len(rollout.calls) == num_calls
    assert rollout.info["num_segments"] == num_segments
    assert rollout.reward == 0.25


def test_a_second_attempt_of_recency_keeps_nothing(tokenizer):
    """Two kept turns with long answers do not fit; none does."""
    rollout, prompts = play(
        tokenizer,
        compaction=Recency(keep_last=1),
        script=[">", "a long answer"],
        max_context_tokens=52,
        max_tokens_per_call=14,
    )
    assert rollout.status == "ok"
    assert prompts[2] == "<|user|>find c\n...\ne1 f0<|end|><|assistant|>"
    assert rollout.info["num_segments"] == len(segments_of(rollout))


def test_limits_on_calls_and_segments_truncate(tokenizer):
    rollout, _ = play(tokenizer, compaction=Recency(keep_last=0), max_calls=2)
    assert (rollout.status, len(rollout.calls)) == ("truncated", 2)
    assert "max_calls = 2" in rollout.status_reason
    rollout, _ = play(tokenizer, compaction=Recency(keep_last=0), max_segments=2, max_context_tokens=29)
    assert rollout.status == "truncated"
    assert "max_segments = 2" in rollout.status_reason
    assert len(segments_of(rollout)) == 2


def test_an_environment_that_crashes_fails_its_rollout(tokenizer):
    rollout, _ = play(tokenizer, compaction=Recency(), book=Book(crash_at=2))
    assert (rollout.status, rollout.reward, rollout.is_voter) == ("failed", None, False)
    assert "RuntimeError: the book is on fire" in rollout.status_reason
    assert "Traceback" in rollout.status_reason


@pytest.mark.parametrize("error", [EngineError("no room"), StateError("a promise is broken")])
def test_our_own_errors_go_through(tokenizer, error):
    with pytest.raises(type(error), match=str(error)):
        play(tokenizer, compaction=Recency(), book=Book(crash_at=1, error=error))


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match=r"rollout\.max_calls must be at least 1, found 0"):
        AgentOptions(max_context_tokens=10, max_calls=0)
    with pytest.raises(ConfigError, match="temperature"):
        AgentOptions(max_context_tokens=10, temperature=-0.5)
    with pytest.raises(ConfigError, match="keep_last"):
        compaction_named("recency", keep_last=-1)
    with pytest.raises(ConfigError, match="'forget' is not known; known: none, recency, sliding_window, summary"):
        compaction_named("forget")
    with pytest.raises(ConfigError, match="no option 'depth'; it has: keep_last, marker"):
        compaction_named("recency", depth=2)
    with pytest.raises(ConfigError, match="max_note_tokens"):
        compaction_named("summary", max_note_tokens=0)
    with pytest.raises(ConfigError, match="request"):
        compaction_named("summary", request="")
