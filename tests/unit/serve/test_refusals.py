"""What is locked here, by plain requests to the real server:

1. Without a right key nothing is told: 401 on every path but ``/health`` and the description, whatever the body.
2. A rollout's key opens that rollout alone: another's path is 404, with the same words as one that is not there; the
   administrator's key makes rollouts and plays none; a rollout's key makes none.
3. Right status: oversized body 413 (announced or not), malformed JSON 400, too deep 400, ``..`` in a path 404, wrong
   method 405, negative or absurd ``max_tokens`` 422 or 400, other distributions 400, too many calls 429, an ended
   rollout 409.
4. What was sent is not said back, nor anything of another rollout; permanent refusals tell clients not to try again.
5. Limits on calls, segments, tokens and context; a rollout over its limit is truncated, with its reward.
6. A rollout without a reward in time ends as ``failed``, and so does one that is open when the server stops.
7. An engine's failure is 503 without its words. A client that left is not recorded.
8. Logs have no word of a prompt unless asked.
9. Without keys a rollout begins when it is named, by path or key; only loopback's own names are served.
10. A page of another site in the user's browser reaches nothing there, whatever its Host, Origin or fetch metadata;
    reading begins no rollout.
11. A body that is costly to look at (quotes without an end, very many wrong items) is refused at once, and arguments
    of a tool call that are nested without end are a text.
12. A reason that was declared is used once, also when another call fails meanwhile.
13. Files: a rollout is on disk when its reward is acknowledged, unwritten ones are tried again; those that a full disk
    does not take when the server stops are named, and its exit code is not 0.
14. A long text keeps nobody else waiting while it is tokenised, and one that cannot fit is not tokenised at all.
15. A call that still runs when the server stops is 503; what its rollout had before is kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evenstep.cli.serve import _serve
from evenstep.errors import EngineError, StateError
from evenstep.files import RolloutWriter, read_rollouts
from evenstep.rollout.engine import Request
from evenstep.rollout.in_process import InProcessEngine
from evenstep.serve import capture, captured, running
from evenstep.serve.app import make_app
from evenstep.serve.batches import in_background
from evenstep.serve.registry import Registry
from evenstep.serve.running import bound_socket, serving
from evenstep.serve.schemas import NewRolloutBody
from evenstep.train.serving import load_engine
from evenstep.types import Sampling
from serving_fakes import ADMIN, AsyncEngine, ToolTokenizer, http, make_capture, served

SECRET = "a word that nobody else may read"
CHAT = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}


def run(script: Any, engine: Any = None, **options: Any) -> Any:
    async def go() -> Any:
        async with served(engine, **options) as (url, registry):
            return await script(url, registry)

    return asyncio.run(go())


def made(registry: Registry, name: str) -> str:
    return registry.create(NewRolloutBody(rollout_id=name))[1]


# ------------------------------------------------------------------------------------------------ keys


def test_without_a_right_key_nothing_is_told() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        for wrong in (None, "wrong", key + "x", key[:-1], "", "\xff"):
            for method, path, body in (
                ("POST", "/v1/chat/completions", CHAT),
                ("POST", "/r/mine/v1/chat/completions", CHAT),
                ("POST", "/r/mine/reward", {"reward": 1.0}),
                ("POST", "/r/nobody/reward", {"reward": 1.0}),
                ("POST", "/rollouts", {}),
                ("GET", "/r/mine/status", None),
                ("GET", "/v1/models", None),
                ("GET", "/nothing", None),
                ("POST", "/r/mine/reward", b"{not json"),
            ):
                status, answer, headers = await http(url, method, path, body, key=wrong)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), path
                assert headers["x-should-retry"] == "false"
        for scheme in (f"Basic {key}", key, "Bearer"):
            assert (await http(url, "GET", "/v1/models", headers={"Authorization": scheme}))[0] == 401
        assert (await http(url, "GET", "/health"))[:2] == (200, {"status": "ok"})
        assert (await http(url, "GET", "/openapi.json"))[0] == 200
        assert (await http(url, "GET", "/docs", key=key))[0] == 404
        assert (await http(url, "GET", "/v1/models", key=key))[1]["data"][0]["id"] == "policy"

    run(script)


def test_a_key_opens_its_own_rollout_alone() -> None:
    async def script(url: str, registry: Registry) -> None:
        mine, other = made(registry, "mine"), made(registry, "other")
        assert (await http(url, "POST", "/r/other/v1/chat/completions", CHAT, key=other))[0] == 200
        for method, tail, body in (
            ("POST", "/v1/chat/completions", CHAT),
            ("POST", "/v1/completions", {"prompt": "x"}),
            ("POST", "/reward", {"reward": 1.0}),
            ("POST", "/segment", {"reason": "compaction"}),
            ("POST", "/v1/reject", {"calls": [0]}),
            ("GET", "/status", None),
        ):
            found = await http(url, method, f"/r/other{tail}", body, key=mine)
            absent = await http(url, method, f"/r/absent{tail}", body, key=mine)
            assert found[0] == absent[0] == 404
            assert found[1] == absent[1]
            as_admin = await http(url, method, f"/r/other{tail}", body, key=ADMIN)
            assert as_admin[0] == 404
        assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=ADMIN))[0] == 403
        assert (await http(url, "POST", "/rollouts", {}, key=mine))[0] == 403
        assert (await http(url, "GET", "/r/other/status", key=other))[1]["num_calls"] == 1
        # the key alone names its rollout
        assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=mine))[0] == 200
        assert (await http(url, "GET", "/v1/status", key=mine))[1]["num_calls"] == 1

    run(script)


def test_the_administrator_makes_rollouts() -> None:
    async def script(url: str, registry: Registry) -> None:
        status, answer, _ = await http(url, "POST", "/rollouts", {"group_id": "g/1", "prompt_id": "p"}, key=ADMIN)
        assert status == 201
        assert answer["base_url"] == f"{url}/r/{answer['rollout_id']}/v1"
        assert (await http(url, "GET", f"/r/{answer['rollout_id']}/status", key=answer["key"]))[0] == 200
        named = {"rollout_id": "a.b-c_1"}
        assert (await http(url, "POST", "/rollouts", named, key=ADMIN))[0] == 201
        assert (await http(url, "POST", "/rollouts", named, key=ADMIN))[0] == 409
        for name in ("..", ".", "a/b", "a b", "x" * 200, "é", ""):
            status, _, _ = await http(url, "POST", "/rollouts", {"rollout_id": name}, key=ADMIN)
            assert status in (404, 422), name

    run(script)


# ------------------------------------------------------------------------------------------------ what is refused


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"max_tokens": -1}, 422, "max_tokens must be ≥ 1"),
    ({"max_tokens": 0}, 422, "max_tokens"),
    ({"max_tokens": 10**30}, 422, "max_tokens"),
    ({"max_tokens": 10**9}, 400, "max_tokens must be at most 200, found 1000000000"),
    ({"max_tokens": 1.5}, 422, "max_tokens"),
    ({"max_tokens": "5"}, 422, "max_tokens must be an integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "must be the same"),
    ({"temperature": 0.7}, 400, "temperature must be the one that is trained at, 1.0, found 0.7"),
    ({"temperature": -1}, 422, "temperature"),
    ({"top_p": 0.9}, 400, "top_p changes the distribution"),
    ({"top_k": 5}, 400, "top_k"),
    ({"min_p": 0.1}, 400, "min_p"),
    ({"presence_penalty": 0.1}, 400, "presence_penalty"),
    ({"frequency_penalty": -0.1}, 400, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, 400, "repetition_penalty"),
    ({"logit_bias": {"5": 1.0}}, 400, "logit_bias"),
    ({"top_logprobs": 3}, 422, "top_logprobs"),
    ({"n": 0}, 422, "n must be"),
    ({"n": 129}, 422, "n must be"),
    ({"n": 65}, 400, "n must be at most"),
    ({"response_format": {"type": "json_object"}}, 422, "response_format.type"),
    ({"tool_choice": "required"}, 422, "tool_choice"),
    ({"best": 1}, 422, "best is unknown"),
    ({"messages": []}, 422, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 422, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, 422, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 20000}]}, 400, "the context holds 10000 tokens"),
    ({"tools": [{"type": "function"}]}, 422, "tools[0].function is required"),
    ({"stop": [""]}, 422, "stop"),
]


def test_requests_that_cannot_be_served() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        for change, status, says in REFUSED:
            found, answer, headers = await http(url, "POST", "/v1/chat/completions", CHAT | change, key=key)
            assert (found, says in answer["error"]["message"]) == (status, True), (change, answer)
            assert headers["x-should-retry"] == "false"
            assert SECRET not in json.dumps(answer)
        assert (await http(url, "GET", "/v1/status", key=key))[1]["num_calls"] == 0

    run(script)


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0, "frequency_penalty": 0}
NEUTRAL |= {"repetition_penalty": 1.0, "logit_bias": {}, "n": 1, "user": "me", "metadata": {"a": "b"}, "store": False}
NEUTRAL |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "stop": None, "seed": -3, "stream": None}


def test_settings_without_effect_are_taken() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        status, answer, _ = await http(url, "POST", "/v1/chat/completions", CHAT | NEUTRAL, key=key)
        assert status == 200, answer

    run(script)


def deep(levels: int) -> bytes:
    return b'{"reward": 1.0, "info": {"a": ' + b"[" * levels + b"]" * levels + b"}}"


BODIES: list[tuple[bytes, int]] = [
    (b"{not json", 400),
    (b'{"reward": 1.0', 400),
    (b"\xff\xfe{}", 400),
    (b'"\\ud800"', 400),
    (b'{"reward": 1.0, "info": {"x": "\\udfff"}}', 400),
    (b'{"reward": ' + b"9" * 5000 + b"}", 400),
    (deep(100), 400),
    (b"[" * 100_000, 400),
    (deep(30), 200),
    (b'{"reward": NaN}', 422),
    (b'{"reward": 1.0, "info": {"a": Infinity}}', 422),
    (b'{"reward": 1e999}', 422),
    (b'{"reward": 1' + b"0" * 400 + b"}", 422),
    (b'{"reward": true}', 422),
    (b'{"reward": null}', 400),
    (b'{"status": "failed"}', 200),
    (b'{"status": "failed", "reward": 1.0}', 400),
    (b"[]", 422),
    (b"", 422),
    (b'{"reward": 1.0, "chosen": [5]}', 400),
]


def test_bodies() -> None:
    async def script(url: str, registry: Registry) -> None:
        for index, (body, status) in enumerate(BODIES):
            found, answer, _ = await http(url, "POST", "/v1/reward", body, key=made(registry, f"r{index}"))
            assert found == status, (body[:60], answer)

    run(script)


def test_an_oversized_body_is_not_read() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        body = b'{"prompt": "' + b"x" * 3000 + b'"}'
        status, answer, _ = await http(url, "POST", "/v1/completions", body, key=key)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        chunked = b"".join(b"%x\r\n" % 500 + b"x" * 500 + b"\r\n" for _ in range(6)) + b"0\r\n\r\n"
        headers = {"Transfer-Encoding": "chunked", "Content-Length": None}
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        writer.write(head.encode() + b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n" + chunked)
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 10), headers
        writer.close()
        small = await http(url, "POST", "/v1/completions", {"prompt": "x"}, key=key)
        assert small[0] == 200

    run(script, max_body_bytes=2048)


PATHS = [
    "/r/../v1/chat/completions",
    "/r/mine/../other/v1/chat/completions",
    "/r/%2e%2e/v1/chat/completions",
    "/r/mine%2f..%2fother/v1/chat/completions",
    "/../etc/passwd",
    "/v1/../../etc/passwd",
    "/r//v1/chat/completions",
    "//v1/chat/completions",
    "/v1/chat/completions/..",
    "/r/mine/v1/chat/completions%00",
]


def test_paths_lead_nowhere_else() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        for path in PATHS:
            status, answer, _ = await http(url, "POST", path, CHAT, key=key)
            assert status == 404, (path, answer)
            assert answer["error"]["code"] in ("unknown_path", "unknown_rollout")
        assert (await http(url, "GET", "/v1/chat/completions", key=made(registry, "two")))[0] == 405

    run(script)


def test_calls_at_a_time() -> None:
    async def script(url: str, registry: Registry) -> None:
        keys = [made(registry, f"r{i}") for i in range(5)]
        asked = [http(url, "POST", "/v1/chat/completions", CHAT, key=key) for key in keys]
        found = await asyncio.gather(*asked)
        statuses = sorted(status for status, _, _ in found)
        assert statuses == [200, 200, 429, 429, 429]
        assert all(headers.get("retry-after") == "1" for status, _, headers in found if status == 429)
        assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=keys[4]))[0] == 200

    run(script, AsyncEngine(delay_s=0.5), limits={"max_concurrent_calls": 2})


def test_calls_at_a_time_of_one_rollout() -> None:
    async def script(url: str, registry: Registry) -> None:
        mine, other = made(registry, "mine"), made(registry, "other")
        asked = [http(url, "POST", "/v1/chat/completions", CHAT, key=key) for key in (mine, mine, mine, other)]
        found = [status for status, _, _ in await asyncio.gather(*asked)]
        assert sorted(found[:3]) == [200, 200, 429]
        assert found[3] == 200
        assert (await http(url, "POST", "/v1/chat/completions", CHAT | {"n": 2}, key=mine))[0] == 200
        assert (await http(url, "POST", "/v1/chat/completions", CHAT | {"n": 3}, key=mine))[0] == 400

    run(script, AsyncEngine(delay_s=0.5), limits={"max_concurrent_calls_per_rollout": 2})


# ------------------------------------------------------------------------------------------------ limits and ends


@pytest.mark.parametrize(
    "limits, says",
    [
        ({"max_calls": 2}, "max_calls = 2 calls are made"),
        ({"max_sampled_tokens": 6}, "max_sampled_tokens = 6 tokens are sampled"),
        ({"max_segments": 2}, "max_segments = 2 segments are full"),
    ],
)
def test_a_rollout_over_its_limit_is_truncated(limits: dict[str, int], says: str) -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        statuses: list[int] = []
        for index in range(3):
            body = {"messages": [{"role": "user", "content": f"task {index}"}]}
            compacted = {"x-evenstep-break": "compaction"}
            status, answer, _ = await http(url, "POST", "/v1/chat/completions", body, key=key, headers=compacted)
            statuses.append(status)
        assert statuses == [200, 200, 403]
        assert says in answer["error"]["message"]
        status, answer, _ = await http(url, "POST", "/v1/reward", {"reward": 0.5}, key=key)
        assert (status, answer["status"], answer["reward"], answer["num_calls"]) == (200, "truncated", 0.5, 2)
        assert says in answer["status_reason"]
        assert answer["num_sampled_tokens"] == 6

    run(script, AsyncEngine("ok"), limits=limits)


def test_an_ended_rollout_takes_nothing_more() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        assert (await http(url, "POST", "/v1/reward", {"reward": 1.0}, key=key))[0] == 200
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/reward", {"reward": 2.0}),
            ("/v1/segment", {"reason": "template"}),
            ("/v1/reject", {"calls": [0]}),
        ):
            assert (await http(url, "POST", path, body, key=key))[0] == 409
        assert (await http(url, "GET", "/v1/status", key=key))[1]["reward"] == 1.0

    run(script)


def test_abandoned_rollouts_end_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with RolloutWriter(path) as sink:

        async def script(url: str, registry: Registry) -> None:
            key = made(registry, "slow")
            assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=key))[0] == 200
            running = asyncio.create_task(http(url, "POST", "/v1/chat/completions", CHAT, key=key))
            for _ in range(100):
                await asyncio.sleep(0.05)
                if path.read_text():
                    break
            assert (await http(url, "POST", "/v1/reward", {"reward": 1.0}, key=key))[0] == 409
            assert (await running)[0] == 409  # what was being sampled then belongs to nothing
            made(registry, "open")

        run(script, AsyncEngine("x", delay_s=0.7), sink=sink, limits={"timeout_s": 1.0})
    slow, still_open = read_rollouts(path)
    assert (slow.rollout_id, slow.status, slow.reward) == ("slow", "failed", None)
    assert slow.status_reason == "no reward within 1 seconds: abandoned"
    assert len(slow.calls) == 1
    assert (still_open.status, still_open.status_reason) == ("failed", "the server was stopped")


def test_rewards_are_on_disk_when_they_are_acknowledged(tmp_path: Path) -> None:
    class Sink:
        """A disk that is full at first."""

        def __init__(self) -> None:
            self.is_full = True
            self.found: list[Any] = []

        def append(self, rollouts: list[Any]) -> None:
            if self.is_full:
                raise OSError(28, "No space left on device")
            self.found += rollouts

    sink = Sink()

    async def script(url: str, registry: Registry) -> None:
        a, b = made(registry, "a"), made(registry, "b")
        assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=a))[0] == 200
        assert (await http(url, "POST", "/v1/reward", {"reward": 1.0, "info": {"k": [1]}}, key=a))[0] == 500
        sink.is_full = False
        assert (await http(url, "POST", "/v1/reward", {"reward": 2.0, "prompt_id": "p"}, key=b))[0] == 200
        c = made(registry, "c")
        assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=c))[0] == 200
        for method, path, body in (("POST", "/v1/reward", {"reward": 3.0}), ("GET", "/v1/status", None)):
            status, told, _ = await http(url, method, path, body, key=c)
            assert (status, told["num_calls"], told["num_sampled_tokens"]) == (200, 1, 3)
        del sink.found[2:]
        assert [(r.rollout_id, r.reward, len(r.calls)) for r in sink.found] == [("a", 1.0, 1), ("b", 2.0, 0)]
        assert sink.found[0].info == {"k": [1], "num_segments": 1}
        assert sink.found[1].prompt_id == "p"

    run(script, sink=sink)


def test_a_call_that_runs_when_the_server_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "STOP_S", 0.2)
    path, engine = tmp_path / "rollouts.jsonl", AsyncEngine()

    async def go() -> tuple[int, Any, dict[str, str]]:
        with RolloutWriter(path) as sink:
            async with served(engine, sink=sink) as (url, registry):
                key = made(registry, "mine")
                assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=key))[0] == 200
                engine.delay_s = 30.0
                call = asyncio.create_task(http(url, "POST", "/v1/chat/completions", CHAT, key=key))
                while len(engine.requests) < 2:
                    await asyncio.sleep(0.01)
            return await call

    status, answer, headers = asyncio.run(go())
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (503, "server_stopped", "server_error")
    assert headers["x-should-retry"] == "false"
    (rollout,) = read_rollouts(path)
    assert (rollout.status, rollout.status_reason, len(rollout.calls)) == ("failed", "the server was stopped", 1)


@pytest.mark.parametrize("is_rewarded", [True, False])
def test_a_rollout_that_is_being_written_when_the_server_stops(
    is_rewarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(RolloutWriter):
        def append(self, rollouts: Any) -> None:
            is_begun.set()
            time.sleep(1.0)
            super().append(rollouts)

    monkeypatch.setattr(running, "STOP_S", 0.1)
    path, is_begun = tmp_path / "rollouts.jsonl", threading.Event()

    async def go() -> None:
        limits = {} if is_rewarded else {"timeout_s": 0.2}
        with Slow(path) as sink:
            async with served(AsyncEngine(), sink=sink, is_open=True, limits=limits) as (url, registry):
                registry.named("mine")
                if is_rewarded:
                    reward = asyncio.create_task(http(url, "POST", "/r/mine/reward", {"reward": 1.0}))
                while not is_begun.is_set():
                    await asyncio.sleep(0.01)
            assert registry.unwritten_ids == []
            if is_rewarded:
                assert (await reward)[0] == 503

    asyncio.run(go())
    (rollout,) = read_rollouts(path)
    assert rollout.status == ("ok" if is_rewarded else "failed")


def test_a_rollout_that_cannot_be_ended_keeps_no_other_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segmentation_of = captured.segmentation_of

    def faulty(rollout: Any, **options: Any) -> Any:
        assert rollout.rollout_id != "bad"
        return segmentation_of(rollout, **options)

    monkeypatch.setattr(captured, "segmentation_of", faulty)
    path = tmp_path / "rollouts.jsonl"

    async def go() -> list[str]:
        with RolloutWriter(path) as sink:
            async with served(AsyncEngine(), sink=sink, is_open=True) as (_, registry):
                for name in ("bad", "good"):
                    registry.named(name)
            return registry.unwritten_ids

    assert asyncio.run(go()) == ["bad"]  # the command says that it is lost
    assert [rollout.rollout_id for rollout in read_rollouts(path)] == ["good"]


def test_a_batch_that_runs_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, is_begun = InProcessEngine._forward, threading.Event()

    def slow(self: InProcessEngine, *args: Any) -> Any:
        is_begun.set()
        time.sleep(0.05)
        return forward(self, *args)

    monkeypatch.setattr(InProcessEngine, "_forward", slow)
    loaded = load_engine("evenstep:ledger", max_context_tokens=512)

    async def stopped() -> float:
        request = Request(prompt_ids=(1, 2, 3), sampling=Sampling(seed=2), rollout_key=())
        call = asyncio.create_task(in_background(loaded.engine, max_rows=1).generate(request))
        await asyncio.to_thread(is_begun.wait)
        loaded.close()
        with pytest.raises(EngineError, match="was closed while it generated"):
            await call
        return time.monotonic()

    ended = asyncio.run(stopped())
    assert time.monotonic() - ended < 1.0


def test_a_disk_that_is_full_when_the_server_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RolloutWriter, rollouts: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RolloutWriter, "append", full)
    listener = bound_socket("127.0.0.1", 0)
    listener.listen()  # it takes connections from the start; they wait until the server is there
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stopped() -> None:
        serving_it = asyncio.create_task(
            _serve(make_capture(AsyncEngine()), listener, tmp_path / "rollouts.jsonl", None, True, 16, {})
        )
        for name in ("first", "second"):
            assert (await http(url, "POST", f"/r/{name}/v1/chat/completions", CHAT))[0] == 200
        assert (await http(url, "POST", "/r/first/reward", {"reward": 1.0}))[0] == 500
        os.kill(os.getpid(), signal.SIGTERM)
        await serving_it

    with pytest.raises(StateError, match=r"the disk did not take 2 of them: first, second; they are lost"):
        asyncio.run(stopped())


def test_an_engines_failure_tells_nothing_of_itself() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        for _ in range(2):
            status, answer, _ = await http(url, "POST", "/v1/chat/completions", CHAT, key=key)
            assert (status, answer["error"]["code"]) == (503, "engine_failed")
            assert "the secret path" not in json.dumps(answer)
        assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=key))[0] == 200
        assert (await http(url, "GET", "/v1/status", key=key))[1]["num_calls"] == 1

    run(script, AsyncEngine(EngineError("the secret path"), RuntimeError("the secret path"), "ok"))


def test_a_client_that_left_is_not_recorded() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await http(url, "POST", "/v1/chat/completions", CHAT, key=key)
        await asyncio.sleep(0.5)
        assert (await http(url, "GET", "/v1/status", key=key))[1]["num_calls"] == 0
        assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=key))[0] == 200
        assert (await http(url, "GET", "/v1/status", key=key))[1]["num_calls"] == 1

    run(script, AsyncEngine(delay_s=0.3))


def test_a_declared_turn_that_is_sent_again_keeps_its_reason() -> None:
    """As clients do by themselves after a time-out, while the first try still runs."""

    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=key))[0] == 200
        assert (await http(url, "POST", "/v1/segment", {"reason": "compaction"}, key=key))[0] == 200
        compacted = {"messages": [{"role": "user", "content": "in short"}]}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await http(url, "POST", "/v1/chat/completions", compacted, key=key)
        assert (await http(url, "POST", "/v1/chat/completions", compacted, key=key))[0] == 200
        status, answer, _ = await http(url, "POST", "/v1/reward", {"reward": 1.0}, key=key)
        assert (status, answer["status"], answer["num_calls"], answer["num_segments"]) == (200, "ok", 2, 2)

    run(script, AsyncEngine(delay_s=0.6))


@pytest.mark.parametrize("logs_prompts", [False, True])
def test_logs_have_no_prompts_unless_asked(logs_prompts: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        registry = Registry(make_capture(AsyncEngine("the answer")), admin_key=ADMIN)
        async with serving(make_app(registry, logs_prompts=logs_prompts), bound_socket("127.0.0.1", 0)) as url:
            key = made(registry, "mine")
            await http(url, "POST", "/v1/chat/completions", CHAT, key=key)
            await http(url, "POST", "/v1/chat/completions", CHAT | {"temperature": 2.0}, key=key)
            await http(url, "POST", "/v1/chat/completions", CHAT | {"best": SECRET}, key=key)
            await http(url, "POST", "/v1/reward", {"reward": 1.0, "info": {"note": SECRET}}, key=key)

    with caplog.at_level(logging.INFO, "evenstep.serve"):
        asyncio.run(go())
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "evenstep.serve"]
    assert [line["event"] for line in lines] == ["begin", "call", "refused", "refused", "end"]
    assert [line.get("status") for line in lines[2:4]] == [400, 422]
    assert lines[1]["num_output_tokens"] == [11]
    assert (SECRET in caplog.text) == logs_prompts
    assert ("the answer" in caplog.text) == logs_prompts


# ------------------------------------------------------------------------------------------------ without keys


def test_without_keys_a_rollout_begins_when_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.gz"
    with RolloutWriter(path) as sink:

        async def script(url: str, registry: Registry) -> None:
            assert (await http(url, "POST", "/r/by-path/v1/chat/completions", CHAT))[0] == 200
            assert (await http(url, "POST", "/v1/chat/completions", CHAT, key="by-key"))[0] == 200
            assert (await http(url, "POST", "/v1/chat/completions", CHAT))[0] == 404
            assert (await http(url, "POST", "/r/../v1/chat/completions", CHAT))[0] == 404
            assert (await http(url, "POST", "/v1/chat/completions", CHAT, key=".."))[0] == 404
            assert (await http(url, "POST", "/r/by-path/reward", {"reward": 1.0}))[0] == 200
            assert (await http(url, "POST", "/v1/reward", {"reward": 0.0}, key="by-key"))[0] == 200
            foreign = await http(url, "POST", "/r/x/reward", {"reward": 1.0}, headers={"Host": "evil.example:80"})
            assert foreign[0] == 403
            text = await http(url, "POST", "/r/x/reward", b'{"reward": 1.0}', headers={"Content-Type": "text/plain"})
            assert text[0] == 422  # what a page in a browser may send without asking first

        run(script, sink=sink, is_open=True)
    assert [(r.rollout_id, r.group_id, r.reward) for r in read_rollouts(path) if r.status == "ok"] == [
        ("by-path", "by-path", 1.0),
        ("by-key", "by-key", 0.0),
    ]


@pytest.mark.parametrize(
    "headers, is_served",
    [
        ({}, True),
        ({"Host": "localhost"}, True),
        ({"Host": "LOCALHOST:8000"}, True),
        ({"Host": "[::1]"}, True),
        ({"Host": "evil.example"}, False),
        ({"Host": "evil.example:"}, False),
        ({"Host": "127.0.0.1.evil.example:8000"}, False),
        ({"Host": "[evil"}, False),
        ({"Origin": "http://localhost:3000"}, True),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "none"}, True),
    ],
)
def test_pages_of_other_sites_reach_nothing(headers: dict[str, str], is_served: bool) -> None:
    async def script(url: str, registry: Registry) -> None:
        status = (await http(url, "POST", "/r/a/v1/chat/completions", CHAT, headers=headers))[0]
        assert status == (200 if is_served else 403)
        assert (await http(url, "GET", "/r/b/status", headers=headers))[0] == (404 if is_served else 403)
        found = await http(url, "GET", "/r/a/status")
        assert found[0] == (200 if is_served else 404)
        assert (await http(url, "GET", "/v1/status", key="b"))[0] == 404

    run(script, is_open=True)


def test_bodies_that_are_costly_to_look_at() -> None:
    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        call: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 5_000}}
        answer = {"role": "assistant", "content": "x", "tool_calls": [call]}
        for path, body, expected in (
            ("/v1/completions", b'"' + b'\\"' * 400_000, 400),
            ("/v1/completions", b'{"prompt": "\\', 400),
            ("/v1/completions", b'{"prompt": [' + b",".join([b"[]"] * 300_000) + b"]}", 422),
            ("/v1/chat/completions", b'{"messages": [' + b",".join([b"{}"] * 300_000) + b"]}", 422),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * 100_000}]}, 422),
            ("/v1/chat/completions", {"messages": [answer, CHAT["messages"][0]]}, 200),
            ("/v1/chat/completions", {"messages": [answer, CHAT["messages"][0]]}, 200),
        ):
            async with asyncio.timeout(10):
                status, found, _ = await http(url, "POST", path, body, key=key)
            assert status == expected, found

    run(script)


def test_a_declared_reason_is_used_once() -> None:
    class Engine(AsyncEngine):
        """The second call fails, late."""

        async def generate(self, request: Any) -> Any:
            is_second = len(self.requests) == 1
            found = await super().generate(request)
            if is_second:
                await asyncio.sleep(0.3)
                raise EngineError("late")
            return found

    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        other, third = ({"messages": [{"role": "user", "content": text}]} for text in ("another", "a third"))
        path = "/v1/chat/completions"
        assert (await http(url, "POST", path, CHAT, key=key))[0] == 200
        assert (await http(url, "POST", "/v1/segment", {"reason": "compaction"}, key=key))[0] == 200
        said = {"role": "assistant", "content": "ok"}
        going_on = {"messages": [*CHAT["messages"], said, {"role": "user", "content": "go on"}]}
        failing = asyncio.create_task(http(url, "POST", path, going_on, key=key))
        await asyncio.sleep(0.1)
        assert (await http(url, "POST", path, other, key=key))[0] == 200
        assert (await failing)[0] == 503
        assert (await http(url, "POST", path, third, key=key))[0] == 409

    run(script, Engine())


class SlowTokenizer(ToolTokenizer):
    """Takes its time, as one does with a megabyte."""

    num_encoded = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_encoded += 1
        time.sleep(0.5 if len(text) > 100 else 0.0)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_long_texts_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "LONG_CHARACTERS", 100)
    tokenizer = SlowTokenizer()
    told = {"messages": [{"role": "user", "content": "x" * 200}]}

    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        for path, body in (("chat/completions", told), ("completions", {"prompt": "x" * 200})):
            started = time.monotonic()
            call = asyncio.create_task(http(url, "POST", f"/v1/{path}", body | {"model": "m"}, key=key))
            while tokenizer.num_encoded == 0:
                await asyncio.sleep(0.01)
            assert (await http(url, "GET", "/health"))[0] == 200
            assert time.monotonic() - started < 0.5
            assert (await call)[0] == (200 if path == "chat/completions" else 409)
            tokenizer.num_encoded = 0

    run(script, AsyncEngine(), tokenizer=tokenizer)


def test_tools_and_names_are_long_texts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "LONG_CHARACTERS", 100)
    tokenizer = SlowTokenizer()
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 200}}

    async def script(url: str, registry: Registry) -> None:
        key, tokenizer.num_encoded = made(registry, "mine"), 0
        call = asyncio.create_task(http(url, "POST", "/v1/chat/completions", CHAT | {"tools": [tool]}, key=key))
        while tokenizer.num_encoded == 0:
            await asyncio.sleep(0.01)
        assert not call.done()  # what blocks the loop lets nobody look before it is done
        assert (await http(url, "GET", "/health"))[0] == 200
        assert not call.done()
        assert (await call)[0] == 200

    run(script, AsyncEngine(), tokenizer=tokenizer)


def test_calls_whose_texts_wait_to_be_tokenised_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "LONG_CHARACTERS", 100)
    told = {"messages": [{"role": "user", "content": "x" * 200}]}

    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        for body in (told, {"prompt": "x" * 200}):
            path = "chat/completions" if "messages" in body else "completions"
            calls = [http(url, "POST", f"/v1/{path}", body | {"model": "m"}, key=key) for _ in range(6)]
            statuses = [status for status, _, _ in await asyncio.gather(*calls)]
            assert statuses.count(429) == 4
        assert (await http(url, "POST", "/v1/chat/completions", told, key=key))[0] == 200

    limits = {"max_concurrent_calls_per_rollout": 2}
    run(script, AsyncEngine(), tokenizer=SlowTokenizer(), limits=limits)


@pytest.mark.parametrize("is_of_the_model", [True, False])
def test_half_a_surrogate_pair_in_a_tool_call(is_of_the_model: bool) -> None:
    class Plain(ToolTokenizer):
        """Shows a tool call as it is, and takes no half characters, as real ones do."""

        def apply_chat_template(self, conversation: Any, **options: Any) -> str:
            plain = [{**m, "content": m["content"] + str(m.get("tool_calls", ""))} for m in conversation]
            return super().apply_chat_template([{**m, "tool_calls": ()} for m in plain], **options)

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            text.encode()
            return super().encode(text, add_special_tokens=add_special_tokens)

    half = '{"a": "\\ud83d"}'
    history = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": half}}]}
    body = CHAT if is_of_the_model else {"messages": [*CHAT["messages"], history]}
    tool = {"type": "function", "function": {"name": "f"}}

    async def script(url: str, registry: Registry) -> None:
        key = made(registry, "mine")
        status, answer, _ = await http(url, "POST", "/v1/chat/completions", body | {"tools": [tool]}, key=key)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == written  # no tool call: nobody could be told its name

    written = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    run(script, AsyncEngine(written), tokenizer=Plain())


def test_texts_that_cannot_fit_are_not_looked_at() -> None:
    tokenizer = SlowTokenizer()

    async def script(url: str, registry: Registry) -> None:
        key, tokenizer.num_encoded = made(registry, "mine"), 0
        for path, body in (
            (
                "chat/completions",
                {"messages": [{"role": "user", "content": "x" * 61}, {"role": "user", "content": "y" * 60}]},
            ),
            ("completions", {"prompt": "x" * 121}),
        ):
            status, answer, _ = await http(url, "POST", f"/v1/{path}", body | {"model": "m"}, key=key)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert tokenizer.num_encoded == 0  # 60 tokens of two characters are 120 at most
        assert (await http(url, "POST", "/v1/completions", {"model": "m", "prompt": "ab" * 20}, key=key))[0] == 200

    run(script, AsyncEngine(max_context_tokens=60), tokenizer=tokenizer, longest_token=2)


def test_open_rollouts_are_bounded() -> None:
    async def go() -> None:
        registry = Registry(make_capture(AsyncEngine()), admin_key=ADMIN, max_open=2, used_ids=frozenset({"old"}))
        async with serving(make_app(registry), bound_socket("127.0.0.1", 0)) as url:
            assert (await http(url, "POST", "/rollouts", {"rollout_id": "old"}, key=ADMIN))[0] == 409
            found = [(await http(url, "POST", "/rollouts", {}, key=ADMIN))[:2] for _ in range(3)]
            assert [status for status, _ in found] == [201, 201, 429]
            assert (await http(url, "POST", "/v1/reward", {"reward": 1.0}, key=found[0][1]["key"]))[0] == 200
            assert (await http(url, "POST", "/rollouts", {}, key=ADMIN))[0] == 201

    asyncio.run(go())


def test_tools_that_the_model_would_not_see() -> None:
    class Deaf(ToolTokenizer):
        def apply_chat_template(self, conversation: Any, *, tools: Any = None, **options: Any) -> str:
            return super().apply_chat_template(conversation, **options)

    async def go() -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        for tokenizer, family in ((Deaf(), "hermes"), (ToolTokenizer(), None)):
            capture = make_capture(AsyncEngine())
            capture.tokenizer, capture.tool_family = tokenizer, family
            capture.__post_init__()
            registry = Registry(capture, admin_key=ADMIN)
            async with serving(make_app(registry), bound_socket("127.0.0.1", 0)) as url:
                body = CHAT | {"tools": tools}
                status, answer, _ = await http(url, "POST", "/v1/chat/completions", body, key=made(registry, "a"))
                assert (status, answer["error"]["code"]) == (400, "tools_not_supported")

    asyncio.run(go())
