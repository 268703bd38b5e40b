"""A user's own classes and functions, named in a configuration by their file or module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from evenstep.errors import ConfigError

__all__ = ["is_own_class", "own_class", "own_function"]


def is_own_class(name: str) -> bool:
    """Whether a name stands for a class of the user's own: ``path/to/file.py:Name`` or ``package.module:Name``.

    >>> is_own_class("recency"), is_own_class("policies/mine.py:EverySecond"), is_own_class("mine.policies:EverySecond")
    (False, True, True)
    """
    return ":" in name


def own_class(name: str) -> type[Any]:
    """The class that ``path/to/file.py:Name`` or ``package.module:Name`` names, the same object at every call.

    A file's path is relative to the working directory; a module must be one that Python can import. Whatever stands in
    either runs as part of this program.

    >>> own_class("collections:Counter").__name__
    'Counter'

    Raises:
        ConfigError: no such file, module or class, or it cannot be imported.
    """
    return _own(name, "class", type)


def own_function(name: str) -> FunctionType:
    """The function that ``path/to/file.py:name`` or ``package.module:name`` names; as `own_class` in all else.

    >>> own_function("textwrap:dedent").__name__
    'dedent'

    Raises:
        ConfigError: no such file, module or function, or it cannot be imported.
    """
    return _own(name, "function", FunctionType)


def _own(name: str, kind: str, kind_type: type[Any]) -> Any:
    where, _, own_name = name.rpartition(":")
    if not where or not own_name.isidentifier():
        shown = "ClassName" if kind == "class" else "name"
        raise ConfigError(
            f"a {kind} of your own is named path/to/file.py:{shown} or package.module:{shown}, found {name!r}"
        )
    module = _module_of_file(Path(where), name) if where.endswith(".py") else _module_named(where, name)
    try:
        found = getattr(module, own_name)
    except AttributeError:
        others = [
            key
            for key, value in vars(module).items()
            if isinstance(value, kind_type) and value.__module__ == module.__name__
        ]
        plural = "classes" if kind == "class" else "functions"
        raise ConfigError(
            f"{name!r} names a {kind}, found no {own_name} in {where}; it has: {', '.join(others) or f'no {plural}'}"
        ) from None
    if not isinstance(found, kind_type):
        raise ConfigError(f"{name!r} must name a {kind}, found {type(found).__name__}; name the {kind} itself")
    return found


def _module_of_file(path: Path, name: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(
            f"{name!r} names something in a file, found no file {path}; paths are relative to where the "
            f"command is started"
        )
    # Registered, because dataclasses look their own module up; by path, because two folders may have files of one name.
    module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        del sys.modules[module_name]
        raise _import_problem(name, error) from error
    return module


def _module_named(where: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except Exception as error:  # a user's module may raise anything
        raise _import_problem(name, error) from error


def _import_problem(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{name!r} must be importable, found {type(error).__name__}: {error}; correct it, install its package, or put "
        f"its folder on PYTHONPATH"
    )
