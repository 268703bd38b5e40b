"""Engines that follow the policy in training: what generates a run's rollouts, and how it gets new weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from evenstep.config import Config
from evenstep.errors import EngineError
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.engine import Engine
from evenstep.rollout.in_process import InProcessEngine
from evenstep.train import distributed
from evenstep.train.checkpoint import export
from evenstep.train.routing import replayed_routers, router_shape
from evenstep.train.run_folder import RunFolder
from evenstep.train.setup import Models

if TYPE_CHECKING:
    from evenstep.rollout.server import Probe, ServerEngine, ServerOptions
    from evenstep.rollout.server_process import ServerProcess

__all__ = ["PolicyEngine", "policy_engine"]

KEPT_VERSIONS = 2  # folders of weights: the servers' and the one before, which explains a probe that fails


class PolicyEngine(Protocol):
    """An engine, and the one way to give it the policy's weights."""

    @property
    def engine(self) -> Engine: ...

    @property
    def rollouts_at_once(self) -> int:
        """Rollouts of this rank that run side by side."""
        ...

    def update_weights(self, version: int) -> None:
        """Generate with the policy's present weights from the next batch on, and stamp calls with ``version``.

        Every rank calls it at the same point of its training thread. Another thread may be generating: in this process
        a batch that runs is awaited; with servers each call that is under way ends on the weights that it began with,
        and the next call of its rollout has the new ones.

        Raises:
            EngineError: a server cannot take them, or does not sample from them afterwards. Raised on all ranks.
        """
        ...

    def close(self) -> None:
        """End what was started; the engine generates no more."""
        ...


class InProcessPolicyEngine:
    """Every rank generates in its own process, from whole weights."""

    def __init__(self, config: Config, models: Models, renderer: ChatRenderer) -> None:
        self._models = models
        self.rollouts_at_once = config.rollout.generation_batch_rollouts
        self.engine = InProcessEngine(
            models.sampler,
            eos_token_ids=renderer.stop_token_ids,
            max_context_tokens=config.model.max_context_tokens,
            routers=replayed_routers(models.sampler, config.train.routing_replay),
        )

    def update_weights(self, version: int) -> None:
        # Copying is collective where the policy is sharded. A rank that holds this waits for the other ranks' training
        # threads alone, each of which waits for a batch of its own at most, and batches wait for no rank.
        with self.engine.between_batches():
            self._models.refresh_sampler()
            self.engine.weight_version = version

    def close(self) -> None:
        self.engine.close()


class ServerPolicyEngine:
    """Servers generate; rank 0 writes the weights to a folder, gives it to them, and every rank asks them for calls.

    ``weights/version_000003`` of the run's folder holds the weights after 3 optimizer steps. It appears under its name
    when all of it is on disk, and the newest two stay.
    """

    def __init__(
        self, config: Config, models: Models, renderer: ChatRenderer, files: RunFolder, notice: Callable[[str], None]
    ) -> None:
        self._config, self._models, self._notice = config, models, notice
        self._rank, num_ranks = distributed.rank_and_size()
        self.rollouts_at_once = -(-config.engine.max_concurrent // num_ranks)
        self._folder = (files.path / "weights").resolve()
        self._logs = files.path / "logs"
        self._stop_token_ids = frozenset(renderer.stop_token_ids)
        self._engine: ServerEngine | None = None  # from the first weights on
        self._processes: dict[str, ServerProcess] = {}
        self._version: int | None = None

    @property
    def engine(self) -> ServerEngine:
        if self._engine is None:
            raise EngineError("servers serve the policy from its first update_weights() on, found none yet; call it")
        return self._engine

    def update_weights(self, version: int) -> None:
        if version == self._version:
            return  # the weights are a function of the steps behind them
        distributed.together(lambda: None if self._engine is None else self._engine.hold())
        folder = self._folder / f"version_{version:06d}"
        previous = None if self._version is None else self._folder / f"version_{self._version:06d}"
        self._folder.mkdir(parents=True, exist_ok=True)
        export(
            folder,
            self._models.policy.model,
            self._models.tokenizer,
            untied=self._config.engine.untie_embeddings,
            beside=self._models.files_beside,
        )
        if self._engine is None:
            self._start(folder)
        engine = self.engine

        def update() -> list[Probe]:
            return engine.update(folder, version, prompt_ids=self._prompt_ids) if self._rank == 0 else []

        probes = distributed.broadcast(distributed.together(update))
        self._check(probes, folder, previous)
        engine.accept(probes)
        engine.release(version, distributed.broadcast(engine.stamps()))
        self._version = version
        distributed.together(lambda: self._remove_old(folder) if self._rank == 0 else None)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        for process in self._processes.values():
            process.stop()

    # --- what an update is made of --------------------------------------------------------------------------------

    def _check(self, probes: list[Probe], folder: Path, previous: Path | None) -> None:
        from evenstep.train.probe import check_probes

        section = self._config.engine
        check = partial(check_probes, self._models.policy, probes, tolerance=section.probe_tolerance)
        # rank 0 alone explains: that loads the models again
        is_first = self._rank == 0
        distributed.together(
            lambda: check(
                dtype=section.dtype, folder=folder if is_first else None, previous=previous if is_first else None
            )
        )

    def _remove_old(self, newest: Path) -> None:
        # version numbers may have gone back on a resume: the newest is the one just written, not the highest
        others = sorted(
            (path for path in self._folder.glob("version_*") if path != newest),
            key=lambda path: path.stat().st_mtime_ns,
        )
        for path in others[: len(others) - KEPT_VERSIONS + 1]:
            shutil.rmtree(path)

    # --- the start ------------------------------------------------------------------------------------------------

    def _start(self, folder: Path) -> None:
        from evenstep.rollout.server import ServerEngine

        options = self._options()
        self._prompt_ids = self._probe_prompt_ids()  # that a server started here has room for

        def launch() -> None:
            if self._rank == 0 and self._config.engine.launch:
                self._launch(folder)

        def connect() -> ServerEngine:
            self._engine = ServerEngine(
                options,
                is_owner=self._rank == 0,
                run=run,
                notice=self._notice,
                restart=self._restart if self._processes else None,
            )
            self._engine.connect()
            return self._engine

        distributed.together(launch)
        run = distributed.broadcast(os.urandom(6).hex())
        self._prompt_ids = self._probe_prompt_ids(distributed.together(connect).served_tokens)

    def _launch(self, folder: Path) -> None:
        from evenstep.rollout.server_process import ServerProcess, vllm_environment

        config, section = self._config, self._config.engine
        on_cpu = not torch.cuda.is_available()
        for port in section.ports:
            process = ServerProcess(
                f"the vLLM server on port {port}",
                partial(self._command, port, on_cpu),
                environment=vllm_environment(on_cpu=on_cpu),
                port=port,
                log=self._logs / f"vllm_{port}.log",
            )
            self._processes[process.url] = process
            process.start(folder)
        self._notice(
            f"starting {len(self._processes)} vLLM server{'s' * (len(self._processes) > 1)} on port "
            f"{', '.join(map(str, section.ports))} with {config.model.path}; this takes about a minute"
        )
        for process in self._processes.values():
            process.wait(section.start_timeout_s, self._notice)

    def _command(self, port: int, on_cpu: bool, folder: Path) -> list[str]:
        from evenstep.rollout.server import PROBE_TOKENS
        from evenstep.rollout.server_process import vllm_command

        section = self._config.engine
        return vllm_command(
            python=str(section.python),
            folder=folder,
            port=port,
            dtype=section.dtype,
            max_context_tokens=max(self._config.model.max_context_tokens, len(self._prompt_ids) + PROBE_TOKENS),
            max_concurrent=-(-section.max_concurrent // len(section.ports)),
            on_cpu=on_cpu,
            arguments=section.arguments,
        )

    def _restart(self, url: str) -> None:
        process = self._processes.get(url)
        if process is not None and process.has_ended and self._version is not None:
            self._notice(f"{url} has ended; it is started again, its log is {process.log}")
            process.start(self._folder / f"version_{self._version:06d}")

    def _options(self) -> ServerOptions:
        from evenstep.rollout.server import Expected, ServerOptions
        from evenstep.rollout.server_api import TOKENIZER_TEXT
        from evenstep.rollout.server_process import LOOPBACK

        config, section = self._config, self._config.engine
        variable = section.api_key_variable
        urls = tuple(f"http://{LOOPBACK}:{port}" for port in section.ports) if section.launch else section.urls
        routers = replayed_routers(self._models.policy.model, config.train.routing_replay)
        return ServerOptions(
            kind=section.kind,
            urls=urls,
            max_concurrent=self.rollouts_at_once,
            request_timeout_s=section.request_timeout_s,
            update_timeout_s=section.update_timeout_s,
            reconnect_limit_s=section.reconnect_limit_s,
            api_key=os.environ.get(variable) if variable is not None else None,
            experts_shape=None if not routers else (len(routers), router_shape(routers).experts_per_token),
            expected=Expected(
                max_context_tokens=config.model.max_context_tokens,
                vocab_size=self._vocab_size,
                stop_token_ids=self._stop_token_ids,
                temperature=config.rollout.temperature,
                dtype=section.dtype,
                probe_tolerance=section.probe_tolerance,
                tokenizer_ids=tuple(self._models.tokenizer.encode(TOKENIZER_TEXT, add_special_tokens=False)),
            ),
        )

    @property
    def _vocab_size(self) -> int:
        return self._models.sampler.config.get_text_config().vocab_size

    def _probe_prompt_ids(self, served_tokens: int | None = None) -> tuple[int, ...]:
        from evenstep.model_files import max_context_tokens
        from evenstep.train.probe import probe_prompt

        # the model may be made for more than the run uses, and a long probe finds more
        made_for = max_context_tokens(self._models.sampler.config.to_dict()) or self._config.model.max_context_tokens
        most = made_for if served_tokens is None else min(made_for, served_tokens)
        return probe_prompt(vocab_size=self._vocab_size, most=most, seed=self._config.run.seed)


def policy_engine(
    config: Config, models: Models, renderer: ChatRenderer, files: RunFolder, notice: Callable[[str], None]
) -> PolicyEngine:
    """The engine that a configuration asks for."""
    if config.engine.is_server:
        return ServerPolicyEngine(config, models, renderer, files, notice)
    return InProcessPolicyEngine(config, models, renderer)
