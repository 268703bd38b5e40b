"""A window made ready to run: its plan, its weights, its counts. Everything that looks at all rows happens here."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from evenstep.credit import count_window, row_weights
from evenstep.errors import PlanError, RowError
from evenstep.experts import token_keys
from evenstep.media import VisionSpec
from evenstep.plan import StepPlan, plan_cheapest, plan_step, shared_prefixes
from evenstep.plan.choose import CHOICES
from evenstep.plan.footprint import Layout, Room
from evenstep.train.auto_layout import AutoLayout
from evenstep.train.options import StepOptions
from evenstep.train.routing import RouterShape, check_experts
from evenstep.types import PER_TOKEN_FIELDS, Float64Array, Int64Array, Row

__all__ = ["PreparedWindow", "check_images", "prefix_keys", "prepare_window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWindow:
    """What a rank needs to run its share of a window; R rows over all ranks."""

    plan: StepPlan
    lengths: tuple[int, ...]  # [R] what the plan took for each row's length: its tokens, and room for images
    layout_reason: str | None  # of layout "auto": what each layout would have cost
    rows: Mapping[int, Row]  # plan index -> row; all rows, or those of one rank
    weights_R: Float64Array  # weight of each trained token of each row
    num_voters: int
    num_groups: int
    num_rows: int
    num_trained_tokens: int
    tokens_per_rollout: Mapping[Hashable, int]  # trained tokens
    segments_per_rollout_mean: float  # over the rollouts that have rows
    segments_per_rollout_max: int
    has_signal: bool  # whether any trained token's advantage is not 0
    fields: tuple[str, ...]  # per-token fields that every row carries
    has_engine_as_old: bool  # whether the old log-probs are the engine's, so that no pass says what the trainer's were
    vision: VisionSpec | None  # of the model, where any row of any rank has images
    router_shape: RouterShape | None  # of the model whose routing is replayed; None: it is not, or no row carries any
    has_left_experts: bool  # whether experts that rows carry were left aside
    settings: Mapping[str, object]  # that its plan and weights follow from
    digest: str  # of the plan, the weights and all rows

    def for_rank(self, rank: int) -> PreparedWindow:
        """The same window with only the rows that one rank runs."""
        mine = {index for cell in self.plan.cells[rank] for index in cell}
        return replace(self, rows={index: row for index, row in self.rows.items() if index in mine})


def prepare_window(
    rows: Sequence[Row],
    voters: Mapping[Hashable, Hashable] | None,
    *,
    num_ranks: int,
    options: StepOptions,
    plan_sync: Literal["micro_batch", "step"],
    vocab_size: int,
    num_outputs: int | None = None,
    auto: AutoLayout | None = None,
    max_tokens_per_gpu: int | None = None,
    rotary_limit: tuple[str, int] | None = None,
    vision: VisionSpec | None = None,
    router_shape: RouterShape | None = None,
) -> PreparedWindow:
    """Count, weigh and plan a window; a pure function of its arguments.

    A row's length is that of its tokens and, with images, of the patches beside them: both take room and time. So that
    the budget holds for what is computed, see ``_lengths``.

    Layout "auto" is decided with ``auto`` under the budget of the options, so that all passes over a window decide
    alike; ``max_tokens_per_gpu`` is the budget of this pass, None: that of the options.
    ``num_outputs``: ids that the model's output head has, where they may be fewer than the ``vocab_size`` it embeds.
    ``rotary_limit``: see ``evenstep.model_files.rotary_limit``; ``vision``: what the model makes of images;
    ``router_shape``: of a model whose routing is replayed, None: experts that rows carry are left aside.

    Raises:
        RowError: no rows, an id outside the vocabulary, a per-token field that only some rows carry, or images or
            experts that are not the model's.
        CreditError, PlanError: see ``count_window``, ``row_weights``, ``plan_step``; images in layout ``tree``; a
            micro-batch in which rotary angles of one row would depend on another one's length, or on padding.
    """
    if not rows:
        raise RowError(
            "a window needs at least one row, found none; when no rollout of a window has tokens, skip its step"
        )
    has_experts = any(row.routed_experts is not None for row in rows)
    if router_shape is None:
        rows = [row if row.routed_experts is None else replace(row, routed_experts=None) for row in rows]
    else:
        check_experts(rows, router_shape, is_required=options.routing_replay == "required")
    fields = tuple(name for name in PER_TOKEN_FIELDS if _all_or_none(rows, name))
    _require_vocabulary(rows, vocab_size, vocab_size if num_outputs is None else num_outputs)
    has_images = check_images(rows, vision, options.layout)
    counts = count_window(rows, voters)
    weights_R = row_weights(
        rows,
        counts,
        options.normaliser,
        constant=options.normaliser_constant,
        allow_row_splits=options.allow_row_splits,
    )
    layout, reason = options.layout, None
    settings: dict[str, Any] = {
        "num_ranks": num_ranks,
        "row_ids": [row.row_id for row in rows],
        "rollout_ids": [row.rollout_id for row in rows],
        "group_ids": [row.group_id for row in rows],
        "micro_batch_rows": options.micro_batch_rows,
        "logprob_micro_batch_rows": options.logprob_micro_batch_rows,
        "pad_scope": options.pad_scope,
        "pad_to_multiple": options.pad_to_multiple,
        "bucket": options.bucket,
        "sync": plan_sync,
        "effort": options.effort,
    }
    prefixes = shared_prefixes(prefix_keys(rows)) if layout in ("tree", "auto") and not has_images else None
    budget = options.max_tokens_per_gpu if max_tokens_per_gpu is None else max_tokens_per_gpu
    blank = 0 if vision is None or not has_images else vision.merge_size**2
    plan: StepPlan | None = None
    lengths: list[int] = []
    if layout == "auto":
        assert auto is not None
        settings["cost"] = auto.cost
        by_layout = {each: _lengths(rows, each, options, options.max_tokens_per_gpu, blank) for each in CHOICES}
        choice = plan_cheapest(
            by_layout,
            layouts=tuple(each for each in auto.layouts if each != "tree" or not has_images),
            prefixes=prefixes,
            launch_tokens=auto.launch_tokens,
            max_tokens_per_gpu=options.max_tokens_per_gpu,
            **settings,
        )
        layout, reason, lengths = choice.plan.layout, choice.reason, by_layout[choice.plan.layout]
        plan = choice.plan if budget == options.max_tokens_per_gpu else None
    if plan is None:
        prefixes = prefixes if layout == "tree" else None
        lengths = _lengths(rows, layout, options, budget, blank)
        plan = plan_step(lengths, windows=None, layout=layout, prefixes=prefixes, max_tokens_per_gpu=budget, **settings)
    if blank:
        _require_room_for_blanks(plan, blank)
    if rotary_limit is not None:
        _require_own_angles(plan, rows, *rotary_limit)
    segments = list(counts.rows_per_rollout.values())
    return PreparedWindow(
        plan=plan,
        lengths=tuple(lengths),
        layout_reason=reason,
        rows=dict(enumerate(rows)),
        weights_R=weights_R,
        num_voters=counts.num_voters,
        num_groups=counts.num_groups,
        num_rows=len(rows),
        num_trained_tokens=counts.num_trained_tokens,
        tokens_per_rollout=counts.tokens_per_rollout,
        segments_per_rollout_mean=len(rows) / len(segments),
        segments_per_rollout_max=max(segments),
        has_signal=any(bool(row.advantages_T.any()) for row in rows),
        fields=fields,
        has_engine_as_old=_has_engine_as_old(rows, fields),
        vision=vision if has_images else None,
        router_shape=router_shape if has_experts else None,
        has_left_experts=has_experts and router_shape is None,
        settings=options.window_settings,
        digest=_digest(plan, weights_R, rows, fields),
    )


def prefix_keys(rows: Sequence[Row]) -> list[Int64Array]:
    """[R][T] The keys of rows that are merged into a prefix trie: see ``evenstep.experts.token_keys``."""
    return token_keys([row.token_ids for row in rows], [row.routed_experts for row in rows])


def _lengths(rows: Sequence[Row], layout: Layout, options: StepOptions, budget: int | None, blank: int) -> list[int]:
    """[R] What the plan takes for each row's length, so that no micro-batch computes more than the plan says.

    Without images (``blank`` 0), its tokens. Widths are rounded up by tokens alone, patches stand beside them; a row
    without images may be in a micro-batch that runs a blank one, of ``blank`` patches. A rectangle is as wide as its
    longest row while another row may have the most patches, so every row brings the window's most patches. A packed
    micro-batch is as wide as a rung of the bucket ladder, which is at most its rows' widths / (1 - bucket), so each
    brings its share of that. Where that would call a row overlong that is not, it takes the whole budget for itself.
    """
    if not blank:
        return [row.num_tokens for row in rows]
    room = Room(layout=layout, budget=budget, multiple=options.pad_to_multiple, bucket=options.bucket)
    tokens_R = np.array([row.num_tokens for row in rows], dtype=np.int64)
    patches_R = np.array([row.num_patches or blank for row in rows], dtype=np.int64)
    if layout == "packed":
        lengths_R = np.ceil(room.widths(tokens_R) / (1.0 - (options.bucket or 0.0))).astype(np.int64) + patches_R
    else:
        lengths_R = room.widths(tokens_R) + patches_R.max()
    if layout != "fixed" and room.capacity is not None:
        lengths_R = np.minimum(lengths_R, np.maximum(room.alone(tokens_R) + patches_R, room.capacity))
    return lengths_R.tolist()


def _require_room_for_blanks(plan: StepPlan, blank: int) -> None:
    """A micro-batch without rows runs a blank image beside its filler's tokens, of which the planner does not know."""
    room, num_empty = plan.room, sum(not cell for rank in plan.cells for cell in rank)
    if num_empty and room.budget is not None and room.filler_footprint + blank > room.budget:
        raise PlanError(
            f"{num_empty} micro-batches have no row and need a filler of {room.filler_footprint} tokens with a blank "
            f"image of {blank} patches, found a budget of {room.budget}; raise max_tokens_per_gpu or use fewer ranks"
        )


def check_images(rows: Sequence[Row], vision: VisionSpec | None, layout: str) -> bool:
    """Whether any row has images; all of them, and the placeholders, must be the model's."""
    with_images = [row for row in rows if row.media]
    if with_images and vision is None:
        raise RowError(
            f"row {with_images[0].row_id!r} has {len(with_images[0].media)} images, and the model sees none "
            f"({len(with_images)} of {len(rows)} rows have some); train a vision model, or leave the images out"
        )
    if with_images and layout == "tree":
        raise PlanError(
            f"layout 'tree' shares the tokens in which rows begin alike, and the features of an image are no tokens: "
            f"found images in {len(with_images)} of {len(rows)} rows, such as {with_images[0].row_id!r}; use layout "
            f"'packed', or 'auto'"
        )
    if vision is not None:
        for row in rows:
            vision.check(row.media, row.token_ids, row.loss_mask, f"row {row.row_id!r}")
    return bool(with_images)


def _require_vocabulary(rows: Sequence[Row], vocab_size: int, num_outputs: int) -> None:
    for row in rows:
        if int(row.token_ids.max()) >= vocab_size:
            raise RowError(
                f"row {row.row_id!r}: token id {row.token_ids.max()} is outside the model's vocabulary of "
                f"{vocab_size}; use the tokenizer that belongs to the model"
            )
        trained = row.token_ids[row.loss_mask]
        if trained.size and int(trained.max()) >= num_outputs:
            raise RowError(
                f"row {row.row_id!r}: a trained token must be one of the {num_outputs} that the model's output head "
                f"has, found id {trained.max()}, which it embeds but never samples; set loss_mask to 0 there"
            )


def _require_own_angles(plan: StepPlan, rows: Sequence[Row], kind: str, limit: int) -> None:
    for rank, cells in enumerate(plan.cells):
        for k, cell in enumerate(cells):
            lengths = [rows[index].num_tokens for index in cell]
            longest = max(lengths, default=0)
            positions = longest
            if plan.layout == "packed":  # padding behind each row; what is behind the last one is no longer than a row
                positions = -(-longest // plan.multiple) * plan.multiple
            elif plan.layout != "tree" and longest:
                positions = plan.padded_width(longest)
            # beyond the limit longrope has one set of angles, whatever the length
            wrong = [n for n in lengths if kind == "dynamic" or n <= limit]
            if positions > limit and wrong:
                row = rows[cell[lengths.index(wrong[0])]]
                fix = "keep rows within it, or load the model with another rope_type (yarn, linear)"
                if kind == "longrope":
                    fix += ", or run each row alone: layout 'fixed', micro_batch_rows 1, pad_to_multiple 1"
                raise PlanError(
                    f"rope_type {kind!r} has rotary angles that depend on the longest row of a micro-batch beyond "
                    f"{limit} positions, found {positions} in micro-batch {k} of rank {rank}, with row "
                    f"{row.row_id!r} of {row.num_tokens} tokens: it would not have the log-probs it has alone; {fix}"
                )


def _all_or_none(rows: Sequence[Row], name: str) -> bool:
    with_it = [row for row in rows if getattr(row, name) is not None]
    if with_it and len(with_it) != len(rows):
        without = next(row for row in rows if getattr(row, name) is None)
        raise RowError(
            f"{name} must be on all rows of a window or on none: row {with_it[0].row_id!r} has it and row "
            f"{without.row_id!r} has not ({len(with_it)} of {len(rows)} have); score the rest, or drop the field"
        )
    return bool(with_it)


def _has_engine_as_old(rows: Sequence[Row], fields: Sequence[str]) -> bool:
    def is_same(row: Row) -> bool:
        old, engine = row.old_logprobs, row.engine_logprobs
        return old is not None and engine is not None and np.array_equal(old[row.loss_mask], engine[row.loss_mask])

    return {"old_logprobs", "engine_logprobs"} <= set(fields) and all(map(is_same, rows))


def _digest(plan: StepPlan, weights_R: Float64Array, rows: Sequence[Row], fields: Sequence[str]) -> str:
    """A hash of all that decides the step; masked positions are left out, because nothing reads them."""
    state = hashlib.blake2b(digest_size=16)
    state.update(plan.hash.encode())
    state.update(weights_R.tobytes())
    for row in rows:
        state.update(repr((row.row_id, row.rollout_id, row.group_id)).encode())
        for values in (row.token_ids, row.loss_mask, row.advantages_T):
            state.update(np.ascontiguousarray(values).tobytes())
        if row.media:
            state.update(
                repr([(image.start, image.num_tokens, image.grid, image.digest) for image in row.media]).encode()
            )
        if row.routed_experts is not None:
            state.update(row.routed_experts.data)
        for name in fields:
            state.update(getattr(row, name)[row.loss_mask].tobytes())
    return state.hexdigest()
