"""One optimizer step of TRL's ``GRPOTrainer`` and of evenstep on the same rollouts: ``python benchmarks/trl_step.py``.

It needs TRL 1.16 beside evenstep, ``pip install 'trl==1.16.*'`` after torch. Nothing is downloaded.

The window is ``layouts.py --rows lognormal``: 64 rows of a 5-million-parameter model. Both sides train on all of it in
every step: TRL gets the ids from its ``rollout_func``, and what its trainer takes to look them up, pad and score them
is in no time. Settings that mean the same on both sides: loss ``dapo``, which divides by the completion tokens of all
micro-batches and ranks, is evenstep's normaliser ``token``; rewards minus their group's mean (``scale_rewards`` is
none); no KL term; old log-probs are those of the step itself; float32, AdamW, norm measured and clipped at 1. TRL pads
a rank's rows to its longest completion whatever the micro-batch size, so several sizes are tried (``--rows-per-rank``).
Both sides run with replicated parameters (DDP there, one sum per window here), one thread per rank, each arm in
processes of its own. All gradients of the first window must be equal to 1e-5 (relative, whole gradient, before
clipping). On a CPU, TRL's output head scores every position of a completion, padding included; on a GPU with Triton
only those that are real.
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
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from layouts import LOGNORMAL_PROMPT_TOKENS, MODELS, NUM_ROLLOUTS, make_model, make_rows, measure

from evenstep.rank_exit import exits_at_once
from evenstep.train.distributed import exchange
from evenstep.train.launch import joined, run_ranks

MODEL, ROWS = "5m", "lognormal"
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-5, 0.01, 1.0
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one arm; the slower rank's."""

    arm: str
    num_microbatches: int
    num_tokens: int  # computed, padding included, over all ranks
    seconds: list[float]  # of each step
    peak_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def save_gradient(model: Any, path: str) -> None:
    """Rank 0 writes the whole gradient, in the order of the parameters."""
    if dist.get_rank() == 0:
        torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, path)


def measure_evenstep(options: argparse.Namespace) -> Figures:
    given = SimpleNamespace(**vars(options), model=MODEL, rows=ROWS, mode="replicated")
    figures = measure(given, lambda model: save_gradient(model, options.gradient))  # type: ignore[arg-type]
    return Figures(
        arm=options.arm,
        num_microbatches=figures.num_microbatches,
        num_tokens=figures.num_tokens,
        seconds=figures.seconds,
        peak_bytes=figures.peak_bytes,
    )


def measure_trl(options: argparse.Namespace, folder: str) -> Figures:
    from datasets import Dataset  # type: ignore[import-not-found]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    rows = make_rows(ROWS, MODELS[MODEL]["vocab_size"], options.seed)
    of_group: dict[str, list[Any]] = {}
    for row in rows:
        of_group.setdefault(str(row.group_id), []).append(row)

    def frozen_rollouts(prompts: list[str], _: Any) -> dict[str, Any]:
        """The recorded rollouts of each prompt, in order; a rank is given whole groups."""
        found = [of_group[prompts[i]][i % NUM_ROLLOUTS] for i in range(len(prompts))]
        ids = [row.token_ids.tolist() for row in found]
        return {
            "prompt_ids": [row[:LOGNORMAL_PROMPT_TOKENS] for row in ids],
            "completion_ids": [row[LOGNORMAL_PROMPT_TOKENS:] for row in ids],
            "logprobs": None,
            "recorded_reward": [float(row.advantage) for row in found],
        }

    def recorded(recorded_reward: list[float], **_: Any) -> list[float]:
        return recorded_reward

    class FrozenTrainer(GRPOTrainer):
        """Measures TRL's trainer; changes nothing in its step."""

        num_tokens, collecting_s = 0, 0.0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            self.collecting_s += time.perf_counter() - began
            return found

        def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Any, *args: Any, **named: Any) -> Any:
            self.num_tokens += input_ids.numel()
            return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **named)

        def training_step(self, *args: Any, **named: Any) -> Any:
            found = super().training_step(*args, **named)
            if self.state.global_step == 0 and self.accelerator.sync_gradients:
                save_gradient(self.accelerator.unwrap_model(self.model), options.gradient)
            return found

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            trainer.num_tokens, trainer.collecting_s = 0, 0.0
            dist.barrier()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began - trainer.collecting_s)

    vocabulary = {f"t{index}": index for index in range(MODELS[MODEL]["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0")), pad_token="t0", eos_token="t1"
    )
    rows_of_rank = len(rows) // dist.get_world_size()
    size = int(options.arm.removeprefix("trl "))
    settings = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=rows_of_rank // size,
        num_generations=NUM_ROLLOUTS,
        max_completion_length=max(row.num_tokens for row in rows),
        loss_type="dapo",
        scale_rewards="none",
        beta=0.0,
        temperature=1.0,
        shuffle_dataset=False,
        max_steps=options.warm_up + options.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_NORM,
        optim="adamw_torch",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = FrozenTrainer(
        model=make_model(MODEL),
        reward_funcs=recorded,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": list(of_group)}),
        processing_class=tokenizer,
        callbacks=[clock],
        rollout_func=frozen_rollouts,
    )
    trainer.train()
    mine = Figures(
        arm=options.arm,
        num_microbatches=settings.gradient_accumulation_steps,
        num_tokens=trainer.num_tokens * dist.get_world_size(),
        seconds=clock.seconds[options.warm_up :],
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    return max(exchange(mine), key=lambda figures: (figures.median, figures.peak_bytes))


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        is_trl = options.arm.startswith("trl ")
        figures = measure_trl(options, folder) if is_trl else measure_evenstep(options)
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(dataclasses.asdict(figures)))


def distance(path: Path, other: Path) -> float:
    """‖a − b‖ / ‖b‖ over the whole gradient, summed in float64."""
    a, b = (torch.load(file, weights_only=True) for file in (path, other))
    assert a.keys() == b.keys(), "the two sides must have the same parameters"
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    return (apart / sum(float(value.double().square().sum()) for value in b.values())) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=[1, 2, 4], help="each gets whole groups")
    parser.add_argument("--rows-per-rank", type=int, nargs="+", default=[1, 4, 16], help="TRL's micro-batches")
    parser.add_argument("--arms", nargs="+", default=["padded", "packed"], help="evenstep's")
    parser.add_argument("--budget", type=int, default=1536)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them that are in no time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--gradient", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        with joined():
            run_rank(options)
        return
    found: list[Figures] = []
    apart: list[float] = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for arm in [*(f"trl {size}" for size in options.rows_per_rank), *options.arms]:
            out, gradient = folder / f"{arm}.json", folder / f"{arm}.gradient"
            given = [*sys.argv, "--arm", arm, "--out", str(out), "--gradient", str(gradient)]
            ended = run_ranks(["-u", *given], num_ranks=options.ranks)
            if ended.exit_codes or ended.stop_signal:
                sys.exit(f"{arm}: ranks ended with {ended.exit_codes}")
            found.append(Figures(**json.loads(out.read_text())))
            apart.append(distance(gradient, folder / f"{found[0].arm}.gradient"))
            print(f"{arm}: {found[-1].median:.3f} s", file=sys.stderr, flush=True)
    best = min((figures for figures in found if figures.arm.startswith("trl ")), key=lambda figures: figures.median)
    ran = f"{options.steps} steps after {options.warm_up}, seed {options.seed}"
    print(f"\n{options.ranks} ranks, budget {options.budget:,}, {ran}")
    columns = ("arm", "micro-batches per rank", "tokens computed", "seconds (least to most)", "TRL's best / it",
               "peak MiB", "gradient")  # fmt: skip
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for figures, difference in zip(found, apart, strict=True):
        print(
            f"| {figures.arm} | {figures.num_microbatches} | {figures.num_tokens:,} | {figures.median:.3f} "
            f"({min(figures.seconds):.3f} to {max(figures.seconds):.3f}) | {best.median / figures.median:.2f} "
            f"| {figures.peak_bytes / 2**20:,.0f} | {difference:.1e} |"
        )
    wrong = [figures.arm for figures, difference in zip(found, apart, strict=True) if difference > TOLERANCE]
    if wrong:
        sys.exit(f"gradients of all arms must be equal to {TOLERANCE:g}, found others in {', '.join(wrong)}")


if __name__ == "__main__":
    with exits_at_once():
        main()
