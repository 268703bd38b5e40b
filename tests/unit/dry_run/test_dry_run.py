"""A dry run's windows, figures, estimates, picture and trace.

1. Windows hold whole groups, every row once; a file's own steps are windows; a sample is spread evenly.
2. Figures of several windows are sums over sums, not means of ratios: the wrong formula gives another number.
3. Estimates follow the documented formulas by hand, and grow with what they must grow with.
4. The picture is valid XML with a bar for each row, hatched fillers and labels, and stays small for large plans.
5. The trace has a lane for each rank, and lasts as long as the plan costs.
6. The plan of a run's folder is measured as the run planned it, and what does not fit there is named.
7. Layout tree merges tokens by what training merges them by: ids, and the experts that rows carry, unless the run did
   not replay them. Without any it says so.
"""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep.dry_run.arms import EVENSTEP, Arm, Rules, default_budgets, run_arm
from evenstep.dry_run.estimate import DEVICES, Assumptions, read_shape
from evenstep.dry_run.summary import Question, dry_run, labels_of
from evenstep.dry_run.windows import PlanWindow, cut_windows, evenly_spaced
from evenstep.errors import ConfigError, FileFormatError, PlanError
from evenstep.experts import UNKNOWN, RoutedExperts
from evenstep.files import write_rollouts
from evenstep.imports import import_rows
from evenstep.imports.own import is_run_folder, recorded_plans
from evenstep.media import Media
from evenstep.plan import CostModel, plan_step, shared_prefixes
from evenstep.plan.shape import PRESETS
from evenstep.report.plan_picture import plan_svg
from evenstep.report.plan_table import plain_lines
from evenstep.report.plan_trace import plan_trace
from evenstep.types import Call, Rollout

SVG = "{http://www.w3.org/2000/svg}"


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def question(**changes: Any) -> Question:
    given: dict[str, Any] = {
        "layouts": (), "ranks": (2,), "budgets": (64,), "rollouts_per_window": None, "max_windows": 16,
        "has_public": False, "rules": Rules(cost=CostModel()), "asked": frozenset(), "model": None,
        "assumptions": Assumptions(device=DEVICES["h100"]),
    }  # fmt: skip
    return Question(**(given | changes))


# ------------------------------------------------------------------------------------------------ windows


def test_windows_hold_whole_groups(tmp_path: Path) -> None:
    lines = [{"length": 9, "rollout_id": f"g{g}/{r}", "group_id": f"g{g}"} for g in range(5) for r in (0, 1, 1)]
    rows = import_rows(write_lines(tmp_path / "x.jsonl", *lines))
    windows = cut_windows(rows, 4)
    assert [window.rows.tolist() for window in windows] == [[*range(6)], [*range(6, 12)], [*range(12, 15)]]
    assert [window.rows.size for window in cut_windows(rows, 1)] == [3] * 5  # a group is never cut
    assert [window.rows.size for window in cut_windows(rows, None)] == [15]
    with pytest.raises(PlanError, match="--windows must be at least 1"):
        cut_windows(rows, 0)


def test_scattered_rows_of_a_rollout_stay_together(tmp_path: Path) -> None:
    lines = [{"length": 9, "rollout_id": name} for name in ("a", "b", "c", "a", "c")]
    rows = import_rows(write_lines(tmp_path / "x.jsonl", *lines))
    assert [window.rows.tolist() for window in cut_windows(rows, 2)] == [[0, 1, 3], [2, 4]]


def test_steps_are_windows(tmp_path: Path) -> None:
    rows = import_rows(write_lines(tmp_path / "x.jsonl", *({"length": 9, "step": step} for step in (7, 3, 7))))
    assert [(window.name, window.rows.tolist()) for window in cut_windows(rows, None)] == [
        ("step 3", [1]),
        ("step 7", [0, 2]),
    ]


def test_a_sample_of_windows() -> None:
    windows = [PlanWindow(name=str(i), rows=np.arange(1)) for i in range(7)]
    assert [window.name for window in evenly_spaced(windows, 3)] == ["0", "3", "6"]
    assert len(evenly_spaced(windows, 0)) == len(evenly_spaced(windows, 9)) == 7
    assert [window.name for window in evenly_spaced(windows, 1)] == ["0"]


# ------------------------------------------------------------------------------------------------ figures


def test_figures_are_sums_over_sums() -> None:
    lengths = np.array([10, 1, 1, 1, 1, 1, 40, 39])
    windows = [PlanWindow(name="a", rows=np.arange(6)), PlanWindow(name="b", rows=np.arange(6, 8))]
    arm = Arm(planner=EVENSTEP, layout="fixed", num_ranks=1, max_tokens_per_gpu=80, micro_batch_rows=2)
    found = run_arm(arm, Rules(cost=CostModel()), lengths, windows)
    plans = [plan_step(lengths[w.rows], num_ranks=1, max_tokens_per_gpu=80, layout="fixed", micro_batch_rows=2,
                       logprob_micro_batch_rows=2) for w in windows]  # fmt: skip
    footprints = [20 + 2 + 2, 80]
    assert [plan.stats.footprint for plan in plans] == footprints
    assert found.padding_efficiency == (15 + 79) / sum(footprints)
    assert found.padding_efficiency != pytest.approx(np.mean([15 / 24, 79 / 80]))
    assert found.fill == sum(footprints) / (4 * 80)
    assert found.step_cost_mean == pytest.approx(sum(plan.stats.step_cost for plan in plans) / 2)
    efficiency = sum(p.stats.lower_bound for p in plans) / sum(p.stats.step_cost for p in plans)
    assert found.lockstep_efficiency == pytest.approx(efficiency)
    assert (found.num_microbatches_mean, found.num_microbatches_max, found.max_footprint) == (2.0, 3, 80)


def test_default_budgets_hold_the_longest_row_and_stop_where_one_cell_is_left() -> None:
    window = [PlanWindow(name="all", rows=np.arange(100))]
    assert default_budgets(np.full(100, 1000), window, 2) == [1024, 2048, 4096]
    assert default_budgets(np.full(100, 1000), window, 64) == [1024, 2048]
    assert default_budgets(np.full(100, 3), window, 8) == [256]


def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    rows = import_rows(write_lines(tmp_path / "x.jsonl", *({"length": n} for n in (9, 8, 7))))
    found = dry_run("x", rows, question(layouts=("padded", "tree"), has_public=True))
    refused = {result.arm.planner + result.arm.layout: result.refused for result in found.results if result.refused}
    assert list(refused) == ["evenstep" + "tree"]
    assert "needs the rows' token ids, found lengths alone" in str(refused["evenstep" + "tree"])
    assert "not planned: layout 'tree' needs" in "\n".join(plain_lines(found))
    with pytest.raises(PlanError, match="--ranks must be at least 1"):
        dry_run("x", rows, question(ranks=(0,)))
    with pytest.raises(PlanError, match="--sweep must name budgets of at least 2"):
        dry_run("x", rows, question(budgets=(1,)))
    one = dry_run("x", rows, question(layouts=("packed",), ranks=(3,), budgets=(7,)))
    assert one.results[0].num_overlong == 2
    assert "over-long" in plain_lines(one)[4]


def test_tree_is_planned_where_ids_are(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", *({"token_ids": [1] * 20 + [i] * 5} for i in range(8)))
    with_ids = dry_run("x", import_rows(path, keep_token_ids=True), question(ranks=(1,)))
    assert {result.arm.layout for result in with_ids.results} == {"fixed", "padded", "packed", "tree"}
    best = with_ids.best()
    assert best is not None
    assert (best.arm.layout, best.padding_efficiency) == ("tree", pytest.approx(200 / 60))
    without = dry_run("x", import_rows(path), question(ranks=(1,)))
    assert {result.arm.layout for result in without.results} == {"fixed", "padded", "packed"}


def with_experts(group: int, index: int) -> Rollout:
    """Of a group with equal prompts, which went to equal experts but in rollout 1, from its sixth token on."""
    experts = np.zeros((25, 2, 1), dtype=np.int64)
    experts[5:20], experts[24] = index == 1, UNKNOWN
    call = Call(
        order=0, prompt_ids=(7,) * 20, output_ids=(group, 1, 2, index, 3), logprobs=(-1.0,) * 5,
        routed_experts=None if index == 3 else RoutedExperts.of(experts),
    )  # fmt: skip
    return Rollout(rollout_id=f"p{group}/g{index}", group_id=f"p{group}", prompt_id="t", reward=0.5, calls=(call,))


def distinct(rollouts: Iterable[Rollout], *, has_experts: bool) -> int:
    """Different beginnings of rows, in ids and experts."""
    found: set[str] = set()
    for rollout in rollouts:
        (call,) = rollout.calls
        ids = call.prompt_ids + call.output_ids
        experts: list[Any] = [[[UNKNOWN], [UNKNOWN]]] * len(ids)
        if has_experts and call.routed_experts is not None:
            experts = call.routed_experts.experts_TLX.tolist()
        found |= {str((ids[: t + 1], experts[: t + 1])) for t in range(len(ids))}
    return len(found)


def test_tokens_are_merged_as_in_training(tmp_path: Path) -> None:
    rollouts = [with_experts(group, index) for group in (0, 1) for index in range(4)]
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    file = folder / "rollouts" / "collection_000000.jsonl.gz"
    write_rollouts(file, rollouts)
    record = {"collection": 0, "file": file.name, "groups": ["p0", "p1"], "first_window": 0}
    write_lines(folder / "collections.jsonl", record)
    asked = question(layouts=("tree",), ranks=(1,), budgets=(400,))

    def nodes_of(path: Path) -> tuple[int, list[str], list[str]]:
        rows = import_rows(path, keep_token_ids=True)
        found = dry_run("x", rows, asked)
        return found.results[0].windows[0].footprint, plain_lines(found), list(rows.notes)

    by_both, by_ids = distinct(rollouts, has_experts=True), distinct(rollouts, has_experts=False)
    assert by_both > by_ids + 30
    nodes, lines, _ = nodes_of(file)
    assert nodes == by_both
    assert "layout tree merges tokens of equal ids and equal experts: 6 rows carry routed experts" in lines
    for replay, expected in (("recorded", by_both), ("required", by_both), ("off", by_ids)):
        (folder / "config.toml").write_text(f'[train]\nrollouts_per_window = 8\nrouting_replay = "{replay}"\n')
        nodes, lines, notes = nodes_of(folder)
        assert nodes == expected
        assert notes == ["6 rows have routed experts that the run did not replay, so these"][: replay == "off"]
    assert "layout tree merges tokens of equal ids: no row carries routed experts that would keep them apart" in lines


def test_a_rollout_of_a_run_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    known = with_experts(0, 0)
    (call,) = known.calls
    other = replace(call, routed_experts=RoutedExperts.of(np.zeros((25, 1, 1), dtype=np.int64)))
    file = folder / "rollouts" / "collection_000000.jsonl.gz"
    write_rollouts(file, [known, replace(known, rollout_id="p0/g1", calls=(other,))])
    record = {"collection": 0, "file": file.name, "groups": ["p0"], "first_window": 0}
    write_lines(folder / "collections.jsonl", record)
    (folder / "config.toml").write_text('[train]\nrollouts_per_window = 2\nrouting_replay = "recorded"\n')
    with pytest.raises(FileFormatError, match=r"gz, line 2, field `routed_experts`: must have the layers with experts"):
        import_rows(folder)
    assert import_rows(folder, skip_bad=True).lengths_R.tolist() == [25]


def test_a_window_without_images_is_a_tree_beside_one_with(tmp_path: Path) -> None:
    image = Media(start=1, num_tokens=1, grid=(1, 2, 2), pixels=np.zeros((4, 3), dtype=np.float32))
    seen = Call(order=0, prompt_ids=(7, 9), output_ids=(1,), logprobs=(-1.0,), media=(image,))
    rollouts = [with_experts(0, 0), with_experts(0, 2), replace(with_experts(1, 0), calls=(seen,))]
    write_rollouts(tmp_path / "x.jsonl", rollouts)
    rows = import_rows(tmp_path / "x.jsonl", keep_token_ids=True)
    found = dry_run("x", rows, question(rollouts_per_window=2))
    assert [window.prefixes is None for window in found.windows] == [False, True]
    assert {result.arm.layout for result in found.results} == {"fixed", "padded", "packed"}
    assert "layout tree needs the token ids of all rows, and no images: 1 rows are without" in plain_lines(found)
    refused = dry_run("x", rows, question(layouts=("tree",), rollouts_per_window=2)).results[0].refused
    assert refused is not None
    assert "or images, whose tokens it does not share" in refused


# ------------------------------------------------------------------------------------------------ estimates


def test_estimates_by_hand() -> None:
    shape = PRESETS["smollm2-135m"]
    given = Assumptions(device=DEVICES["a100"], utilisation=0.5)
    assert given.step_seconds(shape, 1000.0) == pytest.approx(1000 * shape.token_flops * 4 / (0.5 * 312e12))
    kept = Assumptions(device=DEVICES["a100"], utilisation=0.5, is_checkpointed=False)
    assert kept.step_seconds(shape, 1000.0) == pytest.approx(given.step_seconds(shape, 1000.0) * 3 / 4)
    states = 16 * shape.num_parameters / 4
    gathered = 2 * (shape.outer_parameters + 2 * shape.layer_parameters)
    activations = 2 * 5000 * (30 * 576 + shape.layer_values)
    logits = 12 * 49152 * 1024
    assert given.memory_bytes(shape, 5000, 4) == pytest.approx(states + gathered + activations + logits)
    assert kept.memory_bytes(shape, 5000, 4) > given.memory_bytes(shape, 5000, 4)
    whole = Assumptions(device=DEVICES["a100"], is_sharded=False)
    assert whole.memory_bytes(shape, 5000, 4) == pytest.approx(18 * shape.num_parameters + activations + logits)
    with pytest.raises(PlanError, match="--mfu must be a share"):
        Assumptions(device=DEVICES["a100"], utilisation=1.5)


def test_the_best_arm_fits_where_one_does(tmp_path: Path) -> None:
    rows = import_rows(write_lines(tmp_path / "x.jsonl", *({"length": 30_000} for _ in range(96))))
    model = ("qwen3-8b", PRESETS["qwen3-8b"])
    asked = question(budgets=(32_768, 262_144), layouts=("packed",), ranks=(8,), model=model)
    found = dry_run("x", rows, asked)
    fits = [found.estimates(result)["estimated_to_fit"] for result in found.results]
    assert fits == [True, False]
    best = found.best()
    assert best is not None
    assert best.arm.max_tokens_per_gpu == 32_768
    assert " !" in "\n".join(plain_lines(found))
    assert "Estimates for qwen3-8b (8.19B parameters), not measurements: H100" in "\n".join(plain_lines(found))


def test_shapes_by_name_or_file(tmp_path: Path) -> None:
    assert read_shape("Qwen3-4B") == ("qwen3-4b", PRESETS["qwen3-4b"])
    config = {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(str(tmp_path))[1] == read_shape(str(tmp_path / "config.json"))[1] == PRESETS["smollm2-135m"]
    with pytest.raises(ConfigError, match=r"--model must be a preset .*did you mean qwen3-4b\?"):
        read_shape("qwen3-4")
    for text, message in (("{", "found a problem"), ("[]", "it holds no object"), ("{}", "must have one of")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_shape(str(tmp_path))


# ------------------------------------------------------------------------------------------------ picture and trace


@pytest.mark.parametrize("layout", ["fixed", "padded", "packed", "tree"])
def test_a_picture_has_a_bar_for_each_row(layout) -> None:
    lengths = [50, 40, 31, 30, 22]
    prefixes = (
        shared_prefixes([[1] * 5 + [i + 2] * (n - 5) for i, n in enumerate(lengths)]) if layout == "tree" else None
    )
    plan = plan_step(lengths, num_ranks=3, max_tokens_per_gpu=64, layout=layout, prefixes=prefixes)
    labels = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0), (9, 0, 0)]
    svg = plan_svg(plan, lengths, labels, prefixes=prefixes, title='a "plan" <&>')
    tips = [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}title")]
    assert tips[0] == 'a "plan" <&>'
    assert sorted(int(tip.split(": row ")[1].split()[0]) for tip in tips if ": row " in tip) == [0, 1, 2, 3, 4]
    assert sum("inert filler" in tip for tip in tips) == plan.stats.num_fillers
    assert sum(element.get("fill") == "url(#filler)" for element in ET.fromstring(svg).iter(f"{SVG}rect")) == (
        plan.stats.num_fillers
    )
    assert "prefers-color-scheme:dark" in svg
    assert ">g0·r0·s0<" in svg


def test_a_bar_is_as_wide_as_its_tokens() -> None:
    plan = plan_step([60, 20], num_ranks=1, max_tokens_per_gpu=120)
    svg = plan_svg(plan, [60, 20], [(0, 0, 0), (0, 1, 0)], title="t")
    bars = [e for e in ET.fromstring(svg).iter(f"{SVG}rect") if e.get("fill") == "#0072b2"]
    whole, padded, real = (float(bar.get("width", 0)) + 0.5 for bar in bars)
    assert whole == pytest.approx(padded, abs=0.11)
    assert real / whole == pytest.approx(20 / 60, abs=0.01)
    assert bars[1].get("class") == "pad"


def test_a_large_plan_is_cut_and_says_so() -> None:
    lengths = [3 + i % 5 for i in range(20_000)]
    plan = plan_step(lengths, num_ranks=40, max_tokens_per_gpu=64, layout="packed")
    svg = plan_svg(plan, lengths, [(i, 0, 0) for i in range(20_000)], title="t")
    assert f"shown: 16 of 40 ranks, 32 of {plan.num_microbatches} micro-batches" in svg
    assert len(svg) < 2_000_000
    ET.fromstring(svg)


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_trace_lasts_as_long_as_the_plan_costs(layout, sync) -> None:
    lengths = [50, 40, 31, 30, 22, 20, 18, 9]
    plan = plan_step(lengths, num_ranks=3, max_tokens_per_gpu=64, layout=layout, sync=sync)
    trace = json.loads(plan_trace(plan, lengths, seconds_per_cost=None))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(plan.stats.step_cost)
    cells = [event for event in slices if event["cat"] != "wait"]
    assert len(cells) == 3 * plan.num_microbatches
    assert {event["tid"] for event in slices} == {0, 1, 2}
    assert sum(event["args"]["num_tokens"] for event in cells) == sum(lengths)
    assert sorted(row for event in cells for row in event["args"]["rows"]) == list(range(8))
    for rank in range(3):  # slices of a lane lie one after the other
        lane = sorted((event["ts"], event["dur"]) for event in slices if event["tid"] == rank)
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in itertools.pairwise(lane))
    scaled = json.loads(plan_trace(plan, lengths, seconds_per_cost=1e-3))
    assert scaled["traceEvents"][2]["dur"] == pytest.approx(1000 * trace["traceEvents"][2]["dur"])


def test_labels_number_groups_rollouts_and_segments(tmp_path: Path) -> None:
    names = [("b", "b/0"), ("b", "b/1"), ("b", "b/0"), ("a", "a/0")]
    rows = import_rows(
        write_lines(tmp_path / "x.jsonl", *({"length": 9, "group_id": g, "rollout_id": r} for g, r in names))
    )
    assert labels_of(rows, range(4)) == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]


# ------------------------------------------------------------------------------------------------ a run's folder


def make_run(folder: Path, *, truncated: str = "train") -> list[list[int]]:
    """A folder as a run leaves it: one collection of four groups, one of them dropped, in two windows of two."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "plans").mkdir()
    (folder / "config.toml").write_text(
        f'[train]\nrollouts_per_window = 4\nwindows_per_collection = 2\n[rollout]\ntruncated = "{truncated}"\n'
    )

    def rollout(group: int, index: int) -> Rollout:
        sizes = (10 + group, 3 + index)
        call = Call(order=0, prompt_ids=(1,) * sizes[0], output_ids=(2,) * sizes[1], logprobs=(-1.0,) * sizes[1])
        name = f"p{group}/g{index}"
        status = "truncated" if name == "p3/g1" else "ok"
        return Rollout(rollout_id=name, group_id=f"p{group}", prompt_id="t", reward=0.5, calls=(call,), status=status)

    generated = [rollout(group, index) for group in (0, 1, 3, 4) for index in (0, 1)]
    write_rollouts(folder / "rollouts" / "collection_000000.jsonl.gz", generated)
    write_rollouts(folder / "rollouts" / "carried_000000.jsonl.gz", [rollout(2, i) for i in (0, 1)])
    groups = ["p2", "p0", "p4", "p3"]
    record = {"collection": 0, "file": "collection_000000.jsonl.gz", "groups": groups, "first_window": 0}
    write_lines(folder / "collections.jsonl", record)
    lengths = [[15, 16, 13, 14], [17, 18, 16] + ([17] if truncated == "train" else [])]
    for window, found in enumerate(lengths):
        plan = plan_step(found, num_ranks=2, max_tokens_per_gpu=40, layout="packed", pad_to_multiple=4)
        (folder / "plans" / f"window_{window:06d}.json").write_text(plan.to_json())
    return lengths


@pytest.mark.parametrize("truncated", ["train", "mask"])
def test_a_run_is_measured_as_it_was_planned(truncated: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lengths = make_run(folder, truncated=truncated)
    assert is_run_folder(folder)
    rows = import_rows(folder)
    windows = cut_windows(rows, None)
    assert [rows.lengths_R[window.rows].tolist() for window in windows] == lengths
    assert [window.name for window in windows] == ["window 0", "window 1"]
    found = dry_run("run", rows, question(ranks=(), budgets=()), run=folder)
    recorded = found.results[0]
    assert (recorded.arm.planner, recorded.arm.num_ranks, recorded.arm.max_tokens_per_gpu) == ("as recorded", 2, 40)
    assert list(recorded.windows) == [plan.stats for plan in recorded_plans(folder).values()]
    assert {result.arm.max_tokens_per_gpu for result in found.results[1:]} == {20, 40, 80}
    assert found.question.rules.pad_to_multiple == 4  # as the run was planned
    assert found.best() is not recorded
    elsewhere = dry_run("run", rows, question(ranks=(3,), budgets=()), run=folder)
    best = elsewhere.best()
    assert best is not None
    assert best.arm.num_ranks == 3
    assert elsewhere.cost_to_best(elsewhere.results[0]) is None  # nothing on 2 ranks to compare with
    assert any(line.lstrip().startswith("as recorded") and "×" not in line for line in plain_lines(elsewhere))
    lines = plain_lines(found, has_windows=True)
    assert any(line.startswith("window 1 ") for line in lines)


def test_a_run_whose_plans_are_of_other_rows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    path = folder / "plans" / "window_000000.json"
    path.write_text(plan_step([3, 2], num_ranks=2, max_tokens_per_gpu=40).to_json())
    with pytest.raises(PlanError, match="row"):
        dry_run("run", import_rows(folder), question(), run=folder)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"window_000000.json: must be a step plan"):
        dry_run("run", import_rows(folder), question(), run=folder)


def test_undeclared_breaks_are_cut_as_the_run_did(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    calls = tuple(
        Call(order=order, prompt_ids=prompt, output_ids=(7, 8), logprobs=(-1.0, -1.0))
        for order, prompt in enumerate([(1, 2, 3), (1, 2, 3, 7, 9)])
    )
    rollout = Rollout(rollout_id="p/g", group_id="p", prompt_id="t", reward=0.5, calls=calls)
    write_rollouts(folder / "rollouts" / "collection_000000.jsonl.gz", [rollout])
    record = {"collection": 0, "file": "collection_000000.jsonl.gz", "groups": ["p"], "first_window": 0}
    write_lines(folder / "collections.jsonl", record)
    assert import_rows(folder).lengths_R.tolist() == [5, 7]
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config + 'on_undeclared = "realign"\n')
    assert import_rows(folder).lengths_R.tolist() == [7]
