"""Between rollouts and the step: passes without gradient over a collection, and the credit that needs them.

Rank 0 holds the rows; every rank runs its share of each pass. All passes are planned like the training pass, so without
a budget of their own they run in the very cells that are going to be trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenstep.config import Config
from evenstep.credit import credit_by_gae, credit_by_rollout, kl_penalties, rollout_advantages
from evenstep.errors import CreditError
from evenstep.rollout.call_tree import OnUndeclared
from evenstep.rollout.segments import SegmentationReport, rows_and_report, segmentation_of
from evenstep.train import distributed
from evenstep.train.scorer import Scorer
from evenstep.train.setup import Models
from evenstep.train.window import PreparedWindow
from evenstep.types import Float64Array, Rollout, Row, Window

__all__ = ["WindowRows", "credited", "scored", "ship"]

ByRow = dict[Hashable, Float64Array]  # row id -> [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRows:
    """The rows of a window's voting rollouts."""

    window: Window
    rows: tuple[Row, ...]
    terminal_values: Mapping[Hashable, float]  # rollout id -> a critic's value after its last token
    report: SegmentationReport  # what became of their calls
    kl_penalty_mean: float | None = None  # over voting rollouts: what their rewards were lowered by

    @staticmethod
    def of(window: Window, on_undeclared: OnUndeclared = "error") -> WindowRows:
        rows, report = rows_and_report(window.rollouts, on_undeclared=on_undeclared)
        return WindowRows(window=window, rows=tuple(rows), terminal_values={}, report=report)

    @property
    def metrics(self) -> dict[str, float | int | None]:
        """What `metrics.jsonl` says of a window's rows before they are trained."""
        return {
            "kl_penalty_mean": self.kl_penalty_mean,
            "num_realigned_tokens": self.report.num_realigned_tokens,
            "num_undeclared_breaks": self.report.num_undeclared_calls,
            "num_quarantined_calls": self.report.num_quarantined_calls,
        }

    @property
    def voters(self) -> dict[Hashable, Hashable]:
        return {r.rollout_id: r.group_id for r in self.window.rollouts if r.is_voter}


def ship(prepared: Sequence[PreparedWindow | None] | None) -> list[PreparedWindow | None]:
    """Give each rank the rows of its own cells; rank 0 brings the windows (None for one without rows)."""
    shares: list[list[PreparedWindow | None]] | None = None
    if prepared is not None:
        num_ranks = distributed.rank_and_size()[1]
        shares = [[None if p is None else p.for_rank(r) for p in prepared] for r in range(num_ranks)]
    return distributed.scatter(shares)


def scored(windows: Sequence[WindowRows] | None, models: Models, config: Config) -> list[WindowRows] | None:
    """Rows with the old log-probs, reference log-probs and values that the configuration asks for.

    Args:
        windows: of one epoch; on rank 0, None elsewhere.
    """
    budget = config.train.score_max_tokens_per_gpu
    _refuse_other_distributions(windows or (), config)
    if config.old_logprobs == "scored":
        windows = _with_field("old_logprobs", windows, _pass(models.policy, windows, budget))
    elif config.old_logprobs == "engine" and windows is not None:
        windows = [
            replace(w, rows=tuple(replace(row, old_logprobs=row.engine_logprobs) for row in w.rows)) for w in windows
        ]
    if config.train.kl_coef > 0:
        with models.reference() as scorer:
            windows = _with_field("ref_logprobs", windows, _pass(scorer, windows, budget))
    if models.critic is not None:
        windows = _with_values(windows, models.critic, budget, bootstrap=config.credit.truncated_value == "bootstrap")
    return None if windows is None else list(windows)


def _refuse_other_distributions(windows: Sequence[WindowRows], config: Config) -> None:
    """Refuse to compare the trainer's log-probs with those of tokens that were drawn from another distribution."""
    train, temperature = config.train, config.rollout.temperature
    asked = [name for name in ("importance_cap", "sequence_mask") if getattr(train, name) is not None]
    if config.old_logprobs == "engine":
        asked.append("old_logprobs")
    voters = [r for window in windows for r in window.window.rollouts if r.is_voter] if asked else []
    for rollout_id, call in [(rollout.rollout_id, call) for rollout in voters for call in rollout.sampled_calls]:
        other = call.sampling.other_distribution
        if other is None and call.sampling.temperature != temperature:
            other = f"temperature = {call.sampling.temperature}"
        if other is not None:
            raise CreditError(
                f"train.{asked[0]} compares the engine's log-probs with the trainer's, which are of the whole "
                f"distribution at rollout.temperature = {temperature}; found {other} in rollout "
                f"{rollout_id!r}, call {call.order}; sample with the trainer's temperature and without top_p, "
                f"top_k or penalties, or leave train.{asked[0]} out"
            )


def credited(
    window: WindowRows, config: Config, advantages_of: Callable[..., Mapping[str, float]] | None = None
) -> WindowRows:
    """Rows with their advantages, and for a critic with the returns it is trained towards.

    Args:
        window: scored.
        config: of the run.
        advantages_of: a window's rollouts (and ``penalties``) -> advantage by rollout id; None: the configured
            estimator. Not used by ``gae``.
    """
    train, credit = config.train, config.credit
    coef = train.kl_coef if config.has_kl_in_reward else 0.0
    rollouts, penalties = window.window.rollouts, dict[Any, float]()
    if coef:
        penalties = kl_penalties(window.rows, coef, config.kl_estimator)
    if config.has_critic:
        for rollout in rollouts:
            if rollout.is_voter:
                _refuse_branches(rollout, config.rollout.on_undeclared)
        rows = credit_by_gae(
            rollouts,
            window.rows,
            gamma=credit.gamma,
            lam=credit.lam,
            terminal_values=window.terminal_values,
            kl_coef=coef,
            kl_estimator=config.kl_estimator,
        )
    else:
        given: dict[str, Any] = {"penalties": penalties} if coef else {}
        if advantages_of is None:
            given |= {"estimator": credit.estimator, "num_trained_tokens": _trained_by_rollout(window.rows)}
        rows = credit_by_rollout(window.rows, (advantages_of or rollout_advantages)(rollouts, **given))
    mean = sum(penalties.values()) / max(len(window.voters), 1) if coef else None
    return replace(window, rows=tuple(rows), kl_penalty_mean=mean)


def _trained_by_rollout(rows: Iterable[Row]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in rows:
        found[str(row.rollout_id)] += row.num_trained_tokens
    return dict(found)


def _refuse_branches(rollout: Rollout, on_undeclared: OnUndeclared) -> None:
    """Refuse gae for calls that make no single sequence, also where it is their ids that say so."""
    found = segmentation_of(rollout, on_undeclared=on_undeclared)
    orders = [order for segment in found.segments for order in segment.call_orders]
    if "fork" in found.report.num_segments_by_origin or orders != sorted(orders):
        raise CreditError(
            f"rollout {rollout.rollout_id!r}: gae needs one order of tokens, found calls that branch (by segment: "
            f"{orders}); use an estimator by rollout where rollouts fork"
        )


def _pass(scorer: Scorer, windows: Sequence[WindowRows] | None, budget: int | None) -> ByRow | None:
    """One pass over the rows of all windows; every rank takes part, rank 0 gets the results by row id."""
    prepared = None
    if windows is not None:
        prepared = [scorer.prepare(w.rows, w.voters, max_tokens_per_gpu=budget) if w.rows else None for w in windows]
    found = {}
    for window in ship(prepared):
        if window is not None:
            found |= scorer.score(window)
    parts = distributed.gather({row_id: values.double().numpy() for row_id, values in found.items()})
    return None if parts is None else {row_id: values for part in parts for row_id, values in part.items()}


def _with_field(name: str, windows: Sequence[WindowRows] | None, found: ByRow | None) -> Sequence[WindowRows] | None:
    if windows is None or found is None:
        return windows
    return [
        replace(w, rows=tuple(replace(row, **{name: found[row.row_id]}) for row in w.rows))  # type: ignore[arg-type]
        for w in windows
    ]


def _with_values(
    windows: Sequence[WindowRows] | None, critic: Scorer, budget: int | None, *, bootstrap: bool
) -> Sequence[WindowRows] | None:
    """A critic's values, and with ``bootstrap`` its value after the last token of each truncated rollout.

    A value is read where its token is predicted, so the one after the last token belongs to a token that was never
    sampled: the row is scored with a token more, whatever it is.
    """
    if windows is None or not bootstrap:
        return _with_field("old_values", windows, _pass(critic, windows, budget))
    longer = [replace(w, rows=_with_one_more(w)) for w in windows]
    found = _pass(critic, longer, budget)
    if found is None:
        return None
    done: list[WindowRows] = []
    for before, after in zip(windows, longer, strict=True):
        ends = {
            row.rollout_id: float(found[row.row_id][-1])
            for row, plain in zip(after.rows, before.rows, strict=True)
            if row.num_tokens > plain.num_tokens
        }
        rows = tuple(replace(row, old_values=found[row.row_id][: row.num_tokens]) for row in before.rows)
        done.append(replace(before, rows=rows, terminal_values=ends))
    return done


def _with_one_more(window: WindowRows) -> tuple[Row, ...]:
    """Its rows, the last one of each truncated rollout with a trained token of id 0 behind it."""
    truncated = {r.rollout_id for r in window.window.rollouts if r.status == "truncated"}
    last = {row.rollout_id: row.row_id for row in window.rows}
    return tuple(
        Row(
            row_id=row.row_id,
            rollout_id=row.rollout_id,
            group_id=row.group_id,
            token_ids=np.append(row.token_ids, 0),
            loss_mask=np.append(row.loss_mask, True),
            media=row.media,
        )
        if row.rollout_id in truncated and last[row.rollout_id] == row.row_id
        else replace(row, old_logprobs=None, ref_logprobs=None, engine_logprobs=None)
        for row in window.rows
    )
