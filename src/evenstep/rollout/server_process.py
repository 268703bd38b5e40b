"""vLLM servers that a run starts itself: the command, the environment, the wait until they answer, and their end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from evenstep.errors import ConfigError, EngineError

__all__ = ["ServerProcess", "port_problem", "vllm_command", "vllm_environment", "vllm_module"]

LOOPBACK = "127.0.0.1"
WATCHDOG = Path(__file__).with_name("watchdog.py")
# by age; the `vllm` command is not there in every build
MODULES = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
# of the ranks and of another Python: a server that reads them waits for ranks that never come
NOT_INHERITED = ("PYTHON", "TORCHELASTIC_", "GLOO_", "OMP_")
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
OF_RANKS += ("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PROGRESS_S = 15.0
TAIL_LINES = 12


def vllm_module(python: str) -> str:
    """The module that serves vLLM in another Python, found without importing it.

    Raises:
        ConfigError: that Python cannot be run, or has no vLLM that serves.
    """
    code = "import importlib.util as u; s = u.find_spec('vllm'); print(s.submodule_search_locations[0] if s else '')"
    try:
        # its environment is its own
        found = subprocess.run(
            [python, "-c", code], env=vllm_environment(on_cpu=False), capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"engine.python must be the Python of vLLM's environment, found {python!r} ({error}); install one with "
            f"scripts/install_vllm_cpu.sh, and name its bin/python"
        ) from error
    root = found.stdout.strip()
    for module in MODULES if root else ():
        if Path(root, *module.split(".")[1:]).with_suffix(".py").is_file():
            return module
    raise ConfigError(
        f"engine.python must have vLLM installed, found none in {python!r}; install it with "
        f"scripts/install_vllm_cpu.sh, and name its bin/python"
    )


def vllm_command(
    *,
    python: str,
    folder: Path,
    port: int,
    dtype: str,
    max_context_tokens: int,
    max_concurrent: int,
    on_cpu: bool,
    arguments: Sequence[str] = (),
) -> list[str]:
    """What starts a vLLM server whose log-probs are those of the distribution that it samples from."""
    command = [python, "-m", vllm_module(python), "--model", str(folder), "--served-model-name", "policy"]
    command += ["--host", LOOPBACK, "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", str(max_context_tokens), "--max-num-seqs", str(max_concurrent)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--enable-scale-out"]  # the route whose answers say which weights sampled them
    command += ["--enforce-eager"] if on_cpu else []
    return [*command, *arguments]


def vllm_environment(*, on_cpu: bool) -> dict[str, str]:
    """This process's environment without what belongs to ranks, and with what a server needs."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED) and name not in OF_RANKS
    }
    needed = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1"}
    wished = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        wished |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": _cores(), "TORCH_COMPILE_DISABLE": "1"}
    return wished | inherited | needed


def _cores() -> str:
    """The cores of this process as vLLM writes them, such as ``0-3,8``."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def port_problem(port: int) -> str | None:
    """Why a port of this machine cannot be served on; None where it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return str(error.strerror)
    return None


class ServerProcess:
    """One server, started by this process and ended with it, however it ends.

    Args:
        name: for messages.
        command: what runs it, of the folder whose weights it starts with.
        environment: its whole environment.
        port: where it will answer, on loopback.
        log: file that its output is added to.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[Path], Sequence[str]],
        *,
        environment: Mapping[str, str],
        port: int,
        log: Path,
    ) -> None:
        self.url, self.log = f"http://{LOOPBACK}:{port}", log
        self._name, self._command, self._environment = name, command, environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def start(self, folder: Path) -> None:
        """Start it, or start it again, with the weights of ``folder``."""
        self.stop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WATCHDOG), *self._command(folder)],
                env=dict(self._environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C of the terminal is not for it: it ends after this process
            )

    def wait(self, timeout_s: float, notice: Callable[[str], None]) -> None:
        """Wait until it answers.

        Raises:
            EngineError: it ended, or does not answer in time; with the end of its log.
        """
        started = said = time.monotonic()
        while True:
            if self.has_ended:
                code = None if self._process is None else self._process.returncode
                raise EngineError(f"{self._name} must serve, found that it ended with code {code}; {self._tail()}")
            try:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                pass
            now = time.monotonic()
            if now - started > timeout_s:
                raise EngineError(
                    f"{self._name} must answer within engine.start_timeout_s = {timeout_s:g} seconds, found that it "
                    f"does not; {self._tail()}"
                )
            if now - said > PROGRESS_S:
                said = now
                notice(f"{self._name} is starting ({now - started:.0f} s); its log is {self.log}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End it and wait until it is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if self.log.exists() else []
        return f"the end of its log {self.log}:\n" + "\n".join(f"  {line[:300]}" for line in lines)
