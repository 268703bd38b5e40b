"""From calls to segments by the prefix rule, and from segments to rows.

Prefix rule: with ``S`` the ids accumulated so far (prompt and output of the chain) and ``P'`` the next call's prompt,
``P'[:len(S)] == S`` continues the segment: the new prompt tokens are context, the sampled ones are trained. Otherwise a
new segment begins with all of ``P'`` as context. Ids are compared, never text, and with the completed view (prompt and
output), not with the previous request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from evenstep.errors import SegmentationError
from evenstep.types import BreakReason, Call, Rollout, Row, Segment

__all__ = ["rows_of", "segments_of"]


def segments_of(rollout: Rollout) -> tuple[Segment, ...]:
    """Split a rollout's calls into maximal append-only chains; each sampled token is trained exactly once.

    ``Σ loss_mask over the segments == rollout.num_sampled_tokens``, for any calls.

    Raises:
        SegmentationError: a prompt rewrites the history without a ``break_reason``, or a first prompt is empty.

    >>> def call(order, prompt, output, why=None):
    ...     return Call(order=order, prompt_ids=prompt, output_ids=output, logprobs=(-1.0,) * len(output),
    ...                 break_reason=why)
    >>> calls = (call(0, (1, 2), (3, 4)), call(1, (1, 2, 3, 4, 5), (6,)), call(2, (1, 2, 9, 7), (8,), "compaction"))
    >>> for s in segments_of(Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=0.0, calls=calls)):
    ...     print(s.token_ids, s.loss_mask, s.break_reason)
    (1, 2, 3, 4, 5, 6) (0, 0, 1, 1, 0, 1) None
    (1, 2, 9, 7, 8) (0, 0, 0, 0, 1) compaction
    """
    segments: list[Segment] = []
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    orders: list[int] = []
    reason: BreakReason | None = None

    def close() -> None:
        segments.append(
            Segment(
                index=len(segments),
                token_ids=tuple(ids),
                loss_mask=tuple(mask),
                logprobs=tuple(logprobs),
                break_reason=reason,
                call_orders=tuple(orders),
            )
        )

    for call in sorted(rollout.calls, key=lambda c: c.order):
        _check(call, rollout)
        prompt = list(call.prompt_ids)
        if not orders:
            new_context = prompt
        elif prompt[: len(ids)] == ids:
            new_context = prompt[len(ids) :]
        else:
            if call.break_reason is None:
                raise _undeclared(rollout, call, orders[-1], ids)
            close()
            ids, mask, logprobs, orders, reason = [], [], [], [], call.break_reason
            new_context = prompt
        ids += new_context
        mask += [0] * len(new_context)
        logprobs += [0.0] * len(new_context)
        ids += call.output_ids
        mask += [1] * len(call.output_ids)
        logprobs += call.logprobs
        orders.append(call.order)
    if orders:
        close()
    return tuple(segments)


def rows_of(rollouts: Iterable[Rollout], advantages: Mapping[str, float] | None = None) -> list[Row]:
    """Rows of the voting rollouts, in order; row ids are ``rollout_id/s<segment>``.

    ``advantages`` maps rollout ids to the one advantage of each (None: 0, until credit is known); a rollout that does
    not vote has no rows, because its reward is in no baseline.
    """
    rows: list[Row] = []
    for rollout in rollouts:
        if not rollout.is_voter:
            continue
        for segment in segments_of(rollout):
            rows.append(
                Row(
                    row_id=f"{rollout.rollout_id}/s{segment.index}",
                    rollout_id=rollout.rollout_id,
                    group_id=rollout.group_id,
                    token_ids=segment.token_ids,
                    loss_mask=segment.loss_mask,
                    advantage=0.0 if advantages is None else advantages[rollout.rollout_id],
                    engine_logprobs=segment.logprobs,
                )
            )
    return rows


def _check(call: Call, rollout: Rollout) -> None:
    if not call.prompt_ids:
        raise SegmentationError(
            f"rollout {rollout.rollout_id!r}, call {call.order}: the prompt is empty, so its first sampled token would "
            f"have nothing before it; start every prompt with at least one token (a bos id, or the task)"
        )
    if len(call.logprobs) != len(call.output_ids):
        raise SegmentationError(
            f"rollout {rollout.rollout_id!r}, call {call.order}: one log-prob per sampled token was promised, found "
            f"{len(call.logprobs)} log-probs for {len(call.output_ids)} tokens; record both from the same answer"
        )


def _undeclared(rollout: Rollout, call: Call, previous: int, ids: list[int]) -> SegmentationError:
    prompt: tuple[Any, ...] = call.prompt_ids
    at = next((t for t, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), min(len(prompt), len(ids)))
    found = prompt[at] if at < len(prompt) else "the prompt's end"
    return SegmentationError(
        f"rollout {rollout.rollout_id!r}, call {call.order}: its prompt ({len(prompt)} tokens) does not continue the "
        f"{len(ids)} tokens up to call {previous}: token {at} is {found}, expected {ids[at]}; if the agent rewrote its "
        f"history on purpose, set break_reason to compaction, template or subagent, otherwise keep the exact ids"
    )
