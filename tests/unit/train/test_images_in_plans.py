"""What images take in a plan. What is locked here:

1. No micro-batch computes more tokens and patches than the budget, in layouts, multiples, budgets and bucket ladders
   drawn at random: with the blank image of micro-batches that have none, and with widths on rungs. By each row's tokens
   and patches some would. A budget below a filler with its blank image is refused where one is needed.
2. A plan's file has the lengths that the plan took, so that it can be checked, drawn and measured from the file alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tiny_vision as tiny
from evenstep.cli import app
from evenstep.errors import PlanError
from evenstep.files import write_rollouts
from evenstep.plan import StepPlan
from evenstep.report.plans_shown import plans_shown
from evenstep.train import window as window_module
from evenstep.train.collate import collate
from evenstep.train.options import StepOptions
from evenstep.train.run_folder import RunFolder
from evenstep.train.window import PreparedWindow, prepare_window
from evenstep.types import Call, Rollout, Row

SPEC = tiny.spec()


def prepared(rows: list[Row], **options: Any) -> PreparedWindow:
    settings: dict[str, Any] = {"num_ranks": 2, "plan_sync": "micro_batch", "vocab_size": tiny.VOCAB, "vision": SPEC}
    return prepare_window(rows, None, options=StepOptions(**options), **settings)


def most_computed(window: PreparedWindow) -> tuple[int, bool]:
    """Tokens and patches of the largest micro-batch without an overlong row; whether some have rows of text alone."""
    overlong = {item.row for item in window.plan.overlong}
    most, has_text_alone = 0, False
    for cell in (cell for rank in window.plan.cells for cell in rank):
        found = collate(
            [window.rows[i] for i in cell],
            [0.0] * len(cell),
            layout=window.plan.layout,
            multiple=window.plan.multiple,
            num_shape_rows=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            width=window.plan.padded_width,
            vision=window.vision,
        )
        assert found.images is not None
        has_text_alone |= bool(cell) and not found.images.index_N.numel()
        if not overlong & set(cell):
            most = max(most, found.input_ids_BT.numel() + len(found.images.pixels_QD))
    return most, has_text_alone


def random_rows(draw: np.random.Generator) -> list[Row]:
    """Many short texts, long ones, small and large images."""
    rows = [tiny.row_of("image", 1, tiny.picture(0), 2)]
    for i in range(int(draw.integers(4, 24))):
        text = [3] * int(draw.choice([2, 3, 5, 17, 40]))
        sides = {"height": 4 * int(draw.integers(1, 5)), "width": 4 * int(draw.integers(1, 5))}
        parts = [tiny.picture(i, **sides)] if draw.random() < 0.3 else []
        rows.append(tiny.row_of(f"r{i}", 1, *parts, *text))
    return rows


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_is_computed_keeps_to_any_budget(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    cases: list[tuple[list[Row], dict[str, Any], bool]] = []
    for _ in range(40):
        rows = random_rows(draw)
        options = {
            "layout": layout,
            "max_tokens_per_gpu": int(draw.integers(20, 200)),
            "pad_to_multiple": int(draw.choice([1, 1, 8])),
            "bucket": draw.choice([None, 0.125, 0.4]),
        }
        window = prepared(rows, **options)
        most, has_text_alone = most_computed(window)
        assert most <= options["max_tokens_per_gpu"], options
        cases.append((rows, options, has_text_alone))
    assert any(options["bucket"] for _, options, _ in cases)
    if layout == "padded":
        return
    assert any(has_text_alone for _, _, has_text_alone in cases)
    # the wrong way: each row's tokens and patches
    monkeypatch.setattr(window_module, "_lengths", lambda rows, *_: [row.num_tokens + row.num_patches for row in rows])
    beyond = [most_computed(prepared(rows, **options))[0] > options["max_tokens_per_gpu"] for rows, options, _ in cases]
    assert sum(beyond) > 3


def test_a_row_that_fits_alone_is_not_overlong() -> None:
    # 20 tokens are 23 on the ladder, and 4 patches; with its share of a rung it would have 38
    row = tiny.row_of("r", 1, tiny.picture(0), *[3] * 16)
    window = prepared([row], layout="packed", max_tokens_per_gpu=27, bucket=0.4)
    assert not window.plan.overlong
    assert most_computed(window)[0] <= 27


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_filler_has_room_for_its_blank_image(layout: str) -> None:
    # on two ranks one row leaves a filler: 2 tokens, rounded up to 8, and a blank image of 4 patches
    options: dict[str, Any] = {"layout": layout, "pad_to_multiple": 8}
    row, other = (tiny.row_of(name, 1, tiny.picture(0), 2) for name in "rs")
    window = prepared([row], max_tokens_per_gpu=12, **options)
    assert window.plan.stats.num_fillers == 1
    assert most_computed(window)[0] == 12
    with pytest.raises(PlanError, match=r"a filler of 8 tokens with a blank image of 4 patches, found a budget of 11"):
        prepared([row], max_tokens_per_gpu=11, **options)
    prepared([row, other], max_tokens_per_gpu=11, **options)  # overlong, and no filler
    prepared([tiny.row_of("text", 1, 2, 3)], max_tokens_per_gpu=8, **options)  # no image anywhere


# ------------------------------------------------------------------------------------------------ files


def run_of(folder: Path, rows: list[Row], **options: Any) -> PreparedWindow:
    """A run's folder with one window of these rows, each a rollout of one call."""
    window = prepared(rows, **options)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(f"[train]\nrollouts_per_window = {len(rows)}\nwindows_per_collection = 1\n")
    rollouts: list[Rollout] = []
    for row in rows:
        at = int(np.flatnonzero(row.loss_mask)[0])
        ids = tuple(row.token_ids.tolist())
        logprobs = (-1.0,) * (len(ids) - at)
        call = Call(order=0, prompt_ids=ids[:at], output_ids=ids[at:], logprobs=logprobs, media=row.media)
        rollouts.append(Rollout(rollout_id=str(row.rollout_id), group_id="g", prompt_id="p", reward=1.0, calls=(call,)))
    write_rollouts(folder / "rollouts" / "collection_000000.jsonl.gz", rollouts)
    record = {"collection": 0, "file": "collection_000000.jsonl.gz", "groups": ["g"], "first_window": 0}
    (folder / "collections.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "plans").mkdir()
    RunFolder(folder).write_plan(0, window.plan, rows, window.lengths)
    return window


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_plan_s_file_has_the_lengths_that_the_plan_took(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rows = tiny.mixed_rows()
    window = run_of(folder, rows, layout=layout, max_tokens_per_gpu=60, bucket=0.2 if layout == "packed" else None)
    data = json.loads((folder / "plans" / "window_000000.json").read_text())
    lengths = [row.get("length", row["num_tokens"]) for row in data["rows"]]
    assert lengths == list(window.lengths)
    assert [row["num_tokens"] for row in data["rows"]] == [row.num_tokens for row in rows]
    plan = StepPlan.from_json(data)
    plan.check(lengths)
    with pytest.raises(PlanError, match="promise"):
        plan.check([row.num_tokens for row in rows])

    (shown,) = plans_shown(folder / "plans", []).plans
    assert [n - images for n, images in zip(shown["n"], shown["images"], strict=True)] == [r.num_tokens for r in rows]
    assert max(max(widths) for widths in shown["widths"]) <= 60

    found = CliRunner().invoke(app, ["plan", str(folder), "--layout", "padded,packed", "--json"])
    assert found.exit_code == 0, found.output
    recorded = next(arm for arm in json.loads(found.output)["arms"] if arm["planner"] == "as recorded")
    for name in ("max_footprint", "padding_efficiency"):
        assert recorded[name] == getattr(window.plan.stats, name), name


def test_a_plan_of_text_says_nothing_of_images(tmp_path: Path) -> None:
    rows = [row for row in tiny.mixed_rows() if not row.media]
    window = run_of(tmp_path / "run", rows, layout="packed", max_tokens_per_gpu=60)
    data = json.loads((tmp_path / "run" / "plans" / "window_000000.json").read_text())
    assert list(window.lengths) == [row.num_tokens for row in rows]
    assert not any("length" in row for row in data["rows"])
    assert plans_shown(tmp_path / "run" / "plans", []).plans[0]["images"] is None
