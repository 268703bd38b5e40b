"""What a step costs besides the model and the optimizer: ``python benchmarks/step_overhead.py [--profile]``.

A Qwen3 model of 5 million parameters takes optimizer steps on one window on two gloo ranks, one thread each, which this
script starts itself. The step's wall time is split, on each rank, into

forward, backward   of the model, the collectives of sharded parameters included
gradient sum        the one collective of replicated parameters
optimizer           gradient norm, clip, optimizer step
waiting             for the other rank in front of a collective: imbalance, measured by a barrier
prepare, other      overhead: counting, weighing, planning, digest; collation, agreement, loss, metrics, row results

and compared with a plain loop by hand: another copy of the model, the same rows in the same micro-batches, the same
loss, tensors made beforehand, logits at the trained tokens only, no entropies, no recomputation, no checks. Both take
turns, and their first gradients must be equal.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import io
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from workloads import workload

from evenstep.rank_exit import exits_at_once
from evenstep.train import Trainer, shard
from evenstep.train.attention import NODES_KWARG, attention_for
from evenstep.train.collate import Cell, collate
from evenstep.train.distributed import exchange, set_sync, sum_gradients
from evenstep.train.launch import joined, run_ranks
from evenstep.types import Row

NUM_RANKS = 2
NUM_ROWS = 64
BUDGET = 512
WARM_UP = 2
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
PARTS = ("forward", "backward", "gradient sum", "optimizer", "waiting", "prepare", "other")


class Clock:
    """Seconds by part of a step; a part inside another one is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, name: str, fn: Callable[..., Any], *, waits: bool = False) -> Callable[..., Any]:
        """``fn``, its time counted while a step is being measured; with ``waits`` the ranks meet before it."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self._open:
                return fn(*args, **kwargs)
            if waits:
                with self.part("waiting"):
                    dist.barrier()
            with self.part(name):
                return fn(*args, **kwargs)

        return wrapper


def make_rows(seed: int) -> list[Row]:
    """Compacted rollouts (workload d) at 1/64 of their length; the first quarter of a row is context."""
    random = np.random.default_rng(seed)
    lengths, rollout_of = workload("d", NUM_ROWS, seed)
    advantages = random.normal(size=max(rollout_of) + 1)
    rows = []
    for i, (length, rollout) in enumerate(zip(lengths, rollout_of, strict=True)):
        num_tokens = max(8, length // 64)
        mask = np.arange(num_tokens) >= num_tokens // 4
        ids = random.integers(0, MODEL["vocab_size"], num_tokens)
        fields = {"rollout_id": f"r{rollout}", "group_id": f"g{rollout // 4}", "advantage": float(advantages[rollout])}
        rows.append(Row(row_id=f"{i}", token_ids=ids, loss_mask=mask, **fields))
    return rows


def make_model(*, is_sharded: bool) -> Any:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL))
    return shard(model) if is_sharded else model


class PlainLoop:
    """The same window by hand."""

    def __init__(self, rows: Sequence[Row], trainer: Trainer, *, is_sharded: bool) -> None:
        self.model = make_model(is_sharded=is_sharded).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.layout = trainer.options.layout
        window = trainer.prepare(rows)
        self.cells: list[Cell] = [
            collate(
                [rows[index] for index in indices],
                window.weights_R[list(indices)],
                layout=self.layout,
                multiple=1,
                num_shape_rows=1,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            for indices in window.plan.cells[dist.get_rank()]
        ]

    def forward_backward(self) -> None:
        with attention_for(self.model, self.layout):
            for k, cell in enumerate(self.cells):
                set_sync(self.model, is_last=k == len(self.cells) - 1)
                logprobs_N = self._logprobs(cell)
                ratio_N = torch.exp(logprobs_N - logprobs_N.detach())
                (-cell.weights_N * cell.advantages_N * ratio_N).sum().backward()
        parameters = list(self.model.parameters())
        if not isinstance(parameters[0], DTensor):
            sum_gradients(parameters)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _logprobs(self, cell: Cell) -> Tensor:
        def only_trained(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            return (args[0].flatten(0, 1).index_select(0, cell.gather_N),)

        inputs: dict[str, Any] = {"input_ids": cell.input_ids_BT, "use_cache": False}
        if cell.nodes is not None:
            inputs |= {"position_ids": cell.position_ids_BT, NODES_KWARG: cell.nodes}
        handle = self.model.lm_head.register_forward_pre_hook(only_trained)
        logits_NV = self.model(**inputs).logits
        handle.remove()
        return torch.log_softmax(logits_NV, dim=-1).gather(1, cell.targets_N[:, None])[:, 0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Figures of one kind of step; seconds are medians over steps."""

    name: str
    num_microbatches: int
    parts: dict[str, float]  # of the rank whose overhead is larger
    total: float
    overhead: float  # median over steps of overhead / step
    plain: float
    ratio: float  # median over pairs of step / plain step
    trainer_cpu: float
    plain_cpu: float

    def line(self) -> str:
        cells = [f"{self.parts[part]:.4f}" for part in PARTS]
        return (
            f"| {self.name} | {self.num_microbatches} | {self.total:.3f} | {' | '.join(cells)} | {self.overhead:.2%} "
            f"| {self.plain:.3f} | {self.ratio:.3f} | {self.trainer_cpu / self.plain_cpu:.3f} |"
        )


def measure(*, layout: str, is_sharded: bool, num_steps: int, seed: int, profiler: cProfile.Profile | None) -> Case:
    rows = make_rows(seed)
    clock = Clock()
    model = make_model(is_sharded=is_sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    trainer = Trainer(model, optimizer, layout=layout, max_tokens_per_gpu=BUDGET, max_grad_norm=1.0)
    plain = PlainLoop(rows, trainer, is_sharded=is_sharded)
    result = trainer.forward_backward(rows)
    plain.forward_backward()
    assert_equal_gradients(model, plain.model)
    trainer.optim_step()
    plain.step()

    originals = torch.Tensor.backward, dist.all_reduce, dist.all_gather
    torch.Tensor.backward = clock.timed("backward", originals[0])  # type: ignore[method-assign]
    dist.all_reduce = clock.timed("gradient sum", originals[1], waits=True)
    dist.all_gather = clock.timed("other", originals[2], waits=True)
    kind = type(model)
    kind.__call__ = clock.timed("forward", kind.__call__)
    optimizer.zero_grad = clock.timed("optimizer", optimizer.zero_grad)
    steps: list[dict[str, float]] = []
    plain_s: list[float] = []
    cpu: dict[str, list[float]] = {"trainer": [], "plain": []}
    try:
        for step in range(WARM_UP + num_steps):
            clock.seconds = dict.fromkeys(PARTS, 0.0)
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            if profiler is not None and step >= WARM_UP:
                profiler.enable()
            with clock.part("prepare"):
                window = trainer.prepare(rows)
            with clock.part("other"):
                trainer.forward_backward(window)
            with clock.part("optimizer"):
                trainer.optim_step()
            if profiler is not None:
                profiler.disable()
            seconds = clock.seconds | {"total": time.perf_counter() - began}
            cpu_s = time.process_time() - began_cpu
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            plain.forward_backward()
            plain.step()
            if step >= WARM_UP:
                steps.append(seconds)
                plain_s.append(time.perf_counter() - began)
                cpu["trainer"].append(cpu_s)
                cpu["plain"].append(time.process_time() - began_cpu)
    finally:
        torch.Tensor.backward, dist.all_reduce, dist.all_gather = originals  # type: ignore[method-assign]
        del kind.__call__
    mine = Case(
        name=f"{layout}, {'FSDP2' if is_sharded else 'replicated'}",
        num_microbatches=len(result.plan.cells[0]),
        parts={part: statistics.median(s[part] for s in steps) for part in PARTS},
        total=statistics.median(s["total"] for s in steps),
        overhead=statistics.median((s["prepare"] + s["other"]) / s["total"] for s in steps),
        plain=statistics.median(plain_s),
        ratio=statistics.median(s["total"] / p for s, p in zip(steps, plain_s, strict=True)),
        trainer_cpu=statistics.median(cpu["trainer"]),
        plain_cpu=statistics.median(cpu["plain"]),
    )
    return max(exchange(mine), key=lambda case: case.overhead)


def assert_equal_gradients(model: Any, other: Any) -> None:
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    local = [[(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad) for p in pair] for pair in pairs]
    difference = sum(float((a - b).double().square().sum()) for a, b in local) ** 0.5
    norm = sum(float(b.double().square().sum()) for _, b in local) ** 0.5
    assert difference <= 1e-5 * norm, f"gradients differ by {difference / norm:.2g}"


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    profiler = cProfile.Profile() if options.profile and dist.get_rank() == 0 else None
    rows = make_rows(options.seed)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    num_parameters = sum(p.numel() for p in make_model(is_sharded=False).parameters())
    say(
        f"{num_parameters:,} parameters; {len(rows)} rows, {sum(row.num_tokens for row in rows):,} tokens, "
        f"{sum(row.num_trained_tokens for row in rows):,} trained, longest {max(row.num_tokens for row in rows)}; "
        f"budget {BUDGET}; seed {options.seed}; {options.steps} steps after {WARM_UP}\n"
    )
    say(f"| step | K | seconds | {' | '.join(PARTS)} | overhead | plain loop | step / plain | CPU / plain |")
    say("|" + "---|" * (len(PARTS) + 7))
    for layout in options.layouts:
        for is_sharded in (False, True):
            case = measure(
                layout=layout, is_sharded=is_sharded, num_steps=options.steps, seed=options.seed, profiler=profiler
            )
            say(case.line(), flush=True)
    if profiler is not None:
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats("evenstep")
        print(text.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="+", default=["packed", "padded"], choices=["packed", "padded"])
    parser.add_argument("--profile", action="store_true", help="also rank 0's profile; slows the step down")
    options = parser.parse_args()
    if "RANK" in os.environ:
        with joined():
            run_rank(options)
        return
    ended = run_ranks(["-u", *sys.argv], num_ranks=NUM_RANKS)
    sys.exit(1 if ended.exit_codes or ended.stop_signal else 0)


if __name__ == "__main__":
    with exits_at_once():
        main()
