"""What is locked here, with `evenstep train` on two real ranks and scripted servers in processes of their own:

1. a server that is killed in the middle of a collection and started again, with its first weights: the run waits, gives
   it the present ones and ends with the rollouts that it would have had
2. a server that stays away: the run ends with what it waited for, and with --resume it ends as it would have ended; what
   was finished is not generated again
3. servers that a run starts itself: on the policy's weights, again when they die, and ended with the run, also when it
   is killed; one that cannot start is reported with its log
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from server_runs import (
    TESTS,
    config_of,
    finish,
    free_port,
    ids_of,
    rollouts,
    servers,
    start,
    untied,
    wait_until,
    windows,
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("plain")
    with servers(untied(folder), 2) as found:
        output = finish(start(config_of(folder, engine={"urls": [s.url for s in found]})))
        assert "Traceback" not in output
    return folder


@pytest.mark.timeout(300)
def test_killed_in_the_middle_of_a_collection(plain: Path, tmp_path: Path) -> None:
    with servers(untied(tmp_path), 1, "--seconds-per-token", "0.01") as (server,):
        process = start(config_of(tmp_path, engine={"urls": [server.url]}))
        wait_until(process, lambda: len(windows(tmp_path)) >= 1)
        wait_until(process, lambda: sum(":1:" in entry["stamp"] for entry in server.calls()) >= 3)
        server.kill()
        time.sleep(1.0)
        assert process.poll() is None
        server.start()
        output = finish(process)
        assert "waiting for it" in output
        assert "is back after" in output
        assert {entry["stamp"].split(":")[2] for entry in server.calls()} == {"1", "2"}
    for collection in range(3):
        assert ids_of(rollouts(tmp_path, collection)) == ids_of(rollouts(plain, collection))
    for mine, theirs in zip(windows(tmp_path), windows(plain), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert mine["engine_logprob_difference_max"] < 1e-4


@pytest.mark.timeout(300)
def test_a_server_that_stays_away(plain: Path, tmp_path: Path) -> None:
    with servers(untied(tmp_path), 1, "--seconds-per-token", "0.01") as (server,):
        config = config_of(tmp_path, engine={"urls": [server.url], "reconnect_limit_s": 1.0, "max_concurrent": 2})
        process = start(config)
        wait_until(process, lambda: len(windows(tmp_path)) >= 1)
        wait_until(process, lambda: sum(":1:" in entry["stamp"] for entry in server.calls()) >= 20)
        server.kill()
        output = finish(process, code=2)
        assert "did not come back within engine.reconnect_limit_s = 1 seconds" in output
        assert "--resume" in output
        assert "Traceback" not in output
        finished = ids_of(rollouts(tmp_path, 1))
        assert 0 < len(finished) < 8
        server.start()
        time.sleep(0.2)
        longer = config_of(tmp_path, engine={"urls": [server.url]})
        finish(start(longer, "--resume"))
        prompts = {tuple(entry["body"]["prompt"]) for entry in server.calls()}
        seeds = {entry["body"]["seed"] for entry in server.calls()}
    for name, rollout in rollouts(tmp_path, 1).items():
        again = {call.sampling.seed for call in rollout.calls} & seeds
        assert bool(again) == (name not in finished)
    assert prompts
    for collection in range(3):
        assert ids_of(rollouts(tmp_path, collection)) == ids_of(rollouts(plain, collection))
    assert [line["window"] for line in windows(tmp_path)] == [0, 1, 2]


# --------------------------------------------------------------------------------------------------------- the probe

# --------------------------------------------------------------------------------------------------- servers of a run


def fake_python(folder: Path, body: str) -> Path:
    """A Python whose vLLM is the scripted server."""
    module = folder / "site" / "vllm" / "entrypoints" / "openai"
    module.mkdir(parents=True)
    for parent in (module, module.parent, module.parent.parent):
        (parent / "__init__.py").touch()
    (module / "api_server.py").write_text(body)
    python = folder / "python"
    path = f"{folder / 'site'}:{TESTS}"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH="{path}" OMP_NUM_THREADS=1\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until_gone(port: int) -> None:
    deadline = time.monotonic() + 20
    while is_served(port):
        assert time.monotonic() < deadline, "the server outlived the run"
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_servers_that_a_run_starts(plain: Path, tmp_path: Path) -> None:
    once = tmp_path / "died"
    # the 30th call of its first life ends it
    body = f"""
import os, sys
from pathlib import Path
import scripted_server

class Dying(scripted_server.ScriptedServer):
    def begin(self):
        super().begin()
        once = Path({str(once)!r})
        if len(self.calls) >= 30 and not once.exists():
            once.touch()
            os._exit(9)

scripted_server.ScriptedServer = Dying
scripted_server.main()
"""
    port = free_port()
    engine = {"launch": True, "python": str(fake_python(tmp_path, body)), "ports": [port]}
    output = finish(start(config_of(tmp_path, engine=engine)))
    assert f"starting 1 vLLM server on port {port}" in output
    assert "has ended; it is started again" in output
    assert once.exists()
    for collection in range(3):
        assert ids_of(rollouts(tmp_path, collection)) == ids_of(rollouts(plain, collection))
    wait_until_gone(port)
    assert (tmp_path / "run" / "logs" / f"vllm_{port}.log").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_servers_end_with_the_run(number: signal.Signals, tmp_path: Path) -> None:
    body = "import sys, scripted_server\nscripted_server.main([*sys.argv[1:], '--seconds-per-token', '0.05'])\n"
    port = free_port()
    engine = {"launch": True, "python": str(fake_python(tmp_path, body)), "ports": [port]}
    process = start(config_of(tmp_path, engine=engine))
    wait_until(process, lambda: is_served(port))
    time.sleep(1.0)
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    wait_until_gone(port)


@pytest.mark.timeout(300)
def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    body = "raise SystemExit('no such device: cuda:9')\n"
    engine = {"launch": True, "python": str(fake_python(tmp_path, body)), "ports": [free_port()]}
    output = finish(start(config_of(tmp_path, engine=engine)), code=2)
    assert "must serve, found that it ended with code 1" in output
    assert "no such device: cuda:9" in output
    assert "Traceback" not in output
