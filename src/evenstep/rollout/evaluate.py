"""Held-out evaluation: what greedy rollouts of fixed tasks scored, by length, and the floor beneath it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.errors import CollectionError
from evenstep.types import Rollout

__all__ = ["LONG_SEGMENTS", "Evaluation", "Share", "evaluation_of"]

LONG_SEGMENTS = 3  # from so many segments on a rollout counts as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rollouts of one kind and what they scored."""

    num_rollouts: int
    reward_mean: float  # of a rollout
    floor: float | None  # reward of always giving the most common right answer; None where there is no one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a policy scores on held-out tasks."""

    all: Share
    long: Share | None  # rollouts of at least LONG_SEGMENTS segments; None without any
    by_segments: dict[int, Share]  # number of segments -> those rollouts
    num_failed: int  # in no mean: nothing can be said about their policy
    num_truncated: int
    # of the long ones, those whose environment says that the answer could be read off the last context
    # (info["was_answer_visible"], which compaction may have kept there); None where it does not say
    num_long_visible: int | None

    def to_json(self) -> dict[str, Any]:
        """A flat object for ``metrics.jsonl``; sampling is greedy, one rollout a task (avg@1)."""
        return {
            "eval_num_tasks": self.all.num_rollouts + self.num_failed,
            "eval_temperature": 0.0,
            "eval_rollouts_per_task": 1,
            "eval_reward_mean": self.all.reward_mean,
            "eval_floor": self.all.floor,
            "eval_num_long": self.long.num_rollouts if self.long else 0,
            "eval_num_long_visible": self.num_long_visible,
            "eval_long_reward_mean": self.long.reward_mean if self.long else None,
            "eval_long_floor": self.long.floor if self.long else None,
            "eval_by_segments": {
                str(segments): {"num_rollouts": share.num_rollouts, "reward_mean": share.reward_mean}
                for segments, share in self.by_segments.items()
            },
            "eval_num_failed": self.num_failed,
            "eval_num_truncated": self.num_truncated,
        }


def evaluation_of(rollouts: Sequence[Rollout]) -> Evaluation:
    """Means over held-out rollouts, each counted once, all together and by number of segments.

    >>> def rollout(index, reward, num_segments, answer):
    ...     return Rollout(rollout_id=f"c0/p{index}/g0", group_id=f"c0/p{index}", prompt_id=str(index), reward=reward,
    ...                    info={"num_segments": num_segments, "answer": answer})
    >>> e = evaluation_of([rollout(0, 1.0, 1, "7"), rollout(1, 0.0, 3, "7"), rollout(2, 1.0, 4, "2"),
    ...                    rollout(3, 1.0, 1, "9")])
    >>> e.all
    Share(num_rollouts=4, reward_mean=0.75, floor=0.5)
    >>> e.long
    Share(num_rollouts=2, reward_mean=0.5, floor=0.5)
    >>> {segments: share.num_rollouts for segments, share in e.by_segments.items()}
    {1: 2, 3: 1, 4: 1}

    Raises:
        CollectionError: no rollout has a reward.
    """
    scored = [rollout for rollout in rollouts if rollout.is_voter]
    if not scored:
        raise CollectionError(
            f"an evaluation needs at least one rollout that did not fail, found {len(rollouts)} rollouts, all failed; "
            f"the first says: {rollouts[0].status_reason if rollouts else 'nothing'}"
        )
    by_segments: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in scored:
        by_segments[rollout.info["num_segments"]].append(rollout)
    long = [rollout for rollout in scored if rollout.info["num_segments"] >= LONG_SEGMENTS]
    visible = [rollout.info["was_answer_visible"] for rollout in long if "was_answer_visible" in rollout.info]
    return Evaluation(
        all=_share(scored),
        long=_share(long) if long else None,
        by_segments={segments: _share(members) for segments, members in sorted(by_segments.items())},
        num_failed=len(rollouts) - len(scored),
        num_truncated=sum(rollout.status == "truncated" for rollout in scored),
        num_long_visible=sum(map(bool, visible)) if long and len(visible) == len(long) else None,
    )


def _share(rollouts: Sequence[Rollout]) -> Share:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    # an answer may be any JSON, of which lists and objects cannot be counted as they are
    answers = Counter(
        json.dumps(answer, sort_keys=True) if isinstance(answer, list | dict) else answer
        for answer in (rollout.info["answer"] for rollout in rollouts if "answer" in rollout.info)
    )
    has_floor = sum(answers.values()) == len(rollouts)
    return Share(
        num_rollouts=len(rollouts),
        reward_mean=sum(rewards) / len(rewards),
        floor=max(answers.values()) / len(rollouts) if has_floor else None,
    )
