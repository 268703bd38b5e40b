"""Tiny random models, in float32 or in *true* float64, and models whose log-probs are known by hand.

transformers computes RMSNorm, the rotary angles and the softmax of attention and routers in float32 whatever the
model's dtype, so a "float64" model is only half true. ``true_float64()`` replaces those casts for the length of a
``with`` block, and ``no_float32()`` fails on any operation, forward or backward, that yields a floating-point tensor of
another dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import transformers.models.gemma2.modeling_gemma2 as gemma2
import transformers.models.gemma3.modeling_gemma3 as gemma3
import transformers.models.gpt_oss.modeling_gpt_oss as gpt_oss
import transformers.models.llama.modeling_llama as llama
import transformers.models.mixtral.modeling_mixtral as mixtral
import transformers.models.qwen3.modeling_qwen3 as qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tiny_hybrids import HYBRIDS, hybrid_model, keeps_float64

VOCAB = 23
NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2  # of the families with experts
WINDOW = 5  # tokens that a layer with a sliding window sees: gemma2, gemma3, gpt_oss; every other layer has one
FAMILIES = ("qwen3", "llama", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "mixtral")


def tiny_model(
    family: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    attention: str = "sdpa",
    num_layers: int = 2,
    is_tied: bool = False,
    scale: float = 0.4,
    experts: str = "eager",
    head_dim: int = 4,
) -> Any:
    """A causal LM of a few thousand parameters whose weights are a pure function of ``seed``, whatever the dtype.

    Weights are drawn in float32 with standard deviation ``scale``. At 0.4 attention is far from uniform, and a token
    that sees too much changes its log-prob by tenths; rounding to float32 alone then moves the gradient by up to 3e-6.
    At 0.15, nearer to a model in use, that is 0.3e-6.

    Qwen3 and Llama have plain attention; Gemma 2 windows and capped scores, Gemma 3 windows with rotary angles of their
    own, gpt-oss windows, sinks and experts (and no fused attention); those of ``HYBRIDS`` carry a state.

    ``experts`` is how transformers multiplies with experts: its default ``grouped_mm`` knows no float64.
    """
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "tie_word_embeddings": is_tied,
        "attn_implementation": attention,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
    elif family == "qwen3_moe":
        shape |= {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 12, "norm_topk_prob": True}
        shape |= {"num_experts_per_tok": EXPERTS_PER_TOKEN, "experts_implementation": experts}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    elif family == "mixtral":
        shape |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN}
        model = MixtralForCausalLM(MixtralConfig(**shape, experts_implementation=experts))
    elif family in ("gemma2", "gemma3"):
        shape |= {"sliding_window": WINDOW, "query_pre_attn_scalar": 4}
        shape |= {"layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]}
        if family == "gemma2":
            shape |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
            shape |= {"attn_implementation": "eager"}
            model = Gemma2ForCausalLM(Gemma2Config(**shape))
        else:
            model = Gemma3ForCausalLM(Gemma3TextConfig(**shape))
    elif family == "gpt_oss":
        shape |= {"sliding_window": WINDOW, "attn_implementation": "eager", "experts_implementation": experts}
        shape |= {"layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]}
        shape |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN}
        shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        model = GptOssForCausalLM(GptOssConfig(**shape))
    elif family in HYBRIDS:
        model = hybrid_model(family, shape | {"experts_implementation": experts})
    else:
        assert family == "llama"
        model = LlamaForCausalLM(LlamaConfig(**shape))
    generator = torch.Generator().manual_seed(seed)
    center = 0.0 if family.startswith("gemma") else 1.0  # of norms: Gemma adds the 1 itself
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(center + 0.5 * scale * noise if parameter.ndim == 1 else scale * noise)
    return with_dtype(model, dtype)


def bigram_model(probabilities_VV: Sequence[Sequence[float]], *, dtype: torch.dtype = torch.float64) -> Any:
    """A Llama model with P(next | current) given by hand: attention and MLP are cut off, the head holds log P."""
    vocab = len(probabilities_VV)
    hidden = 4 * math.ceil(vocab / 4)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model = with_dtype(model, dtype)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(1e6 * torch.eye(vocab, hidden))
        model.model.norm.weight.fill_(hidden**-0.5)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :vocab].copy_(torch.tensor(probabilities_VV, dtype=torch.float64).log().T)
    return model


def with_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model in ``dtype``; in float64 the rotary frequencies are computed anew instead of rounded."""
    model = model.to(dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if isinstance(module, ROTARY):
                module.inv_freq = _frequencies(module.config.rope_parameters, module.inv_freq)
            elif isinstance(module, gemma3.Gemma3RotaryEmbedding):
                for kind, parameters in module.config.rope_parameters.items():
                    name = f"{kind}_inv_freq"
                    setattr(module, name, _frequencies(parameters, getattr(module, name)))
    return model


def _frequencies(rope_parameters: Any, rounded: Tensor) -> Tensor:
    dim = 2 * rounded.numel()
    return 1.0 / rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


ROTARY = (
    gemma2.Gemma2RotaryEmbedding,
    gpt_oss.GptOssRotaryEmbedding,
    llama.LlamaRotaryEmbedding,
    mixtral.MixtralRotaryEmbedding,
    qwen3.Qwen3RotaryEmbedding,
    qwen3_moe.Qwen3MoeRotaryEmbedding,
)


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def _gemma3_rotary(self: Any, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].to(x.dtype) * getattr(self, f"{layer_type}_inv_freq")
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _gpt_oss_rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].to(x.dtype) * self.inv_freq
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


def _router(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden_states.reshape(-1, self.hidden_dim) @ self.weight.T
    scores, experts = torch.topk(torch.softmax(logits, dim=-1), self.top_k, dim=-1)
    return logits, scores / scores.sum(dim=-1, keepdim=True), experts


@contextlib.contextmanager
def true_float64(family: str | None = None) -> Iterator[None]:
    """Within the block, the tiny models keep the dtype of their inputs throughout; hybrids where ``family`` is one."""
    norms = (
        *(gpt_oss.GptOssRMSNorm, llama.LlamaRMSNorm, mixtral.MixtralRMSNorm, qwen3.Qwen3RMSNorm),
        qwen3_moe.Qwen3MoeRMSNorm,
    )
    modules = (gemma2, gemma3, gpt_oss, llama, mixtral, qwen3, qwen3_moe)
    routers = (mixtral.MixtralTopKRouter, qwen3_moe.Qwen3MoeTopKRouter)
    replaced: list[tuple[type | ModuleType, str, Any]] = [
        *((norm, "forward", _rms_norm) for norm in norms),
        *((norm, "forward", _gemma_norm) for norm in (gemma2.Gemma2RMSNorm, gemma3.Gemma3RMSNorm)),
        *((rotary, "forward", _rotary) for rotary in ROTARY if rotary is not gpt_oss.GptOssRotaryEmbedding),
        (gpt_oss.GptOssRotaryEmbedding, "forward", _gpt_oss_rotary),
        (gemma3.Gemma3RotaryEmbedding, "forward", _gemma3_rotary),
        *((router, "forward", _router) for router in routers),
        *((module, "eager_attention_forward", _eager_attention) for module in modules),
    ]
    originals = [vars(owner)[name] for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        with keeps_float64() if family in HYBRIDS else contextlib.nullcontext():
            yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


class _OnlyFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                raise AssertionError(f"{func} gave a tensor of dtype {leaf.dtype}, shape {tuple(leaf.shape)}")
        return out


def no_float32() -> TorchDispatchMode:
    """A block in which no operation, forward or backward, may yield a floating-point tensor other than float64."""
    return _OnlyFloat64()
