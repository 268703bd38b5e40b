"""Which windows are run how: every rank count with every layout, budget and kind of parameters, all else pairwise.

``covering(factors, fixed)`` is a small seeded covering array: the full product of the fixed factors, and for every
other pair of factors every pair of values at least once.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evenstep.types import Row
from step_cases import StepCase
from tiny_models import tiny_model, true_float64
from tiny_rows import make_rows, with_garbage, with_old_logprobs

WORLD_SIZES = (1, 2, 3, 4)
SEGMENTS = ((1, 3), (2, 2), (1, 1))  # 10 rows
# layout and how large a micro-batch is: with budget 12 the longest rows (13 tokens) stand alone, over the budget
SHAPES: dict[str, dict[str, Any]] = {
    **{f"padded-{n}": {"layout": "padded", "max_tokens_per_gpu": n} for n in (12, 30, 200)},
    **{f"packed-{n}": {"layout": "packed", "max_tokens_per_gpu": n} for n in (12, 30, 200)},
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


def _detached(rows: Sequence[Row], model: Any) -> list[Row]:
    return list(rows)


def _shuffled(rows: Sequence[Row], model: Any) -> list[Row]:
    rows = with_old_logprobs(rows, model)
    random.Random(5).shuffle(rows)
    return rows


def _only_one_trained(rows: Sequence[Row], model: Any) -> list[Row]:
    """All rows but one are context: on several ranks some rank has nothing to train."""
    rows = with_old_logprobs(rows, model)
    return [rows[0], *(dataclasses.replace(row, loss_mask=[0] * row.num_tokens) for row in rows[1:])]


def _no_rows_for_some(rows: Sequence[Row], model: Any) -> list[Row]:
    """One group and one rollout of another; the other rollouts vote without rows."""
    return [row for row in with_old_logprobs(rows, model) if row.rollout_id in ("g0/r0", "g0/r1", "g2/r1")]


WINDOWS: dict[str, Callable[[Sequence[Row], Any], list[Row]]] = {
    "plain": with_old_logprobs,
    "detached": _detached,
    "garbage": lambda rows, model: with_garbage(with_old_logprobs(rows, model)),
    "shuffled": _shuffled,
    "two-rows": lambda rows, model: with_old_logprobs(rows, model)[3:5],
    "one-trained": _only_one_trained,
    "voters": _no_rows_for_some,
}


def build_case(point: Mapping[str, Any], seed: int = 0) -> StepCase:
    """The case of one point of the product."""
    model = {"family": point["family"], "dtype": point.get("dtype", torch.float64), "seed": seed}
    if model["dtype"] == torch.float32:
        model["scale"] = 0.15
    rows = make_rows(SEGMENTS, seed=seed, max_tokens=13, has_uneven_advantages=point["advantage"] == "token")
    with true_float64():
        rows = WINDOWS[point["window"]](rows, tiny_model(**(model | {"dtype": torch.float64})))
    voters = None
    if point["window"] == "voters":
        voters = {f"g{g}/r{r}": f"g{g}" for g in range(4) for r in range(2)}
    trainer = SHAPES[point["shape"]] | NORMALISERS[point["normaliser"]] | CLIPS[point["clip"]]
    return StepCase(
        name=" ".join(f"{name}={value}" for name, value in point.items()),
        rows=rows,
        voters=voters,
        model=model,
        trainer=trainer | {"pad_to_multiple": point["multiple"]},
        is_sharded=point["is_sharded"],
        forbids_float32=point["world_size"] == 2 and model["dtype"] == torch.float64,
    )


FACTORS: dict[str, tuple[Any, ...]] = {
    "world_size": WORLD_SIZES,
    "shape": tuple(SHAPES),
    "is_sharded": (False, True),
    "window": tuple(WINDOWS),
    "normaliser": tuple(NORMALISERS),
    "family": ("qwen3", "llama"),
    "multiple": (1, 4),
    "clip": tuple(CLIPS),
    "advantage": ("rollout", "token"),
}


def covering(
    factors: Mapping[str, Sequence[Any]], fixed: Sequence[str], *, seed: int = 0, num_tries: int = 30
) -> list[dict[str, Any]]:
    """Points that hold every combination of ``fixed`` once or more, and every pair of values of any two factors."""
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

    points = []
    for values in itertools.product(*(factors[name] for name in fixed)):
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
