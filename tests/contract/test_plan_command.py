"""What is locked here, with the real command:

1. Every importable format is planned; what is approximate or skipped is said; the output is plain when piped.
2. The JSON object has the documented keys, and names the arm that the table marks.
3. 100,000 lengths are planned in seconds, and neither the command nor its help imports torch.
4. --out is a plan that can be used, --picture valid XML, --trace JSON; nothing half-written stays behind.
5. Mistakes are one message with exit code 2, before anything is read where they can be.
6. The public planners stand beside evenstep's arms; a run's folder shows its own plans.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from evenstep.cli import app
from evenstep.imports import FORMATS, import_rows
from evenstep.plan import StepPlan

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "imports"
EXAMPLE = ROOT / "examples" / "lengths.csv"


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def as_json(*arguments: str | Path) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("path", sorted(DATA.iterdir()), ids=lambda path: path.name)
def test_every_format(path: Path) -> None:
    found = as_json(path, "--ranks", "2", "--sweep", "64")
    rows = import_rows(path)
    assert (found["format"], found["num_rows"], found["num_tokens"]) == (
        rows.format,
        rows.num_rows,
        int(rows.lengths_R.sum()),
    )
    has_ids = import_rows(path, keep_token_ids=True).token_ids is not None
    layouts = {"fixed", "padded", "packed"} | ({"tree"} if has_ids else set())
    assert {arm["layout"] for arm in found["arms"]} == layouts
    text = plan(path, "--ranks", "2", "--sweep", "64").stdout
    assert ("APPROXIMATE" in text) == (found["num_approximate"] > 0)


def test_piped_output_is_plain() -> None:
    command = [sys.executable, "-m", "evenstep", "plan", str(EXAMPLE), "--windows", "64", "--ranks", "4"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "\x1b" not in found.stdout
    assert found.stderr == ""
    lines = found.stdout.splitlines()
    header = next(line for line in lines if line.lstrip().startswith("planner"))
    arms = [line for line in lines if re.match(r"[* ]  evenstep ", line)]
    assert len(arms) == 9
    assert sum(line.startswith("*") for line in arms) == 1
    assert all(len(line) == len(header) for line in arms)  # aligned


def test_the_json_object() -> None:
    asked = ("--windows", "64", "--compare", "--model", "qwen3-4b", "--ranks", "4,8", "--sweep", "16384")
    found = as_json(EXAMPLE, *asked)
    documented = (ROOT / "docs" / "plan_command.md").read_text(encoding="utf-8")
    for key in [*found, *found["arms"][0], *found["arms"][0]["windows"][0], *found["lengths"], *found["assumptions"]]:
        assert f"`{key}`" in documented, key
    assert found["format_version"] == 1
    assert (found["num_rollouts"], found["num_groups"], found["num_windows"]) == (128, 16, 2)
    best = found["arms"][found["best"]]
    assert (best["planner"], best["num_ranks"], best["step_cost_to_best"]) == ("evenstep", 4, 1.0)
    for arm in found["arms"]:
        if arm["refused"] is None:
            assert arm["estimated_memory_bytes"] > 0
            assert len(arm["windows"]) == arm["num_windows"] == 2
            assert arm["padding_efficiency"] <= 1
        else:
            assert arm["padding_efficiency"] is None
    assert {arm["planner"] for arm in found["arms"]} >= {
        "evenstep",
        "NeMo-RL dynamic",
        "miles first-fit",
        "TRL token budget",
    }
    refused = {arm["planner"] for arm in found["arms"] if arm["refused"]}
    assert refused <= {"AReaL first-fit", "verl balanced"}


def test_a_hundred_thousand_lengths(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(7.5, 1.0, 100_000), 64, 32_768).astype(int)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)))
    for extra in ([], ["--windows", "128"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "evenstep", "plan", str(path), "--json", *extra]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # processor time: on a busy machine the clock on the wall says how busy it is
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0
        record = json.loads(found.stdout)
        assert record["num_rows"] == 100_000
        assert all(arm["refused"] is None for arm in record["arms"])
    assert (record["num_windows"], record["num_windows_planned"]) == (782, 16)


def test_no_torch() -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['evenstep', 'plan', {str(EXAMPLE)!r}, '--compare', '--model', 'qwen3-4b']\n"
        "from evenstep.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "loaded = {'torch', 'transformers', 'pyarrow', 'rich.table'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr


def test_plan_picture_and_trace(tmp_path: Path) -> None:
    out, picture, trace = tmp_path / "plan.json", tmp_path / "plan.svg", tmp_path / "trace.json"
    written = ("--out", out, "--picture", picture, "--trace", trace)
    result = plan(EXAMPLE, "--windows", "64", "--window", "1", "--ranks", "4", "--sweep", "16384", *written)
    assert result.exit_code == 0, result.output
    found = StepPlan.from_json(out.read_text())
    rows = import_rows(EXAMPLE)
    found.check(rows.lengths_R, rollout_ids=rows.rollout_ids)
    assert found.window is not None
    assert found.window[0] == 167  # indices into the file, not into the window
    ET.parse(picture)
    lanes = {event["tid"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert lanes == {0, 1, 2, 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.svg", "trace.json"]


def test_skipping_is_counted_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"length": n}) + "\n" for n in range(1, 20)) + '{"length": null}\nnonsense\n')
    result = plan(path)
    assert result.exit_code == 2
    assert "rows.jsonl, line 20, field `length`: must be a whole number ≥ 1, found null; " in result.stderr
    result = plan(path, "--skip-bad")
    assert "skipped: 2 lines that could not be read" in result.stdout
    assert "rows.jsonl, line 21: must be one complete JSON object" in result.stdout
    found = as_json(path, "--skip-bad")
    assert (found["num_rows"], found["num_skipped"], len(found["skipped"])) == (19, 2, 2)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["absent.txt"], "absent.txt: cannot be read"),
        (
            ["absent.txt", "--layout", "paked"],
            "--layout must be one of fixed, padded, packed, tree, found 'paked'; did you mean",
        ),
        (["absent.txt", "--device", "h10"], "--device must be one of a100, h100, h200, found 'h10'"),
        (["absent.txt", "--sharding", "fsdp"], "did you mean fsdp2?"),
        (["absent.txt", "--effort", "max"], "--effort must be one of"),
        (["absent.txt", "--ranks", "8;4"], "--ranks must be whole numbers with commas between them, found '8;4'"),
        (["absent.txt", "--sweep", "x"], "--sweep must be whole numbers"),
        (["absent.txt", "--model", "qwen4"], "--model must be a preset"),
        (["absent.txt", "--mfu", "40"], "--mfu must be a share"),
        ([str(EXAMPLE), "--windows", "0"], "--windows must be at least 1"),
        ([str(EXAMPLE), "--ranks", "0"], "--ranks must be at least 1, found 0"),
        ([str(EXAMPLE), "--sweep", "1"], "--sweep must name budgets of at least 2 tokens, found 1"),
        ([str(EXAMPLE), "--window", "3", "--out", "x.json"], "--window must be within 0 and 0"),
        ([str(EXAMPLE), "--out", "/dev/null/x/plan.json"], "cannot be written"),
        ([str(EXAMPLE), "--out", "."], ".: cannot be written there (Is a directory)"),
        ([str(EXAMPLE), "--picture", "."], ".: cannot be written there (Is a directory)"),
        ([str(EXAMPLE), "--layout", "tree"], "at least one arm must be planned, found none"),
        ([str(EXAMPLE), "--pad-to-multiple", "0"], "at least one arm must be planned, found none"),
        ([str(EXAMPLE), "--format", "parquett"], "--format must be one of"),
    ],
)
def test_mistakes_are_short_messages(arguments: list[str], expected: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert "Traceback" not in result.output


def test_help_teaches() -> None:
    text = plan("--help").stdout
    assert "Examples:" in text
    for name in FORMATS:
        assert name in text, f"{name} is not in the help"
    assert "Exit codes:" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_figure_is_cut_on_a_terminal(width: int) -> None:
    """Whatever its width: what does not fit into a table stands in plain lines."""
    master, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm"}
    arguments = ("--compare", "--windows", "64", "--layout", "padded")
    command = [sys.executable, "-m", "evenstep", "plan", str(EXAMPLE), *arguments]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is gone with the process
            while data := os.read(master, 4096):
                shown += data
    os.close(master)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    for figure in ("32,768", "dynamic-batching proposal", "90.5%", "1.00×", "lockstep"):
        assert figure in text
    assert "…" not in text
    assert ("│" in text) == (width == 200)
