"""Write docs/config.md from the configuration's schema: python scripts/write_config_docs.py"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from evenstep.config.components import component_types
from evenstep.config.schema import Config, known_keys

TARGET = Path(__file__).parent.parent / "docs" / "config.md"
HEAD = """\
# Configuration

A run is described by TOML files, merged left to right, and by `--set section.key=value` on top:

```bash
evenstep train examples/ledger.toml --set train.lr=1e-4 --dry-run
```

`--dry-run` prints the result with every key. An unknown key, a wrong type, a value out of range or keys that contradict
each other stop the command before a model is loaded. No value is ever changed silently.

`scripts/write_config_docs.py` makes this page.
"""


def type_text(annotation: Any) -> str:
    """A key's type as a reader of TOML knows it."""
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(f'`"{choice}"`' for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return type_text(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is tuple:
        first, *others = typing.get_args(annotation)
        many = {"text": "texts", "integer": "integers"}
        return f"array of {many[type_text(first)]}" if others == [...] else f"array of {1 + len(others)} numbers"
    if typing.get_origin(annotation) is Mapping:
        return "table"
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    present = [part for part in typing.get_args(annotation) or (annotation,) if part is not type(None)]
    return " or ".join(names.get(part) or type_text(part) for part in present)


def value_text(value: Any) -> str:
    if value is PydanticUndefined or value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def section_lines(section: str) -> Iterator[str]:
    yield f"## [{section}]\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for (owner, name), field in known_keys().items():
        if owner == section:
            yield f"| `{name}` | {type_text(field.annotation)} | {value_text(field.default)} | {field.description} |"
    yield ""
    if section in ("environment", "compaction"):
        for name, options_type in component_types(section).items():
            yield from option_lines(section, name, options_type())


def option_lines(section: str, name: str, options_type: type[Any]) -> Iterator[str]:
    key = "name" if section == "environment" else "policy"
    fields = dataclasses.fields(options_type)
    yield f'Options of `{key} = "{name}"`:' + ("\n" if fields else " none.\n")
    if fields:
        hints = typing.get_type_hints(options_type)
        yield "| key | type | default |"
        yield "|---|---|---|"
        for field in fields:
            has_factory = field.default_factory is not dataclasses.MISSING
            default = "empty" if has_factory else value_text(field.default)
            yield f"| `{field.name}` | {type_text(hints[field.name])} | {default} |"
        yield ""


def page() -> str:
    return "\n".join([HEAD, *(line for section in Config.model_fields for line in section_lines(section))])


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
