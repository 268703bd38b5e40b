"""Which keys of a configuration may not contradict each other."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.config_schema import Config, PlanSection, RolloutSection, TrainSection
from evenstep.errors import ConfigError

__all__ = ["check_relations", "listed"]


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
    if credit.estimator != "reinforce_pp" and rollout.num_generations < 2:
        problems.append(
            f"credit.estimator = {credit.estimator!r} compares the rollouts of a group, found "
            f"rollout.num_generations = {rollout.num_generations}, where every advantage is 0; set it to 2 or more"
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
    problems += _plan_problems(plan) + _train_problems(train)
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


def _plan_problems(plan: PlanSection) -> list[str]:
    problems: list[str] = []
    if plan.layout != "fixed" and plan.max_tokens_per_gpu is None:
        problems.append(
            f"plan.layout = {plan.layout!r} fills micro-batches up to a budget, found no plan.max_tokens_per_gpu; add "
            f"it, or set plan.layout = 'fixed'"
        )
    if plan.layout != "fixed" and plan.micro_batch_rows != 1:
        problems.append(
            f"plan.micro_batch_rows belongs to plan.layout = 'fixed', found {plan.micro_batch_rows} with layout "
            f"{plan.layout!r}; leave it out, or set plan.layout = 'fixed'"
        )
    if plan.max_tokens_per_gpu is not None and plan.pad_to_multiple > plan.max_tokens_per_gpu:
        problems.append(
            f"plan.pad_to_multiple must fit into plan.max_tokens_per_gpu, found {plan.pad_to_multiple} and "
            f"{plan.max_tokens_per_gpu}; lower the first or raise the second"
        )
    return problems


def _train_problems(train: TrainSection) -> list[str]:
    problems: list[str] = []
    if train.old_logprobs == "detached" and (train.epochs > 1 or train.windows_per_collection > 1):
        problems.append(
            f"train.old_logprobs = 'detached' is exact for one window and one epoch, found "
            f"train.windows_per_collection = {train.windows_per_collection} and "
            f"train.epochs = {train.epochs}; set both to 1, or use 'scored'"
        )
    if train.score_max_tokens_per_gpu is not None and train.is_detached:
        problems.append(
            f"train.score_max_tokens_per_gpu belongs to a scoring pass, found {train.score_max_tokens_per_gpu} where "
            f"old log-probs are detached; leave it out, or set train.old_logprobs = 'scored'"
        )
    if train.ratio_unit != "rollout" and train.loss != "gspo":
        problems.append(
            f"train.ratio_unit belongs to train.loss = 'gspo', found {train.ratio_unit!r} with loss {train.loss!r}; "
            f"leave it out, or set train.loss = 'gspo'"
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
