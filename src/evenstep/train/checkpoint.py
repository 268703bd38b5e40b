"""Checkpoints: torch DCP to resume bit for bit, Hugging Face safetensors to take away.

A checkpoint is a folder that appears under its final name only when all of it is on disk. Under LoRA it holds the
adapters alone: the frozen weights are those of the model it is loaded into.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evenstep.errors import FileFormatError, StateError
from evenstep.train.distributed import rank_and_size
from evenstep.train.lora import is_lora, merged_weights

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "Trained",
    "export",
    "export_adapter",
    "latest_checkpoint",
    "load_checkpoint",
    "read_state",
    "save_checkpoint",
]

STATE_FILE = "state.json"
PREFIX = "window_"


class Trained(NamedTuple):
    """A model and the optimizer of what trains in it."""

    model: PreTrainedModel | PeftModel
    optimizer: torch.optim.Optimizer


def save_checkpoint(
    folder: Path,
    trained: Mapping[str, Trained],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write ``folder/window_<n>`` from all ranks; the oldest ones beyond ``keep`` are removed.

    Args:
        folder: the run's checkpoint folder.
        trained: name -> model (replicated or sharded; with adapters, only they are saved) and optimizer, whose moments
            are saved once it has stepped.
        state: JSON counters; ``state["window"]`` names the checkpoint.
        keep: how many checkpoints stay.

    Raises:
        StateError: it could not be written; the checkpoints before it stay as they are.
        KeyboardInterrupt: on any rank.
    """
    final = folder / f"{PREFIX}{state['window']:06d}"
    partial = final.with_suffix(".partial")
    rank, size = rank_and_size()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    with_moments = sorted(name for name, (_, optimizer) in trained.items() if optimizer.state)
    for name in with_moments:
        _complete(trained[name].optimizer)
    tensors = _tensors(trained, with_moments)
    try:
        with _interrupts():
            save(tensors, checkpoint_id=partial / "dcp", no_dist=not dist.is_initialized())
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise StateError(
            f"{final}: the checkpoint could not be written: {type(cause).__name__}: {str(cause)[:200]}; make room "
            f"on the disk and go on with --resume, from the one before it"
        ) from error
    if rank == 0:
        document = {"format_version": 1, "num_ranks": size, "with_moments": with_moments, **state}
        with (partial / STATE_FILE).open("w") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in _all(folder)[: -max(keep, 1)]:
            shutil.rmtree(old)
    _barrier()
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _all(folder)
    return found[-1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The counters a checkpoint was saved with.

    Raises:
        FileFormatError: the file is missing, broken, or of a newer format.
    """
    path = checkpoint / STATE_FILE
    try:
        state = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise FileFormatError(
            f"{path}: a checkpoint's counters were expected, found {error}; remove the folder {checkpoint.name} to "
            f"resume from an older one"
        ) from error
    missing = [name for name in ("window", "num_ranks", "with_moments") if name not in state]
    if state.get("format_version") == 1 and missing:
        raise FileFormatError(
            f"{path}: found no {', '.join(missing)}; remove the folder to resume from the one before it"
        )
    if state.get("format_version") != 1:
        raise FileFormatError(
            f"{path}: format_version 1 was expected, found {state.get('format_version')}; use a newer evenstep"
        )
    return state


def load_checkpoint(checkpoint: Path, trained: Mapping[str, Trained]) -> dict[str, Any]:
    """Load weights and moments in place and return the counters.

    Raises:
        FileFormatError: the checkpoint is broken, or of models of another shape.
    """
    state = read_state(checkpoint)
    tensors = _tensors(trained, state["with_moments"])
    try:
        with _interrupts():
            load(tensors, checkpoint_id=checkpoint / "dcp", no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, ValueError) as error:
        raise FileFormatError(
            f"{checkpoint}: a whole checkpoint was expected, found {type(error).__name__}: {str(error)[:200]}; remove "
            f"the folder to resume from an older one"
        ) from error
    for name, (model, optimizer) in trained.items():
        # all names came from the model itself; those of frozen weights are not among an adapted model's
        set_model_state_dict(model, tensors[name], options=StateDictOptions(strict=not is_lora(model)))
        if name in state["with_moments"]:
            moments = tensors[f"{name}.optimizer"]
            set_optimizer_state_dict(model, optimizer, moments, options=StateDictOptions(strict=True))
        else:
            optimizer.state.clear()
    return state


@contextmanager
def _interrupts() -> Iterator[None]:
    """Raise an interrupt as itself: DCP hands over whatever was raised on any rank as an exception of its own. That one
    process saves alone is no news either."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
            raise KeyboardInterrupt from error
        raise


def _tensors(trained: Mapping[str, Trained], with_moments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: _weights(model) for name, (model, _) in trained.items()}
    for name in with_moments:
        found[f"{name}.optimizer"] = get_optimizer_state_dict(*trained[name])
    return found


def _complete(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that no gradient has reached yet the state that they will start with.

    An optimizer makes it at their first gradient. Loading asks for that of every parameter.
    """
    known, state = next((parameter, state) for parameter, state in optimizer.state.items() if parameter.ndim)
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state):
        optimizer.state[parameter] = {
            name: torch.zeros_like(parameter.detach() if value.shape == known.shape else value)
            for name, value in state.items()
        }


def export(
    folder: Path,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    untied: bool = False,
    beside: Sequence[Path] = (),
) -> None:
    """Write safetensors, configuration and tokenizer that ``from_pretrained`` loads; written aside, then renamed.

    Adapters are added into the weights that are written, so loading needs no peft; the model itself stays as it is.

    Args:
        untied: an output head that is the embedding is written a second time, as a head of its own.
        beside: files that are copied into the folder.
    """
    whole: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )

    def write(partial: Path) -> None:
        base = model.get_base_model() if is_lora(model) else model
        weights = merged_weights(model, whole) if is_lora(model) else whole
        with _written_untied(cast(PreTrainedModel, base), weights) if untied else nullcontext(weights) as weights:
            cast(PreTrainedModel, base).save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
        for file in beside:
            shutil.copyfile(file, partial / file.name)

    _replace(folder, write)


@contextmanager
def _written_untied(model: PreTrainedModel, weights: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Inside the block a tied model is saved as one with a head of its own, from these weights."""
    config, head = model.config, model.get_output_embeddings()
    if not getattr(config, "tie_word_embeddings", False) or head is None:
        yield dict(weights)
        return
    name = next(name for name, module in model.named_modules() if module is head)
    source = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    untied = {**weights, f"{name}.weight": weights[f"{source}.weight"].clone()}
    config.tie_word_embeddings = False
    try:
        yield untied
    finally:
        config.tie_word_embeddings = True


def export_adapter(folder: Path, model: PeftModel) -> None:
    """Write the adapters alone in peft's format, for ``PeftModel.from_pretrained``; written aside, then renamed.

    Raises:
        StateError: the model has no adapters.
    """
    if not is_lora(model):
        raise StateError(f"export_adapter needs a model with adapters, found {type(model).__name__}; use export")
    weights = _weights(model, full_state_dict=True, cpu_offload=True)

    def write(partial: Path) -> None:
        # peft would otherwise ask the network whether the vocabulary has grown
        model.save_pretrained(str(partial), state_dict=weights, save_embedding_layers=False)

    _replace(folder, write)


def _weights(model: PreTrainedModel | PeftModel, **options: Any) -> dict[str, Any]:
    """What a checkpoint holds of a model, by parameter name: everything, or what trains where there are adapters."""
    weights = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=is_lora(model), **options))
    if not is_lora(model):
        return weights
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: weight for name, weight in weights.items() if name in trained}  # no second names of frozen weights


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """On rank 0, fill a folder aside and put it in the place of ``folder``; the other ranks wait."""
    if rank_and_size()[0] == 0:
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    _barrier()


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or a folder's names."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _all(folder: Path) -> list[Path]:
    numbered = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix(PREFIX)))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
