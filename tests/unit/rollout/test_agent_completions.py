"""What is locked here, for any engine behind the protocol:

1. Numbers of other libraries are taken and kept as plain integers and floats.
2. An answer that no engine may give (wrong lengths, no log-probs, NaN, log-probs above 0, ids outside the vocabulary,
   too many tokens, an aborted request, something else altogether) ends the run with what to do, and is never a reward.
3. An engine's own cancellation is its failure, and ours is not.
4. A batch with an answer too few or too many ends every rollout of it in the same way.
5. By choice an episode that ends with an output that was cut off is truncated, with its reward; one that went on after
   such an output is not.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenstep.errors import EngineError
from evenstep.rollout.engine import Barrier
from evenstep.rollout.environment import Episode, Score, Start
from scripted import END, ScriptedBatchEngine, ScriptedEngine, play, played, says


class OneTurn:
    def __init__(self) -> None:
        self.num_scores = 0

    async def reset(self) -> Start:
        return Start(task="t")

    async def step(self, action: str) -> str | None:
        return None

    async def score(self, episode: Episode) -> Score:
        self.num_scores += 1
        return Score(reward=1.0)


class ThreeTurns(OneTurn):
    def __init__(self) -> None:
        super().__init__()
        self.observations = ["more", "more"]

    async def step(self, action: str) -> str | None:
        return self.observations.pop() if self.observations else None


def test_episodes_that_end_cut_off() -> None:
    cut = replace(says("hi"), output_ids=(104, 105), logprobs=(-0.5, -0.5), finish_reason="length")
    limits = {"max_tokens_per_call": 2, "is_cut_off_truncated": True}
    for environment, answers in ((OneTurn, [cut]), (ThreeTurns, ["a", "b", cut]), (ThreeTurns, [cut] * 3)):
        rollout = played(environment(), *answers, **limits)
        assert (rollout.status, rollout.reward, len(rollout.calls)) == ("truncated", 1.0, len(answers))
        assert "cut off after 2 tokens (max_tokens_per_call = 2, " in str(rollout.status_reason)
        assert played(environment(), *answers, max_tokens_per_call=2).status == "ok"
    gone_on = played(ThreeTurns(), cut, cut, "c", **limits)
    assert (gone_on.status, gone_on.status_reason, gone_on.reward) == ("ok", None, 1.0)


def test_numpy_numbers_become_plain_ones() -> None:
    answer = replace(says("hi"), output_ids=np.array([104, 105, END]), logprobs=np.float32([-0.5, 0, -0.25]))
    (call,) = played(OneTurn(), answer).calls
    assert (call.output_ids, call.logprobs) == ((104, 105, END), (-0.5, 0.0, -0.25))
    assert json.dumps([call.output_ids, call.logprobs])
    (call,) = played(OneTurn(), replace(says("hi"), weight_version=np.int64(3))).calls
    assert (call.weight_version, type(call.weight_version)) == (3, int)
    rounded_up = replace(says("h"), logprobs=(1e-7, -0.5))  # float32 may leave a trace above 0
    assert played(OneTurn(), rounded_up).calls[0].logprobs == (1e-7, -0.5)
    empty = replace(says("h"), output_ids=(), logprobs=())
    assert played(OneTurn(), empty).calls[0].output_ids == ()


NAN, INF = float("nan"), float("inf")


class NoArray:
    """As a tensor with a gradient, or on another device."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"logprobs": (-0.1, -0.2)},
            "one log-prob for each token, found 2 for 3 tokens; take both from the same choice",
        ),
        ({"logprobs": (-0.1,) * 4}, "one log-prob for each token, found 4 for 3 tokens"),
        ({"logprobs": ((-0.1,), (-0.2,), (-0.3,))}, "one log-prob for each token"),
        ({"logprobs": None}, "a log-prob for each token, found none; switch on the log-probs"),
        ({"logprobs": ()}, "a log-prob for each token, found none; switch on"),
        ({"logprobs": (None, -0.1, -0.1)}, r"a log-prob for each token, found \(None, -0.1, -0.1\)"),
        ({"logprobs": ("-0.1",) * 3}, "a log-prob for each token"),
        ({"logprobs": (-0.1, NAN, -0.1)}, "finite and at most 0, found nan at output token 1"),
        ({"logprobs": (-0.1, -0.1, -INF)}, "finite and at most 0, found -inf at output token 2"),
        ({"logprobs": (-0.1, -9999.0, -0.1)}, "found -9999.0, a probability of 0, at output token 1"),
        ({"logprobs": (0.9, -0.1, -0.1)}, "finite and at most 0, found 0.9 at output token 0; give natural logarithms"),
        ({"output_ids": (104, -1, END)}, "ids that are at least 0, found id -1"),
        ({"output_ids": (104, 200, END)}, "vocabulary, below 128, found id 200; it serves another model"),
        ({"output_ids": (104, 128, END)}, "below 128, found id 128"),
        ({"output_ids": (104.0, 105.0, 1.0)}, "a list of token ids, found .*ask the server for ids"),
        ({"output_ids": "hi!"}, "a list of token ids, found 'hi!'"),
        ({"output_ids": (True, True, True)}, "a list of token ids"),
        ({"output_ids": (104,) * 9, "logprobs": (-0.1,) * 9}, "at most the 8 tokens it was asked for, found 9"),
        ({"output_ids": [[104], [105, END]]}, "a list of token ids, found "),
        ({"logprobs": [[-0.1], [-0.1, -0.1]]}, "a log-prob for each token, found "),
        ({"logprobs": NoArray()}, "a log-prob for each token, found <.*NoArray.*give them as a list of numbers"),
        ({"logprobs": -0.1}, "one log-prob for each token, found 1 for 3 tokens"),
        ({"logprobs": (value for value in (-0.1,) * 3)}, "a log-prob for each token, found <generator"),
        ({"weight_version": None}, "as weight_version, an integer ≥ 0, found None"),
        ({"weight_version": -1}, "as weight_version, an integer ≥ 0, found -1"),
        ({"weight_version": True}, "as weight_version, an integer ≥ 0, found True"),
        ({"weight_version": 3.0}, "as weight_version, an integer ≥ 0, found 3.0"),
        ({"finish_reason": "abort"}, "finish_reason 'stop' or 'length', found 'abort'; do not pass on"),
    ],
)
def test_an_answer_that_no_engine_may_give_ends_the_run(changes: dict[str, Any], message: str) -> None:
    environment = OneTurn()
    wrong = replace(says("hi"), **changes)
    with pytest.raises(EngineError, match=f"^rollout r0, call 0: an engine must answer with .*{message}"):
        played(environment, wrong, max_tokens_per_call=8, vocab_size=128)
    assert environment.num_scores == 0


def test_an_answer_that_is_no_completion() -> None:
    with pytest.raises(EngineError, match="a Completion, found dict; return one"):
        played(OneTurn(), {"output_ids": [1], "logprobs": [-0.1]})


def test_ids_are_bounded_only_where_the_vocabulary_is_known() -> None:
    assert played(OneTurn(), says("\u2603")).calls[0].output_ids == (0x2603, END)
    assert played(OneTurn(), says("\x7f"), vocab_size=128).status == "ok"


class Cancelled(ScriptedEngine):
    async def generate(self, request: Any) -> Any:
        raise asyncio.CancelledError


class Hanging(ScriptedEngine):
    async def generate(self, request: Any) -> Any:
        await asyncio.Event().wait()


def test_a_cancellation_is_ours_or_the_engines_failure() -> None:
    with pytest.raises(EngineError, match="the engine failed with CancelledError"):
        asyncio.run(play(OneTurn(), Cancelled()))

    async def stopped() -> None:
        task = asyncio.create_task(play(OneTurn(), Hanging()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())


class Miscounting(ScriptedBatchEngine):
    def __init__(self, num_answers: int) -> None:
        super().__init__("ok")
        self._num_answers = num_answers

    def generate_batch(self, requests: Any) -> list[Any]:
        return self.answers * self._num_answers


@pytest.mark.timeout(20)
@pytest.mark.parametrize("num_answers", [0, 2, 4])
def test_a_batch_with_another_number_of_answers(num_answers: int) -> None:
    async def run() -> list[Any]:
        barrier = Barrier(Miscounting(num_answers), [(i,) for i in range(3)])
        return await asyncio.gather(*(play(OneTurn(), barrier, index=i) for i in range(3)), return_exceptions=True)

    found = asyncio.run(run())
    assert [type(error) for error in found] == [EngineError] * 3
    assert f"found {num_answers} completions for 3 requests" in str(found[1])
