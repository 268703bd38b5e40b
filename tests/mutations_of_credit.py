"""Wrong formulas of advantages, token weights and losses.

``contract/test_mutations.py`` puts each into the production code; P1 to P35 are the known faults it is typical of.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_ADVANTAGES = partial(Mutation, module="evenstep.credit.advantages")
_GAE = partial(Mutation, module="evenstep.credit.gae")
_ROWS = partial(Mutation, module="evenstep.credit.rows")
_WEIGHTS = partial(Mutation, module="evenstep.credit.weights")
_PASSES = partial(Mutation, module="evenstep.train.passes")
_LOSSES = partial(Mutation, module="evenstep.train.losses")

TEST_ADVANTAGES = "tests/unit/credit/test_advantages.py::"
TEST_ESTIMATORS = "tests/unit/credit/test_estimators.py::"
TEST_GAE = "tests/unit/credit/test_gae.py::"
TEST_ROWS = "tests/unit/credit/test_rows.py::"
TEST_WEIGHTS = "tests/unit/credit/test_weights.py::"
TEST_FORMULAS = "tests/unit/train/test_loss_formulas.py::"
TEST_CASES = "tests/unit/test_cases_train.py::"
TEST_GAPS = "tests/unit/test_mutation_gaps.py::"

CREDIT: list[Mutation] = [
    _PASSES(
        name="whitening by sampled tokens",
        why="Tokens that were realigned away still weigh in the window's mean and deviation.",
        old='"num_trained_tokens": _trained_by_rollout(window.rows)',
        new='"num_trained_tokens": None',
        killed_by="tests/unit/train/test_credit_of_windows.py::test_whitening_weighs_by_trained_tokens",
    ),
    _ADVANTAGES(
        name="rows as votes",
        why="[P3] The group's mean and deviation count a rollout once for each of its rows.",
        old="voters_by_group.setdefault(rollout.group_id, []).append(rollout)",
        new="voters_by_group.setdefault(rollout.group_id, []).extend([rollout] * max(1, len(rollout.calls)))",
        killed_by=TEST_ADVANTAGES + "test_rows_do_not_vote",
    ),
    _ADVANTAGES(
        name="one baseline for all groups",
        why="[P16] Every prompt shares the mean of the whole window.",
        old="voters_by_group.setdefault(rollout.group_id, [])",
        new='voters_by_group.setdefault("all", [])',
        killed_by=TEST_ADVANTAGES + "test_uneven_groups_by_id_in_any_order",
    ),
    _ADVANTAGES(
        name="groups by prompt",
        why="[P16, P35] Two occurrences of one prompt share a group.",
        old="voters_by_group.setdefault(rollout.group_id, [])",
        new="voters_by_group.setdefault(rollout.prompt_id, [])",
        killed_by=TEST_ADVANTAGES + "test_uneven_groups_by_id_in_any_order",
    ),
    _ADVANTAGES(
        name="population deviation",
        why="grpo divides by the deviation with ddof 0.",
        old="(len(rewards_G) - 1)) + STD_FLOOR",
        new="len(rewards_G)) + STD_FLOOR",
        killed_by=TEST_ADVANTAGES + "test_rows_do_not_vote",
    ),
    _ADVANTAGES(
        name="deviation in one pass",
        why="[P27] The deviation is sqrt(E[x²] - E[x]²) in float32, which leaves a residue.",
        old="np.sqrt((centred_G**2).sum() / (len(rewards_G) - 1))",
        new="np.sqrt(abs(np.float32((rewards_G.astype(np.float32) ** 2).mean() - np.float32(rewards_G.mean()) ** 2)))",
        killed_by=TEST_ADVANTAGES + "test_one_odd_reward_among_eight_stays_within_the_bound",
    ),
    _ADVANTAGES(
        name="flat by deviation",
        why="[P27] Equal rewards are told by std == 0, which rounding breaks.",
        old="values.max() == values.min()",
        new="values.std() == 0.0",
        killed_by=TEST_ADVANTAGES + "test_equal_rewards_and_lone_voters_give_exactly_zero[7-0.7]",
    ),
    _ADVANTAGES(
        name="deviation of one voter",
        why="[P28] A lone voter is divided by its own sample deviation, 0/0.",
        old="np.zeros_like(rewards_G) if _is_flat(rewards_G) else baseline(rewards_G)",
        new="baseline(rewards_G)",
        killed_by=TEST_ADVANTAGES + "test_equal_rewards_and_lone_voters_give_exactly_zero[1-0.7]",
    ),
    _ADVANTAGES(
        name="failed rollouts vote",
        why="[P28] A failed rollout that left a reward is in the baseline.",
        old="if rollout.is_voter:\n            voters_by_group",
        new="if rollout.reward is not None:\n            voters_by_group",
        killed_by=TEST_ESTIMATORS + "test_failed_rollouts_count_nowhere[100.0-50-grpo]",
    ),
    _ADVANTAGES(
        name="own reward in the rloo baseline",
        why="rloo subtracts the mean of all rollouts of the group, its own included.",
        old="_minus_mean(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))",
        new="_minus_mean(rewards_G) * 1.0",
        killed_by=TEST_ESTIMATORS + "test_group_estimators_by_hand[rloo-expected1]",
    ),
    _ADVANTAGES(
        name="whitening by rollouts",
        why="The whitened mean counts every rollout once instead of once per trained token.",
        old="mean = float((values_O * tokens_O).sum() / total)",
        new="mean = float(values_O.mean())",
        killed_by=TEST_ESTIMATORS + "test_whitening_by_hand",
    ),
    _ADVANTAGES(
        name="sample deviation in whitening",
        why="Whitening divides by the deviation with ddof 1.",
        old="((values_O - mean) ** 2 * tokens_O).sum() / total",
        new="((values_O - mean) ** 2 * tokens_O).sum() / (total - 1)",
        killed_by=TEST_ESTIMATORS + "test_whitening_by_hand",
    ),
    _ADVANTAGES(
        name="penalty added",
        why="The KL penalty is added to the reward.",
        old="rewards.append(voter.reward - penalty)",
        new="rewards.append(voter.reward + penalty)",
        killed_by=TEST_ESTIMATORS + "test_penalties_come_first[grpo]",
    ),
    _GAE(
        name="value of the same token",
        why="[P12] The next value is read one token too early, shift by one.",
        old="np.append(values_M[1:], terminal_value)",
        new="np.append(values_M[:-1], terminal_value)",
        killed_by=TEST_GAE + "test_by_hand",
    ),
    _GAE(
        name="reward at every token",
        why="The reward is paid at each trained token.",
        old="rewards_M[-1] += reward",
        new="rewards_M[:] += reward",
        killed_by=TEST_GAE + "test_by_hand",
    ),
    _GAE(
        name="no lambda",
        why="λ is left out of the recursion.",
        old="gamma * lam * running",
        new="gamma * running",
        killed_by=TEST_GAE + "test_by_hand",
    ),
    _GAE(
        name="one-step returns",
        why="Returns are δ + V instead of A + V.",
        old="advantages_M + values_M)",
        new="deltas_M + values_M)",
        killed_by=TEST_GAE + "test_by_hand",
    ),
    _ROWS(
        name="penalty of the last row",
        why="[P3] A rollout is penalised by the KL of its last row alone.",
        old="penalties.get(row.rollout_id, 0.0) + penalty",
        new="penalty",
        killed_by=TEST_GAPS + "test_kl_in_the_reward_by_hand",
    ),
    _ROWS(
        name="k3 of the other ratio",
        why="k3 in the reward takes policy over reference.",
        old="np.expm1(-apart) + apart",
        new="np.expm1(apart) - apart",
        killed_by=TEST_GAPS + "test_kl_in_the_reward_by_hand",
    ),
    _ROWS(
        name="token rewards raised by KL",
        why="Each token's reward is raised by its KL.",
        old="[-kl_coef * token_kl(row, kl_estimator) for row in mine]",
        new="[kl_coef * token_kl(row, kl_estimator) for row in mine]",
        killed_by=TEST_GAPS + "test_credit_of_a_split_rollout_by_hand",
    ),
    _ROWS(
        name="advantages of another row",
        why="[P7] The parts of a rollout's advantages go to its rows in reverse.",
        old="for row, (advantages_M, returns_M) in zip(mine, parts, strict=True):",
        new="for row, (advantages_M, returns_M) in zip(mine[::-1], parts, strict=True):",
        killed_by=TEST_GAPS + "test_credit_of_a_split_rollout_by_hand",
    ),
    _ROWS(
        name="truncated rollouts end at 0",
        why="The value after a truncated rollout's last token is 0 even where it is given.",
        old="(terminal_values or {}).get(rollout.rollout_id, 0.0)",
        new="0.0",
        killed_by=TEST_ROWS + "test_gae_by_rows[bootstrapped]",
    ),
    _ROWS(
        name="calls without gaps",
        why="A call continues the one whose number is one less, so a chain with a removed call counts as a fork.",
        old="and parent != previous)",
        new="and parent != call.order - 1)",
        killed_by=TEST_ROWS + "test_forks_are_refused",
    ),
    _WEIGHTS(
        name="row divisor",
        why="[P9] The mean over rollouts divides by the number of rows.",
        old="(counts.num_voters * tokens_R).astype",
        new="(counts.num_rows * tokens_R).astype",
        killed_by=TEST_WEIGHTS + "test_worked_case_of_one_split_rollout",
    ),
    _WEIGHTS(
        name="row mean as rollout mean",
        why="[P9] A token is divided by its row's tokens instead of its rollout's.",
        old="[counts.tokens_per_rollout[row.rollout_id] for row in rows]",
        new="[row.num_trained_tokens for row in rows]",
        killed_by=TEST_CASES + "test_p9_rollout_mean[6]",
    ),
    _WEIGHTS(
        name="at least one token a row",
        why="[P26] Rows are clamped to one token each before they are summed.",
        old="tokens_R[i] = row.num_trained_tokens",
        new="tokens_R[i] = max(1, row.num_trained_tokens)",
        killed_by=TEST_CASES + "test_p26_only_trained_tokens_count[100]",
    ),
    _WEIGHTS(
        name="context counted",
        why="[P26] N counts all tokens of a row, tool text included.",
        old="tokens_R[i] = row.num_trained_tokens",
        new="tokens_R[i] = row.num_tokens",
        killed_by=TEST_WEIGHTS + "test_only_trained_tokens_are_in_the_denominator",
    ),
    _WEIGHTS(
        name="counts in float32",
        why="[P34] The window's tokens are summed in float32.",
        old="num_trained_tokens=int(tokens_R.sum())",
        new="num_trained_tokens=int(tokens_R.astype(np.float32).sum(dtype=np.float32))",
        killed_by=TEST_WEIGHTS + "test_counts_are_exact",
        is_long=True,
    ),
    _WEIGHTS(
        name="only rollouts with rows vote",
        why="[P15] Voters without rows are in no denominator.",
        old="owners = dict(voters)",
        new="owners = {rollout_id: voters[rollout_id] for rollout_id in owners}",
        killed_by=TEST_WEIGHTS + "test_voters_without_rows_count_as_rollouts_and_their_groups_as_groups",
    ),
    _WEIGHTS(
        name="prompts divided by rollouts",
        why="Normaliser prompt divides by the number of rollouts.",
        old="(counts.num_groups * tokens_R)",
        new="(counts.num_voters * tokens_R)",
        killed_by=TEST_WEIGHTS + "test_voters_without_rows_count_as_rollouts_and_their_groups_as_groups",
    ),
    _WEIGHTS(
        name="constant per row",
        why="[P9] Normaliser constant multiplies its constant by the rows.",
        old="counts.num_voters * float(constant)",
        new="counts.num_rows * float(constant)",
        killed_by=TEST_WEIGHTS + "test_worked_case_of_one_split_rollout",
    ),
    _WEIGHTS(
        name="rows without tokens in the row mean",
        why="[P26] Normaliser row also counts rows in which nothing is trained.",
        old="np.count_nonzero(n_R) * n_R",
        new="len(rows) * n_R",
        killed_by=TEST_WEIGHTS + "test_only_trained_tokens_are_in_the_denominator",
    ),
    _WEIGHTS(
        name="row mean of split rollouts",
        why="[P9] Normaliser row is accepted for rollouts of several rows without being asked for.",
        old="if split and not allow_row_splits:",
        new="if False and split:",
        killed_by=TEST_WEIGHTS + "test_row_is_refused_under_several_segments",
    ),
    _WEIGHTS(
        name="division by no token",
        why="[P15] Rows without trained tokens are divided by 0.",
        old="where=(n_R > 0) & (divisor_R > 0))",
        new="where=n_R >= 0)",
        killed_by=TEST_WEIGHTS + "test_nothing_to_train_is_weight_zero_and_no_division",
    ),
]

LOSSES: list[Mutation] = [
    _LOSSES(
        name="ratio upside down",
        why="The ratio is old over new.",
        old="return _clipped(batch.logprobs_N - batch.old_logprobs_N, batch)",
        new="return _clipped(batch.old_logprobs_N - batch.logprobs_N, batch)",
        killed_by=TEST_FORMULAS + "test_ppo_clip[1.1-2.0-settings0--2.2--2.2-False-production]",
    ),
    _LOSSES(
        name="one clip range",
        why="The upper clip uses the lower one's range.",
        old="bound_N = ratio_N.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_high)",
        new="bound_N = ratio_N.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_low)",
        killed_by=TEST_FORMULAS + "test_ppo_clip[1.25-2.0-settings2--2.5--2.5-False-production]",
    ),
    _LOSSES(
        name="clip on both sides",
        why="The ratio is clipped whatever the sign of the advantage: the minimum is left out.",
        old="bound_N * advantages_N < ratio_N * advantages_N",
        new="bound_N != ratio_N",
        killed_by=TEST_FORMULAS + "test_ppo_clip[0.5-2.0-settings3--1.0--1.0-False-production]",
    ),
    _LOSSES(
        name="dual clip of every sign",
        why="The dual clip also acts on positive advantages.",
        old="(advantages_N < 0) & (ratio_N > batch.dual_clip)",
        new="ratio_N > batch.dual_clip",
        killed_by=TEST_FORMULAS + "test_ppo_clip[4.0-2.0-settings12--2.4-0.0-True-production]",
    ),
    _LOSSES(
        name="gradient of overflowing ratios",
        why="[P13] A clipped ratio is computed and multiplied by 0: 0·inf in the backward pass.",
        old="torch.exp(torch.where(is_clipped_N | (advantages_N == 0), 0.0, log_ratio_N))",
        new="torch.exp(log_ratio_N)",
        killed_by=TEST_FORMULAS + "test_overflowing_ratios[1.0-None--1.2-ppo_clip-dtype1]",
    ),
    _LOSSES(
        name="token ratio in gspo",
        why="gspo multiplies the ratio of the whole by the token's own.",
        old="(batch.logprobs_N - batch.logprobs_N.detach())",
        new="(batch.logprobs_N - batch.old_logprobs_N)",
        killed_by=TEST_FORMULAS + "test_gspo[5.0-1.1-2.0-settings0--2.2--2.2-False-production]",
    ),
    _LOSSES(
        name="gradient through the cispo weight",
        why="cispo does not stop the gradient of its weight.",
        old="ratio_N = torch.exp(batch.logprobs_N - batch.old_logprobs_N).detach()",
        new="ratio_N = torch.exp(batch.logprobs_N - batch.old_logprobs_N)",
        killed_by=TEST_FORMULAS + "test_cispo[1.1-2.0-1.1-False-production]",
    ),
    _LOSSES(
        name="cispo drops clipped tokens",
        why="cispo takes the gradient of clipped tokens away, as the PPO clip does.",
        old="return -clipped_N * batch.advantages_N * batch.logprobs_N,",
        new="return -clipped_N * ~is_clipped_N * batch.advantages_N * batch.logprobs_N,",
        killed_by=TEST_FORMULAS + "test_cispo[1.5-2.0-1.28-True-production]",
    ),
    _LOSSES(
        name="kl the other way round",
        why="k3 takes policy over reference: it estimates another divergence.",
        old="log_ratio_N = ref_logprobs_N - logprobs_N",
        new="log_ratio_N = logprobs_N - ref_logprobs_N",
        killed_by=TEST_FORMULAS + "test_kl_by_hand",
    ),
    _LOSSES(
        name="k1 in the loss",
        why="The KL term is the plain log-ratio, whose gradient is 0 on-policy.",
        old="0.5 * log_ratio_N**2 if",
        new="-log_ratio_N if",
        killed_by=TEST_FORMULAS + "test_kl_by_hand",
    ),
    _LOSSES(
        name="smaller value error",
        why="The value loss takes the smaller of the clipped and the plain error.",
        old="is_clipped_N = clipped_N > error_N",
        new="is_clipped_N = clipped_N < error_N",
        killed_by=TEST_GAPS + "test_value_clip_by_hand",
    ),
    _LOSSES(
        name="values clipped around returns",
        why="Values are clipped around the returns instead of the old values.",
        old="moved_N = (batch.values_N - batch.old_values_N).clamp",
        new="moved_N = (batch.values_N - batch.returns_N).clamp",
        killed_by=TEST_GAPS + "test_value_clip_by_hand",
    ),
]
