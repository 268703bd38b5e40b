"""A run: collect, close, credit, plan, train, log; the same code on one rank or many.

Every rank generates its share of a collection; rank 0 gathers the rollouts, writes them to disk, closes the collection,
and ships each rank the rows of its own cells. All state is three counters: a run can stop anywhere and go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

from evenstep.config import Config
from evenstep.credit import rollout_advantages
from evenstep.errors import CollectionError, ConfigError, NumericsError
from evenstep.files import read_rollouts, write_rollouts
from evenstep.report.console import Reporter
from evenstep.rollout.agent import AgentOptions
from evenstep.rollout.ahead import Ahead
from evenstep.rollout.chat import ChatRenderer, ChatTokenizer
from evenstep.rollout.collector import Slot, generate_rollouts, windows_of
from evenstep.rollout.compaction import compaction_named
from evenstep.rollout.environment import TaskSource
from evenstep.rollout.evaluate import evaluate, evaluation_of
from evenstep.rollout.in_process import InProcessEngine
from evenstep.rollout.refill import CollectionBuilder, RefillOptions
from evenstep.train import distributed
from evenstep.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from evenstep.train.metrics import METRIC_NAMES, peak_memory_bytes, rollout_metrics
from evenstep.train.passes import WindowRows, credited, scored, ship
from evenstep.train.run_folder import RunFolder
from evenstep.train.schedule import learning_rate, set_learning_rate
from evenstep.train.setup import load_models
from evenstep.train.step import StepOutcome, StepResult
from evenstep.train.window import PreparedWindow
from evenstep.types import Collection, Rollout, Window

__all__ = ["run_training"]

CRITIC_METRICS = ("value_error", "value_clip_fraction", "explained_variance")
# exactly 0 on a CPU with a reused plan; in bfloat16 another budget means other shapes and other rounding
RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
ENGINE_TOLERANCE = 1e-2  # nats per token; about 1e-12 in float32 on one machine


@dataclass(slots=True, kw_only=True)
class Counters:
    """All that a resume needs besides weights and moments."""

    collection: int = 0  # collections trained
    window: int = 0  # windows trained, each epoch's pass counted
    optimizer_step: int = 0  # of them, those that moved the weights
    task: int = 0  # tasks drawn


# a window's rollouts, and what is subtracted from their rewards -> advantage by rollout id
Credit = Callable[..., Mapping[str, float]]


def run_training(
    config: Config, *, resume: bool = False, reporter: Reporter | None = None, credit: Credit | None = None
) -> None:
    """Train as configured; every rank calls this with the same arguments, under torchrun or alone.

    Args:
        config: a checked configuration.
        resume: go on from the newest checkpoint of the run folder; rollouts that were generated after it and not yet
            trained are taken from disk.
        reporter: shown to the user by rank 0.
        credit: advantages of a window's voting rollouts, with ``train.kl_in = "reward"`` also given ``penalties``, what
            each rollout's reward is lowered by; None: the configured estimator.

    Raises:
        EvenstepError: see its subclasses; what was finished before stays on disk and can be resumed.
    """
    _Run(config, reporter, credit).train(resume=resume)


class _Ahead(NamedTuple):
    """A generation that is under way on this rank."""

    slots: tuple[Slot, ...]  # of all ranks
    generation: Ahead[list[Rollout]]


class _Run:
    def __init__(self, config: Config, reporter: Reporter | None, credit: Credit | None) -> None:
        if credit is not None and config.has_critic:
            raise ConfigError(
                "credit gives advantages by rollout, found credit.estimator = 'gae', which has one per token; leave "
                "credit out, or set another estimator"
            )
        self.config = config
        self.credit = credit or partial(rollout_advantages, estimator=config.credit.estimator)
        self.files = RunFolder(Path(config.run.dir))
        self.rank, self.num_ranks = distributed.rank_and_size()
        self.reporter = reporter if self.rank == 0 else None
        self.counters = Counters()
        self.evaluations: list[dict[str, Any]] = []
        self._ahead: _Ahead | None = None
        self._replaced: frozenset[str] = frozenset()  # groups of the present collection that stand in for dropped ones
        # which passes and windows there are follows from it, so ranks that differ would wait for each other
        distributed.agree("configuration", sha256(config.resolved().encode()).hexdigest())
        self._load()

    def _load(self) -> None:
        config = self.config
        models = load_models(config)
        self.models, self.trainer, self.tokenizer = models, models.policy, models.tokenizer
        self.compaction = compaction_named(config.compaction.policy, **config.compaction.options)
        self.renderer = ChatRenderer(cast(ChatTokenizer, self.tokenizer))
        self.engine = InProcessEngine(
            models.sampler,
            eos_token_ids=self.renderer.stop_token_ids,
            max_context_tokens=config.model.max_context_tokens,
        )
        self.agent_options = AgentOptions(
            max_context_tokens=config.model.max_context_tokens,
            max_tokens_per_call=config.rollout.max_tokens_per_call,
            temperature=config.rollout.temperature,
            max_calls=config.rollout.max_calls,
            max_segments=config.rollout.max_segments,
            step_timeout_s=config.rollout.step_timeout_s,
            timeout_s=config.rollout.timeout_s,
            vocab_size=models.sampler.config.get_text_config().vocab_size,
        )

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self, *, resume: bool) -> None:
        config = self.config
        self._open_folder(resume=resume)
        if self.reporter:
            self.reporter.start(
                {
                    "num_ranks": self.num_ranks,
                    "num_parameters": self.models.num_parameters,
                    "num_windows": self.num_windows,
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
            self.reporter.finish({"folder": str(self.files.path), "evaluations": self.evaluations})

    @property
    def num_windows(self) -> int:
        """Windows of the whole run, which is also the most optimizer steps it can take."""
        train = self.config.train
        return self.config.run.num_collections * train.windows_per_collection * train.epochs

    def _train_collection(self) -> None:
        started = time.perf_counter()
        self._phase("generate")
        windows = self._collect()
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
                    metrics["kl_penalty_mean"] = credited_windows[index].kl_penalty_mean
                    window = windows[epoch * len(first_pass) + index]
                    seconds = {
                        "seconds_generate": seconds_generate,
                        "seconds_score": seconds_score,
                        "seconds_train": time.perf_counter() - started,
                    }
                    self._log_window(window, prepared, metrics | seconds)
                self.counters.window += 1
                self.counters.optimizer_step += bool(metrics["stepped"])

    def _check_agreement(self, metrics: Mapping[str, Any]) -> None:
        """Before a collection's first update: stop when engine, scoring and training do not see one policy.

        Raises:
            NumericsError: the ratio is not 1, or the engine sampled from another distribution than the trainer's.
        """
        deviation, divergence = metrics.get("ratio_max_deviation"), metrics.get("engine_trainer_kl")
        tolerance = RATIO_TOLERANCE[self.config.train.compute_dtype]
        is_fresh = self.config.rollout.max_staleness == 0
        is_one = self.config.old_logprobs == "scored" or is_fresh
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

    # --- collecting -----------------------------------------------------------------------------------------------

    def _collect(self) -> list[Window] | None:
        """Rank 0: the windows of the next collection, all epochs; other ranks: None."""
        train, index = self.config.train, self.counters.collection
        builder = self._builder()
        path = self.files.collection(index)
        if self.rank == 0:
            builder.add(self._stored(path))
        while slots := distributed.broadcast(builder.missing()):
            parts = distributed.gather(self._generated(slots))
            if parts is not None:
                found = [r for part in parts for r in part]
                # written before anything is decided, so that a budget that is spent costs no rollout
                write_rollouts(path, [*builder.rollouts, *found])
                builder.add(found)
        self.counters.task = distributed.broadcast(self.counters.task + builder.num_tasks)
        windows = None
        if self.rank == 0:
            collection = builder.close()
            self._replaced = builder.replaced
            self._report_losses(collection, builder.dropped)
            self.files.append_index(
                {
                    "collection": index,
                    "file": path.name,
                    "num_rollouts": len(builder.rollouts),
                    "num_sampled_tokens": sum(r.num_sampled_tokens for r in builder.rollouts),
                    "groups": [group.group_id for group in collection.groups],
                    "dropped": builder.dropped,
                    "num_carried": len(builder.leftovers),
                    "first_window": self.counters.window,
                    "optimizer_step": self.counters.optimizer_step,
                }
            )
            self.files.write_carried(index + 1, builder.leftovers)
            windows = list(
                windows_of(
                    collection,
                    rollouts_per_window=train.rollouts_per_window,
                    epochs=train.epochs,
                    first_window=self.counters.window,
                    num_windows=train.windows_per_collection,
                )
            )
        if self.config.rollout.max_staleness and index + 1 < self.config.run.num_collections:
            self._generate_ahead()
        return windows

    def _builder(self, *, num_ahead: int = 0) -> CollectionBuilder:
        """Of the present collection, or of one that is still to come."""
        rollout, collection = self.config.rollout, self.counters.collection + num_ahead
        version = self.counters.optimizer_step
        train = self.config.train
        # what will be stale once the windows before it are trained is not counted on
        oldest = version - rollout.max_staleness + num_ahead * train.windows_per_collection * train.epochs
        return CollectionBuilder(
            collection=collection,
            num_prompts=rollout.num_prompts,
            num_generations=rollout.num_generations,
            first_task=self.counters.task,
            options=RefillOptions(
                drop_zero_spread=rollout.drop_zero_spread,
                truncated=rollout.truncated,
                num_extra_prompts=rollout.num_extra_prompts,
                max_attempts_per_prompt=rollout.max_attempts_per_prompt,
                max_replacements=rollout.max_replacements,
                on_shortfall=rollout.on_shortfall,
            ),
            carried=self.files.read_carried(collection) if self.rank == 0 else (),
            weight_versions=range(max(0, oldest), version + 1),
        )

    def _generate_ahead(self) -> None:
        """Begin with the next collection, on the present weights, while this one is trained."""
        self._ahead = self._start(distributed.broadcast(self._builder(num_ahead=1).missing()))

    def _generated(self, slots: tuple[Slot, ...]) -> list[Rollout]:
        """This rank's share of the slots: begun while the last collection was trained, or now."""
        if self._ahead is not None:
            found, asked, self._ahead = self._ahead.generation.result(), self._ahead.slots, None
            if asked == slots:
                return found
        return self._start(slots).generation.result()

    def _start(self, slots: tuple[Slot, ...]) -> _Ahead:
        # nothing generates at this moment, so the weights that it reads may change
        self.models.refresh_sampler()
        self.engine.weight_version = self.counters.optimizer_step
        return _Ahead(slots, Ahead(self._generate(slots)))

    async def _generate(self, slots: Sequence[Slot]) -> list[Rollout]:
        """This rank's share."""
        return await generate_rollouts(
            slots,
            tasks=self._tasks("train", self.config.run.seed),
            engine=self.engine,
            renderer=self.renderer,
            compaction=self.compaction,
            options=self.agent_options,
            run_seed=self.config.run.seed,
            batch_rollouts=self.config.rollout.generation_batch_rollouts,
            rank=self.rank,
            num_ranks=self.num_ranks,
        )

    def _report_losses(self, collection: Collection, dropped: Mapping[str, str]) -> None:
        """Say what failed or was dropped, and why; a collection that has nothing to train ends the run."""
        if dropped:
            group_id, reason = next(iter(dropped.items()))
            num_kept = len(collection.groups)
            self._notice(f"{len(dropped)} groups were dropped, {num_kept} are trained; {group_id}: {reason}")
        rollouts = collection.rollouts
        failed = [r for r in rollouts if r.status == "failed"]
        if not any(r.calls for r in rollouts):
            first = next((r for r in rollouts if r.status_reason), rollouts[0])
            raise CollectionError(
                f"collection {collection.collection}: none of {len(rollouts)} rollouts made a call that can be trained "
                f"({len(failed)} failed); {first.rollout_id} says: {first.status_reason}"
            )
        if failed:
            reason = (failed[0].status_reason or "").strip().splitlines()[-1:]
            self._notice(f"{len(failed)} of {len(rollouts)} rollouts failed; {failed[0].rollout_id}: {''.join(reason)}")

    def _stored(self, path: Path) -> list[Rollout]:
        """Rollouts of this collection that an interrupted run left behind, sampled by these very weights."""
        found = list(read_rollouts(path)) if path.exists() else []
        oldest = self.counters.optimizer_step - self.config.rollout.max_staleness
        versions = [r.weight_version for r in found if r.weight_version is not None]
        if any(not oldest <= version <= self.counters.optimizer_step for version in versions):
            self._notice(f"{path.name}: sampled by other weights, generated again")
            return []
        return found

    def _credited(self, windows: Sequence[Window] | None) -> list[WindowRows] | None:
        """Rank 0: the rows of each window of one epoch, scored and credited; other ranks take part in the passes."""
        config = self.config
        found = None
        if windows is not None:
            found = [WindowRows.of(window) for window in windows if window.epoch == 0]
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
        self.files.write_plan(window.window.window, prepared.plan.to_json())
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
            total_steps=self.num_windows,
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
        line |= rollout_metrics(window, optimizer_step=self.counters.optimizer_step, replaced=self._replaced)
        line |= metrics
        seconds = sum(line[name] for name in ("seconds_generate", "seconds_score", "seconds_train"))
        num_tokens = prepared.plan.stats.num_tokens if prepared is not None else 0
        line |= {
            "collection": window.collection,
            "epoch": window.epoch,
            "tokens_per_second": num_tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        self.files.append_metrics(line)
        if self.reporter:
            self.reporter.window(line)

    # --- evaluation, state ----------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        options = self.config.evaluation
        if options.num_tasks == 0:
            return
        self._phase("evaluate")
        if self._ahead is not None:
            self._ahead.generation.result()  # both read the sampler's weights
        self.models.refresh_sampler()
        self.engine.weight_version = self.counters.optimizer_step
        tasks = self._tasks("heldout", options.seed)
        # of a finite set each task once: twice would count twice in the mean
        num_tasks = options.num_tasks if tasks.num_tasks is None else min(options.num_tasks, tasks.num_tasks)
        if num_tasks == 0:
            return
        mine = asyncio.run(
            evaluate(
                num_tasks=num_tasks,
                tasks=tasks,
                engine=self.engine,
                renderer=self.renderer,
                compaction=self.compaction,
                options=self.agent_options,
                batch_rollouts=self.config.rollout.generation_batch_rollouts,
                rank=self.rank,
                num_ranks=self.num_ranks,
            )
        )
        parts = distributed.gather(mine)
        if parts is None:
            return
        result = {"window": self.counters.window, "optimizer_step": self.counters.optimizer_step}
        result |= evaluation_of([rollout for part in parts for rollout in part]).to_json()
        self.evaluations.append(result)
        self.files.append_metrics(result)
        if self.reporter:
            self.reporter.evaluation(result)

    def _tasks(self, split: Any, seed: int) -> TaskSource:
        config = self.config
        return TaskSource(name=config.environment.name, options=config.environment_options, seed=seed, split=split)

    def _checkpoint(self) -> None:
        self._phase("checkpoint")
        save_checkpoint(
            self.files.checkpoints, self.models.trained, asdict(self.counters), keep=self.config.checkpoint.keep
        )

    def _open_folder(self, *, resume: bool) -> None:
        """Make the run folder, or go back to its newest checkpoint."""
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

    def _phase(self, name: str) -> None:
        if self.reporter:
            self.reporter.phase(name)

    def _notice(self, text: str) -> None:
        if self.reporter:
            self.reporter.notice(text)
