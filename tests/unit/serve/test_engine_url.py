"""What is locked here: ``evenstep serve --engine-url`` stands before servers that generate.

1. The model's folder needs no weights; a rollout's ids and log-probs are those that the server sampled.
2. A server with another tokenizer, a shorter context, log-probs of another distribution, or none at all is refused.
3. A server that dies and comes back with the same weights goes on, also after the limit; calls meanwhile fail. One
   that comes back with other weights is refused.
4. A second server on the same file of rollouts does not start.
5. Addresses that are none are refused before anything is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from evenstep.cli import app
from evenstep.errors import EngineError
from evenstep.files import read_rollouts
from evenstep.rollout.engine import Request
from evenstep.rollout.server import Expected, ServerEngine, ServerOptions
from evenstep.types import Sampling
from scripted_server import ScriptedServer, Table
from serving_fakes import http

pytest.importorskip("fastapi", reason="the extra 'serve' brings the server")
LEDGER = Path(str(files("evenstep"))) / "data" / "ledger"


class Words(Table):
    """A table with the ids of a tokenizer's file."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        super().__init__(json.loads((folder / "config.json").read_text())["vocab_size"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without its weights."""
    copied = tmp_path_factory.mktemp("model") / "ledger"
    shutil.copytree(LEDGER, copied, ignore=shutil.ignore_patterns("*.safetensors"))
    return copied


@pytest.mark.timeout(120)
def test_it_serves_what_the_server_samples(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with ScriptedServer(Words(folder), max_model_len=4096, key="the-engine's") as engine:
        command = [sys.executable, "-m", "evenstep", "serve", str(folder), "--open", "--out", str(out), "--port", "0"]
        process = subprocess.Popen(
            [*command, "--engine-url", engine.url, "--max-context-tokens", "256"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "EVENSTEP_ENGINE_KEY": "the-engine's"},
        )
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"at (http://\S+),", said)) is None:
                line = process.stderr.readline()
                said += line
                assert line, said
            url = found.group(1)
            again = [*command, "--engine-url", engine.url, "--max-context-tokens", "256"]
            environ = {**os.environ, "EVENSTEP_ENGINE_KEY": "the-engine's"}
            second = subprocess.run(again, env=environ, capture_output=True, text=True, timeout=60, check=False)
            assert (second.returncode, "another process appends to" in second.stderr) == (2, True), second.stderr
            body = {"messages": [{"role": "user", "content": "find c"}], "max_tokens": 6, "return_token_ids": True}
            status, answer, _ = asyncio.run(http(url, "POST", "/r/a/v1/chat/completions", body))
            assert status == 200, answer
            assert asyncio.run(http(url, "POST", "/r/a/reward", {"reward": 1.0}))[0] == 200
            process.terminate()
            rest = process.stderr.read()
            assert process.wait(20) == 0, rest
            assert "Traceback" not in rest
        finally:
            process.kill()
            if process.stderr is not None:
                process.stderr.close()
        (rollout,) = read_rollouts(out)
        (call,) = rollout.calls
        assert list(call.output_ids) == answer["choices"][0]["token_ids"]
        assert engine.calls[-1]["body"]["prompt"] == list(call.prompt_ids) == answer["prompt_token_ids"]
        context, logprobs = list(call.prompt_ids), []
        for token in call.output_ids:
            logits = engine.model.logits(context, {})
            logprobs.append(float(logits[token] - np.log(np.exp(logits).sum())))
            context.append(token)
        np.testing.assert_allclose(call.logprobs, logprobs, atol=1e-12)


@pytest.mark.parametrize(
    "server, arguments, says",
    [
        ({"max_model_len": 64}, [], "must take --max-context-tokens = 256 tokens, found a context of 64"),
        ({"logprobs_mode": "raw_logprobs"}, ["--temperature", "0.5"], "must give log-probs of the distribution"),
        ({"faults": {"other_tokenizer": -1}}, [], "must have the tokenizer of"),
        ({"kind": "sglang", "max_model_len": 64}, ["--engine-kind", "sglang"], "found a context of 64"),
        ({"key": "secret"}, [], "set EVENSTEP_ENGINE_KEY"),
    ],
)
def test_another_server_is_refused(
    folder: Path, tmp_path: Path, server: dict[str, Any], arguments: list[str], says: str
) -> None:
    out = tmp_path / "out.jsonl"
    of_server: dict[str, Any] = {"max_model_len": 4096} | server
    with ScriptedServer(Words(folder), **of_server) as engine:
        given = ["serve", str(folder), "--open", "--out", str(out), "--port", "0", "--engine-url", engine.url]
        result = CliRunner().invoke(app, [*given, "--max-context-tokens", "256", *arguments])
    assert (result.exit_code, says in result.output) == (2, True), result.output
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--engine-url", "localhost:8000"], "--engine-url must be like"),
        (["--engine-url", "http://a:b@h"], "without key or query"),
        (["--engine-url", "http://h:99999"], "--engine-url must be like"),
        (["--engine-url", "http://h:1", "--engine-url", "http://h:1/"], "must name each server once"),
        (["--engine-url", "http://h:1", "--engine-kind", "tgi"], "must be vllm or sglang, found 'tgi'"),
        ([], "without weights"),
    ],
)
def test_addresses(folder: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["serve", str(folder), "--open", "--out", str(out), *arguments])
    assert (result.exit_code, says in result.output) == (2, True), result.output


# ------------------------------------------------------------------------------------------ servers that come back


def adopted(url: str, kind: str) -> ServerEngine:
    expected = Expected(
        max_context_tokens=400, vocab_size=32, stop_token_ids=frozenset([7]), temperature=1.0, dtype=None
    )
    options = ServerOptions(kind=kind, urls=(url,), expected=expected, max_concurrent=4, reconnect_limit_s=0.3)
    engine = ServerEngine(options, is_owner=False)
    engine.connect()
    engine.adopt()
    return engine


def tokens(engine: ServerEngine) -> tuple[int, ...]:
    request = Request(prompt_ids=(3, 4), sampling=Sampling(temperature=1.0, max_tokens=9, seed=1))
    return asyncio.run(engine.generate(request)).output_ids


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_comes_back(kind: str) -> None:
    with ScriptedServer(kind=kind) as first:
        engine = adopted(first.url, kind)
        port = int(first.url.rpartition(":")[2])
        before = tokens(engine)
    try:
        with pytest.raises(EngineError, match=r"did not come back within|must be answered within"):
            tokens(engine)
        time.sleep(1.0)  # well beyond the limit
        with ScriptedServer(kind=kind, port=port):
            deadline = time.monotonic() + 20
            found: Mapping[Any, Any] | tuple[int, ...] = ()
            while not found and time.monotonic() < deadline:
                try:
                    found = tokens(engine)
                except EngineError:
                    time.sleep(0.1)
            assert found == before
        other = ScriptedServer(kind=kind, port=port)
        other.stamp = "evenstep:someone:3:abcd"
        with other:
            said = ""
            while "weights" not in said and time.monotonic() < deadline:
                with pytest.raises(EngineError) as refused:
                    tokens(engine)
                said = str(refused.value)
            assert "must keep the weights that it had, '" in said
            assert "found 'evenstep:someone:3:abcd'" in said
    finally:
        engine.close()


@pytest.mark.parametrize(("kind", "has_scale_out"), [("vllm", False), ("vllm", True), ("sglang", False)])
def test_a_server_that_comes_back_with_other_weights_of_the_same_name(kind: str, has_scale_out: bool) -> None:
    with ScriptedServer(kind=kind, has_scale_out=has_scale_out) as server:
        engine = adopted(server.url, kind)
        before = tokens(engine)
        try:
            server.stamp, server.model.number = "default", 5.0
            server.faults["busy"] = 1  # SGLang's weights have no name: that it was away is what can be seen
            with pytest.raises(EngineError, match="must answer the probe as before with the same weights"):
                tokens(engine)
        finally:
            engine.close()
        assert len(before) > 0
