"""Adapters instead of whole weights (LoRA, through peft): ``y = W x + (alpha / rank) · B A x``, where A and B train.

B starts at zero, so an adapted model starts as its base model, and stays it whenever the adapters are off. The Trainer
takes the adapted model as it is: what does not train is neither summed over ranks, nor clipped, nor checkpointed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from evenstep.errors import ConfigError, StateError
from evenstep.train.distributed import is_sharded

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["adapters_off", "add_lora", "is_lora", "merged_weights"]

ALL_LINEAR = "all-linear"  # every linear layer but the output head
WRAPPED = "base_model.model."  # peft's prefix of the base model's parameter names
# Linear layers of state-space mixers whose weights are handed to a scan: an adapter beside them would be left out.
SCANNED = ("x_proj", "dt_proj", "out_proj")


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    seed: int,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = ALL_LINEAR,
) -> PeftModel:
    """Freeze a causal LM, put a low-rank adapter beside its linear layers, and return the adapted model.

    ``y = W x + (alpha / rank) · B A x`` with A [rank, in], B [out, rank]; B is zero at first and A is drawn from
    ``seed`` alone, so it is the same on every rank. Adapters are float32, float64 in a float64 model; W keeps its dtype
    and its bits. The layers are put into ``model`` itself, which computes with them too.

    Args:
        model: whole; ``shard`` comes after this, and the optimizer, over what ``requires_grad``, after that.
        rank: of B A, at least 1.
        alpha: the adapters' output is scaled by ``alpha / rank``.
        seed: of A; the global random state is left alone.
        dropout: must be 0: no pass has dropout, so that all of them see one policy.
        target_modules: ``"all-linear"`` (all but the output head, routers that are linear layers, and the layers of
            state-space mixers whose weights go into a scan), or names of linear layers: whole ones or their last
            parts, such as ``["q_proj", "v_proj"]``. The output head can be named unless it is tied to the embedding.

    Raises:
        ConfigError: peft is not installed, a number is out of range, or a name matches nothing that can be adapted.
        StateError: the model has adapters already, or is sharded.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
    """
    peft = _peft()
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"rank must be a whole number from 1 on, found {rank!r}; 8 to 64 are usual")
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"alpha must be above 0 and finite, found {alpha!r}; alpha = rank leaves B A unscaled")
    if dropout != 0:
        raise ConfigError(
            f"adapters must have dropout 0, found {dropout!r}: with it the trained policy is not the one that was "
            f"sampled from; leave it out, or lower rank"
        )
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"add_lora adapts a causal LM, found {type(model).__name__}, which has no output head; train it whole"
        )
    if is_lora(model) or is_sharded(model):
        found = "one that has adapters" if is_lora(model) else "one that is sharded"
        raise StateError(f"add_lora needs the whole base model, found {found}; call it once, before shard()")
    _check_targets(model, target_modules)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_targets(model, target_modules),
        task_type="CAUSAL_LM",
    )
    # peft makes its layers on the CPU and moves them, so one generator decides whatever the device
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft sets it right by itself
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")  # its own, for experts
        torch.default_generator.manual_seed(seed)
        return peft.get_peft_model(model, config)


def is_lora(model: nn.Module) -> TypeGuard[PeftModel]:
    """Whether peft made this model; does not import peft."""
    peft = sys.modules.get("peft")  # without it there is no such model
    return peft is not None and isinstance(model, peft.PeftModel)


@contextmanager
def adapters_off(model: PeftModel) -> Iterator[None]:
    """The base model inside the block, bit for bit: the reference policy of a run whose adapters started at zero.

    Raises:
        StateError: the model has no adapters.
    """
    if not is_lora(model):
        raise StateError(
            f"adapters_off needs a model with adapters, found {type(model).__name__}; make it with add_lora, or keep a "
            f"frozen copy as the reference"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with model.disable_adapter():
        # peft freezes the adapters as well. Leaving the block, it would thaw what FSDP2 has gathered inside, and the
        # shards behind that would stay frozen.
        for parameter in trained:
            parameter.requires_grad_(True)
        yield


def merged_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base model's state dict with the adapters added in: ``W + (alpha / rank) · B A``, in W's dtype.

    Args:
        model: read for names and scales only, so it may be sharded; it is not changed.
        weights: its whole state dict.

    Raises:
        ConfigError: the model has parts that cannot be added to a weight, such as several sets of adapters.
    """
    from peft.tuners.lora import LoraLayer

    merged = dict(weights)
    names = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        parameter = f"{names[base]}.{getattr(module, 'parameter_name', 'weight')}"
        for adapter in module.active_adapters:
            A = merged.pop(f"{name}.lora_A.{adapter}.weight")
            B = merged.pop(f"{name}.lora_B.{adapter}.weight")
            weight = merged[parameter]
            change = module.scaling[adapter] * (B @ A if weight.ndim == 2 else _of_experts(A, B, base, len(weight)))
            change = change.T if isinstance(base, Conv1D) else change  # which keeps [in, out]
            merged[parameter] = (weight.to(change.dtype) + change).to(weight.dtype)
    left = [name for name in merged if ".lora_" in name or ".modules_to_save." in name]
    if left:
        raise ConfigError(
            f"only adapters as add_lora makes them can be merged, found {left[0]} ({len(left)} such parameters); use "
            f"export_adapter, or peft's own merge_and_unload"
        )
    return {name.removeprefix(WRAPPED).replace(".base_layer", ""): weight for name, weight in merged.items()}


def _of_experts(A: Tensor, B: Tensor, base: nn.Module, num_experts: int) -> Tensor:
    """[E, out, in], or [E, in, out] where the experts keep it so: the product of each expert's own factors.

    peft stacks the factors of E experts as A [E · rank, in] and B [out, rank · E].
    """
    A_ERI = A.reshape(num_experts, -1, A.shape[-1])
    B_ORE = B.reshape(B.shape[0], -1, num_experts)
    is_transposed = bool(getattr(base, "is_transposed", False))
    return torch.einsum("ore,eri->eio" if is_transposed else "ore,eri->eoi", B_ORE, A_ERI)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"LoRA needs the extra 'lora' ({error}); run: pip install 'evenstep[lora]'") from error
    return peft


def _targets(model: PreTrainedModel, target_modules: str | Sequence[str]) -> str | list[str]:
    """What peft is given; names where all linear layers are more than can be adapted."""
    if not isinstance(target_modules, str):
        return list(target_modules)
    left_out = _scanned(model) | _linear_routers(model)
    if not left_out:
        return target_modules
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and name not in left_out
    ]


def _scanned(model: nn.Module) -> frozenset[str]:
    """Names of the linear layers of state-space mixers whose weights are read without calling the layer."""
    return frozenset(
        f"{name}.{child}"
        for name, module in model.named_modules()
        if {"A_log", "D"} <= {own for own, _ in module.named_parameters(recurse=False)}
        for child in SCANNED
        if isinstance(getattr(module, child, None), nn.Linear)
    )


def _linear_routers(model: nn.Module) -> frozenset[str]:
    """Names of the routers that are linear layers and answer with the chosen experts, to which peft cannot add."""
    return frozenset(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).__name__.endswith("Router")
    )


def _check_targets(model: PreTrainedModel, target_modules: str | Sequence[str]) -> None:
    """Refuse names that match nothing (peft ignores them) and layers whose adapters would not be exact."""
    if isinstance(target_modules, str):
        if target_modules != ALL_LINEAR:
            raise ConfigError(
                f"target_modules must be {ALL_LINEAR!r} or a list of names, found {target_modules!r}; write "
                f"[{target_modules!r}] for one name"
            )
        return
    modules = dict(model.named_modules())
    linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))}
    hint = f"this model has: {', '.join(sorted(linear))}"
    if not target_modules:
        raise ConfigError(f"target_modules must name at least one linear layer, found none; {hint}")
    for target in target_modules:
        found = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if not found:
            raise ConfigError(f"target_modules: found no layer {target!r} in {type(model).__name__}; {hint}")
        scanned = [name for name in sorted(_scanned(model)) if name == target or name.endswith(f".{target}")]
        if scanned:
            raise ConfigError(
                f"target_modules: {target!r} names {scanned[0]}, a layer of a state-space mixer that hands its weight "
                f"to a scan, where an adapter beside it would have no effect; leave it out, or use {ALL_LINEAR!r}"
            )
        routers = _linear_routers(model)
        wrong = [
            type(module).__name__
            for module in found
            if not isinstance(module, (nn.Linear, Conv1D)) or any(modules[name] is module for name in routers)
        ]
        if wrong:
            raise ConfigError(f"target_modules must be linear layers, found that {target!r} is a {wrong[0]}; {hint}")
        if any(_is_shared(model, module) for module in found):
            raise ConfigError(
                f"target_modules: {target!r} has a weight that this model uses in a second place (an output head does, "
                f"tied to the embedding), and an adapter would change only one of them; leave it out"
            )


def _is_shared(model: nn.Module, layer: nn.Module) -> bool:
    """Whether the layer's weight has a second name in the model."""
    return sum(weight is layer.weight for _, weight in model.named_parameters(remove_duplicate=False)) > 1
