"""The models of a run, made from its configuration: policy, sampler, reference, critic."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evenstep.config import Config
from evenstep.media import VisionSpec
from evenstep.train import distributed
from evenstep.train.checkpoint import Trained, export, export_adapter
from evenstep.train.lora import adapters_off, add_lora, is_lora
from evenstep.train.models import load_critic, load_model, load_vision
from evenstep.train.scorer import Scorer, share_layouts
from evenstep.train.step import Trainer

__all__ = ["Models", "load_models"]

COPIES = ("sampler", "reference", "critic")
EXPORT, EXPORT_ADAPTER, EXPORT_CRITIC = "model", "adapter", "critic"  # folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Everything in a run that has weights."""

    policy: Trainer
    tokenizer: PreTrainedTokenizerBase
    # of a policy that is sharded, or trained while the engine generates; refreshed before each generation
    whole_copy: PreTrainedModel | None
    frozen_copy: Scorer | None  # of the policy at step 0; None without KL, and with adapters, which can be turned off
    critic: Trainer | None
    vision: VisionSpec | None = None  # what the policy makes of images; None: it sees none
    processor_file: Path | None = None  # that says how, exported with the policy

    @property
    def sampler(self) -> PreTrainedModel:
        """What the engine generates with: whole weights."""
        whole = self.policy.model if self.whole_copy is None else self.whole_copy
        # adapter layers stand inside the base model, which has the forward that an engine knows
        return cast(PreTrainedModel, whole.get_base_model()) if is_lora(whole) else whole

    @property
    def num_parameters(self) -> int:
        """Of the policy, frozen ones included."""
        return sum(parameter.numel() for parameter in self.policy.model.parameters())

    @property
    def trained(self) -> dict[str, Trained]:
        """What a checkpoint holds, by name."""
        found = {"policy": Trained(self.policy.model, self.policy.optimizer)}
        if self.critic is not None:
            found["critic"] = Trained(self.critic.model, self.critic.optimizer)
        return found

    @property
    def files_beside(self) -> tuple[Path, ...]:
        """What whoever loads the policy's folder needs beside weights, configuration and tokenizer."""
        return () if self.processor_file is None else (self.processor_file,)

    @contextmanager
    def reference(self) -> Iterator[Scorer]:
        """Scores with the policy at step 0."""
        if self.frozen_copy is not None:
            yield self.frozen_copy
        else:
            with adapters_off(self.policy.model):  # type: ignore[arg-type]
                yield self.policy

    def refresh_sampler(self) -> None:
        """Give the engine the policy's present weights."""
        if self.whole_copy is not None:
            distributed.copy_full_weights(self.policy.model, self.whole_copy)

    def export(self, folder: Path) -> None:
        """Write Hugging Face folders of all that was trained."""
        export(folder / EXPORT, self.policy.model, self.tokenizer, beside=self.files_beside)
        if is_lora(self.policy.model):
            export_adapter(folder / EXPORT_ADAPTER, self.policy.model)
        if self.critic is not None:
            export(folder / EXPORT_CRITIC, self.critic.model, self.tokenizer)


def load_models(config: Config, *, copies: Container[str] = COPIES) -> Models:
    """Load, adapt and shard the models that a configuration asks for.

    Args:
        config: of the run.
        copies: which models beside the policy are made where the configuration needs them: ``sampler``, ``reference``,
            ``critic``; the others are None.

    Raises:
        ConfigError, PlanError, DistributedError: see ``load_model``, ``add_lora``, ``Trainer``.
    """
    train, lora = config.train, config.lora
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    is_sharded = train.sharding == "fsdp2"

    def place(model: PreTrainedModel) -> PreTrainedModel:
        cast(nn.Module, model).to(distributed.device())
        return model

    with distributed.rank_zero_first():  # converting packaged weights happens once
        policy, tokenizer = load_model(config.model.path, dtype=dtype)
    vision, processor_file = load_vision(config.model.path)
    if lora.rank:
        targets = lora.target_modules
        policy = add_lora(
            policy,
            rank=lora.rank,
            alpha=lora.alpha,
            seed=config.run.seed,
            target_modules=targets[0] if targets == ("all-linear",) else targets,
        )
    place(policy)  # type: ignore[arg-type]
    is_trained_while_read = (is_sharded or config.rollout.max_staleness > 0) and not config.engine.is_server
    whole_copy = copy.deepcopy(policy) if is_trained_while_read and "sampler" in copies else None
    frozen_copy = critic = None
    if train.kl_coef > 0 and not lora.rank and "reference" in copies:
        reference, _ = load_model(config.model.path, dtype=dtype)
        reference.requires_grad_(False)
        if is_sharded:
            distributed.shard(reference)
        frozen_copy = Scorer(place(reference), **_plan_options(config))
    if config.has_critic and "critic" in copies:
        critic = _critic_trainer(config, place(load_critic(config.critic.path or config.model.path, dtype=dtype)))
    if is_sharded:
        distributed.shard(policy)
    kl_coef = train.kl_coef if train.kl_in == "loss" else 0.0
    trainer = Trainer(
        policy,  # type: ignore[arg-type]
        _optimizer(config, policy, train.lr),
        **_plan_options(config),
        **_step_options(config),
        max_grad_norm=train.max_grad_norm,
        loss=train.loss,
        ratio_unit=train.ratio_unit,
        dual_clip=train.dual_clip,
        entropy_coef=train.entropy_coef,
        moe_balance_coef=train.moe_balance_coef,
        importance_cap=train.importance_cap,
        sequence_mask=train.sequence_mask,
        clip_low=train.clip_low,
        clip_high=train.clip_high,
        kl_coef=kl_coef,
        kl_estimator=config.kl_estimator if kl_coef else "k3",
    )
    if critic is not None:
        share_layouts(trainer, critic)  # the critic runs the windows that the policy prepares
    return Models(
        policy=trainer,
        tokenizer=tokenizer,
        whole_copy=whole_copy,  # type: ignore[arg-type]
        frozen_copy=frozen_copy,
        critic=critic,
        vision=vision,
        processor_file=processor_file,
    )


def _critic_trainer(config: Config, critic: PreTrainedModel) -> Trainer:
    if config.train.sharding == "fsdp2":
        distributed.shard(critic)
    return Trainer(
        critic,
        _optimizer(config, critic, config.critic.lr or config.train.lr),
        **_plan_options(config),
        **_step_options(config),
        loss="value_clip",
        value_clip=config.critic.value_clip or None,
        max_grad_norm=config.critic.max_grad_norm or config.train.max_grad_norm,
    )


def _optimizer(config: Config, model: nn.Module, lr: float) -> torch.optim.AdamW:
    train = config.train
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay)


def _plan_options(config: Config) -> dict[str, Any]:
    """Options that every pass shares, so that equal rows make equal plans."""
    return {
        "layout": config.plan.layout,
        "max_tokens_per_gpu": config.plan.max_tokens_per_gpu,
        "pad_to_multiple": config.plan.pad_to_multiple,
        "bucket": config.plan.bucket,
        "attention": config.train.attention,
        "micro_batch_rows": config.plan.micro_batch_rows,
        "logprob_micro_batch_rows": config.plan.logprob_micro_batch_rows,
        "pad_scope": config.plan.pad_scope,
        "effort": config.plan.effort,
        "normaliser": config.credit.normaliser,
        "normaliser_constant": config.credit.constant,
        "allow_row_splits": config.credit.allow_row_splits,
        "temperature": config.rollout.temperature,
        "compute_dtype": config.train.compute_dtype,
        "routing_replay": config.train.routing_replay,
        "logprob_chunk_tokens": config.train.logprob_chunk_tokens,
    }


def _step_options(config: Config) -> dict[str, Any]:
    return {"activation_checkpointing": config.train.activation_checkpointing, "sync": config.train.sync}
