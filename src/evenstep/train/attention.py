"""Attention for packed rows and prefix tries: each token sees its own row's tokens before it, and nothing else.

Functions registered with transformers' attention interface; what they need to know of the rows reaches them as a
keyword argument of the model's call. Right-padded rectangles need none of this: with causal attention a real token
never looks at the padding after it.

========  =============================================================================================================
sdpa      a fused call per node; where windows, sinks or soft caps apply, or a trie is so wide that copying keys for
          each node would need more memory than the tokens do, blocks (see ``blocks``). Everywhere.
flex      one FlexAttention kernel for the whole micro-batch, its mask made from the nodes' intervals. CUDA; on a CPU
          it has no backward pass, so only passes without gradients may ask for it.
flash     FlashAttention 2 with one length per row. Layout ``packed`` in bfloat16 on CUDA, without sinks.
========  =============================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._triton import has_triton
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.utils.import_utils import is_flash_attn_2_available

from evenstep.errors import ConfigError, PlanError
from evenstep.train.blocks import block_attention
from evenstep.train.trie import Node, paths

__all__ = ["NODES_KWARG", "Backend", "attention_for", "attention_named", "choose_backend"]

Backend = Literal["sdpa", "flex", "flash"]
NODES_KWARG = "evenstep_nodes"  # reaches the attention function through the model's keyword arguments
# fused calls copy the keys and values of each node's path: at most this many for each token, and masks of this size
MAX_COPIES = 6
MAX_MASK = 1 << 22
MIN_FLEX_DIM = 16  # of a head


def by_node(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention along the path of each node: a fused call per node, or blocks where that cannot be exact."""
    nodes = _nodes_of(module, kwargs)
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    longest = max(node.depth + node.stop - node.start for node in nodes)
    window = None if sliding_window is None or longest <= sliding_window else sliding_window
    if window is None and softcap is None and s_aux is None and _is_cheap_by_node(nodes):
        out_BHTD = _fused_by_node(query_BHTD, key_BHTD, value_BHTD, nodes, scale)
    else:
        settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": s_aux}
        out_BHTD = block_attention(query_BHTD, key_BHTD, value_BHTD, nodes, **settings)
    return out_BHTD.transpose(1, 2).contiguous(), None


def _nodes_of(module: nn.Module, kwargs: Mapping[str, Any]) -> tuple[Node, ...]:
    """What the model was called with.

    Raises:
        PlanError: the model keeps it from its attention, as models do that hand their layers no further arguments.
    """
    if NODES_KWARG not in kwargs:
        raise PlanError(
            f"layouts 'packed' and 'tree' must tell attention where a row ends, found that this model hands "
            f"{type(module).__name__} none of the keyword arguments that say so; use layout 'padded'"
        )
    return kwargs[NODES_KWARG]


def _is_cheap_by_node(nodes: tuple[Node, ...]) -> bool:
    below = [(node.depth + node.stop - node.start, node.stop - node.start) for node in nodes if node.depth]
    num_copies = sum(keys for keys, _ in below)
    return num_copies <= MAX_COPIES * nodes[-1].stop and all(keys * queries <= MAX_MASK for keys, queries in below)


def _fused_by_node(query: Tensor, key: Tensor, value: Tensor, nodes: tuple[Node, ...], scale: float) -> Tensor:
    lengths = [node.stop - node.start for node in nodes]
    is_grouped = query.shape[1] != key.shape[1]
    queries, keys, values = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    outputs: list[Tensor] = []
    for i, (node, path) in enumerate(zip(nodes, paths(nodes), strict=True)):
        mask = None
        if path:
            length = lengths[i]
            mask = torch.ones(length, node.depth + length, dtype=torch.bool, device=query.device).tril(node.depth)
        outputs.append(
            scaled_dot_product_attention(
                queries[i],
                torch.cat([keys[j] for j in (*path, i)], dim=2) if path else keys[i],
                torch.cat([values[j] for j in (*path, i)], dim=2) if path else values[i],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=is_grouped,
            )
        )
    return torch.cat(outputs, dim=2)


def by_flex(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same as ``by_node`` in one kernel, which transformers compiles once for each width."""
    nodes = _nodes_of(module, kwargs)
    if s_aux is not None and not query_BHTD.is_cuda:  # only there the kernel says what its weights summed up to
        settings: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        return by_node(module, query_BHTD, key_BHTD, value_BHTD, None, s_aux=s_aux, **settings, **kwargs)
    mask = block_mask(nodes, sliding_window, query_BHTD.device)
    inputs = (query_BHTD, key_BHTD, value_BHTD, mask)
    with _known_sizes() if query_BHTD.device.type == "cpu" else nullcontext():
        return flex_attention_forward(module, *inputs, scaling=scaling, softcap=softcap, s_aux=s_aux)


def _known_sizes() -> Any:
    """A kernel of its own for each width: with sizes left open, the C++ that torch 2.13 writes does not compile.

    It puts the block's size in place of every name that *begins* with its symbol (``ks1`` in ``ks18``).
    """
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)


@lru_cache(maxsize=4)
def block_mask(nodes: tuple[Node, ...], window: int | None, device: torch.device) -> BlockMask:
    """Which tokens see each other: key ≤ query < end of the key's node, and fewer than ``window`` positions apart."""
    lengths = torch.tensor([node.stop - node.start for node in nodes])
    end_T = torch.tensor([node.end for node in nodes]).repeat_interleave(lengths).to(device)
    shift_T = torch.tensor([node.depth - node.start for node in nodes]).repeat_interleave(lengths)
    position_T = (torch.arange(len(end_T)) + shift_T).to(device)

    def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    def sees_near(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        return (key <= query) & (query < end_T[key]) & (position_T[query] - position_T[key] < window)

    size = len(end_T)
    # compiled, it does not make the square of all pairs on its way
    is_cuda = device.type == "cuda"
    return create_block_mask(sees if window is None else sees_near, None, None, size, size, device, _compile=is_cuda)


def by_flash(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """FlashAttention 2, in which every row is a sequence of its own."""
    nodes = _nodes_of(module, kwargs)
    lengths = [node.stop - node.start for node in nodes]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query_BHTD.device)
    out_BTHD: Tensor = _flash_attention_forward(
        query_BHTD.transpose(1, 2),
        key_BHTD.transpose(1, 2),
        value_BHTD.transpose(1, 2),
        None,
        query_BHTD.shape[2],
        is_causal=True,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        cu_seq_lens_q=starts,  # type: ignore[arg-type]
        cu_seq_lens_k=starts,  # type: ignore[arg-type]
        max_length_q=max(lengths),
        max_length_k=max(lengths),
        target_dtype=torch.bfloat16,
        attn_implementation="flash_attention_2",
    )
    return out_BTHD, None


_FUNCTIONS: dict[Backend, Any] = {"sdpa": by_node, "flex": by_flex, "flash": by_flash}
# transformers looks for the words sdpa and flash in a name, and then for a model's own support of these
_NAMES: dict[Backend, str] = {"sdpa": "evenstep_nodes", "flex": "evenstep_intervals", "flash": "evenstep_rows"}
for _backend, _function in _FUNCTIONS.items():
    AttentionInterface.register(_NAMES[_backend], _function)


def choose_backend(
    model: PreTrainedModel, layout: str, requested: str, *, compute_dtype: str | None, is_trained: bool
) -> Backend | None:
    """The fastest backend that is exact for this model in this layout; None: the model's own attention.

    Args:
        model: where it will run.
        layout: of the micro-batches.
        requested: ``auto``, or a backend by name.
        compute_dtype: of the forward pass, or None for that of the parameters.
        is_trained: whether a backward pass follows.

    Raises:
        ConfigError: the backend that was asked for cannot do it; says why.
    """
    if layout not in ("packed", "tree"):
        if requested != "auto":
            raise ConfigError(
                f"attention = {requested!r} is a way to do layouts packed and tree, found it with layout {layout!r}, "
                f"where the model's own attention runs; leave it out"
            )
        return None
    parameter = next(model.parameters())
    problems = {
        "sdpa": None,
        "flex": _flex_problem(model, parameter, is_trained),
        "flash": _flash_problem(model, parameter, layout, compute_dtype),
    }
    if requested == "auto":
        order: tuple[Backend, ...] = ("flash", "flex", "sdpa") if parameter.is_cuda else ("sdpa",)
        return next(backend for backend in order if problems[backend] is None)
    if problems[requested] is not None:
        raise ConfigError(f"attention = {requested!r} {problems[requested]}; leave it out, or use 'sdpa'")
    return requested  # type: ignore[return-value]


def _flex_problem(model: PreTrainedModel, parameter: Tensor, is_trained: bool) -> str | None:
    if not parameter.is_cuda:
        return "has no backward pass on a CPU" if is_trained else None
    # as written down: a model whose layers differ refuses to name one number for all of them
    config: dict[str, Any] = model.config.get_text_config().to_dict()
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if parameter.dtype == torch.float64:
        return "does not compute in float64"
    if not has_triton():
        return "is compiled by Triton, which is not installed"
    return None if dim >= MIN_FLEX_DIM else f"needs heads of at least {MIN_FLEX_DIM} dimensions, found {dim}"


def _flash_problem(model: PreTrainedModel, parameter: Tensor, layout: str, compute_dtype: str | None) -> str | None:
    if not (parameter.is_cuda and is_flash_attn_2_available()):
        return "needs a CUDA device and the package flash-attn"
    if layout != "packed":
        return f"knows rows and no tries, found layout {layout!r}"
    if compute_dtype != "bfloat16":
        return f"computes in half precision, found compute_dtype {compute_dtype!r}"
    sinks = [name for name, _ in model.named_parameters() if name.endswith("sinks")]
    return f"has no attention sinks, found {sinks[0]}" if sinks else None


@contextmanager
def attention_for(model: PreTrainedModel, backend: Backend | None) -> Iterator[None]:
    """Switch the model to a backend; covers the backward pass too, which may recompute."""
    if backend is None:
        yield
        return
    with attention_named(model, _NAMES[backend]):
        yield


@contextmanager
def attention_named(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch the decoder to one of transformers' attention functions; a vision tower keeps its own."""
    text = model.config.get_text_config()
    keys = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    before = str(text._attn_implementation)
    model.set_attn_implementation({keys[0]: name} if keys else name)
    try:
        yield
    finally:
        model.set_attn_implementation({keys[0]: before} if keys else before)
