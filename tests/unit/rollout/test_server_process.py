"""What is locked here, with small scripts in place of a server:

1. the command and the environment that start a vLLM server: log-probs of what is sampled, loopback, nothing of ranks
2. a server ends with the process that started it, however that ends, and so does what it started itself
3. one that ends or never answers is reported with the end of its log
4. what cannot be started is refused before a model is loaded: no vLLM there, a taken port, a missing key or package
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.config.schema import EngineSection
from evenstep.errors import ConfigError, EngineError
from evenstep.preflight import check_engine
from evenstep.rollout.server_process import (
    WATCHDOG,
    ServerProcess,
    port_problem,
    vllm_command,
    vllm_environment,
    vllm_module,
)

SERVES = """
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def fake_vllm(folder: Path, module: str) -> str:
    """A Python that has a vLLM with one module."""
    path = folder.joinpath("site", *module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.touch()
    (folder / "site" / "vllm" / "__init__.py").touch()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH="{folder / "site"}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    "module", ["vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"]
)
def test_the_command(module: str, tmp_path: Path) -> None:
    python = fake_vllm(tmp_path, module)
    command = vllm_command(
        python=python,
        folder=tmp_path / "weights",
        port=8123,
        dtype="float32",
        max_context_tokens=384,
        max_concurrent=16,
        on_cpu=True,
        arguments=("--seed", "3"),
    )
    assert command[:3] == [python, "-m", module]
    pairs = dict(zip(command[3::2], command[4::2], strict=False))
    assert pairs["--model"] == str(tmp_path / "weights")
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--port"] == "8123"
    assert pairs["--max-model-len"] == "384"
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--generation-config"] == "vllm"
    assert "--enforce-eager" in command
    assert command[-2:] == ["--seed", "3"]


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    found = vllm_environment(on_cpu=True)
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "PYTHONPATH"} & set(
        found
    )
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "7"  # the user's
    assert found["VLLM_CPU_OMP_THREADS_BIND"]
    assert found["PATH"] == os.environ["PATH"]
    assert "TORCH_COMPILE_DISABLE" not in vllm_environment(on_cpu=False)


def started(folder: Path, script: str, port: int, *arguments: str) -> ServerProcess:
    def command(weights: Path) -> list[str]:
        return [sys.executable, "-c", script, str(port), str(weights), *arguments]

    environment = dict(os.environ)
    process = ServerProcess("the server", command, environment=environment, port=port, log=folder / "logs" / "s.log")
    process.start(folder)
    return process


def test_a_server_is_started_awaited_and_stopped(tmp_path: Path) -> None:
    port = free_port()
    assert port_problem(port) is None
    process = started(tmp_path, SERVES, port)
    try:
        process.wait(30, print)
        assert not process.has_ended
        assert port_problem(port) == "Address already in use"
    finally:
        process.stop()
    assert process.has_ended
    assert port_problem(port) is None
    process.start(tmp_path)  # and again
    process.wait(30, print)
    process.stop()


def test_one_that_ends(tmp_path: Path) -> None:
    script = "import sys; print('line one'); print('no such device'); sys.exit(3)"
    process = started(tmp_path, script, free_port())
    with pytest.raises(EngineError, match=r"(?s)found that it ended with code 3; .*no such device"):
        process.wait(30, print)
    process.stop()


def test_one_that_never_answers(tmp_path: Path) -> None:
    script = "import time; print('thinking', flush=True); time.sleep(60)"
    process = started(tmp_path, script, free_port())
    try:
        with pytest.raises(EngineError, match=r"engine\.start_timeout_s = 1\.5 seconds"):
            process.wait(1.5, print)
    finally:
        process.stop()


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_with_who_started_it(number: signal.Signals, tmp_path: Path) -> None:
    grandchild = "import time; time.sleep(60)"
    server = (
        f"import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', {grandchild!r}]); "
        f"print(c.pid, flush=True); time.sleep(60)"
    )
    starter = (
        # what starts tests in the background may have told them to ignore interrupts
        f"import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"p = subprocess.Popen([sys.executable, {str(WATCHDOG)!r}, sys.executable, '-c', "
        f"{server!r}], stdin=subprocess.PIPE, start_new_session=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert is_there(pid)
    process.send_signal(number)
    process.wait(timeout=10)
    deadline = time.monotonic() + 20
    while is_there(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.stdout.close()


# ------------------------------------------------------------------------------------------------ before anything loads


def config(**engine: Any) -> Any:
    return SimpleNamespace(engine=EngineSection(**engine))


def test_what_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_engine(config())
    with pytest.raises(ConfigError, match=r"engine\.python must have vLLM installed, found none"):
        check_engine(config(kind="vllm", launch=True, python=sys.executable))
    with pytest.raises(ConfigError, match=r"engine\.python must be the Python of vLLM's environment"):
        vllm_module(str(tmp_path / "absent"))
    python = fake_vllm(tmp_path, "vllm.entrypoints.openai.api_server")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine\.ports must be free, found that {port} is not"):
            check_engine(config(kind="vllm", launch=True, python=python, ports=[port]))
    check_engine(config(kind="vllm", launch=True, python=python, ports=[free_port()]))
    monkeypatch.delenv("KEY_OF_TESTS", raising=False)
    served = {"kind": "vllm", "urls": ["http://127.0.0.1:1"], "api_key_variable": "KEY_OF_TESTS"}
    with pytest.raises(ConfigError, match="KEY_OF_TESTS, found that it is not set"):
        check_engine(config(**served))
    for key in ("sk-secret\n", " sk-secret", "sk-secrét", "sk\rsecret"):
        monkeypatch.setenv("KEY_OF_TESTS", key)
        with pytest.raises(ConfigError, match=r"printable ASCII .* another in KEY_OF_TESTS") as refused:
            check_engine(config(**served))
        assert "secr" not in str(refused.value)
    monkeypatch.setenv("KEY_OF_TESTS", "k")
    check_engine(config(**served))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs? the extra 'engines', found no httpx2"):
        check_engine(config(**served))
