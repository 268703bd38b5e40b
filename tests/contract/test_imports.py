"""What is locked here:

1. ``import evenstep``, ``evenstep.plan`` and ``evenstep.credit`` load no torch, pydantic or typer.
2. Files, configuration, reports and the command line load no torch.
3. Only the listed files import torch, and nothing else in the package may.
4. The part that needs only NumPy imports nothing else from outside the standard library.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"
TORCH = {"torch", "transformers", "safetensors", "accelerate"}
MAY_IMPORT_TORCH = ("train/", "rollout/in_process.py")
NUMPY_ONLY = ("__init__.py", "types.py", "errors.py", "experts.py", "media.py", "plan/", "credit/")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path


def imported(path: Path) -> set[str]:
    """First parts of all absolute imports of a file, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    "code, banned",
    [
        ("import evenstep", {"torch", "pydantic", "typer", "numpy", "rich"}),
        ("import evenstep.plan", {"torch", "pydantic", "typer", "rich"}),
        ("import evenstep.credit", {"torch", "pydantic", "typer", "rich"}),
        ("from evenstep import plan_step; plan_step([3, 2], num_ranks=1, max_tokens_per_gpu=8)",
         {"torch", "pydantic", "typer", "rich"}),
        ("from evenstep import Row, Rollout, Call, StepPlan", {"torch", "pydantic", "typer", "rich"}),
        ("import evenstep.files, evenstep.config, evenstep.preflight, evenstep.cli, evenstep.report.console", TORCH),
        ("import evenstep.report.html_page, evenstep.cli.report", TORCH),
        ("import evenstep.cli", {*TORCH, "numpy"}),
        ("import evenstep.imports, evenstep.dry_run.summary, evenstep.report.plan_picture, evenstep.report.plan_table",
         {*TORCH, "typer", "rich", "pyarrow"}),
    ],
)  # fmt: skip
def test_loaded_modules(code: str, banned: set[str]) -> None:
    check = f"{code}\nimport sys\nprint(*sorted({banned!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == []


def test_only_listed_files_import_torch() -> None:
    found = {name for name, path in modules() if imported(path) & TORCH}
    assert {name for name in found if not name.startswith(MAY_IMPORT_TORCH)} == set()
    assert "train/step.py" in found  # the check sees what it looks for


def test_the_numpy_part_needs_numpy_alone() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "evenstep"}
    for name, path in modules():
        if name.startswith(NUMPY_ONLY) and "/__init__.py" not in name:
            assert imported(path) <= allowed, name


def test_the_numpy_part_imports_only_itself_from_evenstep() -> None:
    for name, path in modules():
        if not name.startswith(NUMPY_ONLY[1:]):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("evenstep."):
                known = ("types", "errors", "experts", "media", "plan", "credit")
                assert node.module.split(".")[1] in known, f"{name}: {node.module}"
