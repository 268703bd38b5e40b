"""Run folders made by hand, for the tests of their page: small ones with every part, and long ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.files import write_rollouts
from evenstep.plan import plan_step
from evenstep.rollout.segments import rows_of
from evenstep.train.run_folder import RunFolder
from evenstep.types import Call, Rollout, Row

# what a hostile environment, prompt or model may put into a run's files
HOSTILE = (
    "</script><script>document.title='owned'</script><!--<img src=x onerror=\"document.title='owned'\">"
    "\x00\u202e{{data}}"
)
CONFIG = """
[run]
num_collections = 3
[model]
path = "evenstep:ledger"
[environment]
name = "ledger"
[credit]
estimator = "grpo"
[plan]
layout = "padded"
[train]
windows_per_collection = 1
epochs = 1
"""


def metrics_of(window: int, **values: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "window": window,
        "optimizer_step": window,
        "stepped": True,
        "skip_reason": None,
        "lr": 1e-4,
        "num_rollouts": 6,
        "num_voters": 6,
        "num_failed": 0,
        "num_truncated": 0,
        "num_replaced": 0,
        "num_rows": 13 + window % 3,
        "num_fillers": 3,
        "segments_per_rollout_mean": 2.1666666666666665,
        "segments_per_rollout_max": 5,
        "num_trained_tokens": 100 + window,
        "num_microbatches": 4,
        "padding_efficiency": 0.8,
        "lockstep_efficiency": 0.9,
        "reward_mean": 0.123456789 + window / 100_000,
        "reward_std": 0.4,
        "loss": -0.001,
        "grad_norm": 0.25,
        "kl": None,
        "tokens_per_second": 1000.0,
        "peak_memory_bytes": 485_289_984,
        "seconds_generate": 0.5,
        "seconds_score": 0.1,
        "seconds_train": 0.4,
        "collection": window,
        "epoch": 0,
    }
    return found | values


def evaluation(window: int, mean: float, **values: Any) -> dict[str, Any]:
    return {
        "window": window,
        "optimizer_step": window,
        "eval_num_tasks": 400,
        "eval_temperature": 0.0,
        "eval_rollouts_per_task": 1,
        "eval_reward_mean": mean,
        "eval_floor": 0.15,
        "eval_long_reward_mean": None,
        "eval_num_failed": 0,
        "eval_num_truncated": 0,
    } | values


def rollout_of(collection: int, group: int, generation: int, num_segments: int, **values: Any) -> Rollout:
    """A rollout whose segments have 6, 7, 8 … tokens, two of them trained in each."""
    calls = tuple(
        Call(
            order=s,
            prompt_ids=(4, *range(10, 13 + s)),
            output_ids=(20 + s, 2),
            logprobs=(-0.5, -0.1),
            break_reason="compaction" if s else None,
        )
        for s in range(num_segments)
    )
    group_id = f"c{collection}/p{group}"
    fields = {"reward": generation / 2, "prompt_id": f"task {group}"} | values
    return Rollout(rollout_id=f"{group_id}/g{generation}", group_id=group_id, calls=calls, **fields)


SEED_SEGMENTS = ((1, 3), (2, 5), (1, 1))  # of the two rollouts of three groups: 13 rows


def collection_of(index: int) -> list[Rollout]:
    return [
        rollout_of(index, group, generation, count)
        for group, counts in enumerate(SEED_SEGMENTS)
        for generation, count in enumerate(counts)
    ]


def small_run(path: Path, *, rollouts: Sequence[Rollout] | None = None) -> Path:
    """Three windows of a collection each: the seed's 13 rows on four ranks, layout ``fixed``, three fillers."""
    files = RunFolder(path)
    files.open(CONFIG, window=0, collection=0)
    files.append_metrics(evaluation(0, 0.4))
    for window in range(3):
        found = collection_of(window) if rollouts is None else list(rollouts)
        rows = rows_of(found)
        plan = plan_step(
            [row.num_tokens for row in rows],
            num_ranks=4,
            layout="fixed",
            group_ids=[row.group_id for row in rows],
            pad_scope="group",
        )
        files.write_plan(window, plan, rows)
        write_rollouts(files.collection(window), found)
        files.append_index(
            {
                "collection": window,
                "file": files.collection(window).name,
                "groups": list(dict.fromkeys(r.group_id for r in found)),
                "dropped": {},
                "first_window": window,
            }
        )
        files.append_metrics(metrics_of(window))
    files.append_metrics(evaluation(3, 0.7))
    return path


def row_of(index: int, num_tokens: int) -> Row:
    return Row(
        row_id=f"c0/p{index // 8}/g{index % 8}/s0",
        rollout_id=f"c0/p{index // 8}/g{index % 8}",
        group_id=f"c0/p{index // 8}",
        token_ids=[1] * num_tokens,
        loss_mask=[0] + [1] * (num_tokens - 1),
    )


def page_data(html: str) -> dict[str, Any]:
    """What the page's script reads."""
    _, _, rest = html.partition('<script type="application/json" id="data">')
    return json.loads(rest.partition("</script>")[0])


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
