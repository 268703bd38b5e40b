"""Everything that can be refused before torch is imported or a model is loaded."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep.config import Config, read_toml
from evenstep.config.schema import known_keys
from evenstep.errors import ConfigError
from evenstep.media import VISION_MODEL_TYPES
from evenstep.model_files import (
    PYPI,
    balance_problem,
    capacity_problem,
    layout_problem,
    max_context_tokens,
    model_folder,
    model_settings,
)

__all__ = [
    "check_command",
    "check_engine",
    "check_extra",
    "check_model",
    "check_ranks",
    "check_run_folder",
    "preflight",
    "used_folder",
]

# extra -> what needs it, and the packages that it brings
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": ("training", ("torch", "transformers", "safetensors")),
    "lora": ("lora.rank", ("peft",)),
    "smollm2": ('model.path = "pypi:..."', ("gguf",)),
    "engines": ("generating on servers", ("httpx2",)),
    "serve": ("serving the OpenAI API", ("fastapi", "uvicorn")),
}

# Keys that may differ between a run and its continuation: they change what is kept, shown and fits into memory, and the
# step only by rounding.
CHANGEABLE_ON_RESUME = (
    *("run.dir", "checkpoint.", "evaluation.", "plan.", "train.score_max_tokens_per_gpu"),
    *("rollout.max_attempts_per_prompt", "rollout.max_replacements", "rollout.on_shortfall"),
    *("rollout.step_timeout_s", "rollout.timeout_s", "agent.rollout_timeout_s", "engine."),
)


def preflight(config: Config, *, ranks: int | None = None, resume: bool = False) -> None:
    """Check packages, ranks, model files and run folder, in this order; the folder exists afterwards.

    Raises:
        ConfigError: names the key, the value and the fix.
    """
    check_extra("train")
    if config.lora.rank:
        check_extra("lora")
    if config.model.path.startswith(PYPI) and model_folder(config.model.path) is None:
        check_extra("smollm2")
    if config.agent.kind == "command":
        check_command(config.agent.command[0])
    if ranks is not None:
        check_ranks(ranks)
    check_model(config)
    check_engine(config)
    check_run_folder(config, resume=resume)


def check_extra(name: str) -> None:
    """Refuse what needs an extra of evenstep where the packages of it are not installed.

    Raises:
        ConfigError: names the missing ones and the command that installs them.
    """
    what, packages = EXTRAS[name]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{what} needs the extra {name!r}, found no {', '.join(missing)}; run: pip install 'evenstep[{name}]'"
        )


def check_command(program: str) -> None:
    """Refuse a program that cannot be started, before anything else is.

    Raises:
        ConfigError: there is no such program, or the packages that serve it are missing.
    """
    check_extra("serve")
    if shutil.which(program) is None:
        raise ConfigError(
            f"agent.command must begin with a program that can be started, found {program!r}; give its path, or put it "
            f"on PATH"
        )


def check_engine(config: Config) -> None:
    """Refuse servers that cannot be asked or started, before a model is loaded.

    Raises:
        ConfigError: a package, vLLM's environment or the key is missing, or a port is taken.
    """
    engine = config.engine
    if not engine.is_server:
        return
    check_extra("engines")
    variable = engine.api_key_variable
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(
            f"engine.api_key_variable names the environment variable {variable}, found that it is not set; export it, "
            f"or leave the key out"
        )
    key = os.environ.get(variable, "") if variable is not None else ""
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(
            f"engine.api_key_variable must name a key of printable ASCII characters without spaces around it, found "
            f"another in {variable}; was a line break or a quotation mark copied with it?"
        )
    if not engine.launch:
        return
    from evenstep.rollout.server_process import port_problem, vllm_module

    vllm_module(str(engine.python))
    for port in engine.ports:
        problem = port_problem(port)
        if problem is not None:
            raise ConfigError(
                f"engine.ports must be free, found that {port} is not ({problem}); choose another, or end what listens "
                f"there"
            )


def check_ranks(ranks: int) -> None:
    """Refuse a number of ranks that cannot run.

    >>> check_ranks(2)
    """
    if ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, found {ranks}; leave it out to use what fits this machine")


def check_model(config: Config) -> None:
    """Compare the model's own configuration with what is asked of it, from its files alone.

    Raises:
        ConfigError: files are missing, the context is too long for the model, its experts have a capacity, or it
            cannot do the layout.
    """
    backbones = {"model.path": config.model.path}
    if config.has_critic and config.critic.path is None:
        _refuse_critic_that_sees(config)
    if config.critic.path is not None:
        backbones["critic.path"] = config.critic.path
    for key, path in backbones.items():
        try:
            settings = model_settings(path)
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.path", key)) from None
        most = max_context_tokens(settings)
        # the value after a truncated rollout's last token is read with one token more
        num_beyond = int(config.has_critic and config.credit.truncated_value == "bootstrap")
        if most is not None and config.model.max_context_tokens + num_beyond > most:
            raise ConfigError(
                f"model.max_context_tokens must be at most {most - num_beyond}, the context that {key} = {path!r} was "
                f"made for, found {config.model.max_context_tokens}; lower it, compaction keeps rollouts within it"
            )
        problem = balance_problem(settings) if key == "model.path" else None
        if problem is not None and config.train.moe_balance_coef:
            raise ConfigError(
                f"train.moe_balance_coef = {config.train.moe_balance_coef} needs the routing of every token, found "
                f"that {problem} ({key}); leave it out, or set it to 0"
            )
        if problem is not None and config.train.routing_replay != "off":
            raise ConfigError(
                f"train.routing_replay = {config.train.routing_replay!r} needs routers whose choice can be replayed, "
                f"found that {problem} ({key}); leave it out"
            )
        problem = capacity_problem(settings)
        if problem is not None:
            raise ConfigError(
                f"{key}: a token's experts must not depend on the other rows of its micro-batch, found that {problem} "
                f"in {path!r}; set the limit to null in its config.json if the model can run without, or train "
                f"another model"
            )
        problem = layout_problem(settings, config.plan.layout)
        if problem is not None:
            raise ConfigError(
                f"plan.layout = {config.plan.layout!r} must keep rows apart, found that {problem} ({key}); "
                f"set plan.layout = 'padded'"
            )


def _refuse_critic_that_sees(config: Config) -> None:
    """A critic is made of the policy's backbone, and of one that sees images none can be made."""
    model_type = model_settings(config.model.path).get("model_type")
    if model_type in VISION_MODEL_TYPES:
        raise ConfigError(
            f"credit.estimator = 'gae' trains a critic, which sees no images, found model.path of type {model_type!r}; "
            f"set another estimator, or where the environment shows text alone critic.path to a text model with the "
            f"same tokenizer"
        )


def check_run_folder(config: Config, *, resume: bool) -> None:
    """Create the run's folder where it is missing, and refuse one that is in use or cannot be written.

    Raises:
        ConfigError: the folder has a run and ``resume`` is False, has none and ``resume`` is True, has one of another
            configuration, or cannot be written.
    """
    folder = Path(config.run.dir)
    recorded = folder / "config.toml"
    has_run = recorded.is_file()
    if has_run and not resume:
        raise ConfigError(used_folder(config.run.dir))
    if resume and not has_run:
        raise ConfigError(
            f"--resume continues the run in run.dir, found no config.toml in {config.run.dir!r}; start it without "
            f"--resume, or name the right folder with --run-dir"
        )
    if has_run:
        _check_same_run(read_toml(recorded), config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.dir must be a folder that can be written, found {config.run.dir!r} ({error.strerror}); choose "
            f"another with --run-dir"
        ) from None


def used_folder(folder: str) -> str:
    """What is wrong with a run's folder that has a run already: its rollouts would be taken for the new run's."""
    return (
        f"run.dir must be a new folder, found a run in {folder!r}; continue it with --resume, or choose another folder "
        f"with --run-dir"
    )


def _check_same_run(recorded: Mapping[str, Any], asked: Config) -> None:
    """Compare what the run folder recorded with what is asked for, as texts: nothing that it names is loaded."""
    before, after = _flat(recorded), _flat(tomllib.loads(asked.resolved()))
    may_change = CHANGEABLE_ON_RESUME
    if before["rollout.on_undeclared"] == "error":  # nothing was trained yet to which another choice would matter
        may_change += ("rollout.on_undeclared",)
    if asked.train.schedule == "constant":  # else the schedule's end would move under the steps already made
        may_change += ("run.num_collections",)
    changed = [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(may_change)
    ]
    if changed:
        raise ConfigError(
            f"--resume continues a run as it was configured, found changes: {'; '.join(changed)}; undo them, or start "
            f"a new run with --run-dir"
        )


def _flat(tables: Mapping[str, Any]) -> dict[str, object]:
    """Values by ``section.key``; a key that is not there, because its value is the default, has that."""
    found: dict[str, object] = {
        f"{section}.{name}": _plain(field.get_default())
        for (section, name), field in known_keys().items()
        if not field.is_required()
    }
    for section, table in tables.items():
        for name, value in (table if isinstance(table, Mapping) else {"": table}).items():
            found[f"{section}.{name}"] = value
    return found


def _plain(value: object) -> object:
    """As TOML has it."""
    return list(value) if isinstance(value, tuple) else value
