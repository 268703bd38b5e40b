"""Sums of a window: numerators are added up over cells and ranks, and divided once at the end."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenstep.errors import ConfigError, NumericsError
from evenstep.train import distributed
from evenstep.train.collate import Cell
from evenstep.train.window import PreparedWindow

__all__ = ["Terms", "Totals", "refuse_clash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a cell adds to a window; N counts its trained tokens."""

    losses_N: Tensor  # with gradient, not weighted
    outputs_N: Tensor  # what the model said of each token; must be finite
    means: Mapping[str, Tensor]  # metric -> [N]; its mean over the window's trained tokens is reported
    maxima: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # metric -> [N]
    # loss terms over other tokens than the trained ones: metric -> scalar with gradient, weighted
    others: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


# metrics of every window
RESERVED = {
    *("bad", "loss", "num_voters", "num_rows", "num_fillers", "num_trained_tokens", "num_microbatches"),
    *("segments_per_rollout_mean", "segments_per_rollout_max", "padding_efficiency", "lockstep_efficiency"),
}


class Totals:
    """Numerators of a rank's metrics over its cells; fillers are in none of them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._means: set[str] = set()  # sums that are divided by the window's trained tokens
        self._maxima: dict[str, Tensor] = {}
        self._num_fillers = 0
        self._bad_rows: list[Hashable] = []

    def add(self, cell: Cell, terms: Terms) -> Tensor:
        """Σ weight · loss of a cell, with gradient; its numerators are kept."""
        for name, values_N in {"a loss": terms.losses_N, **terms.means}.items():
            if values_N.shape != cell.weights_N.shape:
                raise ConfigError(
                    f"a loss function gives one number per trained token, shape {tuple(cell.weights_N.shape)}, found "
                    f"{name} of shape {tuple(values_N.shape)}; do not average: weights and sums are the caller's"
                )
        weighted_N = cell.weights_N * terms.losses_N
        loss = weighted_N.sum()
        for term in terms.others.values():
            loss = loss + term
        with torch.no_grad():
            is_bad_N = ~(torch.isfinite(weighted_N) & torch.isfinite(terms.outputs_N))
            self._add("bad", is_bad_N)
            if bool(is_bad_N.any()):
                self._bad_rows += [cell.rows[i].row_id for i in cell.row_index_N[is_bad_N].unique().tolist()]
            self._add("loss", weighted_N)
            for name, term in terms.others.items():
                self._add("loss", term)
                self._add(name, term)
            for name, values_N in terms.means.items():
                self._means.add(name)
                self._add(name, values_N)
            for name, values_N in terms.maxima.items():
                highest = values_N.max() if values_N.numel() else values_N.new_zeros(())
                self._maxima[name] = torch.maximum(self._maxima.get(name, highest), highest)
        self._num_fillers += cell.num_fillers
        return loss

    def finish(self, window: PreparedWindow) -> dict[str, float | int | None]:
        """Metrics of the whole window, the same on every rank.

        Raises:
            NumericsError: an output or loss at a trained token is not finite; names the rows, on every rank.
        """
        distributed.agree("names of metrics", " ".join(sorted((*self._sums, *self._maxima))))
        local = {name: float(value) for name, value in self._sums.items()} | {"num_fillers": self._num_fillers}
        sums, maxima = distributed.reduce_sums(local, {name: float(value) for name, value in self._maxima.items()})
        if sums.pop("bad") > 0:
            bad = sorted({repr(row) for part in distributed.exchange(self._bad_rows) for row in part})
            raise NumericsError(
                f"model outputs and losses of trained tokens must be finite; they are not in rows {', '.join(bad[:8])}"
                f"{' …' if len(bad) > 8 else ''} ({len(bad)} rows); look at their tokens, old log-probs and advantages"
            )
        num_tokens = window.num_trained_tokens
        stats = window.plan.stats
        metrics: dict[str, float | int | None] = {
            "num_voters": window.num_voters,
            "num_rows": window.num_rows,
            "num_fillers": int(sums.pop("num_fillers")),
            "segments_per_rollout_mean": window.segments_per_rollout_mean,
            "segments_per_rollout_max": window.segments_per_rollout_max,
            "num_trained_tokens": num_tokens,
            "num_microbatches": stats.num_microbatches,
            "padding_efficiency": stats.padding_efficiency,
            "lockstep_efficiency": stats.lockstep_efficiency,
        }
        for name, total in sums.items():
            if name in self._means:
                metrics[name] = total / num_tokens if num_tokens else None
            else:
                metrics[name] = total
        return metrics | maxima

    def _add(self, name: str, values: Tensor) -> None:
        total = values.detach().double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total


def refuse_clash(means: Mapping[str, Tensor], reserved: Set[str]) -> None:
    """A loss function's own metrics must not hide those that evenstep computes.

    Raises:
        ConfigError: names both have.
    """
    if clash := (reserved | RESERVED) & means.keys():
        raise ConfigError(
            f"a loss function's metrics need names of their own, found {', '.join(sorted(clash))}; evenstep computes "
            f"these itself, so rename them"
        )
