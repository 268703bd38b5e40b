"""Loss terms and metrics of a window: numerators are summed over cells and ranks, and divided once at the end."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from evenstep.errors import ConfigError, NumericsError
from evenstep.train import distributed
from evenstep.train.collate import Cell
from evenstep.train.logprobs import TokenLogprobs
from evenstep.train.losses import TokenBatch, gspo, kl_estimate
from evenstep.train.options import StepOptions
from evenstep.train.window import PreparedWindow

__all__ = ["Totals"]

# names that are computed for every loss
RESERVED = {"bad", "loss", "entropy", "kl", "engine_trainer_kl", "ratio_max_deviation", "num_fillers"}


class Totals:
    """Numerators of a rank's metrics over its cells; fillers are in none of them.

    Args:
        options: of the step.
        rollout_log_ratios: gspo by rollout: rollout id -> mean log-ratio at the current weights.
    """

    def __init__(self, options: StepOptions, rollout_log_ratios: Mapping[Hashable, float] | None) -> None:
        self._options = options
        self._rollout_log_ratios = rollout_log_ratios
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._num_fillers = 0
        self._bad_rows: list[Hashable] = []

    def add(self, cell: Cell, out: TokenLogprobs) -> Tensor:
        """Σ weight · loss of a cell, with gradient; its numerators are kept."""
        old_N = out.logprobs_N.detach() if cell.old_logprobs_N is None else cell.old_logprobs_N
        batch = TokenBatch(
            logprobs_N=out.logprobs_N,
            old_logprobs_N=old_N,
            advantages_N=cell.advantages_N,
            sequence_log_ratio_N=self._sequence_log_ratio(cell, out.logprobs_N.detach() - old_N),
            clip_low=self._options.clip_low,
            clip_high=self._options.clip_high,
            dual_clip=self._options.dual_clip,
        )
        losses_N, token_metrics = self._options.loss_function(batch)
        if clash := RESERVED & token_metrics.keys():
            raise ConfigError(
                f"a loss function's metrics need names of their own, found {', '.join(sorted(clash))}; evenstep "
                f"computes these itself, so rename them"
            )
        weighted_N = cell.weights_N * self._with_other_terms(losses_N, cell, out, old_N)
        with torch.no_grad():
            self._count(cell, out, weighted_N, old_N, token_metrics)
        return weighted_N.sum()

    def _with_other_terms(self, losses_N: Tensor, cell: Cell, out: TokenLogprobs, old_N: Tensor) -> Tensor:
        options = self._options
        if options.importance_cap is not None:
            assert cell.engine_logprobs_N is not None
            # numerators only: a token whose weight is small stays in every denominator
            losses_N = losses_N * torch.exp(old_N - cell.engine_logprobs_N).clamp(max=options.importance_cap)
        if options.kl_coef:
            assert cell.ref_logprobs_N is not None
            kl_N = kl_estimate(out.logprobs_N, cell.ref_logprobs_N, options.kl_estimator)
            losses_N = losses_N + options.kl_coef * kl_N
        if options.entropy_coef:
            losses_N = losses_N - options.entropy_coef * out.entropies_N
        return losses_N

    def _sequence_log_ratio(self, cell: Cell, log_ratio_N: Tensor) -> Tensor | None:
        if self._options.loss_function is not gspo:
            return None
        if self._rollout_log_ratios is not None:
            per_row = [self._rollout_log_ratios[row.rollout_id] for row in cell.rows]
            per_row_B = torch.tensor(per_row, dtype=log_ratio_N.dtype, device=log_ratio_N.device)
        else:
            counts_B = torch.tensor([max(row.num_trained_tokens, 1) for row in cell.rows], device=log_ratio_N.device)
            per_row_B = log_ratio_N.new_zeros(len(cell.rows)).index_add(0, cell.row_index_N, log_ratio_N) / counts_B
        return per_row_B[cell.row_index_N]

    def _count(
        self, cell: Cell, out: TokenLogprobs, weighted_N: Tensor, old_N: Tensor, token_metrics: Mapping[str, Tensor]
    ) -> None:
        is_bad_N = ~(torch.isfinite(weighted_N) & torch.isfinite(out.logprobs_N))
        self._sum("bad", is_bad_N)
        if bool(is_bad_N.any()):
            self._bad_rows += [cell.rows[i].row_id for i in cell.row_index_N[is_bad_N].unique().tolist()]
        self._sum("loss", weighted_N)
        self._sum("entropy", out.entropies_N)
        for name, values_N in token_metrics.items():
            self._sum(name, values_N)
        logprobs_N = out.logprobs_N.double()
        self._max("ratio_max_deviation", torch.expm1(logprobs_N - old_N.double()).abs())
        if cell.ref_logprobs_N is not None:
            self._sum("kl", kl_estimate(logprobs_N, cell.ref_logprobs_N.double(), "k3"))
        if cell.engine_logprobs_N is not None:
            # tokens were drawn from the engine's distribution, so that one is the first argument
            self._sum("engine_trainer_kl", kl_estimate(cell.engine_logprobs_N.double(), logprobs_N, "k3"))
        self._num_fillers += cell.num_fillers

    def finish(self, window: PreparedWindow) -> dict[str, float | int | None]:
        """Metrics of the whole window, the same on every rank.

        Raises:
            NumericsError: a log-prob or loss at a trained token is not finite; names the rows, on every rank.
        """
        names = {name: float(value) for name, value in self._sums.items()}
        sums, maxima = distributed.reduce_sums(
            {**names, "num_fillers": self._num_fillers}, {name: float(value) for name, value in self._maxima.items()}
        )
        if sums.pop("bad") > 0:
            bad = sorted({repr(row) for part in distributed.exchange(self._bad_rows) for row in part})
            raise NumericsError(
                f"log-probs and losses of trained tokens must be finite; they are not in rows {', '.join(bad[:8])}"
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
            "loss": sums.pop("loss"),
            "kl": None,
            "engine_trainer_kl": None,
        }
        metrics |= {name: total / num_tokens if num_tokens else None for name, total in sums.items()}
        return metrics | maxima

    def _sum(self, name: str, values_N: Tensor) -> None:
        total = values_N.detach().double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def _max(self, name: str, values_N: Tensor) -> None:
        highest = values_N.max() if values_N.numel() else values_N.new_zeros(())
        self._maxima[name] = torch.maximum(self._maxima[name], highest) if name in self._maxima else highest
