"""Locks:

1. token, rollout, prompt, constant and row weights by their formulas, on the published worked cases
2. token, rollout, prompt and constant weights do not change when a rollout's tokens are split over more rows; row does
3. voters without rows and groups without tokens count as design says
4. all weights of a window sum to 1 (token, rollout and prompt with tokens everywhere, row)
5. counts are exact integers, also beyond what float32 and bfloat16 can hold
6. malformed windows are refused with ids
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.credit import count_window, row_weights
from evenstep.errors import CreditError
from evenstep.types import Row


def row(name: str, rollout: str, trained: int, group: str = "g", context: int = 1) -> Row:
    return Row(
        row_id=name,
        rollout_id=rollout,
        group_id=group,
        token_ids=[0] * (context + trained),
        loss_mask=[0] * context + [1] * trained,
    )


def weights(rows: list[Row], normaliser: str, voters: dict[str, str] | None = None, **options: object) -> list[float]:
    return row_weights(rows, count_window(rows, voters), normaliser, **options).tolist()  # type: ignore[arg-type]


SPLIT = [row("a0", "A", 2), row("a1", "A", 1), row("b0", "B", 1)]
MERGED = [row("a", "A", 3), row("b0", "B", 1)]


def loss(rows: list[Row], losses: dict[str, list[float]], normaliser: str, **options: object) -> float:
    return sum(w * sum(losses[str(r.row_id)]) for r, w in zip(rows, weights(rows, normaliser, **options), strict=True))


def test_worked_case_of_one_split_rollout() -> None:
    split, merged = {"a0": [1, 1], "a1": [4], "b0": [5]}, {"a": [1, 1, 4], "b0": [5]}
    assert loss(SPLIT, split, "rollout") == pytest.approx(3.5)
    assert loss(SPLIT, split, "token") == pytest.approx(2.75)
    assert loss(SPLIT, split, "constant", constant=2) == pytest.approx(11 / 4)
    assert loss(SPLIT, split, "row", allow_row_splits=True) == pytest.approx(10 / 3)
    for normaliser, options in (("rollout", {}), ("token", {}), ("prompt", {}), ("constant", {"constant": 2})):
        assert loss(MERGED, merged, normaliser, **options) == pytest.approx(loss(SPLIT, split, normaliser, **options))
    assert loss(MERGED, merged, "row") != pytest.approx(10 / 3)


def test_only_trained_tokens_are_in_the_denominator() -> None:
    assert weights([row("a", "A", 4, context=6), row("b", "B", 0)], "token") == [0.25, 0.0]
    assert weights([row("a", "A", 4, context=6), row("b", "B", 0)], "rollout") == [0.125, 0.0]
    assert weights([row("a", "A", 4), row("b", "B", 0)], "row") == [0.25, 0.0]


def test_voters_without_rows_count_as_rollouts_and_their_groups_as_groups() -> None:
    rows, voters = [row("a", "A", 2)], {"A": "g", "B": "g", "C": "h"}
    assert weights(rows, "token", voters) == [1 / 2]
    assert weights(rows, "rollout", voters) == [1 / 6]
    assert weights(rows, "constant", voters, constant=10.0) == [1 / 30]
    assert weights(rows, "prompt", voters) == [1 / 4]


def test_nothing_to_train_is_weight_zero_and_no_division() -> None:
    for normaliser in ("token", "rollout", "prompt", "row"):
        assert weights([row("a", "A", 0), row("b", "B", 0)], normaliser) == [0.0, 0.0]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=8))
def test_weights_sum_to_one(shape: list[tuple[int, int, int]]) -> None:
    rows = [row(str(i), f"r{o}", n, group=f"g{o % 2}") for i, (n, o, _) in enumerate(shape)]
    for normaliser in ("token", "rollout", "prompt", "row"):
        found = weights(rows, normaliser, **({"allow_row_splits": True} if normaliser == "row" else {}))
        assert sum(w * r.num_trained_tokens for w, r in zip(found, rows, strict=True)) == pytest.approx(1.0)


def test_counts_are_exact() -> None:
    rows = [row(str(i), str(i), n) for i, n in enumerate([257, 1, 1, 1, 70_000])]
    counts = count_window(rows)
    assert counts.num_trained_tokens == 70_260
    assert counts.tokens_per_row.dtype == np.int64
    big = 16_777_217
    assert count_window([row("a", "a", big)]).num_trained_tokens == big != int(np.float32(big))


def test_row_is_refused_under_several_segments() -> None:
    with pytest.raises(CreditError, match="first: 'A' with 2") as error:
        weights(SPLIT, "row")
    assert "allow_row_splits" in str(error.value)


@pytest.mark.parametrize(
    ("rows", "voters", "message"),
    [
        ([row("a", "A", 1), row("a", "B", 1)], None, "row id 'a' occurs twice"),
        ([row("a", "A", 1), row("b", "A", 1, group="h")], None, "rollout 'A' is in group 'g' and, by row 'b'"),
        ([row("a", "A", 1)], {"B": "g"}, "rollout 'A' has rows but is not among the 1 voters"),
        ([row("a", "A", 1)], {"A": "h"}, "rollout 'A' is in group 'h' by voters"),
    ],
)
def test_malformed_windows_are_refused(rows: list[Row], voters: dict[str, str] | None, message: str) -> None:
    with pytest.raises(CreditError, match=message):
        count_window(rows, voters)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("normaliser", "constant", "message"),
    [("mean", None, "unknown normaliser"), ("constant", None, "both or neither"), ("token", 3.0, "both or neither")],
)
def test_wrong_settings_are_refused(normaliser: str, constant: float | None, message: str) -> None:
    with pytest.raises(CreditError, match=message):
        weights(MERGED, normaliser, constant=constant)


@pytest.mark.parametrize("constant", [0.0, -1.0, float("nan"), float("inf")])
def test_the_constant_must_be_positive(constant: float) -> None:
    with pytest.raises(CreditError, match="positive number"):
        weights(MERGED, "constant", constant=constant)
