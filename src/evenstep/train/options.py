"""Every setting that decides a step, in one value; ranks compare it before they start."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from evenstep.credit import NORMALISERS
from evenstep.errors import ConfigError
from evenstep.train.losses import LOSSES, VALUE_LOSSES, LossFunction

__all__ = ["StepOptions"]

OPTIONAL = ("dual_clip", "importance_cap", "value_clip", "max_grad_norm")  # numbers that may be None: off


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Keyword arguments of ``Trainer``.

    Raises:
        ConfigError: a value outside its range, or options that contradict each other.

    >>> StepOptions(layout="packed", max_tokens_per_gpu=4096).describe()[:61]
    "layout='packed', max_tokens_per_gpu=4096, pad_to_multiple=1, "
    """

    # plan
    layout: Literal["fixed", "padded", "packed", "tree", "auto"] = "padded"  # auto: the cheapest of the last three
    max_tokens_per_gpu: int | None = None  # most tokens a micro-batch may occupy on a rank; None: no limit
    pad_to_multiple: int = 1  # widths are rounded up to it
    bucket: float | None = None  # widths are rungs of a ladder that wastes at most this share; None: no ladder
    micro_batch_rows: int = 1  # rows of a micro-batch in layout fixed
    logprob_micro_batch_rows: int = 1  # rows of a log-prob micro-batch; with fixed, fillers cover both
    pad_scope: Literal["window", "group"] = "window"  # window or group: what fixed fills up to a multiple
    effort: Literal["default", "high"] = "default"  # of the planner: default or high
    # weights
    normaliser: str = "token"  # token, rollout, prompt, constant or row
    normaliser_constant: float | None = None  # the constant of constant
    allow_row_splits: bool = False  # let row weigh rollouts that have several rows
    # loss
    loss: str | LossFunction = "ppo_clip"  # a name in LOSSES (of a critic: in VALUE_LOSSES), or a function like them
    clip_low: float = 0.2  # the ratio is clipped below at 1 - clip_low
    clip_high: float = 0.2  # and above at 1 + clip_high
    dual_clip: float | None = None  # with a negative advantage the loss is at most dual_clip times it; above 1
    ratio_unit: str = "rollout"  # whose length-normalised ratio gspo takes: rollout or segment
    kl_coef: float = 0.0  # times the KL estimate against ref_logprobs, added to the loss
    kl_estimator: str = "k3"  # k2 or k3
    entropy_coef: float = 0.0  # times the entropy, subtracted from the loss
    moe_balance_coef: float = 0.0  # times the load-balancing loss of a mixture of experts, added to the loss
    # tokens go to the experts that their rows carry: off, recorded (rows without them route freely) or required
    routing_replay: Literal["off", "recorded", "required"] = "recorded"
    importance_cap: float | None = None  # truncated importance weight min(cap, exp(old - engine)) on the policy term
    # policy terms of rollouts whose exp(mean of old - engine) is outside (low, high) are 0
    sequence_mask: tuple[float, float] | None = None
    value_clip: float | None = None  # critic: how far a value may leave the old one before its loss is clipped
    temperature: float = 1.0  # of sampling; logits are divided by it in every pass
    # execution
    max_grad_norm: float | None = None  # clip the summed gradient to this global norm
    compute_dtype: Literal["float32", "bfloat16"] | None = None  # of the forward; None: the parameters' own
    activation_checkpointing: bool = False  # recompute each layer's activations in the backward pass: less memory
    # of layouts packed and tree: sdpa, flex (CUDA), flash (packed in bfloat16, CUDA), or auto: the fastest exact one
    attention: Literal["auto", "sdpa", "flex", "flash"] = "auto"
    sync: str = "last"  # reduce sharded gradients once per window (last) or in every micro-batch (each: less memory)
    logprob_chunk_tokens: int = 1024  # trained tokens whose logits exist at once, at most; fewer on a CPU

    def __post_init__(self) -> None:
        choices = {
            "layout": ("fixed", "padded", "packed", "tree", "auto"),
            "pad_scope": ("window", "group"),
            "effort": ("default", "high"),
            "normaliser": NORMALISERS,
            "ratio_unit": ("rollout", "segment"),
            "kl_estimator": ("k2", "k3"),
            "routing_replay": ("off", "recorded", "required"),
            "compute_dtype": (None, "float32", "bfloat16"),
            "attention": ("auto", "sdpa", "flex", "flash"),
            "sync": ("last", "each"),
        }
        for name in ("allow_row_splits", "activation_checkpointing"):
            if not isinstance(self._value(name), bool):
                raise ConfigError(f"{name} must be True or False, found {self._value(name)!r}")
        whole = ("pad_to_multiple", "micro_batch_rows", "logprob_micro_batch_rows", "logprob_chunk_tokens")
        for name in (*whole, *(() if self.max_tokens_per_gpu is None else ("max_tokens_per_gpu",))):
            value = self._value(name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, found {value!r}")
        for name, allowed in choices.items():
            if self._value(name) not in allowed:
                hint = "; k1 has no gradient on-policy" if name == "kl_estimator" else ""
                raise ConfigError(
                    f"{name} must be one of {', '.join(map(str, allowed))}, found {self._value(name)!r}{hint}"
                )
        if isinstance(self.loss, str) and self.loss not in LOSSES | VALUE_LOSSES:
            raise ConfigError(
                f"unknown loss {self.loss!r}; choose one of {', '.join(LOSSES)} (a critic: {', '.join(VALUE_LOSSES)}), "
                f"or pass a function"
            )
        if not isinstance(self.loss, str) and not callable(self.loss):
            raise ConfigError(f"loss must be a name or a function, found {self.loss!r}")
        lowest = {
            "clip_low": (0.0, True),
            "clip_high": (0.0, True),
            "dual_clip": (1.0, False),
            "kl_coef": (0.0, True),
            "entropy_coef": (-math.inf, False),
            "moe_balance_coef": (0.0, True),
            "importance_cap": (0.0, False),
            "value_clip": (0.0, False),
            "temperature": (0.0, False),
            "max_grad_norm": (0.0, False),
        }
        for name, (limit, inclusive) in lowest.items():
            value = self._value(name)
            if value is None and name in OPTIONAL:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ConfigError(f"{name} must be a number, found {value!r}")
            if not math.isfinite(value) or not (value >= limit if inclusive else value > limit):
                raise ConfigError(f"{name} must be {'at least' if inclusive else 'above'} {limit:g}, found {value}")
        if self.bucket is not None and not (isinstance(self.bucket, float) and 0 < self.bucket < 1):
            raise ConfigError(f"bucket must be a share between 0 and 1, found {self.bucket!r}")
        if self.clip_low >= 1:
            raise ConfigError(f"clip_low must be at least 0 and below 1, found {self.clip_low}")
        if (self.normaliser_constant is None) == (self.normaliser == "constant"):
            raise ConfigError(
                f"normaliser_constant belongs to normaliser 'constant' alone, found {self.normaliser_constant} with "
                f"{self.normaliser!r}; give both or neither"
            )
        if self.moe_balance_coef and self.loss in VALUE_LOSSES:
            raise ConfigError(
                f"moe_balance_coef is a term of a policy's loss, found {self.moe_balance_coef} with loss "
                f"{self.loss!r}; leave it out"
            )
        if self.sequence_mask is not None:
            bounds = self.sequence_mask
            is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
            if (
                not is_pair
                or not all(isinstance(x, (int, float)) for x in bounds)
                or not 0 <= bounds[0] < 1 < bounds[1]
            ):
                raise ConfigError(f"sequence_mask must be (low, high) with 0 <= low < 1 < high, found {bounds!r}")

    @property
    def loss_function(self) -> LossFunction:
        return (LOSSES | VALUE_LOSSES)[self.loss] if isinstance(self.loss, str) else self.loss

    @property
    def window_settings(self) -> dict[str, Any]:
        """What a prepared window's plan and weights follow from, but for the budget."""
        names = (
            "layout",
            "pad_to_multiple",
            "bucket",
            "micro_batch_rows",
            "normaliser",
            "normaliser_constant",
            "allow_row_splits",
            "routing_replay",
        )
        return {name: self._value(name) for name in names}

    def describe(self) -> str:
        """All options as text that is equal in every process."""
        named = {field.name: self._value(field.name) for field in fields(self)}
        if not isinstance(self.loss, str):
            named["loss"] = _name(self.loss)
        return ", ".join(f"{name}={value!r}" for name, value in named.items())

    def _value(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def _name(loss: Callable[..., Any]) -> str:
    """A loss function's name, equal in every process."""
    if isinstance(loss, partial):
        return f"partial({_name(loss.func)}, {loss.args!r}, {loss.keywords!r})"
    named = loss if inspect.isroutine(loss) else type(loss)
    return f"{named.__module__}.{named.__qualname__}"
