"""Engines that follow the policy in training: what generates a run's rollouts, and how it gets new weights."""

from __future__ import annotations

from typing import Protocol

from evenstep.config import Config
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.engine import Engine
from evenstep.rollout.in_process import InProcessEngine
from evenstep.train.setup import Models

__all__ = ["PolicyEngine", "policy_engine"]


class PolicyEngine(Protocol):
    """An engine, and the one way to give it the policy's weights."""

    @property
    def engine(self) -> Engine: ...

    def update_weights(self, version: int) -> None:
        """Generate with the policy's present weights from the next batch on, and stamp calls with ``version``.

        Every rank calls it at the same point of its training thread. Another thread may be generating; a batch that
        runs is awaited.
        """
        ...


class InProcessPolicyEngine:
    """Every rank generates in its own process, from whole weights."""

    def __init__(self, config: Config, models: Models, renderer: ChatRenderer) -> None:
        self._models = models
        self.engine = InProcessEngine(
            models.sampler,
            eos_token_ids=renderer.stop_token_ids,
            max_context_tokens=config.model.max_context_tokens,
        )

    def update_weights(self, version: int) -> None:
        # Copying is collective where the policy is sharded. A rank that holds this waits for the other ranks' training
        # threads alone, each of which waits for a batch of its own at most, and batches wait for no rank.
        with self.engine.between_batches():
            self._models.refresh_sampler()
            self.engine.weight_version = version


def policy_engine(config: Config, models: Models, renderer: ChatRenderer) -> PolicyEngine:
    """The engine that a configuration asks for."""
    return InProcessPolicyEngine(config, models, renderer)
