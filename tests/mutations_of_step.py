"""Wrong formulas between the rows of a plan and the optimizer's step: tokens, sums, ranks, clipping.

``contract/test_mutations.py`` puts each into the production code; P1 to P35 are the known faults it is typical of.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_COLLATE = partial(Mutation, module="evenstep.train.collate")
_LOGPROBS = partial(Mutation, module="evenstep.train.logprobs")
_RANKS = partial(Mutation, module="evenstep.train.distributed")
_MOE = partial(Mutation, module="evenstep.train.moe")
_STEP = partial(Mutation, module="evenstep.train.step")
_EXECUTOR = partial(Mutation, module="evenstep.train.executor")
_POLICY = partial(Mutation, module="evenstep.train.policy")
_CRITIC = partial(Mutation, module="evenstep.train.critic")
_PASSES = partial(Mutation, module="evenstep.train.passes")
_ATTENTION = partial(Mutation, module="evenstep.train.attention")
_BLOCKS = partial(Mutation, module="evenstep.train.blocks")
_TRIE = partial(Mutation, module="evenstep.train.trie")
_TOTALS = partial(Mutation, module="evenstep.train.totals")
_WINDOW = partial(Mutation, module="evenstep.train.window")

TEST_FORMULAS = "tests/unit/train/test_loss_formulas.py::"
TEST_LAYOUTS = "tests/unit/train/test_layouts.py::"
TEST_MOE = "tests/unit/train/test_moe.py::"
TEST_STEP = "tests/unit/train/test_trainer_step.py::"
TEST_LOGPROBS = "tests/unit/train/test_logprobs.py::"
TEST_CASES = "tests/unit/test_cases_train.py::"
TEST_ISOLATION = "tests/unit/train/test_trainer_isolation.py::"
TEST_CRITIC = "tests/dist/test_critic.py::"
TEST_MASK = "tests/dist/test_sequence_mask.py::"
TEST_PASSES = "tests/dist/test_passes.py::"
TEST_GAPS = "tests/unit/test_mutation_gaps.py::"

TRIES: list[Mutation] = [
    _COLLATE(
        name="shared tokens counted once",
        why="A token that several rows go through counts once in the balance of experts.",
        old="return torch.from_numpy(index).to(self.input_ids_BT.device)",
        new="return torch.from_numpy(np.unique(index)).to(self.input_ids_BT.device)",
        killed_by=TEST_LAYOUTS + "test_balance_counts_a_shared_token_for_each_row[mixtral]",
    ),
    _TRIE(
        name="siblings see each other",
        why="A branch of a trie ends where its parent does.",
        old="closed.append(Node(cut, stop, size, first + cut - start))",
        new="closed.append(Node(cut, stop, size + 1, first + cut - start))",
        killed_by=TEST_LAYOUTS + "test_blocks_and_checkpoints[tree-qwen3]",
    ),
    _ATTENTION(
        name="one token ahead",
        why="A token of a branch sees the next one.",
        old=".tril(node.depth)",
        new=".tril(node.depth + 1)",
        killed_by=TEST_LAYOUTS + "test_float64[qwen3-False-tree]",
    ),
    _BLOCKS(
        name="window one too wide",
        why="A window of n positions reaches n + 1 back.",
        old="(distance >= shape.window)",
        new="(distance > shape.window)",
        killed_by=TEST_LAYOUTS + "test_float64[gemma3-False-tree]",
    ),
    _BLOCKS(
        name="window in flat order",
        why="A window counts places of the trie instead of positions in the row.",
        old="distance = row_T[:, None] - column_T[None, :]",
        new=(
            "distance = (torch.arange(block.row, block.row_stop)[:, None]"
            " - torch.arange(block.column, block.column_stop)[None, :])"
        ),
        killed_by=TEST_LAYOUTS + "test_float64[gemma3-False-tree]",
    ),
    _BLOCKS(
        name="sinks do not learn",
        why="The gradient of attention sinks leaves out what their weight was.",
        old="grad_sinks = -(weights * along)",
        new="grad_sinks = -(0.0 * weights * along)",
        killed_by=TEST_LAYOUTS + "test_float64[gpt_oss-False-packed]",
    ),
    _BLOCKS(
        name="slope of the soft cap",
        why="The gradient of capped scores is that of plain ones.",
        old="grad_scores * (1 - (scores / softcap) ** 2)",
        new="grad_scores * 1.0",
        killed_by=TEST_LAYOUTS + "test_float64[gemma2-False-packed]",
    ),
    _BLOCKS(
        name="outputs not rescaled",
        why="What earlier blocks gave is not rescaled when a later one has a higher score.",
        old="torch.baddbmm(out[:, rows] * kept, weights, value[:, columns])",
        new="torch.baddbmm(out[:, rows], weights, value[:, columns])",
        killed_by=TEST_LAYOUTS + "test_float64[gpt_oss-False-tree]",
    ),
]

TOKENS: list[Mutation] = [
    _COLLATE(
        name="shift by one",
        why="[P12] The hidden state of the trained token itself predicts it.",
        old="index[t - 1] for index, t",
        new="index[t] for index, t",
        killed_by=TEST_CASES + "test_p12_token_t_given_the_tokens_before[1-padded]",
    ),
    _COLLATE(
        name="first trained token lost",
        why="[P12] The first trained token of each row has weight 0.",
        old="weights_N=join([np.repeat(np.asarray(weights, dtype=np.float64), counts)], dtype)",
        new="weights_N=join([w * (np.arange(n) > 0) for w, n in zip(weights, counts, strict=True)], dtype)",
        killed_by=TEST_CASES + "test_p9_rollout_mean[6]",
    ),
    _COLLATE(
        name="mask of another row",
        why="[P7] Every row of a micro-batch gets the last one's per-token advantages.",
        old="join([row.advantages_T[t] for row, t in zip(rows, trained, strict=True)], dtype)",
        new="join([np.resize(rows[-1].advantages_T, 99)[t] for t in trained], dtype)",
        killed_by=TEST_CASES + "test_p7_each_row_its_own_mask[padded]",
    ),
    _COLLATE(
        name="masked instead of left out",
        why="[P13] What stands at masked positions is multiplied by 0 instead of never read.",
        old="join([value[t] for value, t in zip(values, trained, strict=True)], dtype)",
        new="join([value[t] + 0.0 * value[0] for value, t in zip(values, trained, strict=True)], dtype)",
        killed_by=TEST_CASES + "test_p13_numbers[2.0-nan]",
    ),
    _COLLATE(
        name="filler counted",
        why="[P10] Rows that fill up a micro-batch are copies that keep weight, mask and advantage.",
        old="documents = [*prefix_keys(rows),",
        new=(
            "rows, weights = [*rows, *rows[-1:] * num_fillers], [*weights, *[*weights][-1:] * num_fillers]\n"
            "    documents = [*prefix_keys(rows),"
        ),
        killed_by=TEST_CASES + "test_p10_own_fillers_change_nothing[4]",
        is_long=True,
    ),
    _COLLATE(
        name="uncounted fillers",
        why="[P10] Fillers that a micro-batch runs are not reported.",
        old="        num_fillers=num_fillers,",
        new="        num_fillers=0,",
        killed_by=TEST_CASES + "test_p10_own_fillers_change_nothing[4]",
        is_long=True,
    ),
    _COLLATE(
        name="positions run on",
        why="[P30] Positions of packed rows do not start at 0 again.",
        old="positions_T = np.concatenate(parts)",
        new="positions_T = np.arange(sum(map(len, parts)))",
        killed_by=TEST_ISOLATION + "test_positions_start_at_0_for_each_row[packed]",
        is_long=True,
    ),
    _COLLATE(
        name="packed rows see each other",
        why="[P30] A packed micro-batch is one document.",
        old="nodes = [Node(start, stop, stop, 0) for start, stop in zip(starts, stops, strict=True)]",
        new="nodes = [Node(0, stops[-1], stops[-1], 0)]",
        killed_by=TEST_CASES + "test_p30_pack_of_two[packed]",
    ),
    _COLLATE(
        name="results in another order",
        why="[P8] Results are handed out in the order of the row ids, not in that of the micro-batch.",
        old="for row in self.rows:",
        new="for row in sorted(self.rows, key=lambda row: str(row.row_id)):",
        killed_by=TEST_CASES + "test_p8_results_belong_to_their_rows[1]",
        is_long=True,
    ),
    _COLLATE(
        name="mask from the pad id",
        why="[P32] Attention leaves out every token whose id is the pad id.",
        old='{"input_ids": self.input_ids_BT, "use_cache": False}',
        new='{"input_ids": self.input_ids_BT, "attention_mask": self.input_ids_BT.ne(2).long(), "use_cache": False}',
        killed_by=TEST_CASES + "test_p32_end_tokens_are_trained[padded]",
    ),
    _LOGPROBS(
        name="temperature in one pass",
        why="[P31] Scoring leaves the temperature out that training divides by.",
        old="if temperature != 1.0:",
        new="if temperature != 1.0 and torch.is_grad_enabled():",
        killed_by=TEST_FORMULAS + "test_gspo_by_hand[2.0]",
    ),
    _LOGPROBS(
        name="times temperature",
        why="[P31] Logits are multiplied by the temperature.",
        old="logits_NV = logits_NV / temperature",
        new="logits_NV = logits_NV * temperature",
        killed_by=TEST_LOGPROBS + "test_chunks_equal_the_models_own_logits[0.7-tied]",
    ),
    _LOGPROBS(
        name="soft cap left out",
        why="[P31] Chunks leave out the cap that the model puts on its logits.",
        old="return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)",
        new="return logits_NV",
        killed_by=TEST_LOGPROBS + "test_chunks_equal_the_models_own_logits[1.0-soft_capped]",
    ),
    _LOGPROBS(
        name="entropy of raw logits",
        why="The entropy takes Σ p·z with normalised z, and adds the normaliser again.",
        old="torch.where(probs_NV > 0, logits_NV, 0.0)",
        new="torch.where(probs_NV > 0, logits_NV - lse_N[:, None], 0.0)",
        killed_by=TEST_LOGPROBS + "test_chunks_equal_the_models_own_logits[1.0-tied]",
    ),
    _LOGPROBS(
        name="all logits kept",
        why="Every chunk's logits stay alive for the backward pass.",
        old="return checkpoint(one, hidden, targets, use_reentrant=False, preserve_rng_state=False)",
        new="return one(hidden, targets)",
        killed_by=TEST_GAPS + "test_chunks_of_logits_are_not_saved",
    ),
]

ACROSS_RANKS: list[Mutation] = [
    _RANKS(
        name="averaging of shards",
        why="[P2] Sharded gradients are averaged over ranks.",
        old="module.set_gradient_divide_factor(1.0)",
        new="module.set_gradient_divide_factor(float(dist.get_world_size()))",
        killed_by=TEST_CASES + "test_ranks_run_in_step[2-P2-sharded]",
        is_long=True,
    ),
    _RANKS(
        name="averaging of replicas",
        why="[P2] Replicated gradients are averaged over ranks.",
        old="dist.all_reduce(flat, op=dist.ReduceOp.SUM)",
        new="dist.all_reduce(flat, op=dist.ReduceOp.SUM); flat[len(members) :] /= dist.get_world_size()",
        killed_by=TEST_CASES + "test_ranks_run_in_step[2-P2-replicated]",
        is_long=True,
    ),
    _RANKS(
        name="mean of rank sums",
        why="[P2] The reported loss is a mean over ranks of sums that were to be added.",
        old="table_WX[:, : len(sums)].sum(0).tolist()",
        new="table_WX[:, : len(sums)].mean(0).tolist()",
        killed_by=TEST_CASES + "test_p2_p4_p5_p14_numbers[replicated]",
        is_long=True,
    ),
    _RANKS(
        name="sums in bfloat16",
        why="[P34] Sums over ranks are taken in a low-precision type.",
        old="[*sums.values(), *maxima.values()], dtype=torch.float64)",
        new="[*sums.values(), *maxima.values()], dtype=torch.bfloat16)",
        killed_by=TEST_CASES + "test_ranks_run_in_step[4-P34-replicated]",
        is_long=True,
    ),
    _RANKS(
        name="norm of a shard",
        why="[P29] Each rank clips by the norm of its own shard.",
        old="get_total_norm([p.grad for p in",
        new="get_total_norm([p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in",
        killed_by=TEST_CASES + "test_p29_one_clip_of_the_final_gradient",
        is_long=True,
    ),
    _RANKS(
        name="never given back",
        why="Parameters stay gathered after the last micro-batch, and no gradient is reduced.",
        old="model.set_reshard_after_backward(is_last)",
        new="model.set_reshard_after_backward(False)",
        killed_by=TEST_CASES + "test_ranks_run_in_step[2-P2-sharded]",
        is_long=True,
    ),
    _RANKS(
        name="no agreement",
        why="[P4] Ranks run on what they hold without comparing it.",
        old="if len(set(found)) == 1:",
        new="if found:",
        killed_by="tests/dist/test_step_agreement.py::test_replicas_with_other_weights",
        is_long=True,
    ),
]

STEP: list[Mutation] = [
    _EXECUTOR(
        name="mean of means",
        why="[P1] Each micro-batch divides by its own trained tokens, and the step by their number.",
        old="        fn(cell, k == len(cells) - 1)",
        new=(
            "        from dataclasses import replace\n"
            "        own_N = torch.ones_like(cell.weights_N) / max(1, len(cell.weights_N)) / len(cells)\n"
            "        fn(replace(cell, weights_N=own_N), k == len(cells) - 1)"
        ),
        killed_by=TEST_CASES + "test_p1_numbers[4-2]",
    ),
    _EXECUTOR(
        name="mean of rank means",
        why="[P2] Each rank divides by its own trained tokens, and the step by the number of ranks.",
        old="    for k, indices in enumerate(cells):",
        new=(
            "    from dataclasses import replace\n"
            "    num_own = sum(window.rows[index].num_trained_tokens for cell in cells for index in cell)\n"
            "    share = window.num_trained_tokens / max(1, num_own) / distributed.rank_and_size()[1]\n"
            "    window = replace(window, weights_R=window.weights_R * share)\n"
            "    for k, indices in enumerate(cells):"
        ),
        killed_by=TEST_CASES + "test_p2_p4_p5_p14_numbers[replicated]",
        is_long=True,
    ),
    _EXECUTOR(
        name="divided by K again",
        why="[P21] The loss of the window is divided by the number of micro-batches once more.",
        old="window.weights_R[list(indices)],",
        new="window.weights_R[list(indices)] / len(cells),",
        killed_by=TEST_CASES + "test_p21_weights_move_by_the_whole_step",
    ),
    _EXECUTOR(
        name="micro-batch without trained tokens skipped",
        why="[P14, P4] A rank leaves out a micro-batch in which it has nothing to train.",
        old="        fn(cell, k == len(cells) - 1)",
        new="        if len(cell.targets_N):\n            fn(cell, k == len(cells) - 1)",
        killed_by=TEST_CASES + "test_ranks_run_in_step[2-P14-sharded]",
        is_long=True,
    ),
    _EXECUTOR(
        name="inert cells skipped",
        why="[P5] A rank without rows runs nothing.",
        old="    for k, indices in enumerate(cells):\n",
        new="    for k, indices in enumerate(cells):\n        if not indices:\n            continue\n",
        killed_by=TEST_CASES + "test_ranks_run_in_step[4-P5-sharded]",
        is_long=True,
    ),
    _EXECUTOR(
        name="weights in another order",
        why="[P8] Weights are given to a micro-batch in the caller's order, not in the plan's.",
        old="window.weights_R[list(indices)],",
        new="window.weights_R[sorted(indices)],",
        killed_by=TEST_CASES + "test_p15_voters_without_tokens[rollout]",
    ),
    _STEP(
        name="replicas never summed",
        why="[P2] Each replica keeps the gradient of its own rows.",
        old="        if not self.is_sharded:\n            distributed.sum_gradients(self.parameters)",
        new="        if False:\n            distributed.sum_gradients(self.parameters)",
        killed_by=TEST_CASES + "test_ranks_run_in_step[2-P2-replicated]",
        is_long=True,
    ),
    _STEP(
        name="clip each micro-batch",
        why="[P29] The gradient is clipped after every backward.",
        old="            outputs.update(self._scatter(cell, out))\n\n        # evaluation",
        new=(
            "            outputs.update(self._scatter(cell, out))\n"
            "            if self.options.max_grad_norm is not None:\n"
            "                nn.utils.clip_grad_norm_(self.parameters, self.options.max_grad_norm)\n\n"
            "        # evaluation"
        ),
        killed_by=TEST_STEP + "test_grad_is_final_and_not_clipped[0.001]",
        is_long=True,
    ),
    _STEP(
        name="clip before scale",
        why="[P29] The gradient is clipped before it is divided by N.",
        old="scale = self.options.max_grad_norm / grad_norm",
        new="scale = self.options.max_grad_norm / (grad_norm * window.num_trained_tokens)",
        killed_by=TEST_STEP + "test_sgd[padded-400-0.3]",
        is_long=True,
    ),
    _STEP(
        name="norm after clipping",
        why="[P29] The norm is reported after clipping.",
        old="skip_reason=skip_reason, grad_norm=grad_norm)",
        new="skip_reason=skip_reason, grad_norm=min(grad_norm, self.options.max_grad_norm or grad_norm))",
        killed_by=TEST_STEP + "test_sgd[padded-400-0.3]",
        is_long=True,
    ),
    _STEP(
        name="step without trained tokens",
        why="[P15] A window without trained tokens steps when another term has a coefficient.",
        old="if window.num_trained_tokens == 0:",
        new="if window.num_trained_tokens < 0:",
        killed_by=TEST_GAPS + "test_no_trained_token_no_step",
    ),
    _POLICY(
        name="step without signal",
        why="[P15] Adam steps on a window whose advantages are all 0.",
        old="if window.has_signal or has_other_terms or",
        new="if True or",
        killed_by=TEST_CASES + "test_p15_adamw_does_not_drift[False]",
    ),
    _STEP(
        name="gradients left over",
        why="The step adds to what .grad held before.",
        old="        self._zero_gradients()\n        state =",
        new="        state =",
        killed_by=TEST_STEP + "test_grad_is_final_and_not_clipped[None]",
        is_long=True,
    ),
    _STEP(
        name="dropout in training",
        why="[P31] The training pass runs with dropout, scoring without.",
        old="self.model.train(self.options.activation_checkpointing)",
        new="self.model.train()",
        killed_by=TEST_STEP + "test_dropout_is_off[padded]",
        is_long=True,
    ),
    _WINDOW(
        name="signal in every row",
        why="[P15] A window steps only when all of its rows carry an advantage.",
        old="has_signal=any(",
        new="has_signal=all(",
        killed_by=TEST_GAPS + "test_one_row_with_an_advantage_is_enough",
    ),
    _WINDOW(
        name="segments per voter",
        why="[P20] The mean of segments divides by rows.",
        old="segments_per_rollout_mean=len(rows) / len(segments)",
        new="segments_per_rollout_mean=sum(segments) / len(rows)",
        killed_by=TEST_CASES + "test_p20_rollouts_and_rows_are_told_apart",
    ),
    _POLICY(
        name="importance weight upside down",
        why="The truncated importance weight is engine over old.",
        old="torch.exp(old_N - cell.engine_logprobs_N)",
        new="torch.exp(cell.engine_logprobs_N - old_N)",
        killed_by=TEST_FORMULAS + "test_terms_by_hand[1.2-terms0-1.0]",
    ),
    _POLICY(
        name="importance weight of the current policy",
        why="The importance weight takes the current log-probs, and so the ratio twice.",
        old="torch.exp(old_N - cell.engine_logprobs_N)",
        new="torch.exp(out.logprobs_N - cell.engine_logprobs_N)",
        killed_by=TEST_FORMULAS + "test_terms_by_hand[1.2-terms0-1.0]",
    ),
    _POLICY(
        name="importance weight not truncated",
        why="The importance weight has no upper bound.",
        old=".clamp(max=options.importance_cap)",
        new="",
        killed_by=TEST_FORMULAS + "test_terms_by_hand[1.2-terms0-1.0]",
    ),
    _POLICY(
        name="kl subtracted",
        why="The KL term is a bonus.",
        old="losses_N + options.kl_coef * kl_N",
        new="losses_N - options.kl_coef * kl_N",
        killed_by=TEST_FORMULAS + "test_terms_by_hand[None-terms1-1.0]",
    ),
    _POLICY(
        name="entropy penalised",
        why="The entropy bonus has the wrong sign.",
        old="losses_N - options.entropy_coef * out.entropies_N",
        new="losses_N + options.entropy_coef * out.entropies_N",
        killed_by=TEST_FORMULAS + "test_terms_by_hand[None-terms2-1.0]",
    ),
    _POLICY(
        name="segment ratio as rollout ratio",
        why="gspo by rollout takes each row's own mean log-ratio.",
        old="if state.log_ratios is not None:",
        new="if False:",
        killed_by=TEST_FORMULAS + "test_gspo_by_hand[1.0]",
    ),
    _POLICY(
        name="ratio without length",
        why="gspo multiplies all token ratios of a rollout instead of taking their geometric mean.",
        old="total / max(window.tokens_per_rollout[rollout_id], 1) for",
        new="total for",
        killed_by=TEST_FORMULAS + "test_gspo_by_hand[1.0]",
    ),
    _POLICY(
        name="rollouts of one rank",
        why="gspo by rollout looks at the rows of its own rank only.",
        old="for part in distributed.exchange(sums):",
        new="for part in [sums]:",
        killed_by=TEST_GAPS + "test_rollouts_across_ranks_have_one_ratio",
        is_long=True,
    ),
    _POLICY(
        name="engine divergence the other way round",
        why="The engine's divergence is estimated with its arguments swapped.",
        old='kl_estimate(cell.engine_logprobs_N.double(), trainer_N, "k3")',
        new='kl_estimate(trainer_N, cell.engine_logprobs_N.double(), "k3")',
        killed_by=TEST_FORMULAS + "test_terms_by_hand[None-terms0-1.0]",
    ),
    _COLLATE(
        name="padding balanced",
        why="[P33] Padding and fillers count among the tokens that experts are balanced over.",
        old="index = np.concatenate(self.index_by_row) if self.index_by_row else np.zeros(0, dtype=np.int64)",
        new="index = np.arange(self.input_ids_BT.numel())",
        killed_by=TEST_MOE + "test_the_exact_step[padded-multiple-0.7-mixtral]",
    ),
    _MOE(
        name="first choices balanced",
        why="Only the first expert of each token counts.",
        old="torch.bincount(one.experts_TX.flatten()",
        new="torch.bincount(one.experts_TX[:, 0]",
        killed_by=TEST_MOE + "test_two_layers_two_experts_by_hand",
    ),
    _MOE(
        name="layers averaged",
        why="The balance of experts is a mean over layers.",
        old="return torch.stack(terms).sum()",
        new="return torch.stack(terms).mean()",
        killed_by=TEST_MOE + "test_two_layers_two_experts_by_hand",
    ),
    _POLICY(
        name="fractions of a micro-batch",
        why="[P33] The fraction of tokens per expert is that of the micro-batch.",
        old="balance_loss(out.routing, state.balance_weights_LE)",
        new=(
            "balance_loss(out.routing, balance_weights(count_tokens(out.routing), max(1, len(cell.token_index())))"
            " * len(cell.token_index()) / 77)"
        ),
        killed_by=TEST_MOE + "test_the_exact_step[padded-20-0.7-mixtral]",
    ),
    _POLICY(
        name="fractions of a rank",
        why="[P33] The fraction of tokens per expert is that of the rank.",
        old="parts = distributed.exchange((torch.stack(list(token_counts)).sum(0), num_tokens))",
        new="parts = [(torch.stack(list(token_counts)).sum(0), num_tokens)] * distributed.rank_and_size()[1]",
        killed_by="tests/dist/test_moe.py::test_the_exact_step[2-mixtral-padded-usual-replicated-0.7]",
        is_long=True,
    ),
    _POLICY(
        name="no step for the balance alone",
        why="[P15] A window without advantages does not step although experts are to be balanced.",
        old="any((options.kl_coef, options.entropy_coef, options.moe_balance_coef))",
        new="any((options.kl_coef, options.entropy_coef))",
        killed_by=TEST_MOE + "test_a_window_without_advantages[0.7]",
    ),
    _TOTALS(
        name="metric of micro-batch means",
        why="[P19] A per-token metric adds up the means of micro-batches.",
        old="                self._add(name, values_N)",
        new="                self._add(name, values_N / max(1, len(values_N)))",
        killed_by=TEST_CASES + "test_p19_entropy_is_a_token_mean[10]",
    ),
    _TOTALS(
        name="mean instead of highest",
        why="The largest deviation of the ratio is a sum of the micro-batches' largest.",
        old="torch.maximum(self._maxima.get(name, highest), highest)",
        new="self._maxima.get(name, 0.0) + highest",
        killed_by=TEST_CASES + "test_p19_clip_fraction_and_ratio[3]",
    ),
    _TOTALS(
        name="metrics over rows",
        why="[P19] Per-token metrics are divided by the number of rows.",
        old="total / num_tokens if num_tokens else None",
        new="total / window.num_rows if num_tokens else None",
        killed_by=TEST_CASES + "test_p19_entropy_is_a_token_mean[10]",
    ),
    _TOTALS(
        name="loss of unweighted sums",
        why="[P2] The reported loss is a plain sum.",
        old='self._add("loss", weighted_N)',
        new='self._add("loss", terms.losses_N)',
        killed_by=TEST_CASES + "test_p1_numbers[4-2]",
    ),
    _POLICY(
        name="mean over the kept",
        why="A sequence mask takes rejected tokens out of the denominator.",
        old="losses_N = torch.where(is_kept_N, losses_N, 0.0)",
        new="losses_N = torch.where(is_kept_N, losses_N, 0.0) / is_kept_N.double().mean()",
        killed_by=TEST_MASK + "test_rejected_tokens_stay_in_every_denominator[token]",
    ),
    _POLICY(
        name="other terms masked too",
        why="A sequence mask takes the KL of a rejected rollout away as well.",
        old="losses_N = losses_N + options.kl_coef * kl_N",
        new="losses_N = losses_N + options.kl_coef * kl_N * (1.0 if options.sequence_mask is None else is_kept_N)",
        killed_by=TEST_MASK + "test_other_terms_of_rejected_rollouts_stay",
    ),
    _CRITIC(
        name="value of the token itself",
        why="[P12] A value is read at the token that it speaks of.",
        old="values_BT.reshape(-1).index_select(0, cell.gather_N)",
        new="values_BT.reshape(-1).index_select(0, cell.gather_N + 1)",
        killed_by=TEST_CRITIC + "test_in_one_process",
    ),
    _CRITIC(
        name="error instead of its variance",
        why="Explained variance counts a critic's bias as unexplained.",
        old="1.0 - (error - (return_mean - value_mean) ** 2) / variance",
        new="1.0 - error / variance",
        killed_by=TEST_CRITIC + "test_in_one_process",
    ),
    _CRITIC(
        name="errors without squares",
        why="The value error is a mean of absolute errors.",
        old="errors_N**2",
        new="errors_N.abs()",
        killed_by=TEST_CRITIC + "test_in_one_process",
    ),
    _PASSES(
        name="value of the last trained token",
        why="[P12] The bootstrap is the value at the last token but one.",
        old="float(found[row.row_id][-1])",
        new="float(found[row.row_id][-2])",
        killed_by=TEST_PASSES + "test_in_one_process[gae bootstrap k3, other cells]",
    ),
    _PASSES(
        name="bootstrap of every rollout",
        why="A rollout that ended is bootstrapped like a truncated one.",
        old='for r in window.window.rollouts if r.status == "truncated"}',
        new="for r in window.window.rollouts}",
        killed_by=TEST_PASSES + "test_in_one_process[gae bootstrap k3, other cells]",
    ),
    _PASSES(
        name="penalty per rollout with rows",
        why="The mean KL penalty leaves out voters without tokens.",
        old="max(len(window.voters), 1)",
        new="max(len(penalties), 1)",
        killed_by=TEST_PASSES + "test_in_one_process[gae k2 engine]",
    ),
    _PASSES(
        name="engine log-probs forgotten",
        why="Old log-probs of the engine are left unset, so that the ratio is 1 in every epoch.",
        old="replace(row, old_logprobs=row.engine_logprobs)",
        new="replace(row, old_logprobs=None)",
        killed_by=TEST_PASSES + "test_in_one_process[gae k2 engine]",
    ),
]
