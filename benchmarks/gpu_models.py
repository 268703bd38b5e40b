"""gpt-oss padded under a budget against one row per micro-batch, with compilations counted per ladder of widths.

    python benchmarks/gpu_models.py           # a CUDA device: layers of gpt-oss-20b's shape, FlexAttention, bfloat16
    python benchmarks/gpu_models.py --tiny    # a CPU: a tiny shape and plain attention, to see that the script works

Random weights. Every step has a window of its own, the same for every arm: rows of lognormal lengths, the last two
thirds of each trained. ``fixed`` runs one row of its own length per micro-batch. The others are layout padded under the
budget: with widths as they come, with two ladders of widths (``plan.bucket``) and in multiples of 1,024 tokens.
FlexAttention is compiled for each new shape: ``graphs`` are those that were compiled in all steps, ``in time`` those in
the steps that are timed, ``shapes`` the different shapes that the model was given. The speed-up is the median over the
windows of fixed's seconds / the arm's. All arms must find the loss and the gradient norm of the first.

On several GPUs: torchrun --nproc-per-node N benchmarks/gpu_models.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters
from transformers import GptOssConfig, GptOssForCausalLM

from evenstep.rank_exit import exits_at_once
from evenstep.train import Trainer, shard
from evenstep.train.distributed import device
from evenstep.train.launch import joined
from evenstep.types import Row

ARMS: dict[str, dict[str, Any]] = {
    "fixed": {"layout": "fixed"},
    "padded": {"layout": "padded"},
    "bucket-0.125": {"layout": "padded", "bucket": 0.125},
    "bucket-0.5": {"layout": "padded", "bucket": 0.5},
    "multiple": {"layout": "padded"},
}
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all arms share."""

    shape: dict[str, Any]
    attention: str
    options: dict[str, Any]
    budget: int
    multiple: int  # of arm "multiple"
    num_rows: int
    median_tokens: int
    max_tokens: int
    tolerance: float  # of loss and gradient norm, relative


REAL = Setting(
    shape={
        **{"vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64},
        **{"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
        **{"sliding_window": 128, "max_position_embeddings": 131_072},
    },
    attention="flex_attention",
    options={"compute_dtype": "bfloat16", "activation_checkpointing": True},
    budget=16_384,
    multiple=1024,
    num_rows=64,
    median_tokens=900,
    max_tokens=8192,
    tolerance=2e-2,
)
TINY = Setting(
    shape={
        **{"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"sliding_window": 5, "max_position_embeddings": 256},
    },
    attention="eager",
    options={},
    budget=200,
    multiple=64,
    num_rows=12,
    median_tokens=20,
    max_tokens=60,
    tolerance=1e-4,
)


@dataclasses.dataclass(slots=True, kw_only=True)
class Figures:
    """What an arm did, by step."""

    seconds: list[float] = dataclasses.field(default_factory=list[float])
    losses: list[float] = dataclasses.field(default_factory=list[float])
    norms: list[float] = dataclasses.field(default_factory=list[float])
    efficiencies: list[float] = dataclasses.field(default_factory=list[float])
    num_microbatches: list[int] = dataclasses.field(default_factory=list[int])
    shapes: set[tuple[int, ...]] = dataclasses.field(default_factory=set[tuple[int, ...]])
    num_graphs: int = 0
    num_graphs_in_time: int = 0
    peak_bytes: int = 0


def make_rows(setting: Setting, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    sizes = np.clip(draw.lognormal(np.log(setting.median_tokens), 0.8, setting.num_rows), 3, setting.max_tokens)
    rows: list[Row] = []
    for i, size in enumerate(sizes.astype(int).tolist()):
        rows.append(
            Row(
                row_id=i,
                rollout_id=i,
                group_id=i // 4,
                token_ids=draw.integers(setting.shape["vocab_size"], size=size),
                loss_mask=np.arange(size) >= max(1, size // 3),
                advantage=float(draw.normal()),
            )
        )
    return rows


def make_model(setting: Setting, num_layers: int) -> Any:
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
    rope = {"rope_type": "default", "rope_theta": 150_000.0}
    torch.manual_seed(0)
    with torch.device(device()):
        config = GptOssConfig(
            **setting.shape,
            **NO_SPECIAL,
            num_hidden_layers=num_layers,
            layer_types=kinds,
            rope_parameters=rope,
            attn_implementation=setting.attention,
        )
        return GptOssForCausalLM(config)


def compiled_graphs() -> int:
    """Graphs that torch has compiled since the counters were cleared."""
    return int(counters["stats"]["unique_graphs"])


def measure(setting: Setting, arm: str, options: argparse.Namespace) -> Figures:
    torch._dynamo.reset()
    counters.clear()
    model = make_model(setting, options.layers)
    if dist.is_initialized():
        shard(model)
    is_cuda = device().type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=is_cuda)
    layout = dict(ARMS[arm])
    layout |= {} if arm == "fixed" else {"max_tokens_per_gpu": setting.budget}
    layout |= {"pad_to_multiple": setting.multiple} if arm == "multiple" else {}
    trainer = Trainer(model, optimizer, max_grad_norm=1.0, **setting.options, **layout)
    found = Figures()
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: found.shapes.add(tuple(args[0].shape)))
    before_timing = 0
    for step in range(options.warm_up + options.steps):
        rows = make_rows(setting, options.seed + step)
        before_timing = compiled_graphs() if step == options.warm_up else before_timing
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        result = trainer.forward_backward(rows)
        outcome = trainer.optim_step()
        if is_cuda:
            torch.cuda.synchronize()
        if step >= options.warm_up:
            found.seconds.append(time.perf_counter() - began)
        found.losses.append(result.loss)
        found.norms.append(outcome.grad_norm)
        found.efficiencies.append(result.plan.stats.padding_efficiency)
        found.num_microbatches.append(result.plan.num_microbatches)
    found.num_graphs = compiled_graphs()
    found.num_graphs_in_time = found.num_graphs - before_timing
    found.peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else 0
    return found


def line(arm: str, found: Figures, first: Figures) -> str:
    speed_ups = [a / b for a, b in zip(first.seconds, found.seconds, strict=True)]
    return (
        f"| {arm} | {statistics.mean(found.num_microbatches):.1f} | {statistics.mean(found.efficiencies):.1%} "
        f"| {len(found.shapes)} | {found.num_graphs} | {found.num_graphs_in_time} "
        f"| {statistics.median(found.seconds):.3f} | {statistics.median(speed_ups):.2f} "
        f"| {found.peak_bytes / 2**30:.2f} |"
    )


def compare(setting: Setting, options: argparse.Namespace) -> None:
    """Run every arm on the same windows, print a line for each, and check that they agree."""
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    where = torch.cuda.get_device_name() if device().type == "cuda" else "CPU"
    if is_first_rank:
        print(
            f"gpt-oss, {options.layers} layers of hidden size {setting.shape['hidden_size']}, {setting.attention}, "
            f"{where}; {setting.num_rows} rows a window, budget {setting.budget:,}; {options.steps} steps after "
            f"{options.warm_up}\n\n| arm | K | padding efficiency | shapes | graphs | in time | seconds | speed-up "
            f"| peak GiB |\n|" + "---|" * 9
        )
    first: Figures | None = None
    for arm in options.arms:
        found = measure(setting, arm, options)
        first = found if first is None else first
        for name in ("losses", "norms"):
            ours, theirs = getattr(found, name)[0], getattr(first, name)[0]
            if abs(ours - theirs) > setting.tolerance * max(abs(theirs), 1e-3):
                sys.exit(f"{arm}: {name} of the first window are {ours}, not {theirs}")
        if is_first_rank:
            print(line(arm, found, first), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, on whatever there is")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("this measures FlexAttention on a GPU, and torch finds no CUDA device; --tiny runs it on a CPU")
    # above its limit torch would run FlexAttention uncompiled without a word
    limits: dict[str, Any] = {"recompile_limit": 512, "accumulated_recompile_limit": 4096}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(**limits, fail_on_recompile_limit_hit=True))
        if torch.distributed.is_torchelastic_launched():
            stack.enter_context(joined())
        compare(TINY if options.tiny else REAL, options)


if __name__ == "__main__":
    with exits_at_once():
        main()
