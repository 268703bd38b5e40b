"""The demo under several seeds, beside controls that must not learn as it does.

    python benchmarks/demo_controls.py --seeds 0 1 2 --out runs/controls

Arms: ``train`` is examples/ledger.toml as it stands; ``shuffled`` the same with the advantages of each window dealt out
at random among its rollouts; ``blank`` the trained policy with its notes thrown away when they are written;
``supervised`` the warm start's own training continued for as many steps as the demo takes. Prints held-out scores.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.config import load_config
from evenstep.credit import rollout_advantages
from evenstep.train.launch import run_ranks
from evenstep.types import Rollout

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "ledger.toml"
RANKS = 2


def shuffled(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """The window's advantages, each given to a random voter: the same sizes, no information."""
    advantages = rollout_advantages(rollouts)
    values = list(advantages.values())
    random.Random(rollouts[0].rollout_id).shuffle(values)
    return dict(zip(advantages, values, strict=True))


def rank_main(config: Path) -> None:
    """One rank of the shuffled arm."""
    from evenstep.train.launch import joined
    from evenstep.train.run import run_training

    with joined():
        run_training(load_config([config]), credit=shuffled)


def evenstep(folder: Path, *settings: str) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "evenstep", "train", str(DEMO), "--ranks", str(RANKS), "--run-dir", str(folder)]
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "eval_reward_mean" in record]


def scored(folder: Path, model: Path, *settings: str) -> dict[str, Any]:
    """Held-out scores of a policy, from the evaluation before a run's first window."""
    evenstep(
        folder,
        f"model.path={model}",
        "run.num_collections=1",
        "evaluation.every=0",
        "checkpoint.export=false",
        *settings,
    )
    return evaluations(folder)[0]


def run_seed(seed: int, out: Path) -> None:
    trained = out / f"train-{seed}"
    evenstep(trained, f"run.seed={seed}")
    found = evaluations(trained)
    print_row("train", seed, found[0], found[-1])
    blank = scored(out / f"blank-{seed}", trained / "model", f"run.seed={seed}", "compaction.blank_notes=true")
    print_row("blank", seed, found[-1], blank)
    control = out / f"shuffled-{seed}"
    config = out / f"shuffled-{seed}.toml"
    config.write_text(load_config([DEMO], [f"run.seed={seed}", f"run.dir={control}"]).resolved())
    ended = run_ranks([__file__, "--rank-config", str(config)], num_ranks=RANKS)
    if ended.exit_codes:
        sys.exit(f"the shuffled arm failed: {ended.exit_codes}")
    found = evaluations(control)
    print_row("shuffled", seed, found[0], found[-1])


def print_row(arm: str, seed: int | str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    names = ("eval_reward_mean", "eval_long_reward_mean")
    cells = [f"{before[n]:.3f} → {after[n]:.3f} ({after[n] - before[n]:+.3f})" for n in names]
    floors = f"{after['eval_floor']:.3f} / {after['eval_long_floor']:.3f}"
    print(f"| {arm} | {seed} | {' | '.join(cells)} | {floors} | {after['eval_num_long']} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/controls"))
    parser.add_argument("--rank-config", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_config:
        rank_main(arguments.rank_config)
        return
    arguments.out.mkdir(parents=True)
    print("| arm | seed | held-out reward | 3 or more segments | floors | long tasks |\n|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        run_seed(seed, arguments.out)
    model = arguments.out / "supervised-model"
    steps = load_config([DEMO]).run.num_collections
    script = ROOT / "scripts" / "warm_start_ledger.py"
    subprocess.run(
        [sys.executable, str(script), "--extra-steps", str(steps), "--out", str(model)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    before = evaluations(arguments.out / f"train-{arguments.seeds[0]}")[0]
    print_row("supervised", "-", before, scored(arguments.out / "supervised", model))


if __name__ == "__main__":
    main()
