"""What is locked here, with the real command, a real (tiny) model and programs of their own:

1. The agent of ``examples/openai_agent.py``, which has only the official client, is trained by its configuration: windows
   step, and every rollout has the two segments of its own compaction.
2. The log-probs of its calls are the trainer's, so the ids are those that the engine saw, also across turns.
3. ``evenstep serve`` serves the same model from a shell: two rollouts, streamed and not, tool calls rendered, stopped by a
   signal; its file has the exact calls, and goes on after a crash that cut its last line.
4. It does not start without a key where others can reach it, nor open there, nor on a port that is taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from character_models import save_character_model
from serving_fakes import http

from evenstep.files import read_rollouts
from evenstep.rollout.segments import segments_of

pytest.importorskip("openai", reason="the extra 'dev' brings the openai client")
pytest.importorskip("fastapi", reason="the extra 'serve' brings the server")

ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "use <tool_call>{...}</tool_call><end>{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer of characters."""
    return save_character_model(
        tmp_path_factory.mktemp("model"),
        characters="".join(map(chr, range(32, 127))) + "\n×−",
        roles=["<system>", "<user>", "<assistant>", "<tool>"],
        chat_template=CHAT_TEMPLATE,
        max_position_embeddings=2048,
    )


@pytest.mark.timeout(300)
def test_the_example_is_trained(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {
        "model.path": str(model),
        "model.max_context_tokens": 2048,
        "plan.max_tokens_per_gpu": 4096,
        "run.num_collections": 2,
        "rollout.num_prompts": 1,
        "train.rollouts_per_window": 4,
        "train.lr": 1e-3,
        "checkpoint.export": "false",
    }
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "evenstep", "train", "examples/openai_agent.toml", "--ranks", "1"]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, "--run-dir", str(run), *flags],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    windows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [window["num_rollouts"] for window in windows] == [4, 4]
    assert [window["stepped"] for window in windows] == [True, True]
    assert [window["num_failed"] for window in windows] == [0, 0]
    assert [window["num_rows"] for window in windows] == [8, 8]
    assert all(abs(window["engine_trainer_kl"]) < 1e-9 for window in windows)
    collections = [list(read_rollouts(path)) for path in sorted((run / "rollouts").glob("*.jsonl*"))]
    for version, rollouts in enumerate(collections):
        assert {call.weight_version for rollout in rollouts for call in rollout.calls} == {version}
        for rollout in rollouts:
            assert [call.break_reason for call in rollout.calls] == [None, None, "compaction"]
            assert [call.parent for call in rollout.calls] == [None, 0, None]
            assert [segment.break_reason for segment in segments_of(rollout)] == [None, "compaction"]
        assert len({rollout.calls[0].output_ids for rollout in rollouts}) == len(rollouts)


# ------------------------------------------------------------------------------------------------ evenstep serve


@contextmanager
def server(*arguments: str, environ: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command in a process group of its own; its URL and what it said until then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "evenstep", "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
        start_new_session=True,
    )
    assert process.stderr is not None
    said = ""
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"at (http://\S+), rollouts go to .*\n(.*)\n", said)) is None:
            line = process.stderr.readline()
            said += line
            assert line, said
            assert time.monotonic() < deadline
        yield process, found.group(1), said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


USER = {"role": "user", "content": "12 + 7 = ?"}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def two_turns(url: str, key: str, *, stream: bool) -> list[list[int]]:
    """The ids that the client was told, prompt and output of each call."""
    import openai

    ids: list[list[int]] = []
    extra: Any = {"return_token_ids": True}
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        messages: list[Any] = [USER]
        for _ in range(2):
            create = client.chat.completions.create
            asked: Any = {"model": "m", "messages": messages, "extra_body": extra, "max_tokens": 12, "tools": TOOLS}
            if stream:
                chunks = [chunk async for chunk in await create(**asked, stream=True)]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                message: Any = {"role": "assistant", "content": text}
                ids += [chunks[0].prompt_token_ids, chunks[-1].choices[0].token_ids]  # type: ignore[attr-defined]
            else:
                answer = await create(**asked)
                message = answer.choices[0].message
                ids += [answer.prompt_token_ids, answer.choices[0].token_ids]
            messages += [message, {"role": "tool", "tool_call_id": "x", "content": "19"}]
        await client.post("/reward", body={"reward": 1.0, "group_id": "g"}, cast_to=object)
    return ids


@pytest.mark.timeout(300)
def test_evenstep_serve(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    with server(str(model), "--out", str(out)) as (process, url, said):
        admin = said.split("Admin key: ")[1].strip()

        async def play() -> dict[str, list[list[int]]]:
            made = [(await http(url, "POST", "/rollouts", {}, key=admin))[1] for _ in range(2)]
            told = await asyncio.gather(
                *(two_turns(one["base_url"], one["key"], stream=bool(i)) for i, one in enumerate(made))
            )
            await http(url, "POST", "/rollouts", {"rollout_id": "open"}, key=admin)
            return {one["rollout_id"]: ids for one, ids in zip(made, told, strict=True)}

        told = asyncio.run(play())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    found = {rollout.rollout_id: rollout for rollout in read_rollouts(out)}
    assert found.pop("open").status_reason == "the server was stopped"
    for name, rollout in found.items():
        kept = [list(ids) for call in rollout.calls for ids in (call.prompt_ids, call.output_ids)]
        assert kept == told[name]
        assert (rollout.status, rollout.group_id, len(segments_of(rollout))) == ("ok", "g", 1)
    assert set(found) == set(told)

    with out.open("a") as stream:
        stream.write('{"format_version": 1, "kind": "rollout", "rollo')
    with server(str(model), "--out", str(out), "--open") as (process, url, said):
        assert "(3 there)" in said

        async def again() -> None:
            await two_turns(f"{url}/r/again/v1", "any", stream=False)
            assert (await http(url, "POST", "/r/open/reward", {"reward": 1.0}))[0] == 409

        asyncio.run(again())
        process.kill()  # what was acknowledged is on disk
    assert [rollout.rollout_id for rollout in read_rollouts(out)][-1] == "again"


@pytest.mark.parametrize(
    "arguments, environ, says",
    [
        (["--host", "0.0.0.0"], {}, "so an admin key is needed, found none; set EVENSTEP_ADMIN_KEY or --key-file"),
        (["--host", "0.0.0.0", "--open"], {}, "--open serves this machine alone, found --host 0.0.0.0"),
        (["--host", "0.0.0.0"], {"EVENSTEP_ADMIN_KEY": "short"}, "an admin key has at least 16"),
        (["--key-file", "nowhere"], {}, "--key-file nowhere cannot be read"),
        (["--max-context-tokens", "99999"], {}, "must be at most 2048"),
        (["--on-undeclared", "guess"], {}, "must be one of error, segment, realign, found 'guess'"),
    ],
)
def test_it_does_not_start(model: Path, tmp_path: Path, arguments: list[str], environ: dict[str, str], says: str) -> None:
    from typer.testing import CliRunner

    from evenstep.cli import app

    given = ["serve", str(model), "--out", str(tmp_path / "x.jsonl"), *arguments]
    result = CliRunner().invoke(app, given, env={"EVENSTEP_ADMIN_KEY": None, **environ})
    assert (result.exit_code, says in result.output) == (2, True), result.output
    assert not (tmp_path / "x.jsonl").exists()


def test_a_port_that_is_taken(model: Path, tmp_path: Path) -> None:
    import socket

    from typer.testing import CliRunner

    from evenstep.cli import app

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = ["serve", str(model), "--out", str(tmp_path / "x.jsonl"), "--port", str(taken.getsockname()[1])]
        result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "must be an address of this machine that is free" in result.output


@pytest.mark.skipif(shutil.which("curl") is None, reason="the guide's commands use curl")
def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    start, then = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    words = shlex.split(start)
    assert words[:2] == ["evenstep", "serve"]
    arguments = [str(tmp_path / word) if word == "rollouts.jsonl" else word for word in words[2:]]
    with server(*arguments[:-2]) as (_, url, _):
        script = then.replace("localhost:8000", url.removeprefix("http://"))
        shell = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert '"status":"ok"' in done.stdout
    (rollout,) = read_rollouts(tmp_path / "rollouts.jsonl")
    assert (rollout.rollout_id, rollout.group_id, rollout.reward, len(rollout.calls)) == ("first", "task-1", 1.0, 1)
