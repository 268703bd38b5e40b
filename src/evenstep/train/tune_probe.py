"""One probe of ``evenstep tune``, in ranks of its own: ``python -m evenstep.train.tune_probe FOLDER`` under torchrun.

Steps on made-up rows with the models, the layout and the optimizer of a configuration: what a micro-batch of a given
size needs of memory, and of time.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenstep.config import Config, load_config
from evenstep.rank_exit import exits_at_once
from evenstep.train import distributed
from evenstep.train.memory import peak_memory_bytes, reset_peak_memory
from evenstep.train.rank_errors import reported
from evenstep.train.routing import PADDING, experts_of_cell, router_shape
from evenstep.train.setup import load_models
from evenstep.train.step import Trainer
from evenstep.train.verify import num_outputs
from evenstep.train.vision import spec_of
from evenstep.tune.spec import ANSWER, CellShape, Measured, Probe
from evenstep.types import Row

__all__ = ["main", "run_probe"]

WARM_UP = CellShape(num_rows=1, row_tokens=4)
COLUMNS = (1, 3)  # micro-batches of the two windows whose difference is the time of one
REPEATS = 3


def main() -> None:
    """Be one rank of the probe in the folder that ``sys.argv`` names."""
    from evenstep.train.launch import joined

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    folder = Path(sys.argv[1])
    with reported(folder), joined():
        run_probe(folder)


def run_probe(folder: Path) -> None:
    """Measure the cells of a probe, in a process group or alone.

    Raises:
        EvenstepError: see ``load_models``, ``Trainer``.
    """
    probe, config = Probe.read(folder), load_config([folder / "config.toml"])
    _Prober(config, folder).run(probe)


class _Prober:
    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.rank, self.num_ranks = distributed.rank_and_size()
        self.models = load_models(config)  # copies too: a run has them
        self.draw = np.random.default_rng(0)

    def run(self, probe: Probe) -> None:
        # moments exist from the first step on
        for trainer in self._trainers():
            self._step(trainer, WARM_UP, 1)
        least = self._most(peak_memory_bytes())
        earlier: list[Measured] = []
        for cell in probe.cells:
            if probe.max_bytes is not None and _expected_bytes(earlier, cell, least) > probe.max_bytes:
                break
            reset_peak_memory()
            started = time.perf_counter()
            # gradients of the first micro-batch are there while the second one runs
            for trainer in self._trainers():
                self._step(trainer, cell, 2)
            seconds = (time.perf_counter() - started) / 2
            earlier.append(self._write(cell, least, float(peak_memory_bytes()), seconds))
            if probe.max_seconds is not None and earlier[-1].seconds > probe.max_seconds:
                break
        for cell in probe.timed:
            self._write(cell, least, None, self._seconds(cell))

    def _trainers(self) -> list[Trainer]:
        return [self.models.policy, *([] if self.models.critic is None else [self.models.critic])]

    def _seconds(self, cell: CellShape) -> float:
        """One micro-batch: what a window of three takes more than a window of one, halved."""
        few, many = COLUMNS
        found: list[float] = []
        for _ in range(REPEATS):
            seconds = [self._step(self.models.policy, cell, num) for num in COLUMNS]
            found.append((seconds[1] - seconds[0]) / (many - few))
        return max(0.0, statistics.median(found))

    def _step(self, trainer: Trainer, cell: CellShape, num_microbatches: int) -> float:
        rows = self._rows(trainer, cell, num_microbatches)
        distributed.exchange(None)
        window = trainer.prepare(rows, max_tokens_per_gpu=max(cell.footprint, 2))
        started = time.perf_counter()
        trainer.forward_backward(window)
        trainer.optim_step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _rows(self, trainer: Trainer, cell: CellShape, num_microbatches: int) -> list[Row]:
        """Every token but the first of each row is trained, which is the most there can be."""
        config = self.config
        names = [
            name
            for name, is_there in (
                ("old_logprobs", config.old_logprobs != "detached"),
                ("ref_logprobs", config.train.kl_coef > 0),
                ("engine_logprobs", True),
                ("old_values", config.has_critic),
                ("returns", config.has_critic),
            )
            if is_there
        ]
        num_ids, vision = num_outputs(trainer.model), spec_of(trainer.model)
        rows: list[Row] = []
        for index in range(cell.num_rows * num_microbatches * self.num_ranks):
            ids = self.draw.integers(num_ids, size=cell.row_tokens)
            if vision is not None:  # a placeholder in the context would be one that lost its image
                ids[ids == vision.image_token_id] = vision.end_token_id
            fields: dict[str, Any] = {name: np.full(cell.row_tokens, -1.0) for name in names}
            if trainer.routers:
                spread = experts_of_cell([], [], cell.row_tokens, router_shape(trainer.routers))
                fields["routed_experts"] = PADDING - spread
            fields |= {"rollout_id": index, "group_id": index // 2, "advantage": 1.0}
            rows.append(Row(row_id=index, token_ids=ids, loss_mask=np.arange(cell.row_tokens) > 0, **fields))
        return rows

    def _most(self, value: float) -> float:
        return max(distributed.exchange(float(value)))

    def _write(self, cell: CellShape, least: float, peak: float | None, seconds: float) -> Measured:
        device = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
        measured = Measured(
            num_rows=cell.num_rows,
            row_tokens=cell.row_tokens,
            least_bytes=least,
            peak_bytes=None if peak is None else self._most(peak),
            seconds=self._most(seconds),
            device_bytes=device,
        )
        if self.rank == 0:
            with (self.folder / ANSWER).open("a") as file:
                file.write(json.dumps(asdict(measured)) + "\n")
        return measured


def _expected_bytes(earlier: list[Measured], cell: CellShape, least: float) -> float:
    """Of the next cell, by the steepest growth so far; nothing is expected before there is any."""
    if not earlier:
        return 0.0
    last = earlier[-1]
    slope = max(((m.peak_bytes or 0.0) - least) / m.shape.footprint for m in earlier)
    return (last.peak_bytes or 0.0) + max(0.0, slope) * (cell.footprint - last.shape.footprint)


if __name__ == "__main__":
    with exits_at_once():
        main()
