"""Filling collections in a run: which rollouts are generated, on which weights, and what is on disk before they count.

Every rank generates its share of a collection; rank 0 gathers the rollouts, writes them to disk, and closes the
collection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from evenstep.config import Config
from evenstep.errors import CollectionError, EngineError
from evenstep.files import read_rollouts, write_rollouts
from evenstep.rollout.agent import AgentOptions
from evenstep.rollout.ahead import Ahead
from evenstep.rollout.chat import ChatRenderer, ChatTokenizer
from evenstep.rollout.collector import Player, Slot, generate_rollouts, slots_of, windows_of
from evenstep.rollout.compaction import compaction_named
from evenstep.rollout.environment import TaskSource
from evenstep.rollout.evaluate import evaluation_of
from evenstep.rollout.refill import CollectionBuilder, RefillOptions
from evenstep.train import distributed
from evenstep.train.engines import policy_engine
from evenstep.train.run_folder import RunFolder
from evenstep.train.setup import Models
from evenstep.types import Collection, Rollout, Window

__all__ = ["Collector", "Counters"]

STOP_S = 10.0  # that the end of a run waits for a generation that nobody needs any more


@dataclass(slots=True, kw_only=True)
class Counters:
    """All that a resume needs besides weights and moments."""

    collection: int = 0  # collections trained
    window: int = 0  # windows trained, each epoch's pass counted
    optimizer_step: int = 0  # of them, those that moved the weights
    task: int = 0  # tasks drawn


class _Share(NamedTuple):
    """What a rank generated of what it was asked for, and what ended the rest."""

    rollouts: list[Rollout]
    error: str | None = None


class _Ahead(NamedTuple):
    """A generation that is under way on this rank."""

    slots: tuple[Slot, ...]  # of all ranks
    generation: Ahead[_Share]


class Collector:
    """The collections of a run, one after the other; every rank makes one and calls the same methods.

    Args:
        config: of the run.
        models: whose policy generates.
        files: the run's folder.
        notice: shows a line to the user.
    """

    def __init__(self, config: Config, models: Models, files: RunFolder, notice: Callable[[str], None]) -> None:
        self._config, self._files, self._notice = config, files, notice
        self._rank, self._num_ranks = distributed.rank_and_size()
        self._ahead: _Ahead | None = None
        self._generation: Ahead[_Share] | None = None  # the newest, ahead or not
        # groups of the last collection that stand in for dropped ones
        self.replaced: frozenset[str] = frozenset()
        self._compaction = compaction_named(config.compaction.policy, **config.compaction.options)
        tokenizer = cast(ChatTokenizer, models.tokenizer)
        self._renderer = ChatRenderer(tokenizer, models.vision, images_problem=_images_problem(config))
        self._source = policy_engine(config, models, self._renderer, files, notice)
        self._player: Player | None = None
        if config.agent.kind == "command":
            self._player = _command_player(config, models, self._renderer, self._source.rollouts_at_once)
        self._agent_options = AgentOptions(
            max_context_tokens=config.model.max_context_tokens,
            max_tokens_per_call=config.rollout.max_tokens_per_call,
            temperature=config.rollout.temperature,
            max_calls=config.rollout.max_calls,
            max_segments=config.rollout.max_segments,
            is_cut_off_truncated=config.rollout.cut_off == "truncated",
            step_timeout_s=config.rollout.step_timeout_s,
            timeout_s=config.rollout.timeout_s,
            vocab_size=models.sampler.config.get_text_config().vocab_size,
        )

    def collect(self, counters: Counters) -> list[Window] | None:
        """Rank 0: the windows of the next collection, all epochs; other ranks: None. ``counters.task`` advances.

        Raises:
            CollectionError: it cannot close with the rollouts that it needs, or none of them made a call.
            EngineError: a call cannot be served.
        """
        train, index = self._config.train, counters.collection
        builder = self._builder(counters)
        path = self._files.collection(index)
        if self._rank == 0:
            builder.add(self._stored(path, counters))
        while slots := distributed.broadcast(builder.missing()):
            parts = distributed.gather(self._generated(slots, counters))
            errors: list[str] = []
            if parts is not None:
                found = [r for part in parts for r in part.rollouts]
                # written before anything is decided, so that a budget that is spent costs no rollout
                write_rollouts(path, [*builder.rollouts, *found])
                errors = [part.error for part in parts if part.error is not None]
                if not errors:
                    builder.add(found)
            _raise_first(distributed.broadcast(errors))
        counters.task = distributed.broadcast(counters.task + builder.num_tasks)
        windows = None
        if self._rank == 0:
            collection = builder.close()
            self.replaced = builder.replaced
            self._report_losses(collection, builder.dropped)
            self._files.append_index(
                {
                    "collection": index,
                    "file": path.name,
                    "num_rollouts": len(builder.rollouts),
                    "num_sampled_tokens": sum(r.num_sampled_tokens for r in builder.rollouts),
                    "groups": [group.group_id for group in collection.groups],
                    "dropped": builder.dropped,
                    "num_carried": len(builder.leftovers),
                    "first_window": counters.window,
                    "optimizer_step": counters.optimizer_step,
                }
            )
            self._files.write_carried(index + 1, builder.leftovers)
            windows = list(
                windows_of(
                    collection,
                    rollouts_per_window=train.rollouts_per_window,
                    epochs=train.epochs,
                    first_window=counters.window,
                    num_windows=train.windows_per_collection,
                )
            )
        if self._config.rollout.max_staleness and index + 1 < self._config.run.num_collections:
            self._generate_ahead(counters)
        return windows

    def weights_changed(self, counters: Counters) -> None:
        """After an optimizer step, on every rank: a generation under way goes on with the new weights, if it may."""
        # whether one is under way is the same on every rank; whether it has ended is not, and does not matter
        if self._config.rollout.in_flight_updates and self._ahead is not None:
            self._update_weights(counters)

    def evaluate(self, counters: Counters) -> dict[str, Any] | None:
        """Rank 0: what the present policy scores on held-out tasks, for ``metrics.jsonl``; None without any."""
        options = self._config.evaluation
        if self._ahead is not None:
            self._ahead.generation.result()  # both read the sampler's weights
        self._update_weights(counters)
        tasks = self._tasks("heldout", options.seed)
        # of a finite set each task once: twice would count twice in the mean
        num_tasks = options.num_tasks if tasks.num_tasks is None else min(options.num_tasks, tasks.num_tasks)
        if num_tasks == 0:
            return None
        slots = slots_of(collection=0, num_prompts=num_tasks, num_generations=1)
        greedy = replace(self._agent_options, temperature=0.0)  # which draws nothing, whatever the seed
        parts = distributed.gather(asyncio.run(self._share(slots, tasks, greedy, run_seed=0)))
        _raise_first(distributed.broadcast([part.error for part in parts or () if part.error is not None]))
        if parts is None:
            return None
        result: dict[str, Any] = {"window": counters.window, "optimizer_step": counters.optimizer_step}
        return result | evaluation_of([rollout for part in parts for rollout in part.rollouts]).to_json()

    def close(self) -> None:
        """End what was started to generate, and a generation that is under way."""
        self._source.close()
        if self._generation is not None:
            self._generation.stop(within_s=STOP_S)

    # --- generation -----------------------------------------------------------------------------------------------

    def _update_weights(self, counters: Counters) -> None:
        """Give the engine the policy's present weights."""
        self._source.update_weights(counters.optimizer_step)

    def _builder(self, counters: Counters, *, num_ahead: int = 0) -> CollectionBuilder:
        """Of the present collection, or of one that is still to come."""
        rollout, collection = self._config.rollout, counters.collection + num_ahead
        version = counters.optimizer_step
        train = self._config.train
        # what will be stale once the windows before it are trained is not counted on
        oldest = version - rollout.max_staleness + num_ahead * train.windows_per_collection * train.epochs
        return CollectionBuilder(
            collection=collection,
            num_prompts=rollout.num_prompts,
            num_generations=rollout.num_generations,
            first_task=counters.task,
            options=RefillOptions(
                drop_zero_spread=rollout.drop_zero_spread,
                truncated=rollout.truncated,
                num_extra_prompts=rollout.num_extra_prompts,
                max_attempts_per_prompt=rollout.max_attempts_per_prompt,
                max_replacements=rollout.max_replacements,
                on_shortfall=rollout.on_shortfall,
            ),
            carried=self._files.read_carried(collection) if self._rank == 0 else (),
            weight_versions=range(max(0, oldest), version + 1),
        )

    def _generate_ahead(self, counters: Counters) -> None:
        """Begin with the next collection, on the present weights, while this one is trained."""
        slots = distributed.broadcast(self._builder(counters, num_ahead=1).missing())
        self._ahead = self._start(slots, counters)

    def _generated(self, slots: tuple[Slot, ...], counters: Counters) -> _Share:
        """This rank's share of the slots: begun while the last collection was trained, or now."""
        if self._ahead is not None:
            found, asked, self._ahead = self._ahead.generation.result(), self._ahead.slots, None
            if asked == slots:
                return found
        return self._start(slots, counters).generation.result()

    def _start(self, slots: tuple[Slot, ...], counters: Counters) -> _Ahead:
        self._update_weights(counters)
        self._generation = Ahead(self._generate(slots))
        return _Ahead(slots, self._generation)

    async def _generate(self, slots: Sequence[Slot]) -> _Share:
        run_seed = self._config.run.seed
        return await self._share(slots, self._tasks("train", run_seed), self._agent_options, run_seed=run_seed)

    async def _share(self, slots: Sequence[Slot], tasks: TaskSource, options: AgentOptions, *, run_seed: int) -> _Share:
        """Do this rank's work. With servers, which may go away, what is finished by then is kept; in this process
        whole generation batches are made again, so that they come out the same."""
        done: list[Rollout] = []
        work = generate_rollouts(
            slots,
            tasks=tasks,
            engine=self._source.engine,
            renderer=self._renderer,
            compaction=self._compaction,
            options=options,
            run_seed=run_seed,
            batch_rollouts=self._source.rollouts_at_once,
            rank=self._rank,
            num_ranks=self._num_ranks,
            player=self._player,
            on_done=done.append,
        )
        try:
            return _Share(await work)
        except EngineError as error:
            if not self._config.engine.is_server:
                raise
            return _Share(done, str(error))

    def _tasks(self, split: Any, seed: int) -> TaskSource:
        config = self._config
        return TaskSource(name=config.environment.name, options=config.environment_options, seed=seed, split=split)

    # --- what was kept --------------------------------------------------------------------------------------------

    def _report_losses(self, collection: Collection, dropped: Mapping[str, str]) -> None:
        """Say what failed, was truncated or dropped, and why; a collection that has nothing to train ends the run."""
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
        # no environment's fault: a limit that was set, such as max_segments with a schedule that breaks every context
        truncated = [r for r in rollouts if r.status == "truncated"]
        if truncated:
            self._notice(
                f"{len(truncated)} of {len(rollouts)} rollouts were truncated; {truncated[0].rollout_id}: "
                f"{truncated[0].status_reason}"
            )

    def _stored(self, path: Path, counters: Counters) -> list[Rollout]:
        """Rollouts of this collection that an interrupted run left behind, sampled by these very weights."""
        found = list(read_rollouts(path)) if path.exists() else []
        oldest = counters.optimizer_step - self._config.rollout.max_staleness
        versions = [call.weight_version for rollout in found for call in rollout.calls]
        if any(not oldest <= version <= counters.optimizer_step for version in versions):
            self._notice(f"{path.name}: sampled by other weights, generated again")
            return []
        return found


def _images_problem(config: Config) -> str | None:
    """Why rollouts can show no images, known before the first of them is generated."""
    if config.has_critic:
        return "a critic sees none; set another credit.estimator than 'gae', or use an environment of text"
    if config.engine.is_server:
        return (
            f"servers are asked with token ids alone; let the training ranks generate (engine.kind = 'in_process' "
            f"instead of {config.engine.kind!r}), or use an environment of text"
        )
    return None


def _command_player(config: Config, models: Models, renderer: ChatRenderer, rollouts_at_once: int) -> Player:
    """Plays rollouts with the program that the configuration names."""
    from evenstep.serve.commands import CommandAgent, CommandPlayer  # needs the extra 'serve'

    agent = config.agent
    return CommandPlayer(
        agent=CommandAgent(
            command=agent.command,
            timeout_s=agent.rollout_timeout_s,
            reward=agent.reward,
            on_undeclared=config.rollout.on_undeclared,
        ),
        tokenizer=cast(Any, models.tokenizer),
        renderer=renderer,
        trained_temperature=config.rollout.temperature,
        max_side_by_side=rollouts_at_once,
    )


def _raise_first(errors: Sequence[str]) -> None:
    """On every rank, raise what ended the generation of one of them."""
    if errors:
        raise EngineError(errors[0])
