"""What a model and its optimizer must be before they are trained; everything else is refused with its reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from evenstep.errors import ConfigError, StateError
from evenstep.media import VisionSpec

__all__ = [
    "refuse_other_parameters",
    "refuse_thawed_parameters",
    "refuse_tower_alone",
    "refuse_training_mode",
    "require_master_dtype",
]


def refuse_other_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must hold just what trains: a gradient that nothing steps would still count in the norm."""
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for key, name in trained.items() if key not in set(map(id, held))]
    if missing or not trained:
        raise ConfigError(
            f"the optimizer must hold the model's trainable parameters, found {len(missing)} of {len(trained)} that "
            f"are not among its {len(held)} ({', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}); build it "
            f"after the model is sharded, from model.parameters(), or set requires_grad to False for what shall stay"
        )


def refuse_thawed_parameters(model: nn.Module, trained: Collection[str]) -> None:
    """What trains is known from the start: a gradient that came later would not be summed over ranks, nor clipped."""
    now = {name for name, p in model.named_parameters() if p.requires_grad}
    if changed := sorted(now.symmetric_difference(trained)):
        raise StateError(
            f"a Trainer trains what required a gradient when it was built, found {len(changed)} parameters frozen or "
            f"thawed since ({', '.join(changed[:3])}{' …' if len(changed) > 3 else ''}); build a new Trainer with this "
            f"model and optimizer"
        )


def refuse_training_mode(model: PreTrainedModel) -> None:
    """Activation checkpointing runs in training mode, where dropout, router jitter and batch norm would be active."""
    whole = model.config.to_dict()
    parts = [whole, *(value for value in whole.values() if isinstance(value, dict))]  # of a vision model: text, vision
    settings = {
        name: value
        for part in parts
        for name, value in part.items()
        if isinstance(name, str)  # others are of labels
        and ("dropout" in name or "jitter" in name)
        and isinstance(value, (int, float))
        and value
    }
    modules = {
        name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    }
    modules |= {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p}
    if settings or modules:
        raise ConfigError(
            f"activation_checkpointing needs a model without dropout, router noise or batch norm, found "
            f"{settings or modules}; set it to 0 in the model's configuration before loading it"
        )


def refuse_tower_alone(trained: Iterable[str], vision: VisionSpec | None) -> None:
    """Rows of text give a vision tower no gradient, so where it alone trains a window of text could not be run."""
    if vision is not None and all("visual" in name.split(".") for name in trained):
        raise ConfigError(
            "a policy must train more than its vision tower, found that alone: rows without images would have no "
            "gradient; let the decoder train too, or with adapters name layers of it in target_modules"
        )


def require_master_dtype(model: nn.Module) -> None:
    """Master parameters are float32 or float64, whatever the passes compute in."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"master parameters must be float32 (or float64), found {parameter.dtype} in {name}; small updates "
                f"vanish in half precision: load the model with dtype=torch.float32"
            )
