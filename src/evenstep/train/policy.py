"""What a policy is trained on: its log-probs, the loss of each token, and what is counted beside it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from evenstep.errors import ConfigError
from evenstep.train import distributed
from evenstep.train.collate import Cell
from evenstep.train.logprobs import TokenLogprobs, cell_logprobs
from evenstep.train.losses import LOSSES, VALUE_LOSSES, TokenBatch, kl_estimate, needs_sequence_ratio
from evenstep.train.moe import balance_loss, balance_weights, count_tokens, find_routers
from evenstep.train.options import StepOptions
from evenstep.train.totals import Terms, refuse_clash
from evenstep.train.window import PreparedWindow
from evenstep.types import Float64Array, Row

__all__ = ["PolicyObjective", "WindowState"]

# metrics that evenstep computes itself
RESERVED = {"entropy", "kl", "engine_trainer_kl", "ratio_max_deviation", "kept_fraction", "moe_balance"}
RESERVED |= {"engine_logprob_difference_mean", "engine_logprob_difference_max"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowState:
    """What a token's loss needs to know of other tokens, which may be in other cells and on other ranks."""

    log_ratios: Mapping[Hashable, float] | None = None  # gspo: mean of current - old over the trained tokens
    engine_log_ratios: Mapping[Hashable, float] | None = None  # sequence mask: mean of old - engine
    # expert balance: [L, E] factor of each probability, from the window's tokens at the current weights
    balance_weights_LE: Tensor | None = None
    has_engine_as_old: bool = False  # old log-probs are the engine's


class PolicyObjective:
    """Policy term, KL, entropy, importance weights and expert balance on the log-probs of a causal LM.

    Raises:
        ConfigError: the loss is a critic's, or an expert balance is asked of a model that has none.
    """

    output_name = "logprobs"

    def __init__(self, options: StepOptions, model: PreTrainedModel) -> None:
        if options.loss in VALUE_LOSSES or options.loss in VALUE_LOSSES.values():
            raise ConfigError(
                f"loss {options.loss!r} trains a critic, and the model is a causal LM; choose one of "
                f"{', '.join(LOSSES)}, or give a token classifier with one label"
            )
        if options.value_clip is not None:
            raise ConfigError(f"value_clip belongs to a critic's loss, found {options.value_clip}; leave it out")
        self._options = options
        self._routers = find_routers(model) if options.moe_balance_coef else ()

    def required_fields(self) -> dict[str, str]:
        """Per-token fields that every row must carry, and why."""
        options, required = self._options, dict[str, str]()
        if options.kl_coef != 0.0:
            required["ref_logprobs"] = f"kl_coef = {options.kl_coef}"
        if options.sequence_mask is not None:
            required["engine_logprobs"] = f"sequence_mask = {options.sequence_mask}"
        if options.importance_cap is not None:
            required["engine_logprobs"] = f"importance_cap = {options.importance_cap}"
        return required

    def skip_reason(self, window: PreparedWindow, grad_norm: float) -> str | None:
        """Why a window with trained tokens has no gradient; None where it has one."""
        options, loss = self._options, self._options.loss_function
        has_other_terms = any((options.kl_coef, options.entropy_coef, options.moe_balance_coef))
        # a loss function of one's own, as of distillation, may have a gradient without advantages
        is_own = getattr(loss, "func", loss) not in LOSSES.values()
        if window.has_signal or has_other_terms or (is_own and grad_norm != 0.0):
            return None
        return "all advantages are exactly 0"

    def forward(self, model: PreTrainedModel, cell: Cell) -> TokenLogprobs:
        return cell_logprobs(
            model,
            cell,
            temperature=self._options.temperature,
            chunk_tokens=self._options.logprob_chunk_tokens,
            entropy_gradient=self._options.entropy_coef != 0.0,
            routers=self._routers,
        )

    def look_ahead(
        self, window: PreparedWindow, run_pass: Callable[[Callable[[Cell, TokenLogprobs], None]], None]
    ) -> WindowState:
        """What must be known of other cells and ranks before the first backward.

        Args:
            window: of the step.
            run_pass: runs all cells at the current weights without gradient and calls a function with each.
        """
        options, has_old = self._options, "old_logprobs" in window.fields
        is_rollout_gspo = needs_sequence_ratio(options.loss_function) and options.ratio_unit == "rollout"
        is_masked = options.sequence_mask is not None
        current: dict[Hashable, Float64Array] = {}  # row id -> [M] at trained tokens

        token_counts: list[Tensor] = []  # of each cell: [L, E]
        num_tokens = 0

        def keep(cell: Cell, out: TokenLogprobs) -> None:
            nonlocal num_tokens
            if self._routers:
                token_counts.append(count_tokens(out.routing))
                num_tokens += sum(row.num_tokens for row in cell.rows)
            by_row = cell.scatter(out.logprobs_N)
            current.update({row.row_id: by_row[row.row_id].double().numpy()[row.loss_mask] for row in cell.rows})

        if self._routers or (is_rollout_gspo and has_old) or (is_masked and not has_old):
            run_pass(keep)

        def moved(row: Row) -> Float64Array:
            return current[row.row_id] - old(row) if has_old else np.zeros(row.num_trained_tokens)

        def old(row: Row) -> Float64Array:
            return current[row.row_id] if row.old_logprobs is None else row.old_logprobs[row.loss_mask]

        def apart(row: Row) -> Float64Array:
            assert row.engine_logprobs is not None
            return old(row) - row.engine_logprobs[row.loss_mask]

        return WindowState(
            log_ratios=_rollout_means(window, moved) if is_rollout_gspo else None,
            engine_log_ratios=_rollout_means(window, apart) if is_masked else None,
            balance_weights_LE=_window_balance(token_counts, num_tokens) if self._routers else None,
            has_engine_as_old=window.has_engine_as_old,
        )

    def terms(self, cell: Cell, out: TokenLogprobs, state: WindowState) -> Terms:
        """The losses of a cell's trained tokens, before weighting, and its metrics."""
        options = self._options
        old_N = out.logprobs_N.detach() if cell.old_logprobs_N is None else cell.old_logprobs_N
        logprobs_N, is_kept_N = out.logprobs_N, None
        if options.sequence_mask is not None:
            is_kept_N = self._is_kept(cell, state, options.sequence_mask)
            # no gradient leaves a rejected token's ratio, also not the 0 * inf of one that overflows
            logprobs_N = torch.where(is_kept_N, logprobs_N, logprobs_N.detach())
        batch = TokenBatch(
            logprobs_N=logprobs_N,
            old_logprobs_N=old_N,
            advantages_N=cell.advantages_N,
            sequence_log_ratio_N=self._sequence_log_ratio(cell, out.logprobs_N.detach() - old_N, state),
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
        )
        losses_N, means = options.loss_function(batch)
        refuse_clash(means, RESERVED)
        # numerators only: a token whose weight is small, or 0, stays in every denominator
        if options.importance_cap is not None:
            assert cell.engine_logprobs_N is not None
            losses_N = losses_N * torch.exp(old_N - cell.engine_logprobs_N).clamp(max=options.importance_cap)
        if is_kept_N is not None:
            losses_N = torch.where(is_kept_N, losses_N, 0.0)
            means = {**means, "kept_fraction": is_kept_N}
        if options.kl_coef:
            assert cell.ref_logprobs_N is not None
            kl_N = kl_estimate(out.logprobs_N, cell.ref_logprobs_N, options.kl_estimator)
            losses_N = losses_N + options.kl_coef * kl_N
        if options.entropy_coef:
            losses_N = losses_N - options.entropy_coef * out.entropies_N
        logprobs_N = out.logprobs_N.detach().double()
        means = {"entropy": out.entropies_N.detach(), **means}
        if cell.ref_logprobs_N is not None:
            means["kl"] = kl_estimate(logprobs_N, cell.ref_logprobs_N.double(), "k3")
        maxima: dict[str, Tensor] = {}
        if cell.engine_logprobs_N is not None:
            # tokens were drawn from the engine's distribution, so that one is the first argument; the other is the
            # trainer's at the same weights, where it was scored, and not what updates have made of it since. Where old
            # log-probs are the engine's, only the present ones are the trainer's.
            trainer_N = logprobs_N if state.has_engine_as_old else old_N.double()
            means["engine_trainer_kl"] = kl_estimate(cell.engine_logprobs_N.double(), trainer_N, "k3")
            difference_N = (cell.engine_logprobs_N.double() - trainer_N).abs()
            means["engine_logprob_difference_mean"] = difference_N
            maxima["engine_logprob_difference_max"] = difference_N
        maxima["ratio_max_deviation"] = torch.expm1(logprobs_N - old_N.double()).abs()
        others: dict[str, Tensor] = {}
        if state.balance_weights_LE is not None:
            others["moe_balance"] = options.moe_balance_coef * balance_loss(out.routing, state.balance_weights_LE)
        return Terms(
            losses_N=losses_N,
            outputs_N=out.logprobs_N,
            means=means,
            maxima=maxima,
            others=others,
        )

    def complete(self, metrics: dict[str, float | int | None]) -> dict[str, float | int | None]:
        """Metrics that were not computed are None; ``moe_balance`` is reported without its coefficient."""
        balance = metrics.get("moe_balance")
        if balance is not None:
            metrics = metrics | {"moe_balance": balance / self._options.moe_balance_coef}
        of_engine = ("engine_trainer_kl", "engine_logprob_difference_mean", "engine_logprob_difference_max")
        return {"kl": None, **dict.fromkeys(of_engine)} | metrics

    def _sequence_log_ratio(self, cell: Cell, log_ratio_N: Tensor, state: WindowState) -> Tensor | None:
        if not needs_sequence_ratio(self._options.loss_function):
            return None
        if state.log_ratios is not None:
            return _fan_out(cell, state.log_ratios, log_ratio_N)
        counts_B = torch.tensor([max(row.num_trained_tokens, 1) for row in cell.rows], device=log_ratio_N.device)
        per_row_B = log_ratio_N.new_zeros(len(cell.rows)).index_add(0, cell.row_index_N, log_ratio_N) / counts_B
        return per_row_B[cell.row_index_N]

    @staticmethod
    def _is_kept(cell: Cell, state: WindowState, bounds: tuple[float, float]) -> Tensor:
        assert state.engine_log_ratios is not None
        ratio_N = torch.exp(_fan_out(cell, state.engine_log_ratios, cell.weights_N.double()))
        return (ratio_N >= bounds[0]) & (ratio_N <= bounds[1])


def _fan_out(cell: Cell, by_rollout: Mapping[Hashable, float], like_N: Tensor) -> Tensor:
    """[N] Each trained token's value of its rollout."""
    per_row = [by_rollout[row.rollout_id] for row in cell.rows]
    return torch.tensor(per_row, dtype=like_N.dtype, device=like_N.device)[cell.row_index_N]


def _window_balance(token_counts: Sequence[Tensor], num_tokens: int) -> Tensor:
    """[L, E] Factors of the expert balance, from each cell's counts and the tokens of this rank."""
    parts = distributed.exchange((torch.stack(list(token_counts)).sum(0), num_tokens))
    return balance_weights(torch.stack([counts_LE for counts_LE, _ in parts]).sum(0), sum(num for _, num in parts))


def _rollout_means(window: PreparedWindow, values_of: Callable[[Row], Float64Array]) -> dict[Hashable, float]:
    """Rollout id -> mean of ``values_of(row)`` [M] over all its rows, in whatever cells and on whatever ranks."""
    mine = [window.rows[index] for cell in window.plan.cells[distributed.rank_and_size()[0]] for index in cell]
    sums = {row.row_id: (row.rollout_id, float(values_of(row).sum())) for row in mine}
    totals: dict[Hashable, float] = {}
    for part in distributed.exchange(sums):
        for rollout_id, total in part.values():
            totals[rollout_id] = totals.get(rollout_id, 0.0) + total
    return {rollout_id: total / max(window.tokens_per_rollout[rollout_id], 1) for rollout_id, total in totals.items()}
