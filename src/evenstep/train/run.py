"""A run: collect, close, credit, plan, train, log; the same code on one rank or many.

Rank 0 ships each rank the rows of its own cells. All state is four counters: a run can stop anywhere and go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from evenstep.config import Config
from evenstep.errors import ConfigError, NumericsError
from evenstep.preflight import used_folder
from evenstep.report.console import Reporter
from evenstep.report.html_page import write_report
from evenstep.train import distributed
from evenstep.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from evenstep.train.collecting import Collector, Counters
from evenstep.train.memory import peak_memory_bytes
from evenstep.train.metrics import METRIC_NAMES, rollout_metrics
from evenstep.train.passes import WindowRows, credited, scored, ship
from evenstep.train.run_folder import RunFolder
from evenstep.train.schedule import learning_rate, set_learning_rate
from evenstep.train.setup import load_models
from evenstep.train.step import StepOutcome, StepResult
from evenstep.train.window import PreparedWindow
from evenstep.tune.fit import MemoryFit
from evenstep.types import Window

__all__ = ["run_training"]

CRITIC_METRICS = ("value_error", "value_clip_fraction", "explained_variance")
# exactly 0 on a CPU with a reused plan; in bfloat16 another budget means other shapes and other rounding
RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
ENGINE_TOLERANCE = 1e-2  # nats per token; about 1e-12 in float32 on one machine

# a window's rollouts, and what is subtracted from their rewards -> advantage by rollout id
Credit = Callable[..., Mapping[str, float]]


def run_training(
    config: Config, *, resume: bool = False, reporter: Reporter | None = None, credit: Credit | None = None
) -> None:
    """Train as configured; every rank calls this with the same arguments, under torchrun or alone.

    Args:
        config: a checked configuration.
        resume: go on from the newest checkpoint of the run folder; rollouts that were generated after it and not yet
            trained are taken from disk. False needs a folder without a run.
        reporter: shown to the user by rank 0.
        credit: advantages of a window's voting rollouts, with ``train.kl_in = "reward"`` also given ``penalties``, what
            each rollout's reward is lowered by; None: the configured estimator.

    Raises:
        EvenstepError: see its subclasses; what was finished before stays on disk and can be resumed.
    """
    run = _Run(config, reporter, credit)
    try:
        with run.files.held() if run.rank == 0 else nullcontext():
            run.train(resume=resume)
    finally:
        run.collector.close()


class _Run:
    def __init__(self, config: Config, reporter: Reporter | None, credit: Credit | None) -> None:
        if credit is not None and config.has_critic:
            raise ConfigError(
                "credit gives advantages by rollout, found credit.estimator = 'gae', which has one per token; leave "
                "credit out, or set another estimator"
            )
        self.config = config
        self.credit = credit
        self.files = RunFolder(Path(config.run.dir))
        self.rank, self.num_ranks = distributed.rank_and_size()
        self.reporter = reporter if self.rank == 0 else None
        self.counters = Counters()
        self.evaluations: list[dict[str, Any]] = []
        self.layout: str | None = None  # of the last window that was logged
        # which passes and windows there are follows from it, so ranks that differ would wait for each other
        distributed.agree("configuration", sha256(config.resolved().encode()).hexdigest())
        self.models = load_models(config)
        self.trainer = self.models.policy
        self.collector = Collector(config, self.models, self.files, self._notice)

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self, *, resume: bool) -> None:
        config = self.config
        self._open_folder(resume=resume)
        if self.reporter:
            self.reporter.start(
                {
                    "num_ranks": self.num_ranks,
                    "num_parameters": self.models.num_parameters,
                    "num_windows": config.num_windows,
                    "first_window": self.counters.window,
                    "folder": str(self.files.path),
                    "evaluations": self.evaluations,
                }
            )
        if self.counters.window == 0:
            self._evaluate()
        while self.counters.collection < config.run.num_collections:
            self._train_collection()
            self.counters.collection += 1
            done = self.counters.collection == config.run.num_collections
            every = config.evaluation.every
            if done or (every and self.counters.collection % every == 0):
                self._evaluate()
            if done or self.counters.collection % config.checkpoint.every == 0:
                self._checkpoint()
        if config.checkpoint.export:
            self.models.export(self.files.path)
        if self.reporter:
            self._write_page()
            self.reporter.finish({"folder": str(self.files.path), "evaluations": self.evaluations})

    def _train_collection(self) -> None:
        started = time.perf_counter()
        self._phase("generate")
        windows = self.collector.collect(self.counters)
        # what the whole collection took is shared out evenly, so that windows can be compared
        num_windows = self.config.train.windows_per_collection * self.config.train.epochs
        seconds_generate = (time.perf_counter() - started) / num_windows
        started = time.perf_counter()
        credited_windows = self._credited(windows)
        first_pass = self._ship(credited_windows)
        seconds_score = (time.perf_counter() - started) / num_windows if self.config.has_scoring_pass else 0.0

        for epoch in range(self.config.train.epochs):
            for index, prepared in enumerate(first_pass):
                self._phase("train")
                started = time.perf_counter()
                metrics = self._train_window(prepared, is_first=epoch == index == 0)
                if windows is not None and credited_windows is not None:
                    metrics |= credited_windows[index].metrics
                    window = windows[epoch * len(first_pass) + index]
                    seconds = {
                        "seconds_generate": seconds_generate,
                        "seconds_score": seconds_score,
                        "seconds_train": time.perf_counter() - started,
                    }
                    self._log_window(window, prepared, metrics | seconds)
                self.counters.window += 1
                if metrics["stepped"]:
                    self.counters.optimizer_step += 1
                    self.collector.weights_changed(self.counters)

    def _check_agreement(self, metrics: Mapping[str, Any]) -> None:
        """Before a collection's first update: stop when engine, scoring and training do not see one policy.

        Raises:
            NumericsError: the ratio is not 1, or the engine sampled from another distribution than the trainer's.
        """
        deviation, divergence = metrics.get("ratio_max_deviation"), metrics.get("engine_trainer_kl")
        tolerance = RATIO_TOLERANCE[self.config.train.compute_dtype]
        is_fresh = self.config.rollout.max_staleness == 0
        # a server computes otherwise than the trainer: how far from it is what the divergence says
        is_of_server = self.config.old_logprobs == "engine" and self.config.engine.is_server
        is_one = self.config.old_logprobs == "scored" or (is_fresh and not is_of_server)
        if is_one and deviation is not None and deviation > tolerance:
            raise NumericsError(
                f"window {self.counters.window}: before the first update every ratio must be 1, found a deviation of "
                f"{deviation:.3g} from {self.config.old_logprobs} log-probs; the passes disagree: look for dropout or "
                f"a temperature in one of them only"
            )
        if is_fresh and divergence is not None and divergence > ENGINE_TOLERANCE:
            raise NumericsError(
                f"window {self.counters.window}: the engine's log-probs must be the trainer's, found a KL estimate of "
                f"{divergence:.3g} per token; the model's cache may not be exact in generation"
            )

    def _credited(self, windows: Sequence[Window] | None) -> list[WindowRows] | None:
        """Rank 0: the rows of each window of one epoch, scored and credited; other ranks take part in the passes."""
        config = self.config
        found = None
        if windows is not None:
            found = [WindowRows.of(window, config.rollout.on_undeclared) for window in windows if window.epoch == 0]
        if config.has_scoring_pass:
            self._phase("score")
        # without a pass too: old log-probs of the engine come from the rollouts
        found = scored(found, self.models, config)
        if found is None:
            return None
        return [credited(window, config, self.credit) for window in found]

    def _ship(self, windows: Sequence[WindowRows] | None) -> list[PreparedWindow | None]:
        """Plan on rank 0, then give each rank the rows of its own cells; None for a window without rows."""
        prepared = None if windows is None else [self._prepare(window) for window in windows]
        return ship(prepared)

    def _prepare(self, window: WindowRows) -> PreparedWindow | None:
        if not window.rows:
            return None
        prepared = self.trainer.prepare(window.rows, window.voters)
        self.files.write_plan(window.window.window, prepared.plan, window.rows, prepared.lengths)
        for item in prepared.plan.overlong:
            self._notice(
                f"row {window.rows[item.row].row_id} has {item.length} tokens, more than the budget of {item.budget}: "
                f"it stands alone in its micro-batch"
            )
        return prepared

    # --- training -------------------------------------------------------------------------------------------------

    def _train_window(self, prepared: PreparedWindow | None, *, is_first: bool) -> dict[str, Any]:
        train = self.config.train
        rate = learning_rate(
            self.counters.optimizer_step,
            peak=train.lr,
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            total_steps=self.config.num_windows,
        )
        counters = {"window": self.counters.window, "optimizer_step": self.counters.optimizer_step, "lr": rate}
        if prepared is None:
            return counters | {"stepped": False, "skip_reason": "no rollout of the window has tokens"}
        set_learning_rate(self.trainer.optimizer, rate)
        result: StepResult = self.trainer.forward_backward(prepared)
        if is_first:
            self._check_agreement(result.metrics)
        outcome: StepOutcome = self.trainer.optim_step()
        metrics = result.metrics | self._train_critic(prepared, rate / train.lr)
        step = {"stepped": outcome.stepped, "skip_reason": outcome.skip_reason, "grad_norm": outcome.grad_norm}
        return counters | step | metrics

    def _train_critic(self, prepared: PreparedWindow, schedule: float) -> dict[str, Any]:
        """The critic's step on the same window; its metrics."""
        critic = self.models.critic
        if critic is None:
            return {}
        peak = self.config.critic.lr or self.config.train.lr
        set_learning_rate(critic.optimizer, peak * schedule)
        result = critic.forward_backward(prepared)
        outcome = critic.optim_step()
        found = {name: result.metrics[name] for name in CRITIC_METRICS}
        return found | {"critic_loss": result.loss, "critic_grad_norm": outcome.grad_norm}

    def _log_window(self, window: Window, prepared: PreparedWindow | None, metrics: Mapping[str, Any]) -> None:
        line: dict[str, Any] = dict.fromkeys(METRIC_NAMES)
        line |= rollout_metrics(window, optimizer_step=self.counters.optimizer_step, replaced=self.collector.replaced)
        line |= metrics
        seconds = sum(line[name] for name in ("seconds_generate", "seconds_score", "seconds_train"))
        num_tokens = prepared.plan.stats.num_tokens if prepared is not None else 0
        if prepared is not None:
            line["layout"] = prepared.plan.layout
            if prepared.layout_reason is not None and prepared.plan.layout != self.layout:
                self._notice(f"window {window.window}: layout {prepared.layout_reason}")
            self.layout = prepared.plan.layout
        line |= {
            "collection": window.collection,
            "epoch": window.epoch,
            "tokens_per_second": num_tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "predicted_memory_bytes": self._predicted_bytes(prepared),
        }
        self.files.append_metrics(line)
        if self.reporter:
            self.reporter.window(line)

    def _predicted_bytes(self, prepared: PreparedWindow | None) -> float | None:
        """What the largest micro-batch needs by the fit of ``evenstep tune``."""
        fit = self.config.plan.memory_fit
        if fit is None or prepared is None:
            return None
        least, fixed, per_token, per_logit_token = fit
        known = MemoryFit(
            least_bytes=least, fixed_bytes=fixed, bytes_per_token=per_token, bytes_per_logit_token=per_logit_token
        )
        chunk = self.config.train.logprob_chunk_tokens
        return known.peak_bytes(prepared.plan.stats.max_footprint, chunk_tokens=chunk)

    # --- evaluation, state ----------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        options = self.config.evaluation
        if options.num_tasks == 0:
            return
        self._phase("evaluate")
        result = self.collector.evaluate(self.counters)
        if result is None:
            return
        self.evaluations.append(result)
        self.files.append_metrics(result)
        if self.reporter:
            self.reporter.evaluation(result)

    def _checkpoint(self) -> None:
        self._phase("checkpoint")
        save_checkpoint(
            self.files.checkpoints, self.models.trained, asdict(self.counters), keep=self.config.checkpoint.keep
        )

    def _open_folder(self, *, resume: bool) -> None:
        """Make the run folder, or go back to its newest checkpoint."""
        if not resume and distributed.broadcast(self.files.has_run):
            raise ConfigError(used_folder(str(self.files.path)))
        # rank 0 chooses, so that no rank can go on from another window than the rest
        checkpoint = distributed.broadcast(latest_checkpoint(self.files.checkpoints) if resume else None)
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, self.models.trained)
            if state["num_ranks"] != self.num_ranks:
                self._notice(
                    f"the run was on {state['num_ranks']} ranks and goes on with {self.num_ranks}: the same step, "
                    f"but not the same rounding"
                )
            self.counters = Counters(**{name.name: state[name.name] for name in fields(Counters)})
        if self.rank == 0:
            config, counters = self.config.resolved(), self.counters
            self.evaluations = self.files.open(config, window=counters.window, collection=counters.collection)

    def _write_page(self) -> None:
        try:
            write_report(self.files.path)
        except Exception as error:  # noqa: BLE001 -- the run is done and saved: a page that fails must not fail it
            self._notice(f"no report.html was written ({type(error).__name__}: {error}); see: evenstep report --debug")

    def _phase(self, name: str) -> None:
        if self.reporter:
            self.reporter.phase(name)

    def _notice(self, text: str) -> None:
        if self.reporter:
            self.reporter.notice(text)
