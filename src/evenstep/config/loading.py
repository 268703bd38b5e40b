"""Loading a configuration: files merged, overrides on top, every mistake named by its file and key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_json

from evenstep.config.components import component_type, component_types, options_model
from evenstep.config.relations import check_relations, listed
from evenstep.config.schema import CompactionSection, Config, EnvironmentSection, Section, known_keys
from evenstep.errors import ConfigError, FileFormatError
from evenstep.plugins import is_own_class
from evenstep.validation import dotted, nearest, promise, shown

__all__ = ["load_config", "parse_override", "read_toml"]

Key = tuple[str, ...]
# what other trainers call a key
ELSEWHERE = {
    "adv_estimator": "credit.estimator",
    "beta": "train.kl_coef",
    "clip_ratio": "train.clip_low",
    "clip_ratio_high": "train.clip_high",
    "clip_ratio_low": "train.clip_low",
    "cliprange": "train.clip_low",
    "cliprange_value": "critic.value_clip",
    "delta": "train.dual_clip",
    "dynamic_batch_enable": "plan.layout",
    "dynamic_batch_pad_to_multiple": "plan.pad_to_multiple",
    "entropy_coeff": "train.entropy_coef",
    "epsilon": "train.clip_low",
    "epsilon_high": "train.clip_high",
    "global_batch_size": "train.rollouts_per_window",
    "grad_clip": "train.max_grad_norm",
    "gradient_accumulation_steps": "train.rollouts_per_window",
    "gradient_checkpointing": "train.activation_checkpointing",
    "importance_sampling_level": "train.ratio_unit",
    "kl_loss_coef": "train.kl_coef",
    "learning_rate": "train.lr",
    "logprob_batch_size": "plan.logprob_micro_batch_rows",
    "loss_agg_mode": "credit.normaliser",
    "mask_truncated_completions": "rollout.cut_off",
    "overlong_filtering": "rollout.cut_off",
    "max_completion_length": "rollout.max_tokens_per_call",
    "max_prompt_length": "model.max_context_tokens",
    "max_response_length": "rollout.max_tokens_per_call",
    "max_steps": "run.num_collections",
    "max_total_sequence_length": "model.max_context_tokens",
    "micro_batch_size": "plan.micro_batch_rows",
    "num_generations_per_prompt": "rollout.num_generations",
    "num_iterations": "train.epochs",
    "num_prompts_per_step": "rollout.num_prompts",
    "per_device_train_batch_size": "plan.max_tokens_per_gpu",
    "ppo_epochs": "train.epochs",
    "ppo_max_token_len_per_gpu": "plan.max_tokens_per_gpu",
    "ppo_micro_batch_size_per_gpu": "plan.micro_batch_rows",
    "ppo_mini_batch_size": "train.rollouts_per_window",
    "scale_rewards": "credit.estimator",
    "tis_imp_ratio_cap": "train.importance_cap",
    "train_batch_size": "rollout.num_prompts",
    "train_global_batch_size": "train.rollouts_per_window",
    "train_micro_batch_size": "plan.micro_batch_rows",
}
# and keys of what training does not do
NOT_HERE = dict.fromkeys(
    ("context_parallel_size", "cp", "cp_size", "context_parallel", "sequence_parallel_size", "ring_attn_size"),
    "training does no context parallelism: every rank runs whole rows (evenstep.plan.plan_step(cp=...) plans for "
    "trainers that do)",
)
OptionsT = TypeVar("OptionsT", EnvironmentSection, CompactionSection)
SectionT = TypeVar("SectionT", bound=Section)


# ---------------------------------------------------------------------------------------------------- loading


def load_config(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Merge TOML files left to right, apply ``key=value`` overrides, and check the result.

    Args:
        paths: TOML files; a later file's keys win, tables merge, arrays replace.
        overrides: ``"section.key=value"``; the value is TOML, or a bare text.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, missing, of a wrong type or value, or keys contradict
            each other. All findings of the first failing stage are in the message.
    """
    values: dict[str, Any] = {}
    sources: dict[Key, str] = {}
    for path in paths:
        _merge(values, read_toml(Path(path)), str(path), sources)
    for text in overrides:
        key, value = parse_override(text)
        for part in reversed(key):
            value = {part: value}
        _merge(values, value, f"--set {text}", sources)
    config = _validated(Config, {name: {} for name in Config.model_fields} | values, (), sources)
    config = config.model_copy(
        update={
            "environment": _with_options(config.environment, "name", sources),
            "compaction": _with_options(config.compaction, "policy", sources),
        }
    )
    check_relations(config)
    return config


def parse_override(text: str) -> tuple[Key, Any]:
    """Split ``section.key=value``; the value is TOML where it parses, else a text.

    Raises:
        ConfigError: no ``=``, an empty part of the key, or more than one setting.
    """
    name, separator, value_text = text.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not separator or not all(key):
        raise ConfigError(f"--set takes section.key=value, found {text!r}; for example: --set train.lr=1e-5")
    try:
        parsed = tomllib.loads(f"value = {value_text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return key, value_text.strip()
    if len(parsed) > 1:
        raise ConfigError(
            f"--set takes one section.key=value, found more lines in {text!r}; give each a --set of its own"
        )
    return key, parsed["value"]


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file, unchecked.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark in front
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: must be UTF-8 text, found byte {error.object[error.start]:#x}; give a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; texts need quotes, tables look like [train]") from None


def _merge(
    base: dict[str, Any], new: Mapping[str, Any], source: str, sources: dict[Key, str], prefix: Key = ()
) -> None:
    for name, value in new.items():
        key = (*prefix, name)
        sources[key] = source
        old = base.get(name)
        if isinstance(value, dict):
            # a table of its own, so that nothing read from a file is changed
            base[name] = old if isinstance(old, dict) else {}
            _merge(base[name], value, source, sources, key)
        else:
            base[name] = value


def _with_options(section: OptionsT, name_key: str, sources: Mapping[Key, str]) -> OptionsT:
    """The section with its component's own options checked and completed with their defaults."""
    title = "environment" if isinstance(section, EnvironmentSection) else "compaction"
    types, name = component_types(title), str(section.__dict__[name_key])
    if name not in types and not is_own_class(name):
        guess = nearest(name, types)
        raise ConfigError(
            f"{_origin(sources, (title, name_key))}`{title}.{name_key}` must be one of {', '.join(sorted(types))}, "
            f'found "{name}"; '
            f"{f'did you mean {guess!r}?' if guess else 'choose one of them, or name a class of your own'}"
        )
    try:
        options_type = component_type(title, name)
    except ConfigError as error:
        raise ConfigError(f"{_origin(sources, (title, name_key))}{error}") from None
    schema = options_model(options_type, name, base=Section, taken=name_key)
    given = _validated(schema, section.options, (title,), sources, as_json=True)
    try:
        # as every process reads them out of the run's config.toml, defaults included
        written = tomllib.loads(tomli_w.dumps(given.model_dump(mode="json", exclude_none=True)))
        checked = _validated(schema, written, (title,), sources, as_json=True)
    except (TypeError, ConfigError) as error:
        raise ConfigError(
            f"{_origin(sources, (title, name_key))}[{title}]: every option must be a value that TOML has, defaults of "
            f"{name} too, found {str(error).removeprefix('Object of type ')}; change the default"
        ) from None
    options = {key: getattr(checked, key) for key in schema.model_fields}
    try:
        options_type(**options)
    except FileFormatError:
        raise  # it names its own file
    except (ValueError, TypeError) as error:  # a ConfigError, or what the __post_init__ of a user's own class raises
        raise ConfigError(f"{_origin(sources, (title,))}[{title}]: {error}") from None
    return type(section)(**{name_key: name}, **options)


# ---------------------------------------------------------------------------------------------------- messages


def _validated(
    model: type[SectionT],
    values: Mapping[str, Any],
    prefix: Key,
    sources: Mapping[Key, str],
    *,
    as_json: bool = False,
) -> SectionT:
    """The section of these values; ``as_json``: arrays are tuples and sets, texts are paths, members and days, where
    the section has such."""
    try:
        return model.model_validate_json(to_json(values)) if as_json else model.model_validate(values)
    except ValidationError as error:
        findings = error.errors(include_url=False)
        raise ConfigError(listed([_problem(model, prefix, finding, sources) for finding in findings])) from None


def _origin(sources: Mapping[Key, str], key: Key) -> str:
    """The file or option that a key, or the table around it, was last given by; empty when none did."""
    for length in range(len(key), 0, -1):
        if key[:length] in sources:
            return f"{sources[key[:length]]}: "
    return ""


def _problem(model: type[Section], prefix: Key, finding: ErrorDetails, sources: Mapping[Key, str]) -> str:
    key = (*prefix, *(part for part in finding["loc"] if isinstance(part, str)))
    origin = _origin(sources, key)
    name = dotted((*prefix, *finding["loc"]))
    if finding["type"] == "extra_forbidden":
        return f"{origin}unknown key `{name}`; {_guess(model, prefix, key, finding['input'])}"
    description = _description(model, key[len(prefix) :])
    if finding["type"] == "missing" and isinstance(finding["loc"][-1], int):
        return f"{origin}`{dotted(key)}` must have more values, found {finding['loc'][-1]}; add the others{description}"
    if finding["type"] == "missing":
        files = ", ".join(dict.fromkeys(source for source in sources.values() if not source.startswith("--set")))
        return f"`{name}` is required, found no such key in {files or 'any file'}; add it to [{key[0]}]{description}"
    found, promised = shown(finding["input"]), promise(finding).replace("an object", "a table")
    return f"{origin}`{name}` {promised}, found {found}; {_fix(finding)}{description}"


def _fix(finding: ErrorDetails) -> str:
    kind, value = finding["type"], finding["input"]
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "write it without quotes"
    if kind == "string_type":
        return "write it in quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind == "literal_error" and isinstance(value, str):
        choices = [
            choice.strip(" '")
            for choice in str(finding.get("ctx", {}).get("expected", "")).replace(" or ", ",").split(",")
        ]
        guess = nearest(value, choices)
        if guess:
            return f"did you mean {guess!r}?"
    return "change it"


def _description(model: type[Section], path: Key) -> str:
    """The meaning of a key, in brackets."""
    current: Any = model
    for part in path:
        info = current.model_fields.get(part)
        if info is None:
            return ""
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            current = info.annotation
        elif info.description:
            return f" ({info.description})"
    return ""


def _guess(model: type[Section], prefix: Key, key: Key, value: Any) -> str:
    if prefix:  # a component's option
        known = list(model.model_fields)
        guess = nearest(key[-1], known)
        hint = f"did you mean `{prefix[0]}.{guess}`? " if guess else ""
        return f"{hint}[{prefix[0]}] takes here: {', '.join(known) or 'no options'}"
    names = [*key[:2], *_names_in(value)]
    if known_not := next((NOT_HERE[name] for name in names if name in NOT_HERE), None):
        return known_not
    elsewhere = {name: ELSEWHERE[name] for name in names if name in ELSEWHERE}
    if elsewhere and key[-1] in elsewhere:
        return f"here it is `{elsewhere[key[-1]]}`"
    if elsewhere:
        return f"here {', '.join(f'{name} is `{ours}`' for name, ours in elsewhere.items())}"
    if len(key) == 1:
        owners = [".".join(known) for known in known_keys() if known[1] == key[0]]
        guess = owners[0] if owners else nearest(key[0], Config.model_fields)
        hint = f"did you mean `{guess}`? " if guess else ""
        return f"{hint}the sections are: {', '.join(Config.model_fields)}"
    section_keys = [name for section, name in known_keys() if section == key[0]]
    owners = [f"{section}.{name}" for section, name in known_keys() if name == key[1]]
    guess = nearest(key[1], section_keys)
    if owners:
        return f"did you mean `{owners[0]}`?"
    if guess is not None:
        return f"did you mean `{key[0]}.{guess}`?"
    return f"[{key[0]}] has: {', '.join(section_keys)}"


def _names_in(value: Any) -> Iterator[str]:
    """The keys of a table and of the tables in it: another trainer's section has another name as well."""
    if isinstance(value, Mapping):
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield name
            yield from _names_in(inner)
