"""The rollouts that a page shows as their segments: a few telling ones of several collections."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from evenstep.credit import ESTIMATORS, rollout_advantages
from evenstep.errors import EvenstepError
from evenstep.files import read_rollouts
from evenstep.report.plans_shown import spread_order
from evenstep.report.run_records import RunRecords, setting
from evenstep.report.text import shortened, significant, visible
from evenstep.report.token_text import Decoder
from evenstep.rollout.call_tree import OnUndeclared
from evenstep.rollout.segments import segmentation_of
from evenstep.types import Rollout, Segment

__all__ = ["RolloutsShown", "rollouts_shown"]

MAX_COLLECTIONS = 8
MAX_BYTES = 450_000  # of all rollouts in the page
MAX_FILE_BYTES = 64 << 20  # of files read for it, as they lie on the disk
MAX_SEGMENTS = 64  # of one rollout
MAX_RUNS = 400  # stretches of trained or context tokens of one segment
MAX_CHARACTERS = 1_200  # of one stretch
MAX_ROLLOUT_CHARACTERS = 30_000

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsShown:
    """Rollouts as data for the page, in order of collections, and what is not among them."""

    rollouts: list[Json] = field(default_factory=list[Json])
    num_collections: int = 0  # with rollouts in the page
    num_stored: int = 0  # files of collections
    problems: list[str] = field(default_factory=list[str])


def rollouts_shown(records: RunRecords, decoder: Decoder) -> RolloutsShown:
    """Of collections spread over the run: best, median and worst reward, most segments, and one each that failed, was
    truncated or dropped."""
    files = sorted((records.folder / "rollouts").glob("collection_*.jsonl*"))
    by_name = {str(record.get("file")): record for record in records.collections}
    shown: dict[int, list[Json]] = {}
    problems: list[str] = []
    num_bytes = num_read = 0
    for index in spread_order(len(files)):
        if len(shown) == MAX_COLLECTIONS or num_bytes > MAX_BYTES:
            break
        path = files[index]
        try:
            size = path.stat().st_size
            if num_read + size > MAX_FILE_BYTES:
                problems.append(f"rollouts/{path.name} was not read: it has {size >> 20} MiB")
                continue
            num_read += size
            rollouts = list(read_rollouts(path, allow_truncated_tail=True, pixels=False))
            found = list(_shown(rollouts, by_name.get(path.name), records, decoder))
        except EvenstepError as error:
            problems.append(shortened(str(error), 300))
            continue
        except OSError as error:
            problems.append(f"rollouts/{path.name}: cannot be read ({error.strerror})")
            continue
        for item in found:
            item["file"] = path.name
        num_bytes += len(json.dumps(found))
        shown[index] = found
    return RolloutsShown(
        rollouts=[item for index in sorted(shown) for item in shown[index]],
        num_collections=len(shown),
        num_stored=len(files),
        problems=problems,
    )


def _shown(
    rollouts: Sequence[Rollout], record: Mapping[str, Any] | None, records: RunRecords, decoder: Decoder
) -> Iterator[Json]:
    """The telling rollouts of one collection, each with what it was chosen for."""
    dropped: Any = {} if record is None else record.get("dropped")
    dropped = dropped if isinstance(dropped, dict) else {}
    if setting(records.config, "rollout", "truncated") == "mask":
        rollouts = [replace(r, is_masked=r.status == "truncated") for r in rollouts]
    kept = None if record is None else record.get("groups")
    trained = [r for r in rollouts if r.group_id in kept] if isinstance(kept, list) else []
    # what training refuses is shown all the same
    on_undeclared = "realign" if setting(records.config, "rollout", "on_undeclared") == "realign" else "segment"
    advantages, why_not = _advantages(trained, records.config)
    for rollout, reasons in _chosen(rollouts, dropped):
        item = _rollout_json(rollout, decoder, on_undeclared)
        item["why"] = ", ".join(reasons)
        item["collection"] = record.get("collection") if record is not None else None
        item["window"] = significant(record.get("first_window")) if record is not None else None
        advantage = advantages.get(rollout.rollout_id)
        item["advantage"] = significant(advantage)
        item["advantageNote"] = _advantage_note(rollout, advantage, why_not, dropped, record is not None)
        yield item


def _advantage_note(
    rollout: Rollout, advantage: float | None, why_not: str | None, dropped: Mapping[str, str], is_closed: bool
) -> str:
    if advantage is not None:
        return ""
    if rollout.group_id in dropped:
        return f"not trained: its group was dropped ({shortened(visible(str(dropped[rollout.group_id])), 200)})"
    if not rollout.is_voter:
        return "not trained: it does not vote"
    if not is_closed:
        return "its collection was not closed"
    return why_not or "not trained in this collection"


def _advantages(trained: Sequence[Rollout], config: Mapping[str, Any]) -> tuple[Mapping[str, float], str | None]:
    """Advantages from the rewards, where they need nothing else; or why they do."""
    estimator = setting(config, "credit", "estimator")
    if not isinstance(estimator, str) or estimator not in ESTIMATORS:
        return {}, f"estimator {visible(str(estimator))} gives one per token, not one per rollout"
    if ESTIMATORS[estimator][1]:
        return {}, f"estimator {estimator} whitens over the whole window"
    if setting(config, "train", "kl_in") == "reward" and setting(config, "train", "kl_coef"):
        return {}, "the KL penalty of each rollout is not stored"
    return rollout_advantages(trained, estimator), None


def _chosen(rollouts: Sequence[Rollout], dropped: Mapping[str, str]) -> Iterator[tuple[Rollout, list[str]]]:
    reasons: dict[str, list[str]] = {}

    def choose(rollout: Rollout | None, why: str) -> None:
        if rollout is not None:
            reasons.setdefault(rollout.rollout_id, []).append(why)

    usual = [r for r in rollouts if r.status != "failed" and r.group_id not in dropped and r.reward is not None]
    by_reward = sorted(usual, key=lambda r: r.reward or 0.0)
    if by_reward:
        choose(max(usual, key=_num_breaks), "most segments")
        choose(by_reward[-1], "best reward")
        choose(by_reward[len(by_reward) // 2], "median reward")
        choose(by_reward[0], "worst reward")
    choose(next((r for r in rollouts if r.status == "truncated"), None), "truncated")
    choose(next((r for r in rollouts if r.status == "failed"), None), "failed")
    choose(next((r for r in rollouts if r.group_id in dropped), None), "dropped")
    by_id = {r.rollout_id: r for r in rollouts}
    for rollout_id, why in reasons.items():
        yield by_id[rollout_id], why


def _num_breaks(rollout: Rollout) -> int:
    return sum(call.break_reason is not None for call in rollout.calls)


def _rollout_json(rollout: Rollout, decoder: Decoder, on_undeclared: OnUndeclared) -> Json:
    item: Json = {
        "id": visible(shortened(rollout.rollout_id, 120)),
        "group": visible(shortened(rollout.group_id, 120)),
        "prompt": visible(shortened(rollout.prompt_id, 120)),
        "status": rollout.status,
        "statusReason": visible(shortened(rollout.status_reason or "", 1000)),
        "reward": significant(rollout.reward),
        "info": visible(shortened(json.dumps(dict(rollout.info), ensure_ascii=False, default=str), 1500)),
        "numCalls": len(rollout.calls),
        "numRejected": sum(call.is_rejected for call in rollout.calls),
        "problem": "",
        "segments": [],
        "numSegments": 0,
    }
    try:
        segments = segmentation_of(rollout, on_undeclared=on_undeclared).segments if rollout.calls else ()
    except EvenstepError as error:
        item["problem"] = visible(shortened(str(error), 500))
        return item
    item["numSegments"] = len(segments)
    room = MAX_ROLLOUT_CHARACTERS
    for segment in segments[:MAX_SEGMENTS]:
        shown = _segment_json(segment, decoder, min(MAX_CHARACTERS, room))
        room = max(80, room - sum(len(run[1]) for run in shown["runs"]))
        item["segments"].append(shown)
    return item


def _segment_json(segment: Segment, decoder: Decoder, most: int) -> Json:
    runs: list[list[Any]] = []
    start = 0
    for is_trained, tokens in groupby(segment.loss_mask):
        end = start + len(list(tokens))
        if len(runs) < MAX_RUNS:
            runs.append([is_trained, visible(_excerpt(decoder, segment.token_ids, start, end, most)), end - start])
        start = end
    return {
        "reason": segment.break_reason,
        "tokens": segment.num_tokens,
        "trained": segment.num_trained_tokens,
        "calls": list(segment.call_orders[:200]),
        "runs": runs,
        "numLeftOut": segment.num_tokens - sum(run[2] for run in runs),
    }


def _excerpt(decoder: Decoder, token_ids: Sequence[int], start: int, end: int, most: int) -> str:
    """The text of a stretch; of a very long one only both ends are decoded."""
    if end - start <= 2 * most:
        return shortened(decoder.text(token_ids, start, end), most)
    head, tail = decoder.text(token_ids, start, start + most), decoder.text(token_ids, end - most, end)
    return f"{head[: most // 2]} … {end - start - 2 * most:,} tokens and more … {tail[-(most // 2) :]}"
