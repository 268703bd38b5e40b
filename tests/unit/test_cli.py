"""What is locked here:

1. ``evenstep --help`` starts in half a second and imports nothing heavy; ``python -m evenstep`` is the same command.
2. A user's mistake is one red message with exit code 2 and no traceback, unless ``--debug`` asks for it.
3. ``--dry-run`` checks the model and prints a configuration that loads again, and makes no folder.
4. Everything wrong is found before torch is imported.
5. Under torchrun, ``--ranks`` must agree with it.
6. Ctrl-C and SIGTERM end a replay or a tuning with a line and their exit codes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer
from typer.testing import CliRunner, Result

from evenstep import __version__
from evenstep.cli import app
from evenstep.cli.errors import stoppable
from evenstep.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path / "run"), "num_collections": 1},
        "model": {"path": str(model), "max_context_tokens": 64},
        "environment": {"name": "ledger"},
        "rollout": {"num_prompts": 2, "num_generations": 4, "max_tokens_per_call": 4},
        "plan": {"max_tokens_per_gpu": 256},
        "train": {"rollouts_per_window": 8, "lr": 1e-4},
    }
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def evenstep(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_help_is_quick() -> None:
    # processor time: on a busy machine the clock on the wall says how busy it is
    least = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "evenstep", "--help"], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert least < 0.5


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['evenstep', 'train', '--help']\n"
        "from evenstep.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "loaded = {'torch', 'transformers', 'numpy', 'rich.live'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert "--dry-run" in result.stdout


def test_version() -> None:
    result = evenstep("--version")
    assert (result.exit_code, result.stdout) == (0, f"evenstep {__version__}\n")


def test_dry_run_prints_what_would_run(config: Path, tmp_path: Path) -> None:
    result = evenstep("train", config, "--set", "train.lr=3e-5", "--run-dir", tmp_path / 'a "b"', "--dry-run")
    assert result.exit_code == 0, result.output
    resolved = tomllib.loads(result.stdout)
    assert (resolved["train"]["lr"], resolved["run"]["dir"]) == (3e-5, str(tmp_path / 'a "b"'))
    again = tmp_path / "again.toml"
    again.write_text(result.stdout)
    assert evenstep("train", again, "--dry-run").stdout == result.stdout
    assert not (tmp_path / 'a "b"').exists()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--set", "train.learning_rat=1"], "unknown key `train.learning_rat`"),
        (["--set", "train.rollouts_per_window=4"], "2 × 4 = 8 and 4 × 1 = 4"),
        (["--set", "model.max_context_tokens=65"], "at most 64"),
        (["--set", "model.path=absent"], "found no folder"),
        (["--ranks", "0"], "--ranks must be at least 1, found 0"),
        (["--resume"], "found no config.toml"),
        (["--run-dir", "/dev/null/run"], "must be a folder that can be written"),
        (["--run-dir", ""], "run.dir"),  # an unset variable is not the present folder
    ],
)
def test_mistakes_are_short_messages(config: Path, arguments: list[str], expected: str) -> None:
    result = evenstep("train", config, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_names_that_no_disk_takes_are_short_messages(config: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in ("a" * 300, str(tmp_path / "loop" / "run")):
        result = evenstep("train", config, "--run-dir", folder)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.output


def test_debug_shows_where(config: Path) -> None:
    result = evenstep("train", config, "--debug", "--set", "train.lr=x")
    assert isinstance(result.exception, ConfigError)


def test_a_run_is_not_overwritten(config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(evenstep("train", config, "--dry-run").stdout)
    result = evenstep("train", config)
    assert result.exit_code == 2
    assert "continue it with --resume" in result.stderr


def test_ranks_under_torchrun(config: Path) -> None:
    result = evenstep("train", config, "--ranks", "3", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert result.exit_code == 2
    assert "error on rank 1: --ranks must be what torchrun started, found 3 and 2" in result.stderr


def test_mistakes_are_found_without_torch(config: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['evenstep', 'train', {str(config)!r}, '--set', 'model.max_context_tokens=65']\n"
        "from evenstep.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 2, stop.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert "at most 64" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_said(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(typer.Exit) as ended, stoppable():
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.exit_code == 128 + number
    assert capsys.readouterr().err == "\nStopped; nothing is left behind.\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_signs_that_an_encoding_lacks_end_nothing(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "\udcff.csv"  # a name that is no UTF-8
    path.write_text("length\n7\n")
    environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
    command = [sys.executable, "-m", "evenstep", "plan", str(path), "--layout", "packed"]
    result = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"?.csv: format csv, 1 rows" in result.stdout
    # plain lines go out in UTF-8 where Python is left with ASCII
    assert "1.00×".encode("utf-8" if encoding == "ascii" else encoding, "replace") in result.stdout
