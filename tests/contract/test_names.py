"""What is locked here:

1. Public names, command-line flags, configuration keys and file fields: what others may build on.
2. Every public name of the package has a docstring, and every doctest holds.
3. Every TOML file of the repository loads, run configurations as configurations.
4. Every command in the README and in the guide for contributors exists, and those for ``evenstep`` pass a dry run;
   what documents link to is there.
5. The project speaks of itself alone.
6. docs/code.md has the files that are there, and the README each package.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import evenstep
from evenstep.cli import app
from evenstep.config import load_config
from evenstep.config.components import component_types
from evenstep.config.schema import known_keys
from evenstep.errors import ConfigError
from evenstep.files.lines import CallObject, LengthsLine, RolloutLine, RowLine, SamplingObject

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("public_names.json")


def tracked_files() -> list[Path]:
    """Files of the repository: what git knows, or what lies there when this is no clone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    skipped = {".venv", ".git", "runs", "__pycache__", "build", "dist"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)]


# ------------------------------------------------------------------------------------------------ names


def flags() -> dict[str, list[str]]:
    command: Any = typer.main.get_command(app)
    found = {"evenstep": sorted(option for parameter in command.params for option in parameter.opts)}
    for name, subcommand in command.commands.items():
        found[f"evenstep {name}"] = sorted(option for parameter in subcommand.params for option in parameter.opts)
    return found


def options(section: str) -> dict[str, list[str]]:
    return {name: sorted(load().__dataclass_fields__) for name, load in component_types(section).items()}


def public_names() -> dict[str, Any]:
    packages = [
        *("evenstep", "evenstep.credit", "evenstep.errors", "evenstep.files", "evenstep.imports", "evenstep.plan"),
        "evenstep.types",
    ]
    lines = (RolloutLine, CallObject, SamplingObject, RowLine, LengthsLine)
    return {
        "names": {name: sorted(importlib.import_module(name).__all__) for name in packages},
        "flags": flags(),
        "config": sorted(f"{section}.{name}" for section, name in known_keys()),
        "environments": options("environment"),
        "compaction": options("compaction"),
        "file_fields": {line.__name__: sorted(line.model_fields) for line in lines},
    }


def flat(names: Any, prefix: str = "") -> set[str]:
    """Nested lists of names as one set of paths."""
    if isinstance(names, list):
        return {f"{prefix}: {name}" for name in names}
    return {path for key, inner in names.items() for path in flat(inner, f"{prefix}/{key}")}


def test_public_names_are_what_was_promised() -> None:
    """To change a promise on purpose: ``python tests/contract/test_names.py`` writes the list anew."""
    promised: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(public_names()))
    hint = "if it is meant, run: python tests/contract/test_names.py"
    assert sorted(flat(promised) - flat(found)) == [], f"gone; {hint}"
    assert sorted(flat(found) - flat(promised)) == [], f"new; {hint}"


def test_every_configuration_key_is_used() -> None:
    sources = [path for path in (ROOT / "src").rglob("*.py") if "config" not in path.parts]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    unused = [f"{section}.{name}" for section, name in known_keys() if not re.search(rf"\.{name}\b", text)]
    assert unused == []


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(evenstep.__path__, "evenstep."):
        if not module.name.endswith("__main__"):
            yield module.name


@pytest.mark.parametrize("name", list(modules()))
def test_doctests_and_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} says what it is for"
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    for public in vars(module).get("__all__", ()):
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{public} has a docstring"


def test_there_are_doctests() -> None:
    finder = doctest.DocTestFinder()
    tests = [test for name in modules() for test in finder.find(importlib.import_module(name))]
    assert sum(bool(test.examples) for test in tests) > 20


# ------------------------------------------------------------------------------------------------ files


def test_every_toml_loads() -> None:
    paths = [path for path in tracked_files() if path.suffix == ".toml"]
    assert ROOT / "pyproject.toml" in paths
    for path in paths:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        if path.is_relative_to(ROOT / "examples"):
            assert "train" in values, f"{path.name} is a run's configuration"
            try:
                assert load_config([path]).resolved()
            except ConfigError as error:  # what an extra brings may not be here; everything else must be right
                if "needs the extra" not in str(error):
                    raise


def test_every_example_is_loaded_by_some_test() -> None:
    examples = sorted(path.name for path in tracked_files() if path.is_relative_to(ROOT / "examples"))
    assert {Path(name).suffix for name in examples} <= {".toml", ".py", ".csv"}  # lengths: see unit/imports
    for name in examples:
        if name.endswith(".py"):
            compile((ROOT / "examples" / name).read_text(encoding="utf-8"), name, "exec")


# ------------------------------------------------------------------------------------------------ commands in documents


def commands(document: str) -> list[str]:
    """Lines of the bash blocks of a document, comments cut off, continued lines joined."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found: list[str] = []
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                found.append(shlex.join(words))
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def run_plan_command(words: list[str], tmp_path: Path) -> None:
    """Run it where its files are in the repository, else check its options; what it writes goes elsewhere."""
    for index, word in enumerate(words):
        if word in ("--out", "--picture", "--trace"):
            words[index + 1] = str(tmp_path / words[index + 1])
    is_here = all((ROOT / word).exists() for word in words[2:3])
    result = CliRunner().invoke(app, words[1:] if is_here else [*words[1:], "--debug"])
    assert result.exit_code == 0 or (not is_here and "cannot be read" in str(result.exception)), result.output


def check_command(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] == "make":
        assert set(words[1:]) & make_targets(), f"{command}: no such target"
    elif words[0] == "evenstep":
        if words[1:2] == ["train"] and "--resume" not in words and "--help" not in words:
            result = CliRunner().invoke(app, [*words[1:], "--dry-run"])
            # weights that an extra brings may not be here; everything else must be right
            assert result.exit_code == 0 or "is not installed" in result.output or "needs the extra" in result.output
        elif words[1:2] == ["plan"]:
            run_plan_command(words, tmp_path)
        else:
            assert words[1].startswith("-") or words[1] in typer.main.get_command(app).commands  # type: ignore[attr-defined]
    elif words[0] in ("python", "python3"):
        if words[1] == "-m":
            assert words[2] in ("evenstep", "pytest", "venv", "pip"), command
        else:
            assert (ROOT / words[1]).is_file(), f"{command}: no such file"
    elif words[0] == "torchrun":
        assert "evenstep" in words or any((ROOT / word).is_file() for word in words), command
    elif words[0] == ".ci/run":
        assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    else:
        assert words[0] in ("git", "cd", "pip", "pytest", "tail", "cat"), (
            f"{command}: unknown, teach this test to check it"
        )


@pytest.mark.parametrize(
    "document",
    [*("README.md", "CONTRIBUTING.md"), *("docs/config.md", "docs/plan_command.md", "docs/replay.md", "docs/tune.md")],
)
def test_commands_of_documents(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = commands(document)
    assert found, f"{document} shows commands"
    for command in found:
        check_command(command, tmp_path)


def anchors(path: Path) -> set[str]:
    """What links may point to in a document: its headings, as they are named on a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_documents_lead_somewhere() -> None:
    for path in [path for path in tracked_files() if path.suffix == ".md"]:
        for link in re.findall(r"\]\(([^):]+)\)", path.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), f"{path.name} links to {link}, which is not there"
            assert not anchor or anchor in anchors(target), f"{path.name} links to {link}, which has no such heading"


# ------------------------------------------------------------------------------------------------ words

FORBIDDEN = (
    r"(?:^|[\s\"'(=`])/(?!dev/|proc/|sys/|usr/|bin/|etc/|v1/|r/|chat/|inference/)[a-z]+/",  # somebody's machine
    r"\bissues? #?\d",
    r"://[^/\s]*pypi",
)


def test_the_project_speaks_of_itself_alone() -> None:
    found: list[str] = []
    for path in tracked_files():
        if path.name == ".gitignore" or path.suffix in (".safetensors", ".png", ".gz"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {pattern}"
                for pattern in FORBIDDEN
                if re.search(pattern, line, flags=re.IGNORECASE)
            ]
    assert found == []


# ------------------------------------------------------------------------------------------------ files


def test_the_page_of_the_code_has_the_present_files() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "write_code_docs.py"))["page"]()
    hint = "run: python scripts/write_code_docs.py"
    assert (ROOT / "docs" / "code.md").read_text(encoding="utf-8") == page, hint


def test_the_readme_names_every_package() -> None:
    _, _, listed = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What is where")
    present = {f"{init.parent.name}/" for init in (ROOT / "src" / "evenstep").glob("*/__init__.py")}
    in_table = "".join(re.findall(r"^\|.*\|$", listed, flags=re.MULTILINE))
    assert set(re.findall(r"`([a-z_]+/)`", in_table)) == present


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(public_names(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
