"""The worked example on 4 real gloo ranks: 3 prompts × 2 rollouts, 13 rows, 3 fillers, 16 cells, one exact step.

1. Segments (1,3), (2,5), (1,1) fill up to 4, 8 and 4 rows: 16 cells, 4 on each rank, of the groups 1, 2 and 1.
2. The step counts 6 rollouts, 13 rows, 3 fillers, and only real trained tokens.
3. Loss, whole gradient, log-probs and the weights after one SGD step equal the oracle to 1e-12 in true float64, with
   replicated and with sharded parameters.
4. Groups of 5, 1 and 1 rows: 16 cells filled up group by group, 8 filled up by window; the same gradient.
"""

from __future__ import annotations

from collections import Counter

import pytest

import oracle
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, run_cases
from tiny_models import tiny_model, true_float64
from tiny_rows import SEED_A_SEGMENTS, make_rows, with_old_logprobs

LR = 0.05


@once
def outcomes() -> dict[str, tuple[StepCase, list[CaseOutcome]]]:
    with true_float64():
        model = tiny_model()
        windows = {
            "worked": with_old_logprobs(make_rows(SEED_A_SEGMENTS), model),
            "five-one-one": with_old_logprobs(make_rows(((2, 3), (1,), (1,))), model),
        }
    cases = [
        StepCase(
            name=f"{window} {pad_scope} {'sharded' if is_sharded else 'replicated'}",
            rows=rows,
            trainer={"layout": "fixed", "micro_batch_rows": 1, "pad_scope": pad_scope},
            is_sharded=is_sharded,
            optimizer_args={"lr": LR},
            keeps_weights=True,
            forbids_float32=(window, pad_scope) == ("worked", "group"),
        )
        for window, rows in windows.items()
        for pad_scope in ("group", "window")
        for is_sharded in (False, True)
        if window == "worked" or not is_sharded
    ]
    by_rank = run_ranks(run_cases, 4, cases)
    return {case.name: (case, [found[i] for found in by_rank]) for i, case in enumerate(cases)}


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_cells_and_counts(kind: str) -> None:
    case, by_rank = outcomes()[f"worked group {kind}"]
    cells = by_rank[0].cells
    assert [len(rank) for rank in cells] == [4, 4, 4, 4]
    assert all(len(cell) <= 1 for rank in cells for cell in rank)
    assert sum(len(cell) == 0 for rank in cells for cell in rank) == 3
    assert sorted(i for rank in cells for cell in rank for i in cell) == list(range(13))
    groups_of_columns = [{case.rows[i].group_id for rank in cells for i in rank[k]} for k in range(4)]
    assert all(len(groups) == 1 for groups in groups_of_columns)  # the four cells of a column are of one group
    assert Counter(next(iter(groups)) for groups in groups_of_columns) == {"g0": 1, "g1": 2, "g2": 1}
    metrics = by_rank[0].metrics
    assert len({row.rollout_id for row in case.rows}) == metrics["num_voters"] == 6
    assert (metrics["num_rows"], metrics["num_fillers"], metrics["num_microbatches"]) == (13, 3, 4)
    assert metrics["num_trained_tokens"] == sum(row.num_trained_tokens for row in case.rows)


@pytest.mark.parametrize(
    "name",
    [
        *(f"worked {scope} {kind}" for scope in ("group", "window") for kind in ("replicated", "sharded")),
        *(f"five-one-one {scope} replicated" for scope in ("group", "window")),
    ],
)
def test_equals_the_oracle(name: str) -> None:
    case, by_rank = outcomes()[name]
    expected = case.oracle()
    assert 0.1 < expected.metrics["clip_fraction"] < 0.9
    weights = oracle.sgd_step(by_rank[0].weights[0], expected.gradient, lr=LR)
    for found in by_rank:
        assert oracle.relative_error(found.gradient, expected.gradient) < 1e-12
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        for row in case.rows:
            assert found.logprobs[row.row_id].tolist() == pytest.approx(
                expected.logprobs[row.row_id].tolist(), rel=1e-12, abs=1e-12
            )
        assert found.stepped == (True,)
        assert oracle.relative_error(found.weights[1], weights) < 1e-12
        moved = oracle.relative_error(found.weights[1], found.weights[0])
        assert moved > 1e-4


def test_scope_of_filling_up() -> None:
    by_group, by_window = (outcomes()[f"five-one-one {scope} replicated"][1][0] for scope in ("group", "window"))
    assert sum(map(len, by_group.cells)) == 16
    assert sum(map(len, by_window.cells)) == 8
    assert (by_group.metrics["num_fillers"], by_window.metrics["num_fillers"]) == (9, 1)
    assert oracle.relative_error(by_group.gradient, by_window.gradient) < 1e-12
