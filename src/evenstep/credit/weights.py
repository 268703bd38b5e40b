"""Token weights: every mean of the step is taken here, over the whole window, before anything is planned.

The step's loss is ``L = Σ weight · ℓ`` over all trained tokens of all rows; later code only ever sums. With N the
trained tokens of the window, M_o those of rollout o over all its rows, O the voting rollouts and P the groups with a
voter:

============  ======================================  ===========================================
normaliser    weight of a trained token               survives splitting a rollout into rows
============  ======================================  ===========================================
``token``     1 / N                                   yes
``rollout``   1 / (O · M_o)                           yes
``prompt``    1 / (P · trained tokens of the group)   yes
``constant``  1 / (O · C), C given by the user        yes
``row``       1 / (rows with trained tokens · n_row)  no: refused with several rows in a rollout
============  ======================================  ===========================================
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.errors import CreditError
from evenstep.types import Float64Array, Int64Array, Row

__all__ = ["NORMALISERS", "WindowCounts", "count_window", "row_weights"]

NORMALISERS = ("token", "rollout", "prompt", "constant", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCounts:
    """Exact integer counts of a window; failed rollouts and fillers are in none of them."""

    num_voters: int  # rollouts whose reward is in a baseline, also those without trained tokens
    num_groups: int  # groups with a voter
    num_rows: int
    num_trained_tokens: int  # N
    rows_per_rollout: Mapping[Hashable, int]
    tokens_per_rollout: Mapping[Hashable, int]  # M_o
    tokens_per_group: Mapping[Hashable, int]
    tokens_per_row: Int64Array  # [R] n_row


def count_window(rows: Sequence[Row], voters: Mapping[Hashable, Hashable] | None = None) -> WindowCounts:
    """Count a window's trained tokens per row, rollout and group (int64, exact).

    Args:
        rows: all rows of the window.
        voters: rollout id -> group id of every rollout that votes, also of those without rows; None: the rollouts that
            have rows.

    Raises:
        CreditError: a row id that occurs twice, a rollout in two groups, or a row of a rollout that does not vote.
    """
    owners: dict[Hashable, Hashable] = {}
    tokens_R = np.zeros(len(rows), dtype=np.int64)
    rows_per_rollout: dict[Hashable, int] = {}
    tokens_per_rollout: dict[Hashable, int] = {}
    seen: set[Hashable] = set()
    for i, row in enumerate(rows):
        if row.row_id in seen:
            raise CreditError(f"row id {row.row_id!r} occurs twice in the window; every row needs an id of its own")
        seen.add(row.row_id)
        if owners.setdefault(row.rollout_id, row.group_id) != row.group_id:
            raise CreditError(
                f"rollout {row.rollout_id!r} is in group {owners[row.rollout_id]!r} and, by row {row.row_id!r}, in "
                f"group {row.group_id!r}; a rollout belongs to one group"
            )
        tokens_R[i] = row.num_trained_tokens
        rows_per_rollout[row.rollout_id] = rows_per_rollout.get(row.rollout_id, 0) + 1
        tokens_per_rollout[row.rollout_id] = tokens_per_rollout.get(row.rollout_id, 0) + int(tokens_R[i])
    if voters is not None:
        for rollout_id, group_id in owners.items():
            if rollout_id not in voters:
                raise CreditError(
                    f"rollout {rollout_id!r} has rows but is not among the {len(voters)} voters; a rollout's tokens "
                    f"are trained exactly when its reward votes: add it to voters, or leave its rows out"
                )
            if voters[rollout_id] != group_id:
                raise CreditError(
                    f"rollout {rollout_id!r} is in group {voters[rollout_id]!r} by voters and in {group_id!r} by its "
                    f"rows; give it one group id"
                )
        owners = dict(voters)
    tokens_per_group: dict[Hashable, int] = {}
    for rollout_id, group_id in owners.items():
        tokens_per_group[group_id] = tokens_per_group.get(group_id, 0) + tokens_per_rollout.get(rollout_id, 0)
    return WindowCounts(
        num_voters=len(owners),
        num_groups=len(tokens_per_group),
        num_rows=len(rows),
        num_trained_tokens=int(tokens_R.sum()),
        rows_per_rollout=rows_per_rollout,
        tokens_per_rollout=tokens_per_rollout,
        tokens_per_group=tokens_per_group,
        tokens_per_row=tokens_R,
    )


def row_weights(
    rows: Sequence[Row],
    counts: WindowCounts,
    normaliser: str = "token",
    *,
    constant: float | None = None,
    allow_row_splits: bool = False,
) -> Float64Array:
    """[R] The weight of each trained token of each row; 0 for a row without trained tokens.

    Raises:
        CreditError: an unknown normaliser; ``constant`` without a positive constant, or with another normaliser;
            ``row`` when a rollout has several rows, unless ``allow_row_splits``.

    >>> def row(name, rollout, n):
    ...     return Row(row_id=name, rollout_id=rollout, group_id="g", token_ids=[0] * (n + 1), loss_mask=[0] + [1] * n)
    >>> rows = [row("a0", "A", 2), row("a1", "A", 1), row("b0", "B", 1)]
    >>> counts = count_window(rows)
    >>> row_weights(rows, counts, "token").tolist()
    [0.25, 0.25, 0.25]
    >>> [round(w, 4) for w in row_weights(rows, counts, "rollout").tolist()]
    [0.1667, 0.1667, 0.5]
    """
    if normaliser not in NORMALISERS:
        raise CreditError(f"unknown normaliser {normaliser!r}; choose one of {', '.join(NORMALISERS)}")
    if (constant is not None) != (normaliser == "constant"):
        raise CreditError(
            f"the constant is the divisor of normaliser 'constant' and of no other; found normaliser {normaliser!r} "
            f"with constant {constant}; give both or neither"
        )
    n_R = counts.tokens_per_row
    if normaliser == "token":
        divisor_R = np.full(len(rows), counts.num_trained_tokens, dtype=np.float64)
    elif normaliser == "rollout":
        tokens_R = np.asarray([counts.tokens_per_rollout[row.rollout_id] for row in rows], dtype=np.int64)
        divisor_R = (counts.num_voters * tokens_R).astype(np.float64)
    elif normaliser == "prompt":
        tokens_R = np.asarray([counts.tokens_per_group[row.group_id] for row in rows], dtype=np.int64)
        divisor_R = (counts.num_groups * tokens_R).astype(np.float64)
    elif normaliser == "constant":
        assert constant is not None
        if not (np.isfinite(constant) and constant > 0):
            raise CreditError(f"the constant of normaliser 'constant' must be a positive number, found {constant}")
        divisor_R = np.full(len(rows), counts.num_voters * float(constant))
    else:
        split = [rollout for rollout, count in counts.rows_per_rollout.items() if count > 1]
        if split and not allow_row_splits:
            raise CreditError(
                f"normaliser 'row' gives a rollout more weight the more rows it has, and {len(split)} rollouts have "
                f"several (first: {split[0]!r} with {counts.rows_per_rollout[split[0]]}); use 'rollout', or pass "
                f"allow_row_splits=True if that is what you want"
            )
        divisor_R = (np.count_nonzero(n_R) * n_R).astype(np.float64)
    return np.divide(1.0, divisor_R, out=np.zeros(len(rows)), where=(n_R > 0) & (divisor_R > 0))
