"""Wrong formulas in a replay's figures; see ``mutations``."""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_MEASURES = partial(Mutation, module="evenstep.replay.measures")
_STORED = partial(Mutation, module="evenstep.train.stored_steps")
TEST = "tests/unit/replay/test_measures.py::"

REPLAY = [
    _MEASURES(
        name="mean of paired ratios",
        why="One slow step of the first arm makes every other arm fast.",
        old="statistics.median(pairs)",
        new="statistics.mean(pairs)",
        killed_by=TEST + "test_times",
    ),
    _MEASURES(
        name="warm-up is timed",
        why="Compilation and first allocations count as the arm's speed.",
        old="steps[warmup:]",
        new="steps[0:]",
        killed_by=TEST + "test_times",
    ),
    _MEASURES(
        name="best cosine of all steps",
        why="An arm passes when one of its steps was right.",
        old="(min if is_least else max)(columns[key])",
        new="max(columns[key])",
        killed_by=TEST + "test_the_worst_step_counts",
    ),
    _MEASURES(
        name="lost rows are made up for",
        why="A row that ran twice stands in for one that never ran.",
        old='step["num_rows"] != step["num_rows_expected"]',
        new='step["num_rows"] > step["num_rows_expected"]',
        killed_by=TEST + "test_what_fails[runs6-3-None-lost_rows: step 2 trained 3 of 4 rows exactly once; not r7]",
    ),
    _STORED(
        name="cosine by one norm",
        why="The cosine grows with the gradient's length.",
        old="self.dot / math.sqrt(self.square_d * self.square_f)",
        new="self.dot / self.square_f",
        killed_by=TEST + "test_a_difference_is_over_all_parameters",
    ),
    _STORED(
        name="relative to the worst parameter",
        why="One parameter's difference is taken for that of the whole gradient.",
        old="return _relative(self.square_difference, self.square_f, self.square_d)",
        new="return self.worst_relative",
        killed_by=TEST + "test_a_difference_is_over_all_parameters",
    ),
]
