"""What is locked here, with the official ``openai`` client against the real server on loopback:

1. Ids and log-probs of every call are the engine's, streamed or not; an answer that comes back in the history keeps the
   ids it was sampled with, although its text encodes to others.
2. Two rollouts at once, on one server, do not mix.
3. A declared compaction gives two segments; a sub-agent and a template that rewrites turns are other reasons. Where the
   history goes on, a declared reason changes nothing.
4. An undeclared rewrite is refused with the position and the tokens on both sides, and nothing is recorded: of an
   earlier message, of the model's own words, of words that are just being sampled. By choice it begins a segment, or is
   realigned.
5. Tool calls come and go in OpenAI's shape, and their ids stay.
6. Of ``n`` choices only the continued one, or the one that was named, is trained. What the agent rejects is not.
7. A stop string cuts the text; the ids end with the token that completes it.
8. Equal seeds give the engine equal seeds; of a driven rollout they are mixed with its own.
9. ``/v1/completions`` continues by text and by ids.
10. Captured rollouts become rows in which each sampled token is trained once (of those that are not rejected).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from evenstep.rollout.agent import RolloutIdentity
from evenstep.rollout.segments import segmentation_of, segments_of
from evenstep.serve.captured import CapturedRollout
from evenstep.serve.schemas import ChatBody, NewRolloutBody
from evenstep.types import Rollout
from serving_fakes import END, AsyncEngine, make_capture, served, spelled

openai = pytest.importorskip("openai", reason="the extra 'dev' brings the openai client")

USER = {"role": "user", "content": "say ab"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Agent:
    """The official client, on one rollout."""

    def __init__(self, url: str, registry: Any, **names: str) -> None:
        self.name, self.key = registry.create(NewRolloutBody(**names))
        self.url = url
        self.captured = registry._by_name[self.name]
        plain = openai.DefaultAsyncHttpxClient(verify=False)  # no certificates: reading them takes longer than a test
        self.client = openai.AsyncOpenAI(
            base_url=f"{url}/r/{self.name}/v1", api_key=self.key, max_retries=0, http_client=plain
        )

    async def ask(self, messages: list[Any], **options: Any) -> Any:
        extra = {"return_token_ids": True} | options.pop("extra_body", {})
        return await self.client.chat.completions.create(model="any", messages=messages, extra_body=extra, **options)

    async def end(self, reward: float = 1.0, **fields: Any) -> Rollout:
        await self.client.post("/reward", body={"reward": reward, **fields}, cast_to=object)
        await self.client.close()
        return self.captured.rollout


def play(script: Callable[[Agent], Awaitable[Rollout]], engine: Any = None, **options: Any) -> Rollout:
    async def run() -> Rollout:
        async with served(engine, **options) as (url, registry):
            return await script(Agent(url, registry))

    return asyncio.run(run())


async def two_turns(agent: Agent) -> Rollout:
    first = await agent.ask([USER])
    history = [USER, first.choices[0].message, user("more")]
    await agent.ask(history)
    return await agent.end()


# ------------------------------------------------------------------------------------------------ ids


def test_ids_are_the_engines_and_stay() -> None:
    engine = AsyncEngine("abba", "fine")
    rollout = play(two_turns, engine)
    assert [call.output_ids for call in rollout.calls] == [spelled("abba"), spelled("fine")]
    assert [call.logprobs for call in rollout.calls] == [c.logprobs for c in engine.completions]
    assert [request.prompt_ids for request in engine.requests] == [call.prompt_ids for call in rollout.calls]
    first, second = rollout.calls
    view = first.prompt_ids + first.output_ids
    assert second.prompt_ids[: len(view)] == view
    # its text alone would have become other ids
    assert spelled("abba")[:-1] != tuple(make_capture(None).tokenizer.encode("abba", add_special_tokens=False))
    # the end of turn was sampled and is not written a second time
    assert second.prompt_ids[len(view)] != END
    assert (first.weight_version, second.parent, second.break_reason) == (3, 0, None)
    (segment,) = segments_of(rollout)
    assert segment.num_trained_tokens == rollout.num_sampled_tokens


def test_streaming_gives_the_same() -> None:
    async def script(agent: Agent) -> Rollout:
        stream = await agent.ask([USER], stream=True, logprobs=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "abba " * 40
        assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3
        last = next(chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason)
        assert last.finish_reason == "length"
        assert tuple(last.token_ids) == agent.captured._history.turns[0].answer.call.output_ids
        assert [item.logprob for item in last.logprobs.content][:2] == [-0.25, -0.26]
        assert chunks[-1].usage.completion_tokens == 200
        assert tuple(chunks[0].prompt_token_ids) == agent.captured._history.turns[0].prompt_ids
        await agent.ask([USER, {"role": "assistant", "content": text}, user("more")], stream=False)
        return await agent.end()

    rollout = play(script, AsyncEngine("abba " * 100, "fine"))
    assert rollout.calls[1].parent == 0
    assert len(segments_of(rollout)) == 1


def test_two_rollouts_at_once() -> None:
    async def told(agent: Agent) -> tuple[Rollout, list[str | None]]:
        first = await agent.ask([USER])
        second = await agent.ask([USER, first.choices[0].message, user("more")])
        return await agent.end(), [answer.choices[0].message.content for answer in (first, second)]

    async def run() -> list[tuple[Rollout, list[str | None]]]:
        engine = AsyncEngine("one", "two", "three", "four", delay_s=0.05)
        async with served(engine) as (url, registry):
            agents = [Agent(url, registry, rollout_id=f"r{i}", group_id="g") for i in range(2)]
            return list(await asyncio.gather(*(told(agent) for agent in agents)))

    found = asyncio.run(run())
    rollouts = [rollout for rollout, _ in found]
    assert [(r.rollout_id, r.group_id, len(r.calls)) for r in rollouts] == [("r0", "g", 2), ("r1", "g", 2)]
    said = [[bytes(call.output_ids[:-1]).decode() for call in r.calls] for r in rollouts]
    assert said == [texts for _, texts in found]  # each rollout holds what its own agent was told
    assert sorted(text for texts in said for text in texts) == [
        "four",
        "one",
        "three",
        "two",
    ]  # each told to one of them
    for rollout in rollouts:
        assert len(segments_of(rollout)) == 1


# ------------------------------------------------------------------------------------------------ breaks


def test_a_declared_compaction_is_a_second_segment() -> None:
    async def script(agent: Agent) -> Rollout:
        first = await agent.ask([USER])
        kept = [user("summary so far"), first.choices[0].message, user("go on")]
        compacted = await agent.ask(kept, extra_headers={"x-evenstep-break": "compaction"})
        # the header may stay: where the history goes on it changes nothing
        await agent.ask(
            [*kept, compacted.choices[0].message, user("and")], extra_headers={"x-evenstep-break": "compaction"}
        )
        return await agent.end()

    rollout = play(script, AsyncEngine("abba", "fine", "ok"))
    assert [call.break_reason for call in rollout.calls] == [None, "compaction", None]
    found = segments_of(rollout)
    assert [segment.break_reason for segment in found] == [None, "compaction"]
    assert sum(segment.num_trained_tokens for segment in found) == rollout.num_sampled_tokens
    assert rollout.info["num_segments"] == 2
    # the answer that was kept has its own ids in the new segment too
    kept = rollout.calls[0].output_ids
    prompt = rollout.calls[1].prompt_ids
    assert any(prompt[i : i + len(kept)] == kept for i in range(len(prompt)))


def test_a_break_declared_by_a_call_of_its_own_counts_once() -> None:
    async def script(agent: Agent) -> Rollout:
        await agent.ask([USER])
        await agent.client.post("/segment", body={"reason": "subagent"}, cast_to=object)
        await agent.ask([user("another task")])
        with pytest.raises(openai.ConflictError):
            await agent.ask([user("a third one")])
        return await agent.end()

    assert [call.break_reason for call in play(script).calls] == [None, "subagent"]


def test_a_template_that_rewrites_turns_renders_each_anew() -> None:
    async def script(agent: Agent) -> Rollout:
        first = await agent.ask([USER])
        await agent.ask([USER, first.choices[0].message, user("more")], extra_headers={"x-evenstep-break": "template"})
        return await agent.end()

    rollout = play(script, AsyncEngine("abba", "fine"))
    assert rollout.calls[1].break_reason == "template"
    assert 1000 in rollout.calls[1].prompt_ids  # tokenised from its text, as the template has it
    assert len(segments_of(rollout)) == 2


@pytest.mark.parametrize(
    "rewritten, where",
    [
        ([user("say XX"), "answer", user("more")], "(message 0): found 88 ('X'), expected 1000 ('ab')"),
        ([USER, {"role": "assistant", "content": "abbc"}, user("more")], "(message 1): found 1000 ('ab'), expected 97"),
        ([USER, user("more")], "(message 1): found"),
        ([{"role": "system", "content": "be short"}, USER, "answer", user("more")], "(message 0): found 115 ('s')"),
    ],
)
def test_an_undeclared_rewrite_is_refused(rewritten: list[Any], where: str) -> None:
    async def script(agent: Agent) -> Rollout:
        first = await agent.ask([USER])
        messages = [first.choices[0].message if message == "answer" else message for message in rewritten]
        with pytest.raises(openai.ConflictError) as refused:
            await agent.ask(messages)
        message = str(refused.value)
        assert "does not continue the rollout: it differs from the" in message
        assert where in message
        assert "at token" in message
        assert refused.value.code == "undeclared_break"
        return await agent.end()

    assert len(play(script, AsyncEngine("abba", "fine")).calls) == 1


def test_the_models_own_words_may_not_be_changed_later_on() -> None:
    """The changed prompt continues the first call, and holds the second one's prompt, but not what it said."""

    async def script(agent: Agent) -> Rollout:
        history: list[Any] = [USER]
        for text in ("more", "and more"):
            answer = await agent.ask(history)
            history += [answer.choices[0].message, user(text)]
        changed = [*history[:3], {"role": "assistant", "content": "better"}, history[4]]
        with pytest.raises(openai.ConflictError, match="call 1 at token"):
            await agent.ask(changed)
        # a branch that begins before what was said is none
        await agent.ask([*history[:2], user("something else")])
        return await agent.end()

    rollout = play(script, AsyncEngine("abba", "fine", "ok"))
    assert [call.parent for call in rollout.calls] == [None, 0, 0]
    assert segmentation_of(rollout).report.num_segments == 2


def test_what_is_being_sampled_cannot_be_known() -> None:
    async def script(agent: Agent) -> Rollout:
        running = asyncio.create_task(agent.ask([USER]))
        await asyncio.sleep(0.1)
        guess = [USER, {"role": "assistant", "content": "abba"}, user("more")]
        with pytest.raises(openai.ConflictError, match="an output that is not sampled yet"):
            await agent.ask(guess)
        await running
        return await agent.end()

    assert len(play(script, AsyncEngine("abba", delay_s=0.4)).calls) == 1


@pytest.mark.parametrize("on_undeclared, segments, realigned", [("segment", 2, 0), ("realign", 1, 5)])
def test_undeclared_by_choice(on_undeclared: Any, segments: int, realigned: int) -> None:
    async def script(agent: Agent) -> Rollout:
        first = await agent.ask([USER])
        assert first.choices[0].message.content == "abba"
        await agent.ask([USER, {"role": "assistant", "content": "zz"}, user("more")])
        return await agent.end()

    rollout = play(script, AsyncEngine("abba", "fine"), on_undeclared=on_undeclared)
    found = segmentation_of(rollout, on_undeclared=on_undeclared)
    assert len(found.segments) == segments == rollout.info["num_segments"]
    assert found.report.num_realigned_tokens == realigned


def test_white_space_around_an_answer_does_not_count() -> None:
    async def script(agent: Agent) -> Rollout:
        await agent.ask([USER])
        await agent.ask([USER, {"role": "assistant", "content": "abba"}, user("more")])
        return await agent.end()

    assert play(script, AsyncEngine(" abba\n", "fine")).calls[1].parent == 0


# ------------------------------------------------------------------------------------------------ tools


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tool_calls_come_and_go(is_streamed: bool) -> None:
    written = 'hm <tool_call>{"name": "add",  "arguments": {"x": 1, "why": "ab"}}</tool_call>'

    async def script(agent: Agent) -> Rollout:
        if is_streamed:
            stream = await agent.ask([USER], tools=TOOLS, stream=True)
            deltas = [chunk.choices[0] async for chunk in stream]
            (call,) = [tool for choice in deltas for tool in choice.delta.tool_calls or ()]
            assert deltas[-1].finish_reason == "tool_calls"
            content = "".join(choice.delta.content or "" for choice in deltas)
            function = {"name": call.function.name, "arguments": call.function.arguments}
            message: Any = {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            }
        else:
            answer = await agent.ask([USER], tools=TOOLS)
            assert answer.choices[0].finish_reason == "tool_calls"
            message = answer.choices[0].message
            assert message.content == "hm"
            (call,) = message.tool_calls
        assert call.function.name == "add"
        assert call.function.arguments == '{"x": 1, "why": "ab"}'
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        answer = await agent.ask([USER, message, result], tools=TOOLS)
        assert answer.choices[0].message.content == "it is 2"
        return await agent.end()

    rollout = play(script, AsyncEngine(written, "it is 2"))
    first, second = rollout.calls
    assert first.output_ids == spelled(written)  # with the spaces that its JSON has
    assert second.parent == 0
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.output_ids)] == first.prompt_ids + first.output_ids
    (segment,) = segments_of(rollout)
    assert segment.num_trained_tokens == rollout.num_sampled_tokens


def test_other_arguments_than_the_model_wrote_are_a_rewrite() -> None:
    async def script(agent: Agent) -> Rollout:
        answer = await agent.ask([USER], tools=TOOLS)
        message = answer.choices[0].message.model_dump()
        message["tool_calls"][0]["function"]["arguments"] = '{"x": 2}'
        with pytest.raises(openai.ConflictError):
            await agent.ask([USER, message, user("more")], tools=TOOLS)
        with pytest.raises(openai.ConflictError):  # other tools are another prompt
            await agent.ask([USER, answer.choices[0].message, user("more")])
        return await agent.end()

    play(script, AsyncEngine('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>', "fine"))


def test_what_is_no_tool_call_stays_text() -> None:
    async def script(agent: Agent) -> Rollout:
        answer = await agent.ask([USER], tools=TOOLS)
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content == '<tool_call>{"name": add}</tool_call>'
        again = [USER, answer.choices[0].message, user("x")]
        forbidden = await agent.ask(again, tools=TOOLS, tool_choice="none")
        assert forbidden.choices[0].message.tool_calls is None
        return await agent.end()

    play(script, AsyncEngine('<tool_call>{"name": add}</tool_call>', '<tool_call>{"name": "add"}</tool_call>'))


# ------------------------------------------------------------------------------------------------ choices, stops, seeds


def test_of_several_choices_the_continued_one_is_trained() -> None:
    async def script(agent: Agent) -> Rollout:
        answer = await agent.ask([USER], n=3)
        assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
        assert answer.evenstep == {"calls": [0, 1, 2]}
        await agent.ask([USER, answer.choices[1].message, user("more")])
        return await agent.end()

    rollout = play(script, AsyncEngine("one", "two", "three", "four"))
    assert [call.is_rejected for call in rollout.calls] == [True, False, True, False]
    assert rollout.calls[3].parent == 1
    (segment,) = segments_of(rollout)
    assert segment.num_trained_tokens == rollout.num_sampled_tokens == len("two") + len("four") + 2
    assert len({call.sampling.seed for call in rollout.calls}) == 4


@pytest.mark.parametrize("chosen, rejected", [([], [True, True]), ([1], [True, False])])
def test_choices_that_nothing_continues_are_trained_only_when_named(chosen: list[int], rejected: list[bool]) -> None:
    async def script(agent: Agent) -> Rollout:
        await agent.ask([USER], n=2)
        return await agent.end(chosen=chosen)

    assert [call.is_rejected for call in play(script, AsyncEngine("one", "two")).calls] == rejected


def test_rejected_outputs_are_not_trained() -> None:
    async def script(agent: Agent) -> Rollout:
        await agent.ask([USER])
        await agent.ask([USER])  # the first turn again, no break
        await agent.client.post("/reject", body={"calls": [0]}, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="found 7"):
            await agent.client.post("/reject", body={"calls": [7]}, cast_to=object)
        return await agent.end()

    rollout = play(script, AsyncEngine("bad", "good"))
    assert [call.is_rejected for call in rollout.calls] == [True, False]
    assert len(segments_of(rollout)) == 1


def test_a_stop_string_cuts_the_text_and_not_the_token() -> None:
    async def script(agent: Agent) -> Rollout:
        answer = await agent.ask([USER], stop=["ba", "never"])
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("x", "stop")
        assert choice.token_ids == [120, 1001]  # "ba" is one token
        await agent.ask([USER, choice.message, user("more")])
        return await agent.end()

    rollout = play(script, AsyncEngine((120, 1001, 122, END), "fine"))
    assert rollout.calls[0].output_ids == (120, 1001)
    assert len(rollout.calls[0].logprobs) == 2
    # the turn was not ended by the model, so the template ends it
    assert rollout.calls[1].prompt_ids[len(rollout.calls[0].prompt_ids) + 2] == END


def test_seeds() -> None:
    async def script(agent: Agent) -> Rollout:
        for _ in range(2):
            await agent.ask([USER], seed=7)
        await agent.ask([USER])
        return await agent.end()

    seeds = [call.sampling.seed for call in play(script).calls]
    assert seeds[0] == seeds[1] == 7
    assert seeds[2] not in (7, None)


def test_a_fixed_seed_does_not_make_the_rollouts_of_a_group_alike() -> None:
    async def seeds_of(number: int) -> list[Any]:
        capture = make_capture(AsyncEngine())
        identity = RolloutIdentity(
            rollout_id="r", group_id="g", prompt_id="p", key=(0,), seed_of_call=lambda order: 100 * number + order
        )
        captured = CapturedRollout(identity, capture, mixes_seeds=True)
        body = ChatBody.model_validate({"messages": [USER], "seed": 0})
        return [(await captured.chat(body, None))[0].call.sampling.seed for _ in range(2)]

    (a, b), (c, d) = asyncio.run(seeds_of(0)), asyncio.run(seeds_of(1))
    assert a == b
    assert c == d
    assert a != c


def test_max_tokens() -> None:
    async def script(agent: Agent) -> Rollout:
        answer = await agent.ask([USER], max_completion_tokens=2)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "length")
        answer = await agent.ask([USER], max_tokens=3)
        assert answer.usage.completion_tokens == 3
        return await agent.end()

    rollout = play(script, AsyncEngine("abba"))
    assert [call.sampling.max_tokens for call in rollout.calls] == [2, 3]


# ------------------------------------------------------------------------------------------------ completions


def test_completions_continue_by_text_and_by_ids() -> None:
    async def script(agent: Agent) -> Rollout:
        create = agent.client.completions.create
        first = await create(model="any", prompt="ab:", logprobs=0, extra_body={"return_token_ids": True})
        assert first.choices[0].text == "abba"
        assert first.choices[0].logprobs.token_logprobs == [-0.25, -0.26, -0.27, -0.28, -0.29]
        second = await create(model="any", prompt="ab:abba, and", extra_body={"return_token_ids": True})
        ids = [*second.prompt_token_ids, *second.choices[0].token_ids, 65]
        await create(model="any", prompt=ids)
        with pytest.raises(openai.ConflictError, match="found 66"):
            await create(model="any", prompt=[66, *ids])
        stream = await create(model="any", prompt=[*ids, *spelled("three"), 66], stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "four"
        assert chunks[-1].choices[0].finish_reason == "stop"
        return await agent.end()

    rollout = play(script, AsyncEngine("abba", "two", "three", "four"))
    assert [call.parent for call in rollout.calls] == [None, 0, 1, 2]
    assert rollout.calls[1].prompt_ids == (1000, 58, *spelled("abba"), *map(ord, ", and"))
    assert len(segments_of(rollout)) == 1
