"""A slow, independent reading of a plan's promises, and the requests that property tests draw."""

from __future__ import annotations

import math
import random
from typing import Any

from hypothesis import strategies as st

from evenstep.plan import StepPlan


def width(length: int, settings: dict[str, Any]) -> int:
    """Length rounded up to lcm(2 * cp if cp > 1 else 1, pad_to_multiple); no bucket ladder."""
    cp = settings.get("cp", 1)
    multiple = math.lcm(2 * cp if cp > 1 else 1, settings.get("pad_to_multiple", 1))
    return -(-length // multiple) * multiple


def footprint(lengths: list[int], settings: dict[str, Any]) -> int:
    """Tokens a cell of these rows occupies."""
    widths = [width(n, settings) for n in lengths]
    layout = settings["layout"]
    if layout == "packed":
        return sum(widths)
    return (settings.get("micro_batch_rows", 1) if layout == "fixed" else len(widths)) * max(widths)


def num_nodes(keys: list[list[int]]) -> int:
    """Distinct nodes of the rows' trie: a node is all that a row begins with up to it."""
    return len({hash(tuple(key[: i + 1])) for key in keys for i in range(len(key))})


def tree_keys(num_rows: int, longest: int, seed: int) -> list[list[int]]:
    """Rows that fork from earlier ones anywhere, continue them, repeat them, begin them or share nothing."""
    draw = random.Random(seed)
    keys: list[list[int]] = []
    for _ in range(num_rows):
        before = draw.choice(keys)[:longest] if keys and draw.random() < 0.8 else []
        before = before[: draw.choice([len(before), draw.randint(0, len(before))])]
        after = [draw.randrange(3) for _ in range(draw.choice([0, 1, draw.randint(0, longest)]))]
        keys.append((before + after)[:longest] or [draw.randrange(3)])
    return keys


def budget(settings: dict[str, Any]) -> float:
    most = settings.get("max_tokens_per_gpu")
    return math.inf if most is None else most * settings.get("cp", 1) * settings.get("tp", 1)


def assert_promises(
    plan: StepPlan,
    lengths: list[int],
    rows: list[int],
    settings: dict[str, Any],
    keys: list[list[int]] | None = None,
) -> None:
    """Every promise that can be read off the cells, recomputed without the planner's code."""
    num_ranks, cells = settings["num_ranks"], plan.cells
    assert len(cells) == num_ranks
    assert sorted(row for rank in cells for cell in rank for row in cell) == sorted(rows), "coverage"
    counts = {len(rank) for rank in cells}
    assert len(counts) == 1, "equal counts"
    num_microbatches = counts.pop()
    assert num_microbatches % settings.get("num_microbatches_multiple", 1) == 0
    assert num_microbatches >= settings.get("min_microbatches", 1)
    over = set()
    for rank in cells:
        for cell in rank:
            assert list(cell) == sorted(cell, key=lambda row: -lengths[row]), "longest row of a cell first"
            if settings["layout"] == "tree":
                assert keys is not None
                size = width(num_nodes([keys[row] for row in cell]), settings)
            else:
                size = footprint([lengths[row] for row in cell], settings) if cell else 0
            if size > budget(settings):
                assert len(cell) == 1, "only a lone row may exceed the budget"
                over.add((cell[0], lengths[cell[0]], budget(settings)))
            most_rows = settings.get("max_rows_per_microbatch")
            assert most_rows is None or len(cell) <= most_rows
            assert settings["layout"] != "fixed" or len(cell) <= settings.get("micro_batch_rows", 1)
    assert {tuple(item) for item in plan.overlong} == over, "over-long rows are named"
    if settings["layout"] != "fixed":
        scopes = [list(cells)] if settings.get("placement", "global") == "global" else [[rank] for rank in cells]
        for scope in scopes:
            sizes = [len(cell) for rank in scope for cell in rank]
            assert 0 not in sizes or max(sizes) <= 1, "a filler runs only where no row can be spared"
    for rank, own in zip(cells, settings.get("rank_rows") or [None] * num_ranks, strict=True):
        assert own is None or {row for cell in rank for row in cell} <= set(own), "rows stay on their rank"


@st.composite
def requests(
    draw: st.DrawFn, *, max_rows: int, max_length: int = 50_000, max_ranks: int = 64
) -> tuple[list[int], dict]:
    """Lengths and settings that do not contradict each other."""
    spread = draw(st.sampled_from([8, 300, max_length]))
    lengths = draw(st.lists(st.integers(1, spread), min_size=1, max_size=max_rows))
    return lengths, _settings(
        draw, len(lengths), spread, max_ranks, draw(st.sampled_from(["padded", "packed", "fixed"]))
    )


@st.composite
def tree_requests(draw: st.DrawFn, *, max_rows: int, max_ranks: int = 16) -> tuple[list[list[int]], dict]:
    """Keys of rows that share prefixes, and settings of layout ``tree``."""
    longest = draw(st.sampled_from([6, 60, 400]))
    keys = tree_keys(draw(st.integers(1, max_rows)), longest, draw(st.integers(0, 2**32)))
    return keys, _settings(draw, len(keys), longest, max_ranks, "tree")


def _settings(draw: st.DrawFn, num_rows: int, spread: int, max_ranks: int, layout: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_ranks": draw(st.one_of(st.integers(1, 4), st.integers(1, max_ranks))),
        "layout": layout,
        "placement": draw(st.sampled_from(["global", "global", "local"])),
        "sync": draw(st.sampled_from(["micro_batch", "step"])),
        "pad_to_multiple": draw(st.sampled_from([1, 1, 2, 3, 64])),
        "cp": draw(st.sampled_from([1, 1, 2])),
        "tp": draw(st.sampled_from([1, 2])),
        "min_microbatches": draw(st.sampled_from([1, 1, 2, 5])),
        "num_microbatches_multiple": draw(st.sampled_from([1, 1, 2, 3])),
    }
    # The ladder ends at the budget, so it changes neither which cells fit nor which rows are over-long.
    settings["bucket"] = draw(st.sampled_from([None, None, 0.125, 0.4]))
    if settings["layout"] == "fixed":
        settings["micro_batch_rows"] = draw(st.integers(1, 3))
        settings["logprob_micro_batch_rows"] = draw(st.integers(1, 3))
    else:
        settings["max_tokens_per_gpu"] = draw(st.one_of(st.none(), st.integers(128, max(200, 4 * spread))))
        settings["max_rows_per_microbatch"] = draw(st.sampled_from([None, None, 1, 3]))
    if settings["placement"] == "local":
        ranks = draw(st.lists(st.integers(0, settings["num_ranks"] - 1), min_size=num_rows, max_size=num_rows))
        settings["rank_rows"] = [[i for i, r in enumerate(ranks) if r == rank] for rank in range(settings["num_ranks"])]
    return settings
