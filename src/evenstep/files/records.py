"""Rows as they lie in files: with their tokens, or as lengths alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenstep.experts import RoutedExperts
from evenstep.types import Row

__all__ = ["RowLengths", "RowRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """One row as it lies in a file.

    >>> record = RowRecord(row_id="a", rollout_id="p0/0", group_id="p0", reward=1.0, token_ids=(5, 6, 7),
    ...                    loss_mask=(0, 0, 1), logprobs=(0.0, 0.0, -0.5))
    >>> record.to_row(advantage=0.5).advantages_T.tolist()
    [0.0, 0.0, 0.5]
    """

    row_id: str
    rollout_id: str
    group_id: str
    reward: float  # the rollout's, on each of its rows
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[int, ...]  # [T] 1 where the token was sampled and is trained
    logprobs: tuple[float, ...]  # [T] the engine's, 0.0 where loss_mask is 0
    advantage: float | None = None  # None: not computed yet
    routed_experts: RoutedExperts | None = None  # [T]
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # unknown fields of the file, kept as they were

    def to_row(self, *, advantage: float | None = None) -> Row:
        """The row for training; ``advantage`` takes the place of the record's own (0.0 when neither is given)."""
        value = self.advantage if advantage is None else advantage
        return Row(
            row_id=self.row_id,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            advantage=0.0 if value is None else value,
            engine_logprobs=self.logprobs,
            routed_experts=self.routed_experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """The shape of a row without its content, for people who may not share data."""

    row_id: str
    rollout_id: str
    group_id: str
    num_tokens: int
    num_trained_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
