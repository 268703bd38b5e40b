"""Runs of `evenstep train` against scripted servers: a configuration, servers of their own, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from evenstep.files import read_rollouts
from evenstep.types import Rollout
from scripted_server import CALLS

TESTS = Path(__file__).parent
SCRIPT = TESTS / "scripted_server.py"
LEDGER = "evenstep:ledger"


def config_of(folder: Path, **sections: dict[str, Any]) -> Path:
    """Four collections of 4 × 2 rollouts of a shipped model whose head is its embedding."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "num_collections": 3},
        "model": {"path": LEDGER, "max_context_tokens": 64},
        "environment": {"name": "ledger", "max_pages": 4},
        "rollout": {"num_prompts": 4, "num_generations": 2, "max_tokens_per_call": 4, "temperature": 1.0},
        "engine": {"kind": "vllm", "reconnect_limit_s": 60.0, "max_concurrent": 4},
        "compaction": {"policy": "summary"},
        "plan": {"max_tokens_per_gpu": 256},
        "train": {"rollouts_per_window": 8, "lr": 1e-3, "entropy_coef": 0.01},  # each window has a gradient
        "checkpoint": {"export": False},
        "evaluation": {"num_tasks": 0},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def untied(folder: Path) -> Path:
    """The shipped model with a head of its own, as servers want it."""
    from evenstep.model_files import model_folder
    from evenstep.train.checkpoint import export
    from evenstep.train.models import load_model

    if not (folder / "model").exists():
        import torch

        assert model_folder(LEDGER) is not None
        export(folder / "model", *load_model(LEDGER, dtype=torch.float32), untied=True)
    return folder / "model"


class Server:
    """A scripted server in a process of its own."""

    def __init__(self, model: Path | str, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, str(SCRIPT), "--model", str(model), "--port", str(port), *arguments]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self._command, env=environment, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(self.url + "/script-log", timeout=10) as response:
            return json.load(response)["log"]

    def calls(self) -> list[dict[str, Any]]:
        """Of rollouts: probes take no stop ids, checks of the vocabulary neither."""
        made = [entry for entry in self.log() if entry["path"] in CALLS]
        return [e for e in made if (e["body"].get("sampling_params") or e["body"]).get("stop_token_ids")]

    def fault(self, **faults: int) -> None:
        body = json.dumps(faults).encode()
        urllib.request.urlopen(urllib.request.Request(self.url + "/script-faults", body), timeout=10).close()


@contextlib.contextmanager
def servers(model: Path | str, count: int, *arguments: str) -> Iterator[list[Server]]:
    found = [Server(model, free_port(), *arguments) for _ in range(count)]
    try:
        yield found
    finally:
        for server in found:
            server.kill()


def start(config: Path, *flags: str, ranks: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", "train", str(config), "--ranks", str(ranks), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, output
    return " ".join(output.split())


def windows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rollouts(folder: Path, collection: int) -> dict[str, Rollout]:
    path = folder / "run" / "rollouts" / f"collection_{collection:06d}.jsonl.gz"
    found = list(read_rollouts(path))
    assert len({rollout.rollout_id for rollout in found}) == len(found)
    return {rollout.rollout_id: rollout for rollout in found}


def ids_of(found: dict[str, Rollout]) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    return {name: [(call.prompt_ids, call.output_ids) for call in r.calls] for name, r in found.items()}


def wait_until(process: subprocess.Popen[str], is_true: Any) -> None:
    deadline = time.monotonic() + 100
    while not is_true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
