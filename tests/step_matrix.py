"""Which windows are run how: every rank count with every layout, budget and kind of parameters, all else pairwise.

``covering(factors, fixed)`` is a small seeded covering array: the full product of the fixed factors, and for every
other pair of factors every pair of values at least once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evenstep.types import Row
from step_cases import StepCase
from tiny_models import tiny_model, true_float64
from tiny_rows import (
    LOGPROB_FIELDS,
    filler_rows,
    make_rows,
    split_at_turns,
    with_garbage,
    with_old_logprobs,
    with_shared_beginnings,
)

WORLD_SIZES = (1, 2, 3, 4)
SEGMENTS = ((1, 3), (2, 2), (1, 1))  # 10 rows
# layout and how large a micro-batch is: with budget 11 the longest rows (12 or 13 tokens) stand alone, over it
SHAPES: dict[str, dict[str, Any]] = {
    **{f"padded-{n}": {"layout": "padded", "max_tokens_per_gpu": n} for n in (11, 30, 200)},
    **{f"packed-{n}": {"layout": "packed", "max_tokens_per_gpu": n} for n in (11, 30, 200)},
    **{f"tree-{n}": {"layout": "tree", "max_tokens_per_gpu": n} for n in (11, 30)},
    "fixed-1": {"layout": "fixed", "micro_batch_rows": 1, "pad_scope": "group"},
    "fixed-2": {"layout": "fixed", "micro_batch_rows": 2, "pad_scope": "window"},
    "fixed-3": {"layout": "fixed", "micro_batch_rows": 3, "logprob_micro_batch_rows": 2, "pad_scope": "group"},
}
NORMALISERS: dict[str, dict[str, Any]] = {
    "token": {"normaliser": "token"},
    "rollout": {"normaliser": "rollout"},
    "prompt": {"normaliser": "prompt"},
    "constant": {"normaliser": "constant", "normaliser_constant": 7.5},
    "row": {"normaliser": "row", "allow_row_splits": True},
}
CLIPS: dict[str, dict[str, Any]] = {
    "clip": {},
    "asymmetric": {"clip_low": 0.1, "clip_high": 0.28},
}


TERMS: dict[str, dict[str, Any]] = {
    "policy": {},
    "reported": {},  # rows carry reference and engine log-probs, which only metrics read
    "all": {"kl_coef": 0.1, "entropy_coef": 0.02, "importance_cap": 1.1},
}
FLOAT64_ONLY = ("padded-30", "packed-30", "tree-30", "fixed-2")  # where, on two ranks, no float32 tensor may appear
CLIPPED_NORM = 0.05  # below the norm of nearly every window


def _all(rows: Sequence[Row], num_ranks: int) -> list[Row]:
    return list(rows)


def _fewer_than_ranks(rows: Sequence[Row], num_ranks: int) -> list[Row]:
    """At most ``num_ranks - 1`` rows, also after they are split; one where there is one rank."""
    chosen: list[Row] = []
    room = num_ranks - 1
    for row in sorted(rows, key=lambda row: -len(split_at_turns(row))):
        if len(split_at_turns(row)) <= room:
            room -= len(split_at_turns(row))
            chosen.append(row)
    return chosen or [rows[0]]


def _one_trained(rows: Sequence[Row], num_ranks: int) -> list[Row]:
    """All rows but one are context: on several ranks some rank has nothing to train."""
    return [rows[0], *_untrained(rows[1:], num_ranks)]


def _untrained(rows: Sequence[Row], num_ranks: int) -> list[Row]:
    return [dataclasses.replace(row, loss_mask=[0] * row.num_tokens) for row in rows]


def _some_voters(rows: Sequence[Row], num_ranks: int) -> list[Row]:
    """One group and one rollout of another; the other rollouts vote without rows."""
    return [row for row in rows if row.group_id == rows[0].group_id or row.rollout_id == rows[-1].rollout_id]


CONTENTS: dict[str, Callable[[Sequence[Row], int], list[Row]]] = {
    "all": _all,
    "fewer-than-ranks": _fewer_than_ranks,
    "one-trained": _one_trained,
    "untrained": _untrained,
    "voters": _some_voters,
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "world_size": WORLD_SIZES,
    "shape": tuple(SHAPES),
    "is_sharded": (False, True),
    "multiple": (1, 3, 8),
    "contents": tuple(CONTENTS),
    "order": ("given", "shuffled"),
    "masked": ("clean", "garbage"),
    "fillers": ("none", "one", "half", "most"),  # of the K·ranks - 1 rows that could be added
    "inert": ("zeros", "garbage"),  # tokens of the executor's own fillers and of padding
    "segments": ("whole", "split", "merged"),
    "begin": ("own", "shared"),  # whether the rows of a group begin alike
    "old": ("given", "none", "reused plan", "other cells"),
    "terms": tuple(TERMS),
    "normaliser": tuple(NORMALISERS),
    "clip": tuple(CLIPS),
    "advantage": ("rollout", "token"),
    "max_grad_norm": (None, CLIPPED_NORM),
    "family": ("qwen3", "llama", "gemma3", "gpt_oss"),
}
# what pairs alone leave to chance, on every rank count
PINNED: tuple[dict[str, Any], ...] = tuple(
    {"world_size": world_size, **part}
    for world_size in WORLD_SIZES
    for part in (
        {
            **{"shape": "padded-11", "contents": "all", "masked": "garbage", "segments": "split"},
            **{"old": "given", "terms": "reported"},
        },
        {"contents": "fewer-than-ranks", "fillers": "none"},
        {"shape": "fixed-2", "contents": "all", "segments": "merged", "normaliser": "prompt"},
        {"shape": "tree-30", "contents": "all", "segments": "split", "begin": "shared", "order": "shuffled"},
    )
)


@functools.cache
def base_rows(family: str, scale: float, advantage: str, begin: str, seed: int) -> tuple[Row, ...]:
    """Rows with all log-prob fields near the model's own; any seed but 0 draws the numbers of segments too."""
    segments: Sequence[Sequence[int]] = SEGMENTS
    if seed:
        source = random.Random(seed)
        segments = [[source.randint(1, 4) for _ in range(source.randint(1, 3))] for _ in range(source.randint(1, 3))]
    rows = make_rows(segments, seed=seed, max_tokens=13, has_uneven_advantages=advantage == "token")
    rows = with_shared_beginnings(rows, seed=seed) if begin == "shared" else rows
    with true_float64():
        return tuple(with_old_logprobs(rows, tiny_model(family, scale=scale, seed=seed), names=LOGPROB_FIELDS))


def build_case(point: Mapping[str, Any], seed: int = 0) -> StepCase:
    """The case of one point of the product."""
    dtype, num_ranks = point.get("dtype", torch.float64), point["world_size"]
    scale = 0.4 if dtype == torch.float64 else 0.15
    every = base_rows(point["family"], scale, point["advantage"], point["begin"], seed)
    absent: dict[str, Any] = {} if point["old"] == "given" else {"old_logprobs": None}
    absent |= {"ref_logprobs": None, "engine_logprobs": None} if point["terms"] == "policy" else {}
    whole = CONTENTS[point["contents"]]([dataclasses.replace(row, **absent) for row in every], num_ranks)
    parts = [part for row in whole for part in split_at_turns(row)]
    rows, reference = {"whole": (whole, whole), "split": (parts, whole), "merged": (whole, parts)}[point["segments"]]
    voters = None
    if point["contents"] == "voters":
        voters = {row.rollout_id: row.group_id for row in every} | {"g9/r0": "g9"}
    case = StepCase(
        name=" ".join(f"{name}={value}" for name, value in point.items()),
        rows=rows,
        reference_rows=rows if point["normaliser"] == "row" else reference,  # which does not survive splitting
        voters=voters,
        model={"family": point["family"], "dtype": dtype, "seed": seed, "scale": scale},
        trainer=SHAPES[point["shape"]]
        | NORMALISERS[point["normaliser"]]
        | CLIPS[point["clip"]]
        | TERMS[point["terms"]]
        | {"pad_to_multiple": point["multiple"], "max_grad_norm": point["max_grad_norm"]},
        is_sharded=point["is_sharded"],
        keeps_weights=True,
        forbids_float32=num_ranks == 2 and dtype == torch.float64 and point["shape"] in FLOAT64_ONLY,
        scoring=point["old"] if point["old"] in ("reused plan", "other cells") else None,
        has_dirty_fillers=point["inert"] == "garbage",
    )
    most = num_ranks * case.plan(num_ranks).num_microbatches - 1
    count = {"none": 0, "one": min(1, most), "half": most // 2, "most": most}[point["fillers"]]
    run = [*(with_garbage(rows) if point["masked"] == "garbage" else rows), *filler_rows(rows, count, seed=seed)]
    if point["order"] == "shuffled":
        random.Random(seed + 5).shuffle(run)
    return dataclasses.replace(case, rows=run)


def covering(
    factors: Mapping[str, Sequence[Any]],
    fixed: Sequence[str],
    *,
    seed: int = 0,
    num_tries: int = 30,
    pinned: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Points that hold every combination of ``fixed`` once or more, and every pair of values of any two factors.

    ``pinned`` are parts of points that come first: combinations of more than two values that must be there.
    """
    source = random.Random(seed)
    names = list(factors)

    def pairs(point: Mapping[str, Any]) -> set[tuple[Any, ...]]:
        return {(a, point[a], b, point[b]) for a, b in itertools.combinations(names, 2)}

    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}

    def best(given: Mapping[str, Any]) -> dict[str, Any]:
        tries = [
            {name: given[name] if name in given else source.choice(factors[name]) for name in names}
            for _ in range(num_tries)
        ]
        return max(tries, key=lambda point: len(pairs(point) & missing))

    points: list[dict[str, Any]] = []
    for part in pinned:
        points.append(best(part))
        missing -= pairs(points[-1])
    is_there = {tuple(point[name] for name in fixed) for point in points}
    for values in itertools.product(*(factors[name] for name in fixed)):
        if values not in is_there:
            points.append(best(dict(zip(fixed, values, strict=True))))
            missing -= pairs(points[-1])
    while missing:
        a, x, b, y = min(missing, key=repr)
        points.append(best({a: x, b: y}))
        missing -= pairs(points[-1])
    return points


def random_points(factors: Mapping[str, Sequence[Any]], count: int, *, seed: int) -> list[dict[str, Any]]:
    source = random.Random(seed)
    return [{name: source.choice(values) for name, values in factors.items()} for _ in range(count)]
