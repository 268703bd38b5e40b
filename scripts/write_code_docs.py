"""Write docs/code.md, a line per file of the package from its docstring: python scripts/write_code_docs.py"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "evenstep"
TARGET = ROOT / "docs" / "code.md"
HEAD = """\
# Code

A line per file of `src/evenstep`: what the package's folders are for, and what each file holds.

`scripts/write_code_docs.py` makes this page from the files' docstrings.
"""


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".").replace("``", "`").replace("|", "\\|")


def files_of(folder: Path) -> Iterator[str]:
    yield "| file | what it holds |"
    yield "|---|---|"
    for path in sorted(folder.glob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            yield f"| [{path.name}](../{path.relative_to(ROOT).as_posix()}) | {first_sentence(path)} |"


def page() -> str:
    lines = [HEAD, "## evenstep\n", "What several folders need, and what must be known before torch is loaded.\n"]
    lines += files_of(PACKAGE)
    for init in sorted(PACKAGE.glob("*/__init__.py")):
        lines += ["", f"## {init.parent.name}\n", f"{first_sentence(init)}.\n", *files_of(init.parent)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
