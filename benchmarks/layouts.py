"""The same step in every layout: ``python benchmarks/layouts.py [--rows shared|alone|lognormal] [--model ...]``.

64 rows of 8 prompts × 8 rollouts, random ids, completions trained. ``shared``: prompts of 384 tokens that the rollouts
of a group begin with, completions lognormal with median 64 and sigma 0.5; ``alone``: the same, but every row has a
prompt of its own, so there is nothing to share; ``lognormal``: prompts of 16 tokens, and whole rows whose lengths are
the 64 evenly spaced quantiles of a lognormal with median 125 and sigma 0.75 (longest 766), in an order by seed. Every
arm and gradient-sync mode runs in processes of its own, one thread per rank on a CPU; an arm's line is that of its
fastest mode. All arms must find the same loss and gradient norm.

``fixed`` runs one row per micro-batch at its own length. ``widest`` is the same with every row padded to the longest
of the window, which is what a trainer without a token budget does. ``auto`` is the layout that a run chooses.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from evenstep.rank_exit import exits_at_once
from evenstep.train import Trainer, shard
from evenstep.train.distributed import device, exchange
from evenstep.train.launch import joined, run_ranks
from evenstep.types import Row

NUM_PROMPTS, NUM_ROLLOUTS = 8, 8
PROMPT_TOKENS, MEDIAN_TOKENS, SIGMA = 384, 64, 0.5
LOGNORMAL_PROMPT_TOKENS, ROW_MEDIAN_TOKENS, ROW_SIGMA = 16, 125, 0.75
ARMS = ("widest", "fixed", "padded", "packed", "tree", "auto")
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
    layout: str  # that the window ran in
    backend: str | None
    num_microbatches: int
    num_tokens: int  # computed, padding included, over all ranks
    padding_efficiency: float
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
            f"| {self.arm}{f' ({self.layout})' if self.arm == 'auto' else ''} | {self.mode} | {self.backend or 'own'} "
            f"| {self.num_microbatches} | {self.num_tokens:,} | {self.padding_efficiency:.3f} "
            f"| {self.median:.3f} ({spread[0]:.3f} to {spread[2]:.3f}) | {first.median / self.median:.2f} "
            f"| {self.peak_bytes / 2**20:,.0f} |"
        )


def make_rows(kind: str, vocab_size: int, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    if kind == "lognormal":
        return _lognormal_rows(vocab_size, draw)
    rows: list[Row] = []
    for group in range(NUM_PROMPTS):
        prompt = draw.integers(vocab_size, size=PROMPT_TOKENS)
        for rollout in range(NUM_ROLLOUTS):
            size = max(1, round(float(draw.lognormal(np.log(MEDIAN_TOKENS), SIGMA))))
            own = draw.integers(vocab_size, size=(2, max(size, PROMPT_TOKENS)))
            ids = np.concatenate([prompt if kind == "shared" else own[0, :PROMPT_TOKENS], own[1, :size]])
            rows.append(_row(group, rollout, ids, PROMPT_TOKENS, draw.normal()))
    return rows


def _lognormal_rows(vocab_size: int, draw: np.random.Generator) -> list[Row]:
    """Rewards are random; an advantage is the reward minus its group's mean."""
    num_rows, num_context = NUM_PROMPTS * NUM_ROLLOUTS, LOGNORMAL_PROMPT_TOKENS
    normal = statistics.NormalDist(float(np.log(ROW_MEDIAN_TOKENS)), ROW_SIGMA)
    lengths = np.exp([normal.inv_cdf((index + 0.5) / num_rows) for index in range(num_rows)]).round().astype(int)
    sizes = np.maximum(draw.permutation(lengths) - num_context, 1).reshape(NUM_PROMPTS, NUM_ROLLOUTS)
    rewards = draw.normal(size=sizes.shape)
    rows: list[Row] = []
    for group, (sizes_of_group, rewards_of_group) in enumerate(zip(sizes, rewards, strict=True)):
        prompt = draw.integers(vocab_size, size=num_context)
        for rollout, size in enumerate(sizes_of_group):
            ids = np.concatenate([prompt, draw.integers(vocab_size, size=size)])
            advantage = rewards_of_group[rollout] - rewards_of_group.mean()
            rows.append(_row(group, rollout, ids, num_context, advantage))
    return rows


def _row(group: int, rollout: int, token_ids: Any, num_context: int, advantage: float) -> Row:
    return Row(
        row_id=f"{group}/{rollout}",
        rollout_id=f"{group}/{rollout}",
        group_id=f"{group}",
        token_ids=token_ids,
        loss_mask=np.arange(token_ids.size) >= num_context,
        advantage=float(advantage),
    )


def make_model(name: str) -> Any:
    """Random weights, the same in every process."""
    torch.manual_seed(0)
    with torch.device(device()):
        return Qwen3ForCausalLM(Qwen3Config(**MODELS[name], **TINY))


def measure(options: argparse.Namespace, look_at_gradient: Callable[[Any], None] | None = None) -> Figures:
    """The steps of one arm in one mode; ``look_at_gradient`` sees the model after its first window."""
    model = make_model(options.model)
    if options.mode != "replicated":
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device().type == "cuda")
    rows = make_rows(options.rows, MODELS[options.model]["vocab_size"], options.seed)
    layout = {"layout": "fixed" if options.arm == "widest" else options.arm}
    if options.arm == "widest":
        layout["pad_to_multiple"] = max(row.num_tokens for row in rows)
    if options.model != "5m":
        layout |= {"compute_dtype": "bfloat16", "activation_checkpointing": True}
    budget = {} if layout["layout"] == "fixed" else {"max_tokens_per_gpu": options.budget}
    trainer = Trainer(model, optimizer, max_grad_norm=1.0, **layout, **budget, **MODES[options.mode])
    seconds: list[float] = []
    for step in range(options.warm_up + options.steps):
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        result = trainer.forward_backward(rows)
        if step == 0 and look_at_gradient is not None:
            look_at_gradient(model)
        outcome = trainer.optim_step()
        if device().type == "cuda":
            torch.cuda.synchronize()
        if step >= options.warm_up:
            seconds.append(time.perf_counter() - began)
        if step == 0:
            loss, grad_norm = result.loss, outcome.grad_norm
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device().type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    mine = Figures(
        arm=options.arm,
        mode=options.mode,
        layout=result.plan.layout,
        backend=trainer.backends[result.plan.layout],
        num_microbatches=result.plan.num_microbatches,
        num_tokens=result.plan.stats.footprint + result.plan.stats.filler_footprint,
        padding_efficiency=result.plan.stats.padding_efficiency,
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
    parser.add_argument("--rows", choices=["shared", "alone", "lognormal"], default="shared")
    parser.add_argument("--model", choices=list(MODELS), default="5m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them that are in no time")
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
        f"{options.steps} steps after {options.warm_up}; seed {options.seed}\n"
    )
    print(
        "| arm | fastest mode | attention | K | tokens computed | padding | seconds (quartiles) | speed-up | peak MiB |"
    )
    print("|" + "---|" * 9)
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
    with exits_at_once():
        main()
