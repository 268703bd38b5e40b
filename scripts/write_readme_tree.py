"""Write the tree in README.md between its markers: a line per file, from the first sentence of its docstring.

python scripts/write_readme_tree.py [--check]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: scripts/write_readme_tree.py -->", "<!-- end of tree -->"
FOLDERS = {
    "tests": "unit, property, golden, dist (real gloo ranks), contract; the one-row oracle",
    "benchmarks": "planner, layouts, step and engines, beside public ones; a soak",
    "examples": "configurations of runs, environments, an agent, the planner alone",
    "docs": "a page for each subject, and results",
    "scripts": "what makes tiny policies, the picture and the generated pages; vLLM for the CPU",
}
WIDTH = 118


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".").replace("``", "")


def tree() -> str:
    lines = ["src/evenstep/"]
    package = ROOT / "src" / "evenstep"
    for path in sorted(package.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        if path.suffix == ".py" and path.name not in ("__init__.py", "__main__.py"):
            lines.append(f"  {path.name:<21} {first_sentence(path)}")
        elif (path / "__init__.py").is_file():
            lines.append(f"  {path.name + '/':<21} {first_sentence(path / '__init__.py')}")
            for module in sorted(path.glob("*.py")):
                if module.name != "__init__.py":
                    lines.append(f"    {module.name:<19} {first_sentence(module)}")
    lines.append(f"  {'data/ledger/':<21} the demo's tiny policy")
    lines += [f"{name + '/':<23} {what}" for name, what in FOLDERS.items()]
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 1].rsplit(" ", 1)[0] + " …" for line in lines)


def written() -> str:
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```\n{tree()}\n```\n{END}{after}"


if __name__ == "__main__":
    text = written()
    if "--check" in sys.argv:
        sys.exit(0 if text == README.read_text(encoding="utf-8") else f"{README.name}: run {Path(__file__).name}")
    README.write_text(text, encoding="utf-8")
