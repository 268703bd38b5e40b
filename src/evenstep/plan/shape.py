"""The shape of a decoder: its parameters and its FLOPs, from the numbers in a model's ``config.json``.

Sources: the usual FLOP count of a transformer, 2 per weight and token and 4 per head dimension and attended pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.errors import PlanError

__all__ = ["PRESETS", "ModelShape"]

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense or mixture-of-experts decoder, all layers alike.

    >>> qwen = PRESETS["qwen3-4b"]
    >>> round(qwen.num_parameters / 1e9, 2), round(qwen.token_flops / 1e9, 2)
    (4.02, 8.04)

    Raises:
        PlanError: a size is below 1, or more layers slide than there are.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int  # of one expert
    vocab_size: int
    is_gated_ffn: bool = True
    experts_per_token: int = 1  # those that a token visits, shared ones included
    num_experts: int | None = 1  # of a layer, shared ones included; None: the config does not say
    is_tied: bool = False  # the output layer is the embedding
    sliding_window: int | None = None  # tokens a sliding layer sees
    num_sliding_layers: int = 0

    def __post_init__(self) -> None:
        for name in (
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"),
            *("experts_per_token", "num_experts"),
        ):
            value: Any = getattr(self, name)
            if name == "num_experts" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{name} must be ≥ 1, found {value!r}; read it from the model's config")
        if not 0 <= self.num_sliding_layers <= self.num_layers:
            raise PlanError(
                f"num_sliding_layers must be within 0 and {self.num_layers}, found {self.num_sliding_layers}"
            )

    @property
    def _attention_weights(self) -> int:
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def _expert_weights(self) -> int:
        return self.hidden_size * self.ffn_size * (3 if self.is_gated_ffn else 2)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention, all experts, their router, two norms."""
        if self.num_experts is None:
            raise PlanError("weights of a mixture of experts need the number of experts, found none in its config")
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        return self._attention_weights + self.num_experts * self._expert_weights + router + 2 * self.hidden_size

    @property
    def outer_parameters(self) -> int:
        """Weights outside the layers: embedding, output layer unless it is tied, last norm."""
        return self.hidden_size * (self.vocab_size * (1 if self.is_tied else 2) + 1)

    @property
    def num_parameters(self) -> int:
        """All weights."""
        return self.num_layers * self.layer_parameters + self.outer_parameters

    @property
    def token_flops(self) -> float:
        """FLOPs of a token's forward without attention between tokens: 2 for each weight that it meets."""
        layer = self._attention_weights + self.experts_per_token * self._expert_weights
        return 2.0 * (self.num_layers * layer + self.hidden_size * self.vocab_size)

    @property
    def pair_flops(self) -> float:
        """FLOPs of one attended pair's forward: 4 per head dimension, over all heads and layers."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim

    @property
    def layer_values(self) -> int:
        """Values that one layer keeps for a token's backward: ``6·hidden + 2·(heads + kv heads)·dim + 3·ffn·experts``.

        Inputs of the norms, projections and residual sums; queries, keys, values and the attention's output; gate, up
        and their product. Scores are not kept: attention kernels work them out again.
        """
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return 6 * self.hidden_size + attention + 3 * self.ffn_size * self.experts_per_token

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the shape from a Hugging Face model config given as a mapping (``config.to_dict()`` or ``config.json``).

        Raises:
            PlanError: a needed key is absent.
        """
        text: Mapping[str, Any] = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config

        def need(*names: str) -> int:
            for name in names:
                if text.get(name) is not None:
                    return int(text[name])
            raise PlanError(
                f"the model config must have one of {names}, found keys {sorted(text)[:40]}; use from_shape"
            )

        num_layers = need("num_hidden_layers", "n_layer")
        hidden_size = need("hidden_size", "n_embd")
        num_heads = need("num_attention_heads", "n_head")
        window = text.get("sliding_window")
        layer_types = text.get("layer_types")
        if window is None or text.get("use_sliding_window") is False:
            num_sliding = 0
        elif layer_types is not None:
            num_sliding = sum(kind == "sliding_attention" for kind in layer_types)
        else:
            num_sliding = num_layers
        is_gpt2_like = text.get("n_embd") is not None
        is_moe = text.get("num_experts_per_tok") is not None
        shared = int(text.get("n_shared_experts") or 0)
        experts = next((text[k] for k in _EXPERT_KEYS if text.get(k) is not None), None)
        if is_moe:
            ffn_size = need("moe_intermediate_size", "intermediate_size")
        elif is_gpt2_like and text.get("intermediate_size") is None:
            ffn_size = int(text.get("n_inner") or 4 * hidden_size)
        else:
            ffn_size = need("intermediate_size")
        return cls(
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
            head_dim=int(text.get("head_dim") or hidden_size // num_heads),
            ffn_size=ffn_size,
            vocab_size=need("vocab_size"),
            is_gated_ffn=not is_gpt2_like,
            experts_per_token=need("num_experts_per_tok") + shared if is_moe else 1,
            num_experts=1 if not is_moe else None if experts is None else int(experts) + shared,
            is_tied=bool(text.get("tie_word_embeddings", is_gpt2_like)),
            sliding_window=None if window is None else int(window),
            num_sliding_layers=num_sliding,
        )


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, is_tied: bool, kv_heads: int = 8) -> ModelShape:
    return ModelShape(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        ffn_size=ffn,
        vocab_size=151936,
        is_tied=is_tied,
    )


def _llama3(hidden: int, layers: int, heads: int, head_dim: int, ffn: int, *, is_tied: bool) -> ModelShape:
    return ModelShape(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=128256,
        is_tied=is_tied,
    )


# Numbers of the models' published config.json files.
PRESETS: dict[str, ModelShape] = {
    "llama-3.1-8b": _llama3(4096, 32, 32, 128, 14336, is_tied=False),
    "llama-3.2-1b": _llama3(2048, 16, 32, 64, 8192, is_tied=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 128, 8192, is_tied=True),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, is_tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, is_tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, is_tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, is_tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408, is_tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, is_tied=False),
    "qwen3-30b-a3b": ModelShape(
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_size=768,
        vocab_size=151936,
        experts_per_token=8,
        num_experts=128,
    ),
    "smollm2-135m": ModelShape(
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_size=1536,
        vocab_size=49152,
        is_tied=True,
    ),
}
