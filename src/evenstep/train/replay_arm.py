"""One arm of a replay, in ranks of its own: ``python -m evenstep.train.replay_arm FOLDER`` under torchrun.

The steps of a run on its recorded rollouts. Between the measured parts of a step, what it computed is written, or
compared with what another arm wrote.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenstep.config import Config, load_config
from evenstep.errors import StateError
from evenstep.plan import StepPlan
from evenstep.rank_exit import exits_at_once
from evenstep.replay.recorded import read_recording
from evenstep.replay.spec import STEPS, Launch
from evenstep.train import distributed
from evenstep.train.checkpoint import load_checkpoint
from evenstep.train.memory import peak_memory_bytes, reset_peak_memory
from evenstep.train.passes import WindowRows, credited, scored
from evenstep.train.rank_errors import Watch, reported
from evenstep.train.schedule import learning_rate, set_learning_rate
from evenstep.train.scored_file import read_scored, write_scored
from evenstep.train.setup import Models, load_models
from evenstep.train.step import StepResult
from evenstep.train.stored_steps import StoredSteps
from evenstep.train.window import PreparedWindow
from evenstep.types import Window

__all__ = ["main", "run_launch"]

SHOWN_ROWS = 8


def main() -> None:
    """Be one rank of the launch in the folder that ``sys.argv`` names."""
    from evenstep.train.launch import joined

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted rank just ends
    folder = Path(sys.argv[1])
    with reported(folder), joined():
        run_launch(folder)


def run_launch(folder: Path) -> None:
    """Take all steps of a launch, in a process group or alone.

    Raises:
        EvenstepError: see its subclasses; the steps made before are in ``steps.jsonl``.
    """
    launch = Launch.read(folder)
    with Watch(folder, launch.step_timeout_s) as watch:
        _Arm(folder, launch, watch).run()


class _Arm:
    def __init__(self, folder: Path, launch: Launch, watch: Watch) -> None:
        self.folder, self.launch, self.watch = folder, launch, watch
        config = load_config([folder / "config.toml"])
        # beside the schema: a run is in float32, a replay may look closer
        self.config: Config = config.model_copy(
            update={"model": config.model.model_copy(update={"dtype": launch.dtype})}
        )
        self.rank, self.num_ranks = distributed.rank_and_size()
        places = {"num_windows": launch.num_windows, "first_collection": launch.first_collection}
        self.windows = read_recording(Path(launch.source), config, **places).windows
        self.optimizer_step = launch.optimizer_step
        self.is_reference = launch.role == "reference"
        self.models = self._load()
        self.trainer = self.models.policy
        model: Any = self.trainer.model
        # the trainer's own: a sharded model that ran hands out gathered parameters, whose memory is not theirs for long
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.parameters = list(zip(names, self.trainer.parameters, strict=True))
        self.stored = StoredSteps(Path(launch.stores)) if launch.stores else None
        self.own = self.stored or StoredSteps(folder)
        self.references = {name: StoredSteps(Path(path)) for name, path in (launch.references or {}).items()}

    def _load(self) -> Models:
        # only the first arm scores, as the run did; a checkpoint of a critic is loaded as a whole
        needs_all = self.config.has_scoring_pass and (self.is_reference or self.launch.checkpoint is not None)
        models = load_models(self.config, copies=("reference", "critic") if needs_all else ())
        if self.launch.checkpoint is not None:
            load_checkpoint(Path(self.launch.checkpoint), models.trained)
        return models if self.is_reference else replace(models, critic=None, frozen_copy=None)

    def run(self) -> None:
        self._require_disk()
        self._keep_weights(-1)
        position = 0
        for collection, members in groupby(self.windows, lambda window: window.collection):
            windows = list(members)
            firsts = [window for window in windows if window.epoch == 0]
            credit = self._credited(collection, firsts)
            for index, window in enumerate(windows):  # every epoch goes through the same windows
                self._step(position, window, credit[index % len(credit)])
                position += 1

    # --- credit ---------------------------------------------------------------------------------------------------

    def _credited(self, collection: int, windows: Sequence[Window]) -> list[WindowRows]:
        """Rows of the windows with the credit that the run gave them; what a model had to score is scored once."""
        config = self.config
        self.watch.renew()
        found = [WindowRows.of(window, config.rollout.on_undeclared) for window in windows]
        path = Path(self.launch.scored) / f"collection_{collection}.npz"
        if config.has_scoring_pass and self.is_reference:
            result = scored(found if self.rank == 0 else None, self.models, config)
            if result is not None:
                write_scored(path, result)
            distributed.exchange(None)  # nobody reads before it is written
        if config.has_scoring_pass:
            if not path.exists():
                raise StateError(
                    f"old log-probs and values are scored once, by the first arm, and it ended before collection "
                    f"{collection}; make that arm finish"
                )
            found = read_scored(path, found)
        else:  # nothing to score; old log-probs of the engine come from the rollouts
            found = scored(found, self.models, config) or found
        return [credited(window, config) for window in found]

    # --- one step -------------------------------------------------------------------------------------------------

    def _step(self, position: int, window: Window, credit: WindowRows) -> None:
        train, launch = self.config.train, self.launch
        rate = learning_rate(
            self.optimizer_step,
            peak=train.lr,
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            total_steps=launch.total_windows,
        )
        record: dict[str, Any] = {"step": position, "window": window.window, "lr": rate}
        if not credit.rows:
            self._write(record | {"stepped": False, "skip_reason": "no rollout of the window has tokens"})
            return
        if launch.role == "oracle" and position not in launch.compared:
            return
        set_learning_rate(self.trainer.optimizer, rate)
        self._take_weights(position)
        distributed.exchange(None)  # ranks begin together
        self.watch.renew()
        can_reset = reset_peak_memory()
        started = _now()
        prepared = self._prepared(position, credit)
        result = self.trainer.forward_backward(prepared)
        seconds = _now() - started
        peak = peak_memory_bytes()
        self.watch.renew()
        against = self._look_at_gradient(position, prepared, result)
        reset_peak_memory()
        distributed.exchange(None)
        started = _now()
        outcome = self.trainer.optim_step()
        seconds += _now() - started
        peak = max(peak, peak_memory_bytes())
        self.watch.renew()
        for name, differences in self._look_at_weights(position, rate).items():
            against[name] |= differences
        self._keep_weights(position)
        self._train_critic(prepared, rate / train.lr)
        of_ranks = distributed.gather((seconds, peak, list(result.logprobs)))
        self.optimizer_step += outcome.stepped
        if of_ranks is None:
            return
        counts: dict[Hashable, int] = {}
        for _, _, row_ids in of_ranks:
            for row_id in row_ids:
                counts[row_id] = counts.get(row_id, 0) + 1
        expected = [row.row_id for row in credit.rows]
        stats = prepared.plan.stats
        record |= {
            "stepped": outcome.stepped,
            "skip_reason": outcome.skip_reason,
            "loss": result.loss,
            "grad_norm": outcome.grad_norm,
            "seconds": max(part[0] for part in of_ranks),
            "peak_memory_bytes": max(part[1] for part in of_ranks),
            "is_peak_of_step": can_reset,
            "num_rows_expected": len(expected),
            "num_rows": sum(counts.get(row_id, 0) == 1 for row_id in expected),
            "wrong_rows": [str(row_id) for row_id in expected if counts.get(row_id, 0) != 1][:SHOWN_ROWS],
            "num_trained_tokens": prepared.num_trained_tokens,
            "num_tokens": stats.num_tokens,
            "footprint": stats.footprint,
            "num_tokens_computed": stats.footprint + stats.filler_footprint,
            "num_microbatches": stats.num_microbatches,
            "num_fillers": result.metrics["num_fillers"],
            "lockstep_efficiency": stats.lockstep_efficiency,
            "against": against,
        }
        self._write(record)

    def _take_weights(self, position: int) -> None:
        """Begin where the first arm began, as long as it did."""
        reference = self.references.get("reference")
        if reference is None or position not in self.launch.compared or self.launch.has_own_weights:
            return
        if distributed.broadcast(reference.has("weights", position - 1)):
            reference.load_weights(position - 1, self.parameters)

    def _prepared(self, position: int, credit: WindowRows) -> PreparedWindow:
        prepared = self.trainer.prepare(credit.rows, credit.voters)
        if self.launch.permutation_seed is None:
            return prepared
        return replace(prepared, plan=permuted(prepared.plan, self.launch.permutation_seed + position))

    def _look_at_gradient(
        self, position: int, prepared: PreparedWindow, result: StepResult
    ) -> dict[str, dict[str, Any]]:
        """Store gradients and log-probs, or compare them; by name of what they are compared with."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self.references}
        if position not in self.launch.compared:
            return found
        if self.stored is not None:
            self.stored.save("gradient", position, self.parameters, of="grad")
        logprobs = _gathered(result)
        row_ids = [row.row_id for row in prepared.rows.values()]
        if logprobs is not None and self.stored is not None:
            self.stored.save_logprobs(position, logprobs, row_ids)
        for name, reference in self.references.items():
            if not distributed.broadcast(reference.has("gradient", position)):
                continue
            difference = reference.compare("gradient", position, self.parameters, of="grad")
            found[name] = {
                "gradient_cosine": difference.cosine,
                "gradient_relative_difference": difference.relative,
                "worst_parameter": difference.worst,
                "worst_parameter_relative_difference": difference.worst_relative,
            }
            if logprobs is not None:
                found[name] |= _row_differences(reference.read_logprobs(position), logprobs, row_ids, prepared.plan)
        return found

    def _look_at_weights(self, position: int, rate: float) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, reference in () if self.launch.role == "oracle" else self.references.items():
            is_there = reference.has("weights", position) and reference.has("weights", position - 1)
            if position not in self.launch.compared or not distributed.broadcast(is_there):
                continue
            difference = reference.compare("weights", position, self.parameters, of="weights", with_ulp=True)
            before = self.own if self.launch.has_own_weights else reference
            update = reference.compare_updates(position, before, self.parameters)
            found[name] = {
                "update_cosine": update.cosine,
                "update_relative_difference": update.relative,
                "weight_cosine": difference.cosine,
                "weight_max_abs_difference": difference.max_abs,
                "weight_max_difference_lr": difference.max_abs / rate if rate else 0.0,
                "weight_max_difference_ulp": difference.largest_ulp,
            }
        return found

    def _keep_weights(self, position: int) -> None:
        """Write the weights that a step began with or ended with; of an arm's own only the last are kept."""
        is_before = position + 1 in self.launch.compared
        if self.is_reference and (is_before or position in self.launch.compared):
            self.own.save("weights", position, self.parameters, of="weights")
        elif self.launch.role == "arm" and self.launch.has_own_weights:
            if self.rank == 0:
                self.own.path("weights", position - 1).unlink(missing_ok=True)
            if is_before:
                self.own.save("weights", position, self.parameters, of="weights")

    def _train_critic(self, prepared: PreparedWindow, schedule: float) -> None:
        """The first arm's critic learns as in the run, because later collections are scored with it."""
        critic = self.models.critic
        if critic is None:
            return
        peak = self.config.critic.lr or self.config.train.lr
        set_learning_rate(critic.optimizer, peak * schedule)
        critic.forward_backward(prepared)
        critic.optim_step()

    # --- files ----------------------------------------------------------------------------------------------------

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.rank == 0:
            with (self.folder / STEPS).open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _require_disk(self) -> None:
        """The first arm says what all arms need before it computes anything."""
        if not self.is_reference:
            return
        compared = set(self.launch.compared)
        num_bytes = sum(parameter.numel() * parameter.element_size() for _, parameter in self.parameters)
        # gradients, weights after and before, and what later launches add
        num_copies = len(compared) + len(compared | {step - 1 for step in compared}) + self.launch.extra_copies
        free = shutil.disk_usage(self.folder).free if self.rank == 0 else 0
        free = distributed.broadcast(free)
        if self.rank == 0:
            (self.folder / "disk.json").write_text(json.dumps({"needed": num_copies * num_bytes, "free": free}))
        if num_copies * num_bytes > free:
            raise StateError(
                f"a replay keeps the first arm's gradients and weights of {len(compared)} steps on disk, "
                f"{num_copies * num_bytes / 1e9:.1f} GB; found {free / 1e9:.1f} GB free in {self.folder.parent}; give "
                f"another folder with --scratch, or compare fewer steps with --compare-steps"
            )


def permuted(plan: StepPlan, seed: int) -> StepPlan:
    """The same cells in another order: of rows in a cell, of cells in time, of cells on ranks.

    Each cell keeps its rows and each rank its number of cells, so budgets hold.
    """
    draw = random.Random(seed)
    cells = [tuple(draw.sample(cell, len(cell))) for rank in plan.cells for cell in rank]
    draw.shuffle(cells)
    num = plan.num_microbatches
    return replace(plan, cells=tuple(tuple(cells[r * num : (r + 1) * num]) for r in range(plan.num_ranks)))


def _gathered(result: StepResult) -> dict[Hashable, Tensor] | None:
    """All ranks' log-probs on rank 0."""
    parts = distributed.gather(dict(result.logprobs))
    return None if parts is None else {row_id: value for part in parts for row_id, value in part.items()}


def _row_differences(
    reference: Mapping[int, Tensor], found: Mapping[Hashable, Tensor], row_ids: Sequence[Hashable], plan: StepPlan
) -> dict[str, Any]:
    """The row whose log-probs are furthest from the reference's, and the cell it ran in."""
    worst, worst_index = 0.0, None
    for index, row_id in enumerate(row_ids):
        if row_id in found and index in reference:
            apart = float((found[row_id].double() - reference[index].double()).abs().max())
            if worst_index is None or apart > worst:
                worst, worst_index = apart, index
    if worst_index is None:
        return {}
    places = ((r, k) for r, rank in enumerate(plan.cells) for k, cell in enumerate(rank) if worst_index in cell)
    rank, k = next(places)
    return {
        "logprob_max_abs_difference": worst,
        "worst_row": str(row_ids[worst_index]),
        "worst_row_rank": rank,
        "worst_row_microbatch": k,
    }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    with exits_at_once():
        main()
