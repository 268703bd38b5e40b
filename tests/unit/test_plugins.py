"""What is locked here:

1. A user's class is found by file or by module, and is the same object whenever it is asked for.
2. Two files of one name in two folders are two modules; a dataclass in a file resolves its own annotations.
3. What is not there, is no class, or cannot be imported is refused with its name and what was found.
"""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from evenstep.errors import ConfigError
from evenstep.plugins import is_own_class, own_class

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class Mine:
    size: Size = 3

Size = int
number = 4
"""


def test_a_class_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own.py").write_text(SOURCE.replace("Mine", "Theirs"))
    monkeypatch.chdir(tmp_path)
    mine = own_class("own.py:Mine")
    assert mine is own_class(f"{tmp_path}/own.py:Mine")
    assert typing.get_type_hints(mine) == {"size": int}
    assert own_class("other/own.py:Theirs").__name__ == "Theirs"
    assert mine is own_class("own.py:Mine")


def test_a_class_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policies_of_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert own_class("own_policies_of_a_test:Mine") is own_class("own_policies_of_a_test:Mine")


def test_names() -> None:
    assert [is_own_class(name) for name in ("ledger", "a.py:B", "a.b:C", "")] == [False, True, True, False]


@pytest.mark.parametrize(
    "name, message",
    [
        ("own.py:Absent", "found no Absent in own.py; it has: Mine"),
        ("own.py:number", "must name a class, found int"),
        ("absent.py:Mine", "found no file .*absent.py; paths are relative"),
        ("own.py:", "named path/to/file.py:ClassName or package.module:ClassName, found 'own.py:'"),
        (":Mine", "named path/to/file.py:ClassName"),
        ("own.py:not a name", "named path/to/file.py:ClassName"),
        ("no_such_package.module:Mine", "found ModuleNotFoundError: No module named 'no_such_package'"),
        ("broken.py:Mine", "'broken.py:Mine' must be importable, found ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_found_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(ConfigError, match=message):
            own_class(name)
