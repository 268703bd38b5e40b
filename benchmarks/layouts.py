"""The same step in every layout: ``python benchmarks/layouts.py [--rows shared|alone] [--model 5m|qwen3-4b]``.

64 rows of 8 prompts × 8 rollouts: prompts of 384 tokens, completions lognormal with median 64 and sigma 0.5, random
ids, completions trained. ``shared``: the rollouts of a group begin with their prompt; ``alone``: every row has a prompt
of its own, so there is nothing to share. Every arm and gradient-sync mode runs in processes of its own, one thread per
rank on a CPU; an arm's line is that of its fastest mode. All arms must find the same loss and gradient norm.

``fixed`` runs one row per micro-batch at its own length. ``widest`` is the same with every row padded to the longest
of the window, which is what a trainer without a token budget does.

``--model qwen3-4b`` has the shape of Qwen3-4B with random weights and computes in bfloat16: for a GPU, with
``--ranks 1``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from evenstep.train import Trainer, shard
from evenstep.train.distributed import device, exchange
from evenstep.train.launch import joined, run_ranks
from evenstep.types import Row

NUM_PROMPTS, NUM_ROLLOUTS = 8, 8
PROMPT_TOKENS, MEDIAN_TOKENS, SIGMA = 384, 64, 0.5
WARM_UP = 2
ARMS = ("widest", "fixed", "padded", "packed", "tree")
MODES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "fsdp2, last": {"sync": "last"},
    "fsdp2, each": {"sync": "each"},
}
TINY = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "5m": {
        **{"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    },
    "qwen3-4b": {
        **{"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    },
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one arm in one mode; the slower rank's."""

    arm: str
    mode: str
    backend: str | None
    num_microbatches: int
    num_tokens: int  # computed, padding included, over all ranks
    seconds: list[float]  # of each step
    peak_bytes: int
    loss: float
    grad_norm: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def line(self, first: Figures) -> str:
        spread = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else [self.median] * 3
        return (
            f"| {self.arm} | {self.mode} | {self.backend or 'own'} | {self.num_microbatches} | {self.num_tokens:,} "
            f"| {self.median:.3f} ({spread[0]:.3f} to {spread[2]:.3f}) | {first.median / self.median:.2f} "
            f"| {self.peak_bytes / 2**20:,.0f} |"
        )


def make_rows(kind: str, vocab_size: int, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    rows: list[Row] = []
    for group in range(NUM_PROMPTS):
        prompt = draw.integers(vocab_size, size=PROMPT_TOKENS)
        for rollout in range(NUM_ROLLOUTS):
            size = max(1, round(float(draw.lognormal(np.log(MEDIAN_TOKENS), SIGMA))))
            own = draw.integers(vocab_size, size=(2, max(size, PROMPT_TOKENS)))
            ids = np.concatenate([prompt if kind == "shared" else own[0, :PROMPT_TOKENS], own[1, :size]])
            rows.append(
                Row(
                    row_id=f"{group}/{rollout}",
                    rollout_id=f"{group}/{rollout}",
                    group_id=f"{group}",
                    token_ids=ids,
                    loss_mask=np.arange(ids.size) >= PROMPT_TOKENS,
                    advantage=float(draw.normal()),
                )
            )
    return rows


def measure(options: argparse.Namespace) -> Figures:
    torch.manual_seed(0)
    shape = MODELS[options.model]
    with torch.device(device()):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, **TINY))
    if options.mode != "replicated":
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device().type == "cuda")
    rows = make_rows(options.rows, shape["vocab_size"], options.seed)
    layout = {"layout": "fixed" if options.arm == "widest" else options.arm}
    if options.arm == "widest":
        layout["pad_to_multiple"] = max(row.num_tokens for row in rows)
    if options.model != "5m":
        layout |= {"compute_dtype": "bfloat16", "activation_checkpointing": True}
    budget = {} if layout["layout"] == "fixed" else {"max_tokens_per_gpu": options.budget}
    trainer = Trainer(model, optimizer, max_grad_norm=1.0, **layout, **budget, **MODES[options.mode])
    seconds: list[float] = []
    for step in range(WARM_UP + options.steps):
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        result = trainer.forward_backward(rows)
        outcome = trainer.optim_step()
        if device().type == "cuda":
            torch.cuda.synchronize()
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - began)
        if step == 0:
            loss, grad_norm = result.loss, outcome.grad_norm
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device().type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    mine = Figures(
        arm=options.arm,
        mode=options.mode,
        backend=trainer.backends[result.plan.layout],
        num_microbatches=result.plan.num_microbatches,
        num_tokens=round(sum(row.num_tokens for row in rows) / result.plan.stats.padding_efficiency),
        seconds=seconds,
        peak_bytes=peak,
        loss=loss,
        grad_norm=grad_norm,
    )
    return max(exchange(mine), key=lambda figures: (figures.median, figures.peak_bytes))


def run_rank(options: argparse.Namespace) -> None:
    if device().type == "cpu":
        torch.set_num_threads(1)
    figures = measure(options)
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(dataclasses.asdict(figures)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=["shared", "alone"], default="shared")
    parser.add_argument("--model", choices=list(MODELS), default="5m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        with joined():
            run_rank(options)
        return
    rows = make_rows(options.rows, MODELS[options.model]["vocab_size"], options.seed)
    print(
        f"{len(rows)} rows ({options.rows}), {sum(row.num_tokens for row in rows):,} tokens, "
        f"{sum(row.num_trained_tokens for row in rows):,} trained; budget {options.budget:,}; {options.ranks} ranks; "
        f"{options.steps} steps after {WARM_UP}; seed {options.seed}\n"
    )
    print("| arm | fastest mode | attention | K | tokens computed | seconds (quartiles) | speed-up | peak MiB |")
    print("|" + "---|" * 8)
    first: Figures | None = None
    others: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for arm in options.arms:
            found: list[Figures] = []
            for mode in options.modes:
                out = Path(folder) / f"{arm} {mode}"
                given = [*sys.argv, "--arm", arm, "--mode", mode, "--out", str(out)]
                ended = run_ranks(["-u", *given], num_ranks=options.ranks)
                if ended.exit_codes or ended.stop_signal:
                    sys.exit(f"{arm}, {mode}: ranks ended with {ended.exit_codes}")
                found.append(Figures(**json.loads(out.read_text())))
            best = min(found, key=lambda figures: figures.median)
            first = best if first is None else first
            for figures in found:
                for name in ("loss", "grad_norm"):
                    mine, other = getattr(figures, name), getattr(first, name)
                    tolerance = 1e-5 if options.model == "5m" else 1e-2
                    assert abs(mine - other) <= tolerance * abs(other), f"{arm}, {mode}: {name} {mine}, not {other}"
            print(best.line(first), flush=True)
            others += [f"{figures.arm}, {figures.mode}: {figures.median:.3f} s" for figures in found]
    print("\nmedians by mode: " + "; ".join(others))


if __name__ == "__main__":
    main()
