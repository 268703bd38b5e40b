"""Seconds and bytes of a step for a model's shape: counted FLOPs and values over a device's published figures.

Nothing here is measured. ``docs/plan_command.md`` has every formula; `Assumptions` holds every number that is assumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from evenstep.errors import ConfigError, PlanError
from evenstep.plan.shape import PRESETS, ModelShape
from evenstep.validation import nearest

__all__ = ["DEVICES", "Assumptions", "Device", "read_shape"]

_STATE_BYTES = 16  # float32 master weight, gradient, two moments of Adam
_COMPUTE_BYTES = 2  # bfloat16
_LOGIT_BYTES = 12  # float32 logits, their softmax, their gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a data sheet says."""

    name: str
    dense_bf16_tflops: float  # 10^12 FLOPs a second, without sparsity
    memory_bytes: float


DEVICES: Mapping[str, Device] = {
    "a100": Device(name="A100 SXM 80 GB", dense_bf16_tflops=312.0, memory_bytes=80e9),
    "h100": Device(name="H100 SXM 80 GB", dense_bf16_tflops=989.0, memory_bytes=80e9),
    "h200": Device(name="H200 SXM 141 GB", dense_bf16_tflops=989.0, memory_bytes=141e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """All that an estimate assumes, apart from the model's shape.

    >>> given = Assumptions(device=DEVICES["h100"], utilisation=0.4)
    >>> qwen = PRESETS["qwen3-4b"]
    >>> given.step_seconds(qwen, step_cost=100_000.0)        # 100,000 tokens · 8.04 GFLOPs · 4 / (0.4 · 989 TFLOP/s)
    8.1...
    >>> round(given.memory_bytes(qwen, footprint=16_384, num_ranks=8) / 2**30, 1)
    14.8
    """

    device: Device
    utilisation: float = 0.4  # share of the device's peak that the step reaches
    is_sharded: bool = True  # parameters, gradients and Adam states over all ranks, or whole on each
    is_checkpointed: bool = True  # a layer keeps its input alone and is computed again in the backward
    logprob_chunk_tokens: int = 1024  # trained tokens whose logits exist at once

    def __post_init__(self) -> None:
        if not 0.0 < self.utilisation <= 1.0:
            raise PlanError(
                f"--mfu must be a share of the device's peak above 0 and at most 1, found {self.utilisation}; "
                f"0.4 is usual for dense models"
            )

    def step_seconds(self, shape: ModelShape, step_cost: float) -> float:
        """``step_cost · token FLOPs · passes / (utilisation · peak)``; 3 passes, 4 where layers are computed again.

        ``step_cost`` is in tokens' worth of linear work, each micro-batch's overhead included.
        """
        passes = 4 if self.is_checkpointed else 3
        return step_cost * shape.token_flops * passes / (self.utilisation * self.device.dense_bf16_tflops * 1e12)

    def memory_bytes(self, shape: ModelShape, footprint: int, num_ranks: int) -> float:
        """States + gathered weights + what the largest cell keeps for its backward + one chunk of logits."""
        parameters = shape.num_parameters
        if self.is_sharded:
            states = _STATE_BYTES * parameters / num_ranks
            gathered = _COMPUTE_BYTES * (shape.outer_parameters + 2 * shape.layer_parameters)
        else:
            states, gathered = _STATE_BYTES * parameters, _COMPUTE_BYTES * parameters
        if self.is_checkpointed:
            values = shape.num_layers * shape.hidden_size + shape.layer_values
        else:
            values = shape.num_layers * shape.layer_values
        logits = _LOGIT_BYTES * shape.vocab_size * min(self.logprob_chunk_tokens, footprint)
        return states + gathered + _COMPUTE_BYTES * values * footprint + logits

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """The assumptions in a sentence."""
        states = "FSDP2 shards" if self.is_sharded else "whole on each rank"
        layers = "layers computed again in the backward" if self.is_checkpointed else "all activations kept"
        return (
            f"{self.device.name} ({self.device.dense_bf16_tflops:g} TFLOP/s dense bf16), {self.utilisation:.0%} of it "
            f"reached, states {states} (16 bytes a parameter), bf16 compute, {layers}"
        )


def read_shape(model: str) -> tuple[str, ModelShape]:
    """A preset's shape, or that of a ``config.json`` (or of the folder that holds one).

    Raises:
        ConfigError: neither a preset nor such a file, or the file says too little.
    """
    if model.lower() in PRESETS:
        return model.lower(), PRESETS[model.lower()]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        hint = nearest(model.lower(), PRESETS)
        raise ConfigError(
            f"--model must be a preset ({', '.join(PRESETS)}) or a model's config.json, found {model!r}"
            + (f"; did you mean {hint}?" if hint else "; check the path")
        )
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, Mapping):
            raise PlanError("it holds no object")
        shape = ModelShape.from_hf_config(cast("Mapping[str, Any]", settings))
        _ = shape.num_parameters
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--model: {path} must be a decoder's config.json, found a problem: {error}") from None
    return str(model), shape
