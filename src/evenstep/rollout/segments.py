"""From calls to segments by the prefix rule, and from segments to rows.

Prefix rule: with ``S`` the completed view of the call before (its prompt and output) and ``P'`` the next call's prompt,
``P'[:len(S)] == S`` continues the segment: the new prompt tokens are context, the sampled ones are trained. Otherwise a
new segment begins with all of ``P'`` as context. Ids are compared, never text. Which call is the one before: see
`evenstep.rollout.call_tree`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from evenstep.errors import SegmentationError
from evenstep.experts import UNKNOWN, RoutedExperts
from evenstep.rollout.call_tree import CallNode, OnUndeclared, Origin, call_tree, has_kept
from evenstep.types import BREAK_REASONS, BreakReason, Rollout, Row, Segment

__all__ = ["Segmentation", "SegmentationReport", "rows_and_report", "rows_of", "segmentation_of", "segments_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentationReport:
    """What became of a rollout's calls; reports of several rollouts add up.

    ``num_trained_tokens + num_realigned_tokens == num_sampled_tokens``, always.

    >>> one = SegmentationReport(num_segments=2, num_segments_by_origin={"start": 1, "compaction": 1})
    >>> (one + one).num_segments, (one + one).num_segments_by_origin["compaction"]
    (4, 2)
    """

    num_segments: int = 0
    num_segments_by_origin: Mapping[Origin, int] = field(default_factory=dict[Origin, int])  # why each began
    num_sampled_tokens: int = 0  # of calls that are not rejected
    num_trained_tokens: int = 0
    num_realigned_tokens: int = 0  # sampled, and in no segment: their history drifted before them
    num_shared_tokens: int = 0  # places where a segment holds, as context, a token that another one trains
    num_undeclared_calls: int = 0  # whose prompts rewrote the history without a reason
    num_quarantined_calls: int = 0  # continued several equal chains, nobody can say which
    num_rejected_calls: int = 0
    num_rejected_tokens: int = 0  # sampled by rejected calls

    def __add__(self, other: SegmentationReport) -> SegmentationReport:
        origins: Mapping[Origin, int] = Counter(self.num_segments_by_origin) + Counter(other.num_segments_by_origin)
        return SegmentationReport(
            num_segments=self.num_segments + other.num_segments,
            num_segments_by_origin=dict(origins),
            num_sampled_tokens=self.num_sampled_tokens + other.num_sampled_tokens,
            num_trained_tokens=self.num_trained_tokens + other.num_trained_tokens,
            num_realigned_tokens=self.num_realigned_tokens + other.num_realigned_tokens,
            num_shared_tokens=self.num_shared_tokens + other.num_shared_tokens,
            num_undeclared_calls=self.num_undeclared_calls + other.num_undeclared_calls,
            num_quarantined_calls=self.num_quarantined_calls + other.num_quarantined_calls,
            num_rejected_calls=self.num_rejected_calls + other.num_rejected_calls,
            num_rejected_tokens=self.num_rejected_tokens + other.num_rejected_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmentation:
    """The segments of one rollout and what is to be said about them."""

    segments: tuple[Segment, ...]
    report: SegmentationReport


def segments_of(rollout: Rollout, *, on_undeclared: OnUndeclared = "error") -> tuple[Segment, ...]:
    """The segments of `segmentation_of` alone.

    >>> from evenstep.types import Call
    >>> def call(order, prompt, output, why=None):
    ...     return Call(order=order, prompt_ids=prompt, output_ids=output, logprobs=(-1.0,) * len(output),
    ...                 break_reason=why)
    >>> calls = (call(0, (1, 2), (3, 4)), call(1, (1, 2, 3, 4, 5), (6,)), call(2, (1, 2, 9, 7), (8,), "compaction"))
    >>> for s in segments_of(Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=0.0, calls=calls)):
    ...     print(s.token_ids, s.loss_mask, s.break_reason)
    (1, 2, 3, 4, 5, 6) (0, 0, 1, 1, 0, 1) None
    (1, 2, 9, 7, 8) (0, 0, 0, 0, 1) compaction
    """
    return segmentation_of(rollout, on_undeclared=on_undeclared).segments


def segmentation_of(rollout: Rollout, *, on_undeclared: OnUndeclared = "error") -> Segmentation:
    """Split a rollout's calls into maximal append-only chains; each sampled token is trained exactly once.

    A segment goes from a call that continues nothing to one that nothing continues, in order of the first call that
    belongs to it. Where calls fork, the branch with the lowest order number trains what they share, the others hold it
    with mask 0. With S the tokens sampled by calls that are not rejected,

    ``Σ loss_mask over the segments == S - realigned``, and realigned is 0 unless ``on_undeclared="realign"``.

    A rejected call (``is_rejected``, nothing is guessed) begins or ends no segment; a prompt that holds its output
    holds it as context. A segment whose calls sampled nothing is there all the same, with nothing to train.

    Args:
        rollout: its calls in any order.
        on_undeclared: a prompt that rewrites the history without a ``break_reason`` is an ``error``; or it starts a
            ``segment``; or ``realign``: it goes on in the same segment, in which the new prompt takes the place of
            everything after the first id that differs. What was sampled there, and is in no other segment, is not
            trained and counted as realigned.

    Raises:
        SegmentationError: as `call_tree`.
    """
    nodes = call_tree(rollout, on_undeclared=on_undeclared)
    branches = _branches(nodes)
    trained_ends = [len(node.call.prompt_ids) for node in nodes]  # by node: where its trained tokens end so far
    segments: list[Segment] = []
    origins: Counter[Origin] = Counter()
    num_shared = 0
    for index, branch in enumerate(branches):
        origin = "start" if index == 0 else _origin(nodes, branch[0])
        segment, num_context = _segment(nodes, branch, index, origin, trained_ends)
        segments.append(replace(segment, routed_experts=_experts(rollout, nodes, branch[-1])))
        origins[origin] += 1
        num_shared += num_context
    rejected = [node.call for node in nodes if node.call.is_rejected]
    report = SegmentationReport(
        num_segments=len(segments),
        num_segments_by_origin=dict(origins),
        num_sampled_tokens=rollout.num_sampled_tokens,
        num_trained_tokens=sum(segment.num_trained_tokens for segment in segments),
        num_realigned_tokens=sum(
            node.num_tokens - end for node, end in zip(nodes, trained_ends, strict=True) if not node.call.is_rejected
        ),
        num_shared_tokens=num_shared,
        num_undeclared_calls=sum(n.origin == "undeclared" and not n.call.is_rejected for n in nodes),
        num_quarantined_calls=sum(node.origin == "quarantined" for node in nodes),
        num_rejected_calls=len(rejected),
        num_rejected_tokens=sum(len(call.output_ids) for call in rejected),
    )
    assert report.num_trained_tokens + report.num_realigned_tokens == report.num_sampled_tokens
    return Segmentation(segments=tuple(segments), report=report)


def rows_of(
    rollouts: Iterable[Rollout],
    advantages: Mapping[str, float] | None = None,
    *,
    on_undeclared: OnUndeclared = "error",
) -> list[Row]:
    """Rows of the voting rollouts, in order; row ids are ``rollout_id/s<segment>``.

    ``advantages`` maps rollout ids to the one advantage of each (None: 0, until credit is known); a rollout that does
    not vote has no rows, because its reward is in no baseline. ``on_undeclared``: see `segmentation_of`.

    Rows have ``engine_logprobs`` when all tokens were drawn from the model's whole distribution: those of a call with
    ``top_p`` below 1, a ``top_k`` or penalties are of another one than the trainer's, and nothing may compare them.
    """
    return rows_and_report(rollouts, advantages, on_undeclared=on_undeclared)[0]


def rows_and_report(
    rollouts: Iterable[Rollout],
    advantages: Mapping[str, float] | None = None,
    *,
    on_undeclared: OnUndeclared = "error",
) -> tuple[list[Row], SegmentationReport]:
    """As `rows_of`, and what became of all their calls together."""
    rows: list[Row] = []
    report = SegmentationReport()
    voters = [rollout for rollout in rollouts if rollout.is_voter]
    is_whole = all(call.sampling.other_distribution is None for rollout in voters for call in rollout.sampled_calls)
    for rollout in voters:
        found = segmentation_of(rollout, on_undeclared=on_undeclared)
        report += found.report
        for segment in found.segments:
            rows.append(
                Row(
                    row_id=f"{rollout.rollout_id}/s{segment.index}",
                    rollout_id=rollout.rollout_id,
                    group_id=rollout.group_id,
                    token_ids=segment.token_ids,
                    loss_mask=segment.loss_mask,
                    advantage=0.0 if advantages is None else advantages[rollout.rollout_id],
                    engine_logprobs=segment.logprobs if is_whole else None,
                    media=segment.media,
                    routed_experts=segment.routed_experts,
                )
            )
    return rows, report


def _branches(nodes: Sequence[CallNode]) -> list[list[int]]:
    """For each segment the nodes that belong to it, from the first on; the last one is where the segment ends.

    A branch goes on with the lowest of the calls that continue its last one; each of the others begins a branch.
    """
    is_kept = has_kept(nodes)
    branch_of: dict[int, list[int]] = {}  # last node -> its branch
    branches: list[list[int]] = []
    for index, node in enumerate(nodes):
        if not is_kept[index]:
            continue
        branch = branch_of.pop(node.parent, None) if node.parent is not None else None
        if branch is None:
            branch = []
            branches.append(branch)
        branch.append(index)
        branch_of[index] = branch
    return sorted(branches, key=lambda branch: next(i for i in branch if not nodes[i].call.is_rejected))


def _origin(nodes: Sequence[CallNode], first: int) -> Origin:
    return "fork" if nodes[first].origin == "continued" else nodes[first].origin


def _segment(
    nodes: Sequence[CallNode], branch: Sequence[int], index: int, origin: Origin, trained_ends: list[int]
) -> tuple[Segment, int]:
    """The segment that ends with a branch, and how many tokens of others it holds; updates ``trained_ends``.

    Of each call on the way back to the first, it holds what no later prompt replaced, and trains what no segment
    before it did.
    """
    last = nodes[branch[-1]]
    mask = [0] * last.num_tokens
    logprobs = [0.0] * last.num_tokens
    num_shared = 0
    limit = last.num_tokens
    at: int | None = branch[-1]
    while at is not None:
        node = nodes[at]
        if not node.call.is_rejected:
            begin, start = len(node.call.prompt_ids), trained_ends[at]
            end = min(node.num_tokens, limit)
            num_shared += max(0, min(start, end) - begin)
            if start < end:
                mask[start:end] = [1] * (end - start)
                logprobs[start:end] = node.call.logprobs[start - begin : end - begin]
                trained_ends[at] = end
        limit = min(limit, node.num_kept_tokens)
        at = node.parent
    segment = Segment(
        index=index,
        token_ids=(*last.call.prompt_ids, *last.call.output_ids),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        break_reason=cast(BreakReason, origin) if origin in BREAK_REASONS else None,
        call_orders=tuple(nodes[i].call.order for i in branch if not nodes[i].call.is_rejected),
        media=last.call.media,
    )
    return segment, num_shared


def _experts(rollout: Rollout, nodes: Sequence[CallNode], last: int) -> RoutedExperts | None:
    """The experts of a completed view: of each token, those of the first call on the way to it that knew them.

    What was sampled there followed from them. The last token of a call was never an input of that call, so its experts
    are those of the next one's forward.
    """
    experts_TLX: np.ndarray | None = None
    stop = nodes[last].num_tokens  # of what no later prompt replaced
    at: int | None = last
    while at is not None:
        node = nodes[at]
        found = node.call.routed_experts
        if found is not None:
            if experts_TLX is None:
                experts_TLX = np.full((nodes[last].num_tokens, *found.shape[1:]), UNKNOWN, dtype=np.int16)
            start = node.num_tokens - found.num_tokens
            if start < 0 or found.shape[1:] != experts_TLX.shape[1:]:
                raise SegmentationError(
                    f"rollout {rollout.rollout_id!r}, call {node.call.order}: routed_experts must be of the last of "
                    f"its {node.num_tokens} tokens, with the layers and experts per token that its other calls have "
                    f"{experts_TLX.shape[1:]}, found shape {found.shape}; record all calls from one model"
                )
            part_TLX = found.experts_TLX[: max(stop - start, 0)]
            view_TLX = experts_TLX[start : start + len(part_TLX)]
            np.copyto(view_TLX, part_TLX, where=part_TLX != UNKNOWN)
        stop = min(stop, node.num_kept_tokens)
        at = node.parent
    return None if experts_TLX is None else RoutedExperts.of(experts_TLX)
