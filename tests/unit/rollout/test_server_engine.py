"""What is locked here, over real HTTP with a server that misbehaves on command (scripted_server):

1. vLLM and SGLang: the ids, log-probs and reasons of a call are the server's own; equal seeds give equal tokens;
   where they are asked for, SGLang's calls return the experts of all their tokens but the last
2. siblings of a group go to one server, others to the least busy one; calls at once stay within the limit
3. a call is sent again only while nothing of its answer was accepted: busy, reset, aborted, refused; it is counted once
4. a server that is started again gets its weights before it is asked, and an answer of other weights is never taken;
   an answer that names its weights needs no question for them
5. while weights change no call is in flight, and each call's version is that of the weights that answered it
6. every answer that may not be trained on is refused with what is wrong: ids, log-probs, lengths, stops, prompts
7. a server that is not what the policy needs is refused before the first call
8. when no server comes back within the limit, calls end with an error that says so; so do they when one cannot be
   started again; one that was given up is waited for no more; a call that hangs goes to another server
9. redirects are not followed; time limits are of whole answers, and an answer without end is cut off; one server by
   two names is refused; the end waits for nobody; a server that comes back must answer the probe as before, in numbers
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scripted_server
from evenstep.errors import EngineError
from evenstep.rollout import server_connection
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.returned_experts import returned_experts
from evenstep.rollout.server import Expected, Probe, ServerEngine, ServerOptions
from evenstep.rollout.server_api import TOKENIZER_TEXT
from evenstep.rollout.server_connection import Connection, UnavailableError, connection_pool
from evenstep.rollout.server_options import compare_probes
from evenstep.types import Sampling
from scripted_server import ScriptedServer, Table

STOP = 7
PROBE = tuple(range(1, 30))
KINDS = ("vllm", "vllm scale-out", "sglang")


def weights(folder: Path, number: float) -> Path:
    found = folder / f"version_{number:g}"
    found.mkdir(exist_ok=True)
    (found / "number").write_text(str(number))
    return found


def scripted(kind: str, **settings: Any) -> ScriptedServer:
    name, _, flag = kind.partition(" ")
    return ScriptedServer(kind=name, has_scale_out=flag == "scale-out", **settings)


def options(*urls: str, kind: str = "vllm", **changes: Any) -> ServerOptions:
    of_server = {"max_context_tokens": 400, "vocab_size": 32, "stop_token_ids": frozenset([STOP])}
    of_server |= {"temperature": 1.0, "dtype": "float32"}
    of_server |= {name: changes.pop(name) for name in list(changes) if name in (*of_server, "tokenizer_ids")}
    settings = {"max_concurrent": 8, "request_timeout_s": 5.0, "reconnect_limit_s": 5.0} | changes
    return ServerOptions(kind=kind.partition(" ")[0], urls=urls, expected=Expected(**of_server), **settings)


@contextlib.contextmanager
def engine_of(tmp_path: Path, *urls: str, version: int = 0, **changes: Any) -> Iterator[ServerEngine]:
    """An engine whose servers have the weights of a version."""
    of_engine = {name: changes.pop(name) for name in ("notice", "is_owner", "run", "restart") if name in changes}
    engine = ServerEngine(options(*urls, **changes), **of_engine)
    try:
        engine.connect()
        update(engine, tmp_path, version)
        yield engine
    finally:
        engine.close()


def update(engine: ServerEngine, tmp_path: Path, version: int) -> None:
    engine.hold()
    engine.accept(engine.update(weights(tmp_path, version), version, prompt_ids=PROBE))
    engine.release(version, engine.stamps())


def request(
    *prompt_ids: int, seed: int = 0, max_tokens: int = 20, group_id: str = "", temperature: float = 1.0
) -> Request:
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed)
    return Request(prompt_ids=prompt_ids or (3, 4, 5), sampling=sampling, group_id=group_id)


def call(engine: ServerEngine, *args: int, **changes: Any) -> Completion:
    return asyncio.run(engine.generate(request(*args, **changes)))


def calls(engine: ServerEngine, requests: Sequence[Request]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(one) for one in requests)))

    return asyncio.run(all_of_them())


def expected(completion: Completion, prompt_ids: Sequence[int], number: float, temperature: float = 1.0) -> list[float]:
    table, context, found = Table(), list(prompt_ids), []
    table.number = number
    for token in completion.output_ids:
        logits = table.logits(context, {}) / temperature
        found.append(float(logits[token] - np.log(np.exp(logits).sum())))
        context.append(token)
    return found


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("kind", KINDS)
def test_a_call(kind: str, tmp_path: Path) -> None:
    with scripted(kind) as server, engine_of(tmp_path, server.url, kind=kind, temperature=0.7) as engine:
        found = [call(engine, seed=seed, temperature=0.7) for seed in range(12)]
        assert call(engine, seed=3, temperature=0.7) == found[3]
        assert len({one.output_ids for one in found}) > 6
        for one in found:
            np.testing.assert_allclose(one.logprobs, expected(one, (3, 4, 5), 0.0, 0.7), atol=1e-12)
            assert one.weight_version == 0
            assert (one.finish_reason == "stop") == (one.output_ids[-1] == STOP)
            assert one.finish_reason == "stop" or len(one.output_ids) == 20
        assert {one.finish_reason for one in found} == {"stop", "length"}
        sent = server.calls[-1]["body"]
        name = {"vllm": "prompt", "vllm scale-out": "token_ids", "sglang": "input_ids"}[kind]
        assert sent[name] == [3, 4, 5]
        assert "text" not in sent


def test_a_call_returns_the_experts_that_it_chose(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"kind": "sglang", "experts_shape": (2, 2)}
    with ScriptedServer(kind="sglang") as server, engine_of(tmp_path, server.url, **asked) as engine:
        for seed in range(3):
            found = call(engine, seed=seed)
            ids = (3, 4, 5, *found.output_ids)
            assert found.routed_experts is not None
            assert found.routed_experts.experts_TLX[:-1].tolist() == Table().experts(ids).tolist()
            assert found.routed_experts.is_known_T.tolist() == [True] * (len(ids) - 1) + [False]
        for fault, match in (
            ("no_experts", "found no meta_info.routed_experts; start SGLang with --enable-return-routed-experts"),
            ("more_layers", r"2 layers with 2 experts each, found \d+ numbers"),
        ):
            server.faults[fault] = 1
            with pytest.raises(EngineError, match=match):
                call(engine)
    with ScriptedServer(kind="sglang") as server, engine_of(tmp_path, server.url, kind="sglang") as engine:
        assert call(engine).routed_experts is None
        assert "return_routed_experts" not in server.calls[-1]["body"]


@pytest.mark.parametrize(
    ("found", "match"),
    [(None, "found no meta_info"), ("AAA", "as base64 of int32"), ("AAAAAAAAAAA=", r"found \[0, 0\] at token 0")],
)
def test_experts_that_no_router_chose_are_refused(found: str | None, match: str) -> None:
    with pytest.raises(EngineError, match=rf"the server at http://a must return the experts that it chose.*{match}"):
        returned_experts(found, "http://a", 2, (1, 2))


def test_an_output_ends_at_the_context(tmp_path: Path) -> None:
    with ScriptedServer() as server, engine_of(tmp_path, server.url, max_context_tokens=40) as engine:
        found = call(engine, *[3] * 38, max_tokens=20)
        assert len(found.output_ids) <= 2
        for prompt in ((), (3,) * 40):
            with pytest.raises(EngineError, match=rf"must fit 40 tokens, found a prompt of {len(prompt)}"):
                asyncio.run(engine.generate(Request(prompt_ids=prompt)))


# ------------------------------------------------------------------------------------------------------------ routing


def test_siblings_share_a_server(tmp_path: Path) -> None:
    with (
        ScriptedServer(seconds_per_token=0.002) as one,
        ScriptedServer(seconds_per_token=0.002) as two,
        engine_of(tmp_path, one.url, two.url, max_concurrent=6) as engine,
    ):
        before = [len(one.calls), len(two.calls)]
        requests = [request(3, g, seed=s, group_id=f"g{g}") for g in range(8) for s in range(3)]
        calls(engine, requests)
        by_server = [server.calls[count:] for server, count in zip((one, two), before, strict=True)]
        groups = [{entry["body"]["prompt"][1] for entry in found} for found in by_server]
        assert groups[0] | groups[1] == set(range(8))
        assert not groups[0] & groups[1]
        assert min(map(len, groups)) >= 2
        assert [len(found) for found in by_server] == [3 * len(found) for found in groups]
        assert max(one.most_in_flight, two.most_in_flight) <= 6


def test_the_limit_on_calls_at_once(tmp_path: Path) -> None:
    with (
        ScriptedServer(seconds_per_token=0.002) as server,
        engine_of(tmp_path, server.url, max_concurrent=3) as engine,
    ):
        calls(engine, [request(seed=seed) for seed in range(12)])
        assert server.most_in_flight == 3


# ------------------------------------------------------------------------------------------------------------ retries


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["busy", "reset", "abort"])
def test_a_call_is_sent_again_and_counts_once(kind: str, fault: str, tmp_path: Path) -> None:
    with scripted(kind) as server, engine_of(tmp_path, server.url, kind=kind) as engine:
        first = call(engine, seed=1)
        server.faults[fault] = 2
        assert call(engine, seed=1) == first
        assert server.faults == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", ["no_ids", "no_logprobs"])
def test_an_aborted_call_may_have_nothing_of_an_answer(kind: str, missing: str, tmp_path: Path) -> None:
    with scripted(kind) as server, engine_of(tmp_path, server.url, kind=kind) as engine:
        first = call(engine, seed=1)
        server.faults |= {"abort": 1, missing: 1}
        assert call(engine, seed=1) == first
        assert server.faults == {}


def test_a_server_that_comes_back_gets_its_weights_first(tmp_path: Path) -> None:
    notices: list[str] = []
    first = ScriptedServer(seconds_per_token=0.005)
    port = int(first.url.rpartition(":")[2])
    with first, engine_of(tmp_path, first.url, version=5, notice=notices.append) as engine:
        alone = call(engine, seed=1)
        np.testing.assert_allclose(alone.logprobs, expected(alone, (3, 4, 5), 5.0), atol=1e-12)
        results: list[Completion] = []
        thread = threading.Thread(target=lambda: results.extend(calls(engine, [request(seed=s) for s in range(8)])))
        thread.start()
        time.sleep(0.03)
        first.__exit__()
        with ScriptedServer(port=port) as second:  # with its first weights, number 0
            thread.join(20)
            assert len(results) == 8
            assert results[1] == alone
            for one in results:
                np.testing.assert_allclose(one.logprobs, expected(one, (3, 4, 5), 5.0), atol=1e-12)
            stamps = {entry["stamp"] for entry in second.calls if entry["body"]["prompt"] == [3, 4, 5]}
            # a call may reach it before it is known to be another one; what it answers then is not taken, as seen above
            assert {stamp.split(":")[2] for stamp in stamps - {"default"}} == {"5"}
            assert any("is back after" in line and "with weights 5" in line for line in notices)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_answer_of_other_weights_is_not_taken(kind: str, tmp_path: Path) -> None:
    with scripted(kind, seconds_per_token=0.01) as server, engine_of(tmp_path, server.url, version=5) as engine:
        alone = call(engine, seed=1)
        server.model.number, server.stamp = 0.0, "default"  # as if started again between two calls
        again = call(engine, seed=1)
        assert again == alone
        np.testing.assert_allclose(again.logprobs, expected(again, (3, 4, 5), 5.0), atol=1e-12)


@pytest.mark.parametrize(("kind", "is_asked"), [("vllm", True), ("vllm scale-out", False)])
def test_an_answer_that_names_its_weights_needs_no_question(kind: str, is_asked: bool, tmp_path: Path) -> None:
    with scripted(kind) as server, engine_of(tmp_path, server.url) as engine:
        before = server.num_questions
        for seed in range(12):
            call(engine, seed=seed)
        # the watch of servers may ask too, once a second
        assert (server.num_questions - before >= 12) == is_asked


def test_others_work_while_one_is_away(tmp_path: Path) -> None:
    one, two = ScriptedServer(), ScriptedServer()
    with one, two, engine_of(tmp_path, one.url, two.url, reconnect_limit_s=60.0) as engine:
        calls(engine, [request(3, g, group_id=f"g{g}") for g in range(6)])
        one.__exit__()
        started = time.monotonic()
        assert len(calls(engine, [request(3, g, group_id=f"g{g}") for g in range(6)])) == 6
        assert time.monotonic() - started < 10


def test_no_server_comes_back(tmp_path: Path) -> None:
    server = ScriptedServer()
    with server, engine_of(tmp_path, server.url, reconnect_limit_s=0.5) as engine:
        server.__exit__()
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"did not come back within engine\.reconnect_limit_s = 0\.5 .*--resume"):
            call(engine)
        assert time.monotonic() - started < 8


def test_a_call_that_waits_for_weights_is_given_its_time(tmp_path: Path) -> None:
    with ScriptedServer() as server, engine_of(tmp_path, server.url, reconnect_limit_s=0.8) as engine:
        first = call(engine, seed=2)
        server.faults["reset"] = 1
        results: list[Completion] = []
        thread = threading.Thread(target=lambda: results.append(call(engine, seed=2)))
        thread.start()
        while "reset" in server.faults:
            time.sleep(0.005)
        engine.hold()  # between its first try and the second
        time.sleep(1.2)
        server.faults["reset"] = 1
        engine.release(0, engine.stamps())
        thread.join()
        assert results == [first]


def test_a_call_that_hangs(tmp_path: Path) -> None:
    with ScriptedServer() as server, engine_of(tmp_path, server.url, request_timeout_s=0.3) as engine:
        first = call(engine, seed=2)
        server.faults["hang"] = 1
        assert call(engine, seed=2) == first
        server.faults["hang"] = -1
        with pytest.raises(EngineError, match=r"engine\.request_timeout_s = 0\.3 .*no answer within 0\.3 seconds"):
            call(engine, seed=2)
        server.faults.clear()


def test_a_call_that_hangs_goes_to_another_server(tmp_path: Path) -> None:
    one, two = ScriptedServer(), ScriptedServer()
    with one, two, engine_of(tmp_path, one.url, two.url, request_timeout_s=0.5, reconnect_limit_s=60.0) as engine:
        groups = [request(3, 5, seed=g, group_id=f"g{g}") for g in range(4)]
        before = calls(engine, groups)
        one.faults["hang"] = -1  # and it calls itself healthy
        assert calls(engine, groups) == before
        one.faults.clear()


class _Odd(http.server.BaseHTTPRequestHandler):
    """Sends everybody elsewhere, or answers a byte at a time."""

    drips = False

    def do_GET(self) -> None:
        self.send_response(200 if self.drips else 307)
        self.send_header("Location", "https://elsewhere.example/")
        self.send_header("Content-Length", "40" if self.drips else "0")
        self.end_headers()
        for _ in range(40 if self.drips else 0):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.2)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def odd_server(*, drips: bool) -> Iterator[str]:
    handler = type("Handler", (_Odd,), {"drips": drips})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_redirect_is_not_followed() -> None:
    with odd_server(drips=False) as url:
        engine = ServerEngine(options(url, reconnect_limit_s=60.0))
        try:
            started = time.monotonic()
            with pytest.raises(EngineError, match=r"itself, found status 307 to https://elsewhere\.example/"):
                engine.connect()
            assert time.monotonic() - started < 10
        finally:
            engine.close()


def test_an_answer_that_drips_ends_with_its_time() -> None:
    async def ask(url: str) -> None:
        async with connection_pool([url], max_idle=1) as pool:
            await Connection(pool, url).post("/v1/completions", {}, timeout_s=0.5)

    with odd_server(drips=True) as url:
        started = time.monotonic()
        with pytest.raises(UnavailableError, match=r"no answer within 0\.5 seconds") as found:
            asyncio.run(ask(url))
        assert found.value.is_timeout
        assert time.monotonic() - started < 4


@pytest.mark.parametrize("is_announced", [True, False])
def test_an_answer_without_end_is_cut_off(is_announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "MAX_ANSWER_BYTES", 2**20)
    sent = 0

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: 10000000000\r\n" if is_announced else b"") + b"\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 2**28:
                writer.write(b"[" * 2**16)
                sent += 2**16
                await writer.drain()
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(send, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, connection_pool([url], max_idle=1) as pool:
            with pytest.raises(EngineError, match=r"/v1/models with at most 1048576 bytes, found more \(status 200"):
                await Connection(pool, url).get("/v1/models")

    asyncio.run(ask())
    assert sent < 2**26  # what fits the buffers between


def test_a_restart_that_fails_is_heard_of(tmp_path: Path) -> None:
    def restart(url: str) -> None:
        raise OSError(28, "No space left on device")

    server = ScriptedServer()
    with server, engine_of(tmp_path, server.url, restart=restart) as engine:
        server.__exit__()

        async def in_time() -> Completion:
            return await asyncio.wait_for(engine.generate(request()), 10)

        with pytest.raises(EngineError, match=r"cannot be brought back: OSError: .*No space left"):
            asyncio.run(in_time())


def test_one_server_by_two_names(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        message = r"must name each server once, found that http://127\.0\.0\.1:\d+ and http://localhost:\d+ lead"
        other = server.url.replace("127.0.0.1", "localhost")
        with pytest.raises(EngineError, match=message), engine_of(tmp_path, server.url, other):
            pass


def test_a_server_that_was_given_up_is_waited_for_no_more(tmp_path: Path) -> None:
    one, two = ScriptedServer(), ScriptedServer()
    with one, two, engine_of(tmp_path, one.url, two.url, reconnect_limit_s=3.0) as engine:
        two.__exit__()
        started = time.monotonic()
        update(engine, tmp_path, 1)
        assert time.monotonic() - started > 2.5
        started = time.monotonic()
        update(engine, tmp_path, 2)
        assert time.monotonic() - started < 2
        assert list(engine.stamps()) == [one.url]


def test_the_end_waits_for_no_call(tmp_path: Path) -> None:
    ended: list[BaseException] = []

    def wait(engine: ServerEngine) -> None:
        try:
            call(engine)
        except BaseException as error:  # noqa: BLE001 -- it is what the test asks for
            ended.append(error)

    with ScriptedServer() as server, engine_of(tmp_path, server.url, request_timeout_s=60.0) as engine:
        server.faults["hang"] = 1
        caller = threading.Thread(target=wait, args=(engine,))
        caller.start()
        while "hang" in server.faults:
            time.sleep(0.01)
        started = time.monotonic()
        engine.close()
        caller.join(timeout=10)
        assert time.monotonic() - started < 8
        assert [type(error) for error in ended] == [asyncio.CancelledError]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3.0])
def test_a_server_that_comes_back_otherwise(value: float) -> None:
    before = Probe(url="u", prompt_ids=(1,), output_ids=(2, 3), logprobs=(-0.5, -1.0))
    compare_probes(before, before, tolerance=1e-3)
    after = replace(before, logprobs=(-0.5, value))
    with pytest.raises(EngineError, match=r"must answer the probe as before .* 2 equal ids of 2"):
        compare_probes(before, after, tolerance=1e-3)
    with pytest.raises(EngineError, match=r"0 equal ids of 2"):
        compare_probes(before, replace(before, output_ids=(4, 3)), tolerance=1e-3)


def test_a_follower_waits_for_the_owner(tmp_path: Path) -> None:
    with ScriptedServer() as server, engine_of(tmp_path, server.url, version=4, run="one") as owner:
        follower = ServerEngine(options(server.url), is_owner=False, run="one")
        try:
            follower.connect()
            follower.hold()
            follower.release(4, owner.stamps())
            alone = call(follower, seed=1)
            server.model.number, server.stamp = 0.0, "default"
            again = call(follower, seed=1)  # the owner makes no call and notices all the same
            assert again == alone
            assert server.stamp.startswith("evenstep:one:4:")
        finally:
            follower.close()


def test_a_follower_takes_no_server_that_comes_back_otherwise(tmp_path: Path) -> None:
    with (
        ScriptedServer() as one,
        ScriptedServer() as two,
        engine_of(tmp_path, one.url, two.url, version=4, run="one") as owner,
    ):
        follower = ServerEngine(options(one.url, two.url), is_owner=False, run="one")
        try:
            follower.connect()
            follower.hold()
            follower.accept([probe for server in owner._pool.servers if (probe := server.probe) is not None])
            follower.release(4, owner.stamps())
            two.faults["shifted"], two.stamp = -1, "default"
            while not two.stamp.startswith("evenstep:one:4:"):  # the owner leaves its stamp before it compares
                time.sleep(0.02)
            found: list[Completion] = []
            for _ in range(6):  # the first of them finds out that it was started again
                found += calls(follower, [request(seed=seed) for seed in range(8)])
                time.sleep(0.2)
            for completion in found:
                np.testing.assert_allclose(completion.logprobs, expected(completion, (3, 4, 5), 4.0), atol=1e-12)
        finally:
            follower.close()


def test_a_server_that_is_busy_says_nothing_of_its_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    routes, asked = scripted_server._Handler._vllm, list[str]()

    def starting(self: Any, path: str, query: Any, body: dict[str, Any]) -> None:
        asked.append(path)
        if path == "/inference/v1/generate" and asked.count(path) == 1:
            return self._answer({"error": "starting"}, 503)
        return routes(self, path, query, body)

    monkeypatch.setattr(scripted_server._Handler, "_vllm", starting)
    with ScriptedServer() as server, engine_of(tmp_path, server.url) as engine:
        assert call(engine).weight_version == 0
        assert server.calls[-1]["path"] == "/v1/completions"


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("kind", KINDS)
def test_calls_under_way_end_before_weights_change(kind: str, tmp_path: Path) -> None:
    with (
        scripted(kind, seconds_per_token=0.003) as one,
        scripted(kind, seconds_per_token=0.003) as two,
        engine_of(tmp_path, one.url, two.url, kind=kind, max_concurrent=4) as engine,
    ):
        results: list[Completion] = []
        requests = [request(seed=seed, max_tokens=12) for seed in range(60)]
        thread = threading.Thread(target=lambda: results.extend(calls(engine, requests)))
        thread.start()
        for version in (1, 2, 3):
            time.sleep(0.06)
            update(engine, tmp_path, version)
        thread.join(30)
        assert len(results) == 60
        assert {result.weight_version for result in results} == {0, 1, 2, 3}
        for result in results:
            np.testing.assert_allclose(result.logprobs, expected(result, (3, 4, 5), result.weight_version), atol=1e-12)
        for server in (one, two):  # all of them got each version, once
            stamps = [entry["stamp"] for entry in server.log]
            assert [s.split(":")[2] for s in dict.fromkeys(stamps) if s != "default"] == ["0", "1", "2", "3"]


def test_a_server_that_refuses_weights(tmp_path: Path) -> None:
    for kind, message in (("vllm", "size mismatch for lm_head"), ("sglang", "no such folder")):
        with scripted(kind) as server, engine_of(tmp_path, server.url, kind=kind) as engine:
            server.faults["refuse_weights"] = 1
            engine.hold()
            with pytest.raises(EngineError, match=message):
                engine.update(weights(tmp_path, 1), 1, prompt_ids=PROBE)


def test_a_cache_that_is_not_forgotten(tmp_path: Path) -> None:
    with ScriptedServer() as server, engine_of(tmp_path, server.url) as engine:
        server.faults["no_reset"] = 1
        engine.hold()
        with pytest.raises(EngineError, match="must forget the prefixes"):
            engine.update(weights(tmp_path, 1), 1, prompt_ids=PROBE)


def test_a_server_that_a_killed_run_left_waiting(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        server.pause()
        with engine_of(tmp_path, server.url) as engine:
            assert call(engine).weight_version == 0


def test_two_runs_do_not_share_a_server(tmp_path: Path) -> None:
    with ScriptedServer() as server, engine_of(tmp_path, server.url, version=1) as engine:
        call(engine)
        server.stamp = "evenstep:another:9:0"
        with pytest.raises(EngineError, match=r"must serve one run, found the weights 'evenstep:another:9:0'"):
            call(engine)


# ------------------------------------------------------------------------------------------------------------ refusals

ANSWERS = {
    "no_ids": r"must return token ids",
    "no_logprobs": r"must give a log-prob for each of \d+ sampled tokens, found none",
    "some_logprobs": r"must give a log-prob for each of (\d+) sampled tokens, found \d+",
    "clamp": r"must sample the 6 tokens it is asked for when no stop id comes, found 3 .*--max-model-len",
    "early_stop": r"must stop at ids \[7\] only, found a stop after id",
    "other_prompt": r"must complete",
    "not_json": r"must answer POST \S+ with JSON, found '<html>proxy</html>'",
    "error": r"found status 500: .*illegal memory access",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ANSWERS)
def test_answers_that_may_not_be_trained_on(kind: str, fault: str, tmp_path: Path) -> None:
    with scripted(kind) as server, engine_of(tmp_path, server.url, kind=kind) as engine:
        # a seed whose first six tokens have no stop id, so that each fault shows
        seed = next(s for s in range(50) if call(engine, seed=s, max_tokens=6).finish_reason == "length")
        num_calls = len(server.calls)
        server.faults[fault] = 1
        with pytest.raises(EngineError, match=ANSWERS[fault]):
            call(engine, seed=seed, max_tokens=6)
        assert len(server.calls) - num_calls <= 1  # it was not tried again
        assert call(engine, seed=seed, max_tokens=6).finish_reason == "length"  # and the next call is served


SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "short context": ({"max_model_len": 399}, {}, r"must take model\.max_context_tokens = 400 .* context of 399"),
    "raw log-probs": ({"logprobs_mode": "raw_logprobs"}, {"temperature": 0.7}, r"--logprobs-mode raw_logprobs"),
    "raw logits": ({"logprobs_mode": "raw_logits"}, {}, r"--logprobs-mode raw_logits"),
    "bfloat16": ({"dtype": "bfloat16"}, {}, r"engine\.dtype = 'float32', found 'bfloat16'"),
    "wide vocabulary": ({"faults": {"wide_vocabulary": -1}}, {}, r"32 ids, found one that has the id 32"),
    "narrow vocabulary": ({"faults": {"narrow_vocabulary": -1}}, {}, r"32 ids, found one that has no id 31"),
    "tokenizer": (
        {"faults": {"other_tokenizer": -1}},
        {"tokenizer_ids": tuple(Table().tokens(TOKENIZER_TEXT))},
        r"must have the tokenizer of model\.path",
    ),
    "production mode": ({"has_dev_routes": False}, {}, r"VLLM_SERVER_DEV_MODE=1"),
    "key": ({"key": "secret"}, {}, r"status 401: .*engine\.api_key_variable"),
    "kind": ({"kind": "sglang"}, {}, r"status 404"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_servers_that_are_not_what_is_needed(name: str) -> None:
    of_server, changes, message = SERVERS[name]
    with ScriptedServer(**of_server) as server:
        engine = ServerEngine(options(server.url, **changes))
        try:
            with pytest.raises(EngineError, match=message):
                engine.connect()
        finally:
            engine.close()


def test_servers_that_are(tmp_path: Path) -> None:
    ids = tuple(Table().tokens(TOKENIZER_TEXT))
    with (
        ScriptedServer(key="secret", logprobs_mode="raw_logprobs") as server,
        engine_of(tmp_path, server.url, api_key="secret", tokenizer_ids=ids) as engine,
    ):
        assert call(engine).output_ids
        assert engine.served_tokens == 512


def test_nobody_is_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    engine = ServerEngine(options(url, reconnect_limit_s=0.3))
    try:
        with pytest.raises(EngineError, match=rf"{url} .*ConnectError"):
            engine.connect()
    finally:
        engine.close()
