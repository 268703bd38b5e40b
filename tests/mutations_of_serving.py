"""Wrong formulas of the capture server: which ids a prompt has, which calls are trained, who may read what.

``contract/test_mutations.py`` puts each into the production code.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_CAPTURED = partial(Mutation, module="evenstep.serve.captured")
_CAPTURE = partial(Mutation, module="evenstep.serve.capture")
_HISTORY = partial(Mutation, module="evenstep.serve.history")

TEST = "tests/unit/serve/test_capture.py::"

SERVING: list[Mutation] = [
    _CAPTURED(
        name="answers tokenised again",
        why="An answer that comes back in the history gets the ids of its text.",
        old="parent = None if is_rendered_anew else self._history.continued(messages, tools)",
        new="parent, is_rendered_anew = None, True",
        killed_by=TEST + "test_ids_are_the_engines_and_stay",
    ),
    _CAPTURED(
        name="choices that nobody took are trained",
        why="Of n choices all are trained with the reward that one of them earned.",
        old="turn.is_rejected or (turn.num_siblings > 1 and turn.order not in used)",
        new="turn.is_rejected",
        killed_by=TEST + "test_of_several_choices_the_continued_one_is_trained",
    ),
    _CAPTURE(
        name="ids behind a stop string",
        why="What was sampled behind a stop string is trained, although nobody read it.",
        old="output_ids=call.output_ids[:high], logprobs=call.logprobs[:high]",
        new="output_ids=call.output_ids, logprobs=call.logprobs",
        killed_by=TEST + "test_a_stop_string_cuts_the_text_and_not_the_token",
    ),
    _CAPTURED(
        name="an agent's seed as it is",
        why="An agent with a fixed seed plays all rollouts of a group alike.",
        old="if self._mixes_seeds else",
        new="if not self._mixes_seeds else",
        killed_by=TEST + "test_a_fixed_seed_does_not_make_the_rollouts_of_a_group_alike",
    ),
    _HISTORY(
        name="own words may be changed",
        why="A prompt that replaces what the model said counts as a branch of the call before.",
        old="num_kept < len(turn.prompt_ids) < len(prompt_ids)",
        new="num_kept < len(turn.prompt_ids) < 0",
        killed_by=TEST + "test_the_models_own_words_may_not_be_changed_later_on",
    ),
]
