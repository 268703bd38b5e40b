"""Checkpoints: torch DCP to resume bit for bit, Hugging Face safetensors to take away.

A checkpoint is a folder that appears under its final name only when all of it is on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

from evenstep.errors import FileFormatError
from evenstep.train.distributed import rank_and_size

__all__ = ["export", "latest_checkpoint", "load_checkpoint", "read_state", "save_checkpoint"]

STATE_FILE = "state.json"
PREFIX = "window_"


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write ``folder/window_<n>`` from all ranks; the oldest ones beyond ``keep`` are removed.

    Args:
        folder: the run's checkpoint folder.
        model: replicated or sharded.
        optimizer: its moments are saved once it has stepped.
        state: JSON counters; ``state["window"]`` names the checkpoint.
        keep: how many checkpoints stay.
    """
    final = folder / f"{PREFIX}{state['window']:06d}"
    partial = final.with_suffix(".partial")
    rank, size = rank_and_size()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    has_moments = bool(optimizer.state)
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    if has_moments:
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer)
    save(tensors, checkpoint_id=partial / "dcp", no_dist=not dist.is_initialized())
    if rank == 0:
        document = {"format_version": 1, "num_ranks": size, "has_moments": has_moments, **state}
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
    missing = [name for name in ("window", "num_ranks", "has_moments") if name not in state]
    if state.get("format_version") == 1 and missing:
        raise FileFormatError(
            f"{path}: found no {', '.join(missing)}; remove the folder to resume from the one before it"
        )
    if state.get("format_version") != 1:
        raise FileFormatError(
            f"{path}: format_version 1 was expected, found {state.get('format_version')}; use a newer evenstep"
        )
    return state


def load_checkpoint(checkpoint: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load weights and moments in place and return the counters."""
    state = read_state(checkpoint)
    options = StateDictOptions(strict=True)
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    if state["has_moments"]:
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer)
    try:
        load(tensors, checkpoint_id=checkpoint / "dcp", no_dist=not dist.is_initialized())
    except (CheckpointException, OSError, ValueError) as error:
        raise FileFormatError(
            f"{checkpoint}: a whole checkpoint was expected, found {type(error).__name__}: {str(error)[:200]}; remove "
            f"the folder to resume from an older one"
        ) from error
    set_model_state_dict(model, tensors["model"], options=options)
    if state["has_moments"]:
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=options)
    else:
        optimizer.state.clear()
    return state


def export(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write safetensors, configuration and tokenizer that ``from_pretrained`` loads; written aside, then renamed."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank_and_size()[0] == 0:
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial, state_dict=full)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    _barrier()


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal())


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
