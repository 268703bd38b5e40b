"""Wrong formulas and lost promises of a run's page."""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_CURVES = partial(Mutation, module="evenstep.report.curves")
_SUMMARY = partial(Mutation, module="evenstep.report.summary")
_TEXT = partial(Mutation, module="evenstep.report.text")

TEST_PAGE = "tests/unit/report/test_report_page.py::"

REPORT: list[Mutation] = [
    _CURVES(
        name="gaps as zeros in a stretch's mean",
        why="Windows without a value count in the mean of their stretch.",
        old="means = np.divide(sums, counts, out",
        new="means = np.divide(sums, np.diff([*starts, len(values)]), out",
        killed_by=TEST_PAGE + "test_stretches_keep_extremes",
    ),
    _CURVES(
        name="every n-th window",
        why="Of each stretch the first window alone is kept, so a spike between is lost.",
        old='"most": np.fmax.reduceat(values, starts)',
        new='"most": values[starts]',
        killed_by=TEST_PAGE + "test_stretches_keep_extremes",
    ),
    _SUMMARY(
        name="learning within the noise",
        why="Any rise of the held-out reward is called learning.",
        old="elif change > TELLING * error:",
        new="elif change > 0 * error:",
        killed_by=TEST_PAGE + "test_a_change_within_the_noise_is_not_called_learning",
    ),
    _SUMMARY(
        name="rollouts once an epoch",
        why="A failed rollout is counted again in every epoch.",
        old='once = [window for window in windows if window.get("epoch", 0) == 0]',
        new="once = list(windows)",
        killed_by=TEST_PAGE + "test_losses_are_counted_with_their_reasons",
    ),
    _SUMMARY(
        name="padding against real tokens",
        why="Padding is given as a share of the real tokens, not of what was run.",
        old="{100 * padding / footprint:.1f}",
        new="{100 * padding / tokens:.1f}",
        killed_by=TEST_PAGE + "test_summary_answers",
    ),
    _TEXT(
        name="JSON that ends its script",
        why="Text of a rollout that holds </script> ends the data and begins markup.",
        old="return text.replace(",
        new="return text or text.replace(",
        killed_by=TEST_PAGE + "test_hostile_text_stays_text",
    ),
]
