"""Wrong formulas before the step: segments, windows, seeds, counts of rollouts, and plans.

``contract/test_mutations.py`` puts each into the production code; P1 to P35 are the known faults it is typical of.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_SCHEDULE = partial(Mutation, module="evenstep.train.schedule")
_SEGMENTS = partial(Mutation, module="evenstep.rollout.segments")
_CALL_TREE = partial(Mutation, module="evenstep.rollout.call_tree")
_COLLECTOR = partial(Mutation, module="evenstep.rollout.collector")
_FOOTPRINT = partial(Mutation, module="evenstep.plan.footprint")
_PROMISES = partial(Mutation, module="evenstep.plan.promises")
_IN_PROCESS = partial(Mutation, module="evenstep.rollout.in_process")
_SERVER = partial(Mutation, module="evenstep.rollout.server_pool")
_SERVER_API = partial(Mutation, module="evenstep.rollout.server_api")
_METRICS = partial(Mutation, module="evenstep.train.metrics")

TEST_CALL_TREE = "tests/unit/rollout/test_call_tree.py::"
TEST_SEGMENTS = "tests/unit/rollout/test_segments.py::"
TEST_PLAN_FAULTS = "tests/unit/plan/test_plan_known_faults.py::"
TEST_PLAN_CHECK = "tests/unit/plan/test_plan_check.py::"
TEST_PLAN_CASES = "tests/golden/test_plan_worked_cases.py::"
TEST_GAPS = "tests/unit/test_mutation_gaps.py::"
TEST_CREDIT_OF_WINDOWS = "tests/unit/train/test_credit_of_windows.py::"

TEST_SERVER = "tests/unit/rollout/test_server_engine.py::"

WINDOWS: list[Mutation] = [
    _SEGMENTS(
        name="log-probs of another distribution",
        why="Log-probs that top-p or penalties have renormalised are compared with the trainer's.",
        old="engine_logprobs=segment.logprobs if is_whole else None,",
        new="engine_logprobs=segment.logprobs,",
        killed_by=TEST_CREDIT_OF_WINDOWS + "test_rows_of_another_distribution_have_no_engine_logprobs[top_p = 0.9]",
    ),
    Mutation(
        name="moments of seen parameters alone",
        why="A run whose parameters had no gradient before its checkpoint cannot be resumed.",
        module="evenstep.train.checkpoint",
        old="        _complete(trained[name].optimizer)",
        new="        pass",
        killed_by="tests/unit/train/test_checkpoints.py::test_parameters_without_a_gradient_go_on",
    ),
    Mutation(
        name="shared sampled tokens twice",
        why="[P17] What two branches of a trace share is counted as trained in both.",
        module="evenstep.imports.prime",
        old=" if owner_of[at] == leaf)",
        new=")",
        killed_by="tests/unit/imports/test_readers.py::test_what_branches_share_is_trained_once",
    ),
    Mutation(
        name="each row of a line a rollout",
        why="[P22] Rows of a trace without an id are taken for rollouts, and windows cut it.",
        module="evenstep.imports.rows",
        old="        if lines[i] != lines[first]:",
        new="        if True:",
        killed_by="tests/unit/imports/test_readers.py::test_rows_of_a_line_without_ids_are_one_rollout[traces.jsonl-id-3]",
    ),
    _SERVER(
        name="answers of a server that was started again",
        why="An answer counts although the server has other weights after it.",
        old="if (answer.stamp or await self._stamp_after(server)) != stamp:",
        new="if False:",
        killed_by=TEST_SERVER + "test_an_answer_of_other_weights_is_not_taken[vllm]",
    ),
    _SERVER(
        name="the version of a call",
        why="A call has another version than the weights that answered it.",
        old="weight_version=version,\n            routed_experts",
        new="weight_version=version + 1,\n            routed_experts",
        killed_by=TEST_SERVER + "test_a_call[vllm]",
    ),
    _SERVER_API(
        name="a clamped output",
        why="Fewer tokens than asked for count as a finished output.",
        old='(reason == "length" and num_tokens < max_tokens)',
        new="False",
        killed_by=TEST_SERVER + "test_answers_that_may_not_be_trained_on[clamp-vllm]",
    ),
    _IN_PROCESS(
        name="weights that change within a batch",
        why="A batch does not wait for whoever changes the weights, so its version is not that of all of its tokens.",
        old="with self._lock, torch.no_grad()",
        new="with torch.no_grad()",
        killed_by="tests/unit/rollout/test_in_process_engine.py::test_weights_and_version_change_between_two_batches",
    ),
    _SCHEDULE(
        name="rate of the next step",
        why="[P11] The schedule is one step ahead.",
        old="(optimizer_step - warmup_steps) / max",
        new="(optimizer_step + 1 - warmup_steps) / max",
        killed_by=TEST_GAPS + "test_learning_rate_by_hand[linear]",
    ),
    _SCHEDULE(
        name="decay from the start",
        why="The decay counts the steps of the warm-up.",
        old="(optimizer_step - warmup_steps) / max(1, total_steps - warmup_steps)",
        new="optimizer_step / max(1, total_steps)",
        killed_by=TEST_GAPS + "test_learning_rate_by_hand[cosine]",
    ),
    _SCHEDULE(
        name="first step without a rate",
        why="The warm-up begins at 0.",
        old="peak * (optimizer_step + 1) / warmup_steps",
        new="peak * optimizer_step / warmup_steps",
        killed_by=TEST_GAPS + "test_learning_rate_by_hand[constant]",
    ),
    _METRICS(
        name="reward mean over rows",
        why="[P20] A rollout's reward counts once for each of its rows.",
        old="[r.reward for r in rollouts if r.is_voter]",
        new="[r.reward for r in rollouts if r.is_voter for _ in r.calls]",
        killed_by=TEST_GAPS + "test_rollouts_are_counted_once",
    ),
    _METRICS(
        name="failed rollouts in the reward mean",
        why="[P28] A failed rollout counts as reward 0.",
        old="[r.reward for r in rollouts if r.is_voter]",
        new="[r.reward or 0.0 for r in rollouts]",
        killed_by=TEST_GAPS + "test_rollouts_are_counted_once",
    ),
    _COLLECTOR(
        name="windows in rows",
        why="[P11, P22] Windows are as many as the rows ask for.",
        old="groups_per_window = rollouts_per_window // sizes[0]",
        new=(
            "groups_per_window = max(1, rollouts_per_window * len(collection.groups) "
            "// max(1, sum(len(rollout.calls) for rollout in collection.rollouts)))"
        ),
        killed_by="tests/unit/rollout/test_collector.py::test_windows_count_rollouts_never_calls[<lambda>1]",
    ),
    Mutation(
        name="one seed for a group",
        why="[P35] The generation is not in the seed: rollouts of a group are copies.",
        module="evenstep.rollout.seeds",
        old='mixed_seed("call", run, collection, occurrence, generation, attempt, call)',
        new='mixed_seed("call", run, collection, occurrence, attempt, call)',
        killed_by="tests/unit/rollout/test_rollout_seeds.py::test_one_prompt_twice_with_two_generations_has_four_seeds",
    ),
    Mutation(
        name="one seed for a prompt",
        why="[P35] The occurrence of a prompt is not in the seed.",
        module="evenstep.rollout.seeds",
        old='mixed_seed("call", run, collection, occurrence, generation, attempt, call)',
        new='mixed_seed("call", run, collection, generation, attempt, call)',
        killed_by="tests/unit/rollout/test_rollout_seeds.py::test_one_prompt_twice_with_two_generations_has_four_seeds",
    ),
    _CALL_TREE(
        name="prefix of the second turn",
        why="[P17] The stored prefix is that of turn 2, so the third turn opens a new row.",
        old="if before is not None and _continues(call, before):",
        new="if before is not None and index < 2 and _continues(call, before):",
        killed_by=TEST_SEGMENTS + "test_a_declared_reason_does_not_break_what_continues",
    ),
    _SEGMENTS(
        name="history trained again",
        why="[P17] A new segment trains the history that its prompt repeats.",
        old="mask = [0] * last.num_tokens",
        new="mask = [0, *[int(index > 0)] * (last.num_tokens - 1)]",
        killed_by=TEST_SEGMENTS + "test_a_declared_break_opens_a_row_and_trains_only_what_it_sampled[compaction]",
    ),
    _SEGMENTS(
        name="engine log-probs shifted",
        why="[P12] Log-probs stand one token too early.",
        old="logprobs=tuple(logprobs)",
        new="logprobs=(*logprobs[1:], 0.0)",
        killed_by=TEST_SEGMENTS + "test_logprobs_stand_at_their_tokens",
    ),
    _CALL_TREE(
        name="calls in file order",
        why="Calls are taken as they come instead of by their order number.",
        old="in sorted(rollout.calls, key=lambda call: call.order)]",
        new="in rollout.calls]",
        killed_by=TEST_SEGMENTS + "test_calls_are_taken_by_order_number",
    ),
    _CALL_TREE(
        name="silent break",
        why="[P17] A prompt that rewrites the history opens a row without being asked to.",
        old='if self._on_undeclared == "error":',
        new="if False:",
        killed_by=TEST_SEGMENTS
        + "test_an_undeclared_break_is_an_error_with_the_place[prompt0-token 2 is 9, expected 3]",
    ),
    _CALL_TREE(
        name="drift taken for a fork",
        why="[P17] A prompt that holds a call's prompt and another output forks before that call, unnoticed.",
        old="if prompt == call.prompt_ids[: len(prompt)]:",
        new="if False:",
        killed_by=TEST_CALL_TREE + "test_a_drift_is_no_fork[prompt0-True]",
    ),
    _CALL_TREE(
        name="shortest view as parent",
        why="A call continues the first turn that its prompt begins with.",
        old="alike[lengths == lengths.max()]",
        new="alike[lengths == lengths.min()]",
        killed_by=TEST_CALL_TREE + "test_the_longest_view_is_the_parent",
    ),
    _SEGMENTS(
        name="shared tokens trained by every branch",
        why="[P17] Each branch of a fork trains what they share.",
        old="len(node.call.prompt_ids), trained_ends[at]",
        new="len(node.call.prompt_ids), len(node.call.prompt_ids)",
        killed_by=TEST_SEGMENTS + "test_the_first_branch_trains_what_a_fork_shares",
    ),
    _SEGMENTS(
        name="drifted tail trained",
        why="What was sampled after the point of drift is trained after ids that the policy never saw.",
        old="limit = min(limit, node.num_kept_tokens)",
        new="limit = min(limit, node.num_kept_tokens + 2 * (node.origin == 'undeclared'))",
        killed_by=TEST_SEGMENTS + "test_an_undeclared_break_as_chosen[drift0]",
    ),
    _SEGMENTS(
        name="rejected output trained",
        why="An output that the agent threw away is trained.",
        old="        if not node.call.is_rejected:\n            begin",
        new="        if True:\n            begin",
        killed_by=TEST_SEGMENTS + "test_a_rejected_output_that_a_prompt_holds_is_context",
    ),
    _SEGMENTS(
        name="advantage shared out",
        why="[P3] A rollout's advantage is divided by its segments.",
        old="else advantages[rollout.rollout_id],",
        new="else advantages[rollout.rollout_id] / len(segments_of(rollout)),",
        killed_by=TEST_SEGMENTS + "test_rows_share_the_rollouts_advantage_through_their_own_masks",
    ),
    _SEGMENTS(
        name="failed rollout trained",
        why="[P28] A failed rollout becomes rows with advantage 0, which are in N.",
        old="    voters = [rollout for rollout in rollouts if rollout.is_voter]\n",
        new=(
            "    voters = list(rollouts)\n"
            "    advantages = {rollout.rollout_id: 0.0 for rollout in voters} | dict(advantages)\n"
        ),
        killed_by=TEST_SEGMENTS + "test_a_rollout_that_does_not_vote_has_no_rows",
    ),
]

PLAN: list[Mutation] = [
    Mutation(
        name="repeated once more than forced",
        why="A beginning that the budget puts into m cells is counted m times beside the first.",
        module="evenstep.plan.bounds",
        old="repeats.append((above, depth, num_cells - 1))",
        new="repeats.append((above, depth, num_cells))",
        killed_by="tests/golden/test_plan_worked_cases.py::test_what_the_budget_forces_to_be_repeated",
    ),
    Mutation(
        name="mean of the windows' ratios",
        why="A dry run's padding efficiency is the mean of those of its windows, however many tokens they have.",
        module="evenstep.dry_run.arms",
        old="padding_efficiency=sum(stats.num_tokens for stats in found) / footprint",
        new="padding_efficiency=sum(stats.padding_efficiency for stats in found) / len(found)",
        killed_by="tests/unit/dry_run/test_dry_run.py::test_figures_are_sums_over_sums",
    ),
    Mutation(
        name="recomputation for nothing",
        why="Layers that are computed again in the backward cost no estimated seconds.",
        module="evenstep.dry_run.estimate",
        old="passes = 4 if self.is_checkpointed else 3",
        new="passes = 3",
        killed_by="tests/unit/dry_run/test_dry_run.py::test_estimates_by_hand",
    ),
    Mutation(
        name="padding imported as tokens",
        why="A row of a NeMo-RL dump is as long as its padded ids.",
        module="evenstep.imports.nemo",
        old='length = as_count(values, "input_lengths", least=1)',
        new='length = len(values.get("token_ids", ())) or 1',
        killed_by="tests/unit/imports/test_readers.py::test_nemo_rl_rows_are_as_long_as_their_tokens",
    ),
    Mutation(
        name="messages imported as rows",
        why="A row of a trace is its last message, without the branch before it.",
        module="evenstep.imports.prime",
        old="return path[::-1]",
        new="return path[:1]",
        killed_by="tests/unit/imports/test_readers.py::test_each_branch_of_a_trace_is_a_row",
    ),
    _FOOTPRINT(
        name="budget of real tokens",
        why="[P6] A padded micro-batch is measured by the sum of its rows.",
        old="return rows_C * longest_C",
        new="return sums_C",
        killed_by=TEST_GAPS + "test_the_rectangle_is_checked",
    ),
    Mutation(
        name="filled by real tokens",
        why="[P6] Padded micro-batches are filled until the sum of their rows reaches the budget.",
        module="evenstep.plan.local",
        old='if problem.room.layout == "packed":',
        new='if problem.room.layout != "fixed":',
        killed_by=TEST_PLAN_FAULTS + "test_the_budget_is_on_the_rectangle[local]",
    ),
    _FOOTPRINT(
        name="rounded down to the multiple",
        why="[P6] Widths are rounded down.",
        old="(lengths_R + (self.multiple - 1)) // self.multiple",
        new="lengths_R // self.multiple",
        killed_by=TEST_PLAN_CASES + "test_widths_and_budget_of_the_context_parallel_case",
    ),
    _FOOTPRINT(
        name="fixed shape of the rows there are",
        why="[P6] A fixed micro-batch is measured without its fillers.",
        old="return self.cell_rows * longest_C",
        new="return rows_C * longest_C",
        killed_by=TEST_GAPS + "test_a_fixed_cell_is_measured_with_its_fillers",
    ),
    Mutation(
        name="sum bound as the answer",
        why="[P24] The number of micro-batches is ceil(sum / budget).",
        module="evenstep.plan.local",
        old="if at < len(free):",
        new="if free and len(cells) >= -(-int(problem.widths_R[positions].sum()) // capacity):\n"
        "            left, cell = free.pop()\n"
        "            cells[cell].append(position)\n"
        "        elif at < len(free):",
        killed_by=TEST_PLAN_CASES + "test_rows_that_cannot_share[local-packed]",
    ),
    Mutation(
        name="own number of micro-batches",
        why="[P4] A rank runs as many micro-batches as its own rows need.",
        module="evenstep.plan.local",
        old="parts = split_to_count(problem, cells, num_microbatches)",
        new="parts = cells",
        killed_by=TEST_PLAN_FAULTS + "test_counts_are_agreed_for_placed_rows",
    ),
    Mutation(
        name="company for an over-long row",
        why="[P25] A row over the budget may have a companion.",
        module="evenstep.plan.local",
        old="max(1, capacity // int(widths[start]))",
        new="max(2, capacity // int(widths[start]))",
        killed_by=TEST_PLAN_FAULTS + "test_over_long_rows_stand_alone[local-padded]",
    ),
    _PROMISES(
        name="lost rows unnoticed",
        why="[P18, P22] Only rows in several cells are noticed, rows in none are not.",
        old="np.flatnonzero(seen != expected)",
        new="np.flatnonzero(seen > expected)",
        killed_by=TEST_PLAN_CHECK + "test_a_lost_row",
    ),
    _PROMISES(
        name="doubled rows unnoticed",
        why="Only rows in no cell are noticed, rows in several are not.",
        old="np.flatnonzero(seen != expected)",
        new="np.flatnonzero(seen < expected)",
        killed_by=TEST_PLAN_CHECK + "test_a_doubled_row",
    ),
    _PROMISES(
        name="torn rollouts unnoticed",
        why="[P22] Rows of a rollout may be in different windows.",
        old="    if torn.size:",
        new="    if torn.size > num_rows:",
        killed_by=TEST_PLAN_FAULTS + "test_windows_keep_rollouts_and_groups_whole",
    ),
]
