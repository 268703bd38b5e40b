"""Wrong formulas do not pass: each entry of ``tests/mutations_of_*.py`` is put into the code and killed.

1. The text that a mutation replaces occurs exactly once in its module: a refactor shows which entries to update.
2. Every known fault that is a formula has a typical wrong one in the list.
3. Each mutation makes its named test fail, and that test passes without it: in one test those whose tests are quick, in
   another those that start ranks or take longer.
4. A change that is right survives: it is the formula that kills, not the way it is put in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

import mutations_of_credit as credit
import mutations_of_images as images
import mutations_of_models as models
import mutations_of_replay as replay
import mutations_of_report as report
import mutations_of_rollouts as rollouts
import mutations_of_routing as routing
import mutations_of_serving as serving
import mutations_of_step as step
from mutations import Mutation, run

MUTATIONS = [
    *(*credit.CREDIT, *credit.LOSSES),
    *(*step.TRIES, *step.TOKENS, *step.ACROSS_RANKS, *step.STEP),
    *(*rollouts.WINDOWS, *rollouts.PLAN),
    *models.MODELS,
    *report.REPORT,
    *serving.SERVING,
    *replay.REPLAY,
    *routing.ROUTING,
    *images.IMAGES,
]
HARMLESS = Mutation(
    name="harmless",
    why="Minus the mean, plus the reward.",
    module="evenstep.credit.advantages",
    old="return rewards_G - rewards_G.mean()",
    new="return -rewards_G.mean() + rewards_G",
    killed_by="tests/unit/credit/test_advantages.py::test_rows_do_not_vote",
)
# a resumed run is a run of its own (dist/test_resume.py)
WITHOUT_FORMULA = {"P23"}


def assert_killed(mutations: Sequence[Mutation], timeout_s: float) -> None:
    outcomes = run(mutations, timeout_s=timeout_s)
    for node_id in sorted({mutation.killed_by for mutation in mutations}):
        unchanged = outcomes.get((node_id, None))
        assert unchanged is not None, f"{node_id} did not run"
        assert unchanged.passed == ["setup", "call", "teardown"], f"{node_id} fails without any mutation: {unchanged}"
    survivors = []
    for mutation in mutations:
        outcome = outcomes.get((mutation.killed_by, mutation.name))
        if outcome is None or "call" not in outcome.failed:
            survivors.append(f"{mutation.name!r} ({mutation.why}) is not noticed by {mutation.killed_by}: {outcome}")
    assert not survivors, "\n".join(survivors)


def test_texts_occur_once() -> None:
    for mutation in [*MUTATIONS, HARMLESS]:
        assert mutation.changed_source
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 40


def test_every_known_fault_has_a_wrong_formula() -> None:
    found = {fault for mutation in MUTATIONS for fault in re.findall(r"P\d+", mutation.why)}
    assert found | WITHOUT_FORMULA == {f"P{i}" for i in range(1, 36)}
    assert not found & WITHOUT_FORMULA


@pytest.mark.long
@pytest.mark.timeout(300)  # the first to ask for the server waits until it has imported torch
def test_quick_ones_are_killed() -> None:
    assert_killed([mutation for mutation in MUTATIONS if not mutation.is_long], timeout_s=240)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_long_ones_are_killed() -> None:
    assert_killed([mutation for mutation in MUTATIONS if mutation.is_long], timeout_s=840)


def test_a_right_formula_survives() -> None:
    outcomes = run([HARMLESS], timeout_s=120)
    assert outcomes[HARMLESS.killed_by, "harmless"].passed == ["setup", "call", "teardown"]
