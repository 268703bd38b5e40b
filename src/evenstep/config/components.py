"""Environments and compaction policies by the names that a configuration gives them, and what their options may be."""

from __future__ import annotations

import dataclasses
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model
from pydantic.errors import PydanticUserError

from evenstep.errors import ConfigError

__all__ = ["component_type", "component_types", "options_model"]

SectionT = TypeVar("SectionT", bound=BaseModel)


def component_types(section: str) -> Mapping[str, Callable[[], type[Any]]]:
    """What an environment or a compaction policy may be called, and how to get the dataclass of its options."""
    if section == "environment":
        from evenstep.rollout.environment import ENVIRONMENTS

        return {name: (lambda load=load: load().Options) for name, load in ENVIRONMENTS.items()}
    from evenstep.rollout.compaction import COMPACTIONS

    return {name: (lambda policy=policy: policy) for name, policy in COMPACTIONS.items()}


def component_type(section: str, name: str) -> type[Any]:
    """The dataclass of the options of an environment or a compaction policy, shipped or the user's own.

    Raises:
        ConfigError: nothing has this name, or it is not what the section takes.
    """
    if section == "environment":
        from evenstep.rollout.environment import environment_named

        return environment_named(name).Options
    from evenstep.rollout.compaction import compaction_type

    return compaction_type(name)


def options_model(options_type: type[Any], name: str, *, base: type[SectionT], taken: str) -> type[SectionT]:
    """A schema as strict as ``base`` for the fields of a frozen options dataclass; ``taken`` is the key that names it.

    Raises:
        ConfigError: a field has a type that no TOML value has, or a name that is taken.
    """
    try:
        hints = typing.get_type_hints(options_type)
    except (NameError, TypeError) as error:
        raise ConfigError(_untyped(options_type, error)) from error
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(options_type):
        if item.name in (taken, "model_config"):  # the other one is pydantic's
            raise ConfigError(
                f"{options_type.__qualname__} must have no field `{item.name}`, which is taken; rename it"
            )
        if not item.init:
            continue
        if item.default is not dataclasses.MISSING:
            default: Any = item.default
        elif item.default_factory is not dataclasses.MISSING:
            default = Field(default_factory=item.default_factory)
        else:
            default = ...
        fields[item.name] = (hints[item.name], default)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # `schema` and `json` are names of pydantic's, and good ones
            return create_model(name, __base__=base, **fields)
    except PydanticUserError as error:
        raise ConfigError(_untyped(options_type, error)) from error


def _untyped(options_type: type[Any], error: Exception) -> str:
    reason = str(error).splitlines()[0]
    return (
        f"{options_type.__qualname__} must have fields of types that TOML has (bool, int, float, str, tuple, Mapping), "
        f"found: {reason}"
    )
