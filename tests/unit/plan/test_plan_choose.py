"""The cheapest layout of a window.

1. Groups with long prompts: tree computes at least three times fewer tokens than packed, and is chosen.
2. Where nothing is shared tree is not even planned; a first token that all rows share does not make it worth while.
3. Rows of one length stay padded, ragged rows are packed; many short rows stay padded where launches cost something.
4. The choice depends on the rows alone: not on their order; it is among the layouts named, and bad ones are refused.
5. Each cost is that of ``plan_step`` with the same options, and launches.
"""

import random

import numpy as np
import pytest

from evenstep.errors import PlanError
from evenstep.plan import CostModel, plan_cheapest, plan_step, shared_prefixes

COST = CostModel.from_shape(
    hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_size=1024, vocab_size=512, overhead_tokens=64
)


def _groups(num_prompts: int, num_generations: int, num_prompt_tokens: int, *, seed: int = 0) -> list[list[int]]:
    """Rows of groups; outputs are lognormal with median 64 and sigma 0.5."""
    draw = random.Random(seed)
    rows: list[list[int]] = []
    for _ in range(num_prompts):
        prompt = [draw.randrange(500) for _ in range(num_prompt_tokens)]
        for _ in range(num_generations):
            rows.append(prompt + [draw.randrange(500) for _ in range(round(draw.lognormvariate(np.log(64), 0.5)))])
    return rows


def _choose(rows: list[list[int]], **options):
    settings = {"num_ranks": 2, "max_tokens_per_gpu": 2048, "cost": COST, "row_ids": list(range(len(rows)))}
    return plan_cheapest([len(row) for row in rows], prefixes=shared_prefixes(rows), **(settings | options))


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
@pytest.mark.parametrize("seed", range(5))
def test_groups_with_long_prompts_are_tries(sync: str, seed: int) -> None:
    rows = _groups(8, 8, 384, seed=seed)
    choice = _choose(rows, sync=sync, launch_tokens={"packed": 2.0, "tree": 2.0})
    assert choice.plan.layout == "tree"
    assert choice.footprints["tree"] * 3 <= choice.footprints["packed"]
    assert choice.costs["tree"] * 2 < choice.costs["packed"] < choice.costs["padded"]
    assert "tree computes" in choice.reason
    assert f"packed: {choice.footprints['packed']:,} at" in choice.reason


def test_nothing_shared_is_no_trie() -> None:
    rows = [[i] * (50 + 7 * i) for i in range(40)]
    choice = _choose(rows)
    assert "tree" not in choice.costs
    assert choice.plan.layout == "packed"


@pytest.mark.parametrize("seed", range(3))
def test_a_first_token_in_common_is_not_worth_it(seed: int) -> None:
    draw = random.Random(seed)
    rows = [[1, *[2 + i] * draw.randint(100, 700)] for i in range(40)]
    choice = _choose(rows, launch_tokens={"packed": 2.0, "tree": 2.0})
    assert "tree" in choice.costs
    assert choice.plan.layout == "packed"


def test_even_rows_stay_padded_and_ragged_ones_are_packed() -> None:
    even = [[i] * 256 for i in range(32)]
    assert _choose(even).plan.layout == "padded"
    ragged = [[i] * (16 + 61 * i % 900) for i in range(32)]
    assert _choose(ragged).plan.layout == "packed"
    short = [[i] * (16 + i % 2) for i in range(600)]
    assert _choose(short, max_tokens_per_gpu=320).plan.layout == "padded"
    nearly = [[i] * (20 + i % 8) for i in range(64)]
    assert _choose(nearly, max_tokens_per_gpu=400).plan.layout == "packed"
    assert _choose(nearly, max_tokens_per_gpu=400, launch_tokens={"packed": 20.0}).plan.layout == "padded"


@pytest.mark.parametrize("rows", [_groups(4, 4, 40), _groups(8, 2, 5), [[i] * (30 + i) for i in range(20)]])
def test_the_order_of_the_rows_does_not_matter(rows: list[list[int]]) -> None:
    order = random.Random(3).sample(range(len(rows)), len(rows))
    there = _choose([rows[i] for i in order], row_ids=order)
    here = _choose(rows)
    assert here.costs == there.costs
    assert here.plan.layout == there.plan.layout


def test_only_the_layouts_named_are_tried() -> None:
    rows = _groups(4, 4, 100)
    assert set(_choose(rows, layouts=("padded", "packed")).costs) == {"padded", "packed"}
    assert _choose(rows, layouts=("padded",)).plan.layout == "padded"
    assert _choose([[1] * 9, [2] * 9], layouts=("tree",)).plan.layout == "tree"
    for layouts in ((), ("fixed",), ("padded", "heap")):
        with pytest.raises(PlanError, match="layouts to choose from are padded, packed, tree, found"):
            _choose(rows, layouts=layouts)
    with pytest.raises(PlanError, match="layout 'tree' needs prefixes"):
        plan_cheapest([3, 3], layouts=("tree",), num_ranks=1)


def test_costs_are_those_of_the_plans() -> None:
    rows = _groups(4, 4, 100)
    choice = _choose(rows, launch_tokens={"packed": 3.0, "tree": 5.0})
    options = {"num_ranks": 2, "max_tokens_per_gpu": 2048, "cost": COST, "row_ids": list(range(16))}
    lengths = [len(row) for row in rows]
    packed = plan_step(lengths, layout="packed", **options)
    tree = plan_step(lengths, layout="tree", prefixes=shared_prefixes(rows), **options)
    assert choice.costs["packed"] == pytest.approx(packed.stats.step_cost + 3.0 * 8)  # 8 rows on each rank
    assert choice.costs["tree"] == pytest.approx(tree.stats.step_cost + 5.0 * 16)  # at most 16 nodes
    assert choice.plan.hash == tree.hash


def test_equal_rows_do_not_pass_the_most_rows_of_a_cell() -> None:
    """A block of several rows counts as all of them."""
    prefixes = shared_prefixes([[2], [2], [2, 2], [0]])
    plan = plan_step([1, 1, 2, 1], num_ranks=1, layout="tree", prefixes=prefixes, max_rows_per_microbatch=3)
    assert plan.num_microbatches == 2
