"""What an arm of a replay may change: how the step is taken, never what it is taken on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from evenstep.config import Config, load_config, parse_override
from evenstep.config.relations import OF_LAYOUT_FIXED
from evenstep.config.schema import PlanSection
from evenstep.errors import ConfigError
from evenstep.validation import nearest

__all__ = ["arm_config"]

# Keys outside of [plan] that an arm may set. Rewards, advantages and old log-probs are one for all arms.
OTHER_KEYS = (
    *("train.sharding", "train.sync", "train.compute_dtype", "train.activation_checkpointing"),
    *("train.logprob_chunk_tokens", "train.max_grad_norm"),
    *("credit.normaliser", "credit.constant", "credit.allow_row_splits"),
)


def arm_config(text: str, base: Config, folder: Path) -> Config:
    """The configuration of one arm: a layout, then ``key=value`` of ``[plan]`` or of the few other keys an arm may set.

    Keys that would contradict the arm's layout are left out where they come from the base: a budget with ``fixed``, the
    keys of ``fixed`` with the others.

    Args:
        text: ``padded``, or ``padded,max_tokens_per_gpu=4096``, or ``fixed,train.sharding=fsdp2``.
        base: of the run.
        folder: where the arm's ``config.toml`` is written.

    Raises:
        ConfigError: an unknown key, one that would change the rows, or a wrong value.
    """
    given: dict[str, Any] = {}
    for part in _parts(text):
        name, value = ("layout", part) if "=" not in part else _key_and_value(part, text)
        key = name if "." in name else f"plan.{name}"
        if key in given:
            raise ConfigError(f"--arm {text!r}: `{key}` is given twice; leave one out")
        _require_known(key, text)
        given[key] = value
    if "plan.layout" not in given:
        given["plan.layout"] = base.plan.layout
    values = base.model_dump(mode="json", exclude_none=True)
    if given["plan.layout"] == "fixed":
        values["plan"].pop("max_tokens_per_gpu", None)
    else:
        for name in OF_LAYOUT_FIXED:
            values["plan"].pop(name, None)
    if given.get("train.sharding") == "replicated":
        values["train"].pop("sync", None)
    if given.get("credit.normaliser", "constant") != "constant":
        values["credit"].pop("constant", None)
    for key, value in given.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    try:
        return load_config([path])
    except ConfigError as error:
        raise ConfigError(f"--arm {text!r}: {str(error).replace(f'{path}: ', '')}") from None


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(
            f"--arm takes a layout and key=value, separated by commas, found {text!r}; for example: --arm "
            f"padded,max_tokens_per_gpu=4096"
        )
    return parts


def _key_and_value(part: str, text: str) -> tuple[str, Any]:
    try:
        key, value = parse_override(part)
    except ConfigError:
        raise ConfigError(f"--arm {text!r}: {part!r} must be key=value; for example max_tokens_per_gpu=4096") from None
    return ".".join(key), value


def _require_known(key: str, text: str) -> None:
    known = [*(f"plan.{name}" for name in PlanSection.model_fields), *OTHER_KEYS]
    if key in known:
        return
    guess = nearest(key, known)
    hint = f"did you mean `{guess.removeprefix('plan.')}`? " if guess else ""
    raise ConfigError(
        f"--arm {text!r}: an arm cannot set `{key}`; {hint}it takes what changes how the step is taken, never its rows "
        f"or credit: {', '.join(name.removeprefix('plan.') for name in known)}"
    )
