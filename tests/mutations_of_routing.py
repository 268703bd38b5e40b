"""Wrong formulas between the experts that an engine recorded and those that tokens are sent to.

``contract/test_mutations.py`` puts each into the production code.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_ROUTING = partial(Mutation, module="evenstep.train.routing")
_EXPERTS = partial(Mutation, module="evenstep.experts")
_WINDOW = partial(Mutation, module="evenstep.train.window")
_DRY_RUN = partial(Mutation, module="evenstep.dry_run.windows")
_STEP = partial(Mutation, module="evenstep.train.step")
_SEGMENTS = partial(Mutation, module="evenstep.rollout.segments")
_CALLS = partial(Mutation, module="evenstep.rollout.calls")
_ENGINE = partial(Mutation, module="evenstep.rollout.in_process")

TEST = "tests/unit/train/test_routing.py::"

ROUTING: list[Mutation] = [
    _ROUTING(
        name="weights of other experts",
        why="A token goes to the recorded experts with the weights of those that the router likes best.",
        old="scores_TE.gather(-1, experts_TX).masked_fill",
        new="chosen.values.masked_fill",
        killed_by=TEST + "test_the_exact_step[mixtral-fixed]",
    ),
    _ROUTING(
        name="unknown is the first expert",
        why="A token without a record goes to expert 0.",
        old="torch.where(self._experts_TX == UNKNOWN, chosen.indices, self._experts_TX.long())",
        new="self._experts_TX.long().clamp(min=0)",
        killed_by=TEST + "test_the_exact_step[mixtral-fixed]",
    ),
    _ROUTING(
        name="padding on one expert",
        why="All padding goes to the first experts.",
        old="np.arange(num_tokens * shape.experts_per_token)",
        new="np.tile(np.arange(shape.experts_per_token), num_tokens)",
        killed_by=TEST + "test_padding_goes_round",
    ),
    _ROUTING(
        name="the last token is required too",
        why="A row is refused for a token whose experts nothing depends on.",
        old="num_inputs = int(np.flatnonzero(row.loss_mask)[-1])",
        new="num_inputs = int(np.flatnonzero(row.loss_mask)[-1]) + 1",
        killed_by=TEST + "test_required_refuses_what_is_missing",
    ),
    _STEP(
        name="no replay in the backward pass",
        why="A checkpointed layer is repeated with another choice than it was run with.",
        old="                (totals.add(cell, objective.terms(cell, out, state)) + out.anchor).backward()",
        new="            (totals.add(cell, objective.terms(cell, out, state)) + out.anchor).backward()",
        killed_by=TEST + "test_the_exact_step[gpt_oss-packed]",
        is_long=True,
    ),
    _EXPERTS(
        name="nodes of equal ids",
        why="Tokens with equal ids and other experts become one node of a trie.",
        old="reshape(experts_TX.shape) - UNKNOWN",
        new="reshape(experts_TX.shape) * 0",
        killed_by=TEST + "test_nodes_of_a_trie_have_one_record",
    ),
    _DRY_RUN(
        name="a dry run that merges by ids",
        why="A dry run counts nodes that training keeps apart as one.",
        old="token_keys(token_ids, [rows.routed_experts[index] for index in indices])",
        new="token_keys(token_ids, [None] * len(indices))",
        killed_by="tests/unit/dry_run/test_dry_run.py::test_tokens_are_merged_as_in_training",
    ),
    _WINDOW(
        name="experts are no part of a window",
        why="Ranks that brought other experts do not notice.",
        old="state.update(row.routed_experts.data)",
        new='state.update(b"")',
        killed_by="tests/dist/test_routing.py::test_ranks_that_disagree_are_told",
        is_long=True,
    ),
    _SEGMENTS(
        name="experts of the last call",
        why="A token has the experts of the last call that read it, not of the one whose output followed from it.",
        old="where=part_TLX != UNKNOWN)",
        new="where=(part_TLX != UNKNOWN) & (view_TLX == UNKNOWN))",
        killed_by="tests/unit/test_experts.py::test_the_next_call_knows_the_last_token",
    ),
    _CALLS(
        name="the last sampled token is left out",
        why="A call does not keep the experts of the token that the call before it sampled last.",
        old="first = len(view) - known.num_tokens + num_known",
        new="first = len(view) - known.num_tokens + num_known + 1",
        killed_by="tests/property/test_routed_segments.py::test_experts_of_rows",
    ),
    _ENGINE(
        name="experts of padding",
        why="Of a shorter prompt the padding before it is recorded.",
        old="chosen_BTLX[i, -len(requests[row].prompt_ids) if step == 0 else -1 :]",
        new="chosen_BTLX[i, : len(requests[row].prompt_ids)]",
        killed_by=TEST + "test_the_engine_records_what_its_model_does[qwen3_moe]",
    ),
]
