"""The page of a run, without a browser:

1. its numbers are those of metrics.jsonl; of many windows each stretch keeps its least, its mean and its most
2. a page of 10,000 windows, plans and evaluations stays below 2 MB and is made within seconds; it says what is left out
3. hostile text stays text: no element, attribute or script comes from it, hidden characters are shown
4. nothing is fetched, the HTML is well-formed, ids are unique, and the same files give the same page
5. plans: the seed's thirteen rows with their fillers and names; over-long rows; reused ones; cut ones; broken ones
6. rollouts: the telling ones, their segments with trained text marked, advantages recomputed or why not
7. runs that go on, have only begun, are of other versions, folders that are none: a page, or an error that says why
8. replays become tables
9. `evenstep report` writes the file whole
"""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from evenstep.cli import app
from evenstep.errors import FileFormatError
from evenstep.files import write_rollouts
from evenstep.plan import plan_step
from evenstep.plan.prefixes import shared_prefixes
from evenstep.report.curves import MAX_POINTS, curves
from evenstep.report.html_page import run_page, write_report
from evenstep.report.token_text import IdsAsText, TokenizerText, decoder_for
from evenstep.rollout.segments import segments_of
from evenstep.train.run_folder import RunFolder
from report_runs import (
    CONFIG,
    HOSTILE,
    SEED_SEGMENTS,
    append_lines,
    collection_of,
    evaluation,
    metrics_of,
    page_data,
    rollout_of,
    row_of,
    small_run,
)

VOID = {"meta", "link", "img", "br", "input"}


class Reader(HTMLParser):
    """Checks that elements close in order, and collects what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def begun(path: Path, records: list[dict[str, Any]], config: str = CONFIG) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(config)
    append_lines(path / "metrics.jsonl", records)
    return path


# --- 1


def test_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    data = page_data(run_page(small_run(tmp_path / "run")).html)
    assert data["curves"]["first"] == data["curves"]["last"] == [0, 1, 2]
    for key, values in data["curves"]["metrics"].items():
        assert values["mean"] == pytest.approx([metrics_of(window)[key] for window in range(3)], rel=1e-6), key
    assert "kl" not in data["curves"]["metrics"]  # no window has one
    assert data["evaluations"]["metrics"]["eval_reward_mean"]["mean"] == [0.4, 0.7]


def test_summary_answers(tmp_path: Path) -> None:
    words = re.sub(r"\s+", " ", read(run_page(small_run(tmp_path / "run")).html).words)
    assert "Yes: held-out reward rose, from 0.400 to 0.700 (+0.300)." in words
    assert "avg@1 on 400 held-out tasks, greedy." in words
    assert "14 (13 to 15) rows, of 6 rollouts" in words
    assert "Fillers: 9 in 3 windows" in words
    # three windows of 1000 real tokens, 0.8 of the places
    assert "20.0 % of what was run forward and backward: 750 of 3,750 token places." in words
    assert "all of 3 windows took their optimizer step" in words


def test_a_change_within_the_noise_is_not_called_learning(tmp_path: Path) -> None:
    records = [evaluation(0, 0.5), metrics_of(0), evaluation(1, 0.55)]  # one standard error is at most 0.035
    words = read(run_page(begun(tmp_path / "run", records)).html).words
    assert "changed by less than two standard errors" in words
    worse = [evaluation(0, 0.5), metrics_of(0), evaluation(1, 0.3)]
    assert "No: held-out reward fell" in read(run_page(begun(tmp_path / "worse", worse)).html).words


def test_losses_are_counted_with_their_reasons(tmp_path: Path) -> None:
    path = begun(
        tmp_path / "run",
        [
            metrics_of(0, stepped=False, skip_reason="all advantages are 0", num_failed=2, num_truncated=1),
            metrics_of(1, epoch=1, collection=0, num_failed=2, num_truncated=1),  # the same rollouts again
        ],
    )
    append_lines(path / "collections.jsonl", [{"collection": 0, "dropped": {"c0/p1": "no voter", "c0/p2": "no voter"}}])
    html = run_page(path).html
    words = re.sub(r"\s+", " ", read(html).words)
    assert "1 optimizer step in 2 windows; of 6 rollouts 2 failed and 1 were truncated; 2 groups dropped" in words
    assert "Windows without a step, 1: all advantages are 0" in words
    assert "Dropped groups, 2: no voter" in words
    assert page_data(html)["skipped"] == [0]


def test_stretches_keep_extremes() -> None:
    num = 10_007
    windows = [{"window": w, "grad_norm": 1.0, "kl": None if w % 2 else 0.5} for w in range(num)]
    windows[5_000]["grad_norm"], windows[7_777]["grad_norm"] = 99.0, -3.0
    found = curves(windows)
    metric = found["metrics"]["grad_norm"]
    assert len(found["first"]) == MAX_POINTS
    assert found["first"][0] == 0
    assert found["last"][-1] == num - 1
    assert [b - a for a, b in zip(found["last"], found["first"][1:], strict=False)] == [1] * (MAX_POINTS - 1)
    assert max(metric["most"]) == 99.0
    assert min(metric["least"]) == -3.0
    stretch = next(i for i, last in enumerate(found["last"]) if last >= 5_000)
    size = found["last"][stretch] - found["first"][stretch] + 1
    assert metric["mean"][stretch] == pytest.approx((size - 1 + 99.0) / size, rel=1e-6)
    assert set(found["metrics"]["kl"]["mean"]) == {0.5}  # windows without a value are in no mean


# --- 2


def test_ten_thousand_windows(tmp_path: Path) -> None:
    num = 10_000
    path = begun(tmp_path / "run", [])
    lines = []
    for window in range(num):
        lines += [evaluation(window, 0.5), metrics_of(window, stepped=window % 7 != 0, skip_reason=f"reason {window}")]
    append_lines(path / "metrics.jsonl", lines)
    (path / "plans").mkdir()
    rows = [row_of(index, 3 + index % 60) for index in range(512)]
    files = RunFolder(path)
    plan = plan_step([row.num_tokens for row in rows], num_ranks=8, max_tokens_per_gpu=600)
    files.write_plan(0, plan, rows)
    text = (files.plans / "window_000000.json").read_text()
    for window in range(1, num):
        (files.plans / f"window_{window:06d}.json").write_text(text)
    files.rollouts.mkdir()
    long = [rollout_of(0, 0, g, 40, info={"text": "x" * 9_000}) for g in range(8)]
    for index in range(40):
        write_rollouts(files.collection(index), long)
    started = time.perf_counter()
    page = run_page(path)
    assert time.perf_counter() - started < 20  # about two seconds
    assert len(page.html.encode()) < 2_000_000
    data = page_data(page.html)
    assert len(data["plans"]) >= 20
    assert data["plans"][0]["window"] == 0
    assert data["plans"][-1]["window"] == num - 1
    words = read(page.html).words
    assert f"{len(data['plans'])} of 10,000 stored plans are here" in words
    assert "8 of 40 stored collections are here" in words


# --- 3 and 4


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    rollouts = [
        rollout_of(0, g, n, 2, status="truncated", status_reason=HOSTILE, prompt_id=HOSTILE, info={HOSTILE: HOSTILE})
        for g in range(3)
        for n in range(2)
    ]
    path = small_run(tmp_path / "<b>run", rollouts=rollouts)
    config = CONFIG.replace('name = "ledger"', f"name = {json.dumps(HOSTILE)}")
    (path / "config.toml").write_text(config)
    append_lines(path / "metrics.jsonl", [metrics_of(3, stepped=False, skip_reason=HOSTILE)])
    append_lines(path / "collections.jsonl", [{"collection": 9, "dropped": {HOSTILE: HOSTILE}}])
    replay(path, HOSTILE)
    html = run_page(path).html
    reader = read(html)
    assert [tag for tag, _ in reader.elements].count("script") == 2
    assert not {"img", "iframe", "object", "form"} & {tag for tag, _ in reader.elements}
    assert not [attributes for _, attributes in reader.elements if any(name.startswith("on") for name in attributes)]
    assert "⟨U+0000⟩⟨U+202E⟩" in reader.words
    assert not re.search("[\x00-\x08\u202a-\u202e]", html)
    assert "{{data}}" in reader.words  # what is filled in is not filled again
    shown = page_data(html)["rollouts"][0]
    assert "</script><script>" in shown["statusReason"]
    assert "⟨U+202E⟩" in shown["info"]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    replay(path, "padded")
    html = run_page(path).html
    elements = read(html).elements
    urls = [value for _, attributes in elements for name, value in attributes.items() if name in ("src", "href")]
    assert [url for url in urls if url and not url.startswith(("#", "data:"))] == []
    assert "@import" not in html
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html) == []
    policy = next(a["content"] for tag, a in elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {url[1:] for url in urls if url and url.startswith("#")}
    assert targets <= set(ids)
    assert run_page(path).html == html


# --- 5


def test_the_plan_of_the_seed(tmp_path: Path) -> None:
    plan = page_data(run_page(small_run(tmp_path / "run")).html)["plans"][0]
    assert (plan["numRanks"], len(plan["cells"]), len(plan["cells"][0])) == (4, 4, 4)
    assert sorted(row for rank in plan["cells"] for cell in rank for row in cell) == list(range(13))
    assert sum(not cell for rank in plan["cells"] for cell in rank) == plan["stats"]["num_fillers"] == 3
    names = [(g, plan["rollouts"][str(r)][1], s) for g, r, s in zip(plan["g"], plan["r"], plan["s"], strict=True)]
    assert names == [
        (group, generation, segment)
        for group, counts in enumerate(SEED_SEGMENTS)
        for generation, count in enumerate(counts)
        for segment in range(count)
    ]
    segments = [segment for rollout in collection_of(0) for segment in segments_of(rollout)]
    assert plan["n"] == [segment.num_tokens for segment in segments]
    assert plan["t"] == [segment.num_trained_tokens for segment in segments]
    assert plan["rowsPerRollout"] == [0, 3, 1, 1, 0, 1]
    for rank, widths in zip(plan["cells"], plan["widths"], strict=True):
        assert widths == [max((plan["n"][row] for row in cell), default=0) for cell in rank]


@pytest.mark.parametrize("layout, widths", [("padded", {"16", "8"}), ("packed", {"16", "8"})])
def test_widths_follow_the_multiple(tmp_path: Path, layout: str, widths: set[str]) -> None:
    path = begun(tmp_path / "run", [metrics_of(0)])
    (path / "plans").mkdir()
    rows = [row_of(0, 13), row_of(1, 5)]
    plan = plan_step([13, 5], num_ranks=2, max_tokens_per_gpu=12, layout=layout, pad_to_multiple=4, cp=1)
    RunFolder(path).write_plan(0, plan, rows)
    shown = page_data(run_page(path).html)["plans"][0]
    assert {str(width) for rank in shown["widths"] for width in rank} == widths
    assert shown["overlong"] == [0]


def test_rows_that_share_beginnings(tmp_path: Path) -> None:
    path = begun(tmp_path / "run", [metrics_of(0, padding_efficiency=1.25)])
    (path / "plans").mkdir()
    rows = [row_of(0, 13), row_of(1, 5)]  # all tokens are alike
    prefixes = shared_prefixes([row.token_ids for row in rows])
    plan = plan_step([13, 5], num_ranks=1, max_tokens_per_gpu=16, layout="tree", prefixes=prefixes)
    RunFolder(path).write_plan(0, plan, rows)
    html = run_page(path).html
    [shown] = page_data(html)["plans"]
    assert (shown["stats"]["footprint"], shown["widths"]) == (13, [[18]])
    assert "1,000 tokens of rows ran in 800" in read(html).words


def test_later_epochs_name_the_plan_they_ran(tmp_path: Path) -> None:
    path = begun(tmp_path / "run", [metrics_of(w, collection=0, epoch=w // 2) for w in range(6)])
    (path / "plans").mkdir()
    for window in range(2):
        RunFolder(path).write_plan(window, plan_step([3], num_ranks=1), [row_of(0, 3)])
    assert [plan["also"] for plan in page_data(run_page(path).html)["plans"]] == [[2, 4], [3, 5]]


def test_a_plan_of_many_ranks_is_cut(tmp_path: Path) -> None:
    path = begun(tmp_path / "run", [metrics_of(0)])
    (path / "plans").mkdir()
    rows = [row_of(index, 4) for index in range(6_000)]
    plan = plan_step([4] * 6_000, num_ranks=600, max_tokens_per_gpu=40, effort="default")
    RunFolder(path).write_plan(0, plan, rows)
    shown = page_data(run_page(path).html)["plans"][0]
    assert shown["numRanks"] == 600
    assert len(shown["cells"]) == 300
    assert len(shown["n"]) == 3_000
    assert shown["stats"]["num_rows"] == 6_000


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "Expecting"),
        ("[]", ""),
        ('{"rows": []}', "format_version"),
        ('{"format_version": 99, "rows": []}', "99"),
        ('{"format_version": 1}', "holds no `rows`"),
    ],
)
def test_a_broken_plan_is_left_out_and_named(tmp_path: Path, text: str, why: str) -> None:
    path = small_run(tmp_path / "run")
    (path / "plans" / "window_000001.json").write_text(text)
    page = run_page(path)
    assert [plan["window"] for plan in page_data(page.html)["plans"]] == [0, 2]
    assert "window_000001.json" in page.notes[0]
    assert why in page.notes[0]


# --- 6


def test_rollouts_as_segments(tmp_path: Path) -> None:
    data = page_data(run_page(small_run(tmp_path / "run")).html)
    first = [rollout for rollout in data["rollouts"] if rollout["collection"] == 0]
    assert [rollout["why"] for rollout in first] == [
        "most segments",
        "best reward",
        "median reward",
        "worst reward",
    ]
    most = first[0]
    assert (most["id"], most["numSegments"], most["window"]) == ("c0/p1/g1", 5, 0)
    # rewards 0 and 1/2: (1/2 - 1/4) / (sample std + 1e-6)
    assert most["advantage"] == pytest.approx(0.25 / (0.125**0.5 + 1e-6), rel=1e-6)
    segments = segments_of(collection_of(0)[3])
    decoder = decoder_for(tmp_path, "evenstep:ledger")
    assert isinstance(decoder, TokenizerText)
    for shown, segment in zip(most["segments"], segments, strict=True):
        assert (shown["tokens"], shown["trained"]) == (segment.num_tokens, 2)
        assert [(run[0], run[2]) for run in shown["runs"]] == [(0, segment.num_tokens - 2), (1, 2)]
        whole = decoder.text(segment.token_ids, 0, segment.num_tokens)
        assert "".join(run[1] for run in shown["runs"]) == whole


def test_why_there_is_no_advantage(tmp_path: Path) -> None:
    rollouts = [
        rollout_of(0, 0, 0, 1, reward=None, status="failed", status_reason="it broke"),
        rollout_of(0, 0, 1, 1),
        rollout_of(0, 1, 0, 1),
        rollout_of(0, 1, 1, 1, status="truncated"),
    ]
    path = small_run(tmp_path / "run", rollouts=rollouts)
    index = path / "collections.jsonl"
    records = [json.loads(line) for line in index.read_text().splitlines()]
    for record in records:
        record["groups"], record["dropped"] = ["c0/p1"], {"c0/p0": "one voter"}
    index.write_text("".join(json.dumps(record) + "\n" for record in records))
    notes = {r["id"]: r["advantageNote"] for r in page_data(run_page(path).html)["rollouts"] if r["collection"] == 0}
    assert notes["c0/p0/g0"] == "not trained: its group was dropped (one voter)"
    assert notes["c0/p1/g1"] == ""
    (path / "config.toml").write_text(CONFIG.replace("grpo", "gae"))
    notes = {r["id"]: r["advantageNote"] for r in page_data(run_page(path).html)["rollouts"]}
    assert notes["c0/p1/g1"] == "estimator gae gives one per token, not one per rollout"


def test_long_texts_are_cut_and_characters_stay_whole(tmp_path: Path) -> None:
    assert isinstance(decoder_for(tmp_path, None), IdsAsText)
    assert "found no folder" in decoder_for(tmp_path, "nowhere").source

    class Bytes:
        """Each id is a byte."""

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            assert not skip_special_tokens
            return bytes(ids).decode(errors="replace")

    ids = "aé→b".encode()
    decoder = TokenizerText(Bytes(), "")
    for cut in range(len(ids) + 1):
        pieces = decoder.text(ids, 0, cut), decoder.text(ids, cut, len(ids))
        assert "".join(pieces) == "aé→b"


def test_a_rollout_file_that_is_cut_or_new(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    files = RunFolder(path)
    files.collection(0).write_bytes(files.collection(0).read_bytes()[:-20])
    line = json.dumps({"format_version": 99, "kind": "rollout"})
    (path / "rollouts" / "collection_000007.jsonl").write_text(line + "\n")
    page = run_page(path)
    assert "collection_000007.jsonl" in page.notes[0]
    assert "format_version" in page.notes[0]
    assert {rollout["collection"] for rollout in page_data(page.html)["rollouts"]} >= {1, 2}


# --- 7


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    path = begun(tmp_path / "run", [evaluation(0, 0.5), metrics_of(0), metrics_of(1, loss=float("nan"))])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"window": 2, "los')
    page = run_page(path)
    words = read(page.html).words
    assert "2 of 3 windows trained so far" in words
    assert "There is one held-out evaluation, so nothing can be compared." in words
    assert "metrics.jsonl: its last line has no end yet" in words
    assert page_data(page.html)["curves"]["metrics"]["loss"]["mean"] == [-0.001, None]


def test_only_an_evaluation(tmp_path: Path) -> None:
    html = run_page(begun(tmp_path / "run", [evaluation(0, 0.5)])).html
    assert page_data(html)["curves"]["first"] == []
    read(html)


def test_lines_of_another_version(tmp_path: Path) -> None:
    path = begun(
        tmp_path / "run",
        [{"window": 0, "new_metric": 3, "words": "x", "nested": {"a": 1}}, {"window": 1}, {"window": 1, "loss": 2.0}],
        config="[run\n",
    )
    page = run_page(path)
    assert page_data(page.html)["curves"]["metrics"] == {
        "new_metric": {"mean": [3, None]},
        "loss": {"mean": [None, 2.0]},
    }
    assert any("config.toml is not TOML" in note for note in page.notes)
    assert any("1 lines speak of a window that a later line speaks of" in note for note in page.notes)


def test_an_id_that_no_vocabulary_has_is_shown_as_it_is() -> None:
    class Tokenizer:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(chr(np.uint32(token_id)) for token_id in token_ids)

    assert TokenizerText(Tokenizer(), "").text([97, 98, 2**40], 1, 3) == f"98 {2**40}"


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("metrics.jsonl", '"eval_num_tasks": ', '"eval_num_tasks": [1], "was": '),
        ("metrics.jsonl", '"eval_num_tasks": ', f'"eval_num_tasks": {10**400}'),
        ("metrics.jsonl", '"collection": 0', '"collection": [0]'),
        ("metrics.jsonl", '"num_rows": ', f'"num_rows": {10**400}'),
        ("collections.jsonl", '"file": "collection_000000.jsonl.gz"', '"file": {}'),
        ("collections.jsonl", '"first_window": 0', '"first_window": NaN'),
        ("config.toml", 'estimator = "', 'estimator = [] # "'),
        ("plans/window_000000.json", '"num_tokens": ', f'"num_tokens": {10**30}'),
        ("plans/window_000000.json", '"c0": ', f'"c0": {10**400}'),
    ],
)
def test_a_broken_value_costs_its_place_alone(tmp_path: Path, name: str, old: str, new: str) -> None:
    path = small_run(tmp_path / "run")
    (path / "plans" / "window_²².json").write_text("{}")  # no number either
    text = (path / name).read_text()
    assert old in text
    (path / name).write_text(text.replace(old, new))
    assert page_data(run_page(path).html)["curves"]["first"] == [0, 1, 2]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "found no metrics.jsonl"),
        ("", "at least one window or evaluation was promised, found none"),
        ('{"window": 0}\nnonsense\n{"window": 1}\n', "line 2: a JSON object was expected, found 'nonsense'"),
        ('{"window": 0}\n3\n{"window": 1}\n', "line 2: a JSON object was expected"),
        ('{"epoch": 0}\n', "line 1: `window` must be an integer ≥ 0, found None"),
        ('{"window": "0"}\n', "line 1: `window` must be an integer ≥ 0, found '0'"),
    ],
)
def test_what_is_no_run(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(FileFormatError, match=re.escape(message)):
        run_page(tmp_path)


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="found no such folder"):
        run_page(tmp_path / "none")
    path = begun(tmp_path / "run", [metrics_of(0)])
    with pytest.raises(FileFormatError, match="found a file; name its folder"):
        run_page(path / "metrics.jsonl")
    with pytest.raises(FileFormatError, match="cannot be written there"):
        write_report(path, tmp_path / "none" / "page.html")


# --- 8


def replay(path: Path, arm: str) -> None:
    (path / "replay").mkdir()
    figures = {"steps_completed": 23, "rows_consumed": 184, "step_seconds_median": 1.5, "peak_memory_bytes": 3 << 20}
    against = {"gradient_cosine_min": 1 - 1e-9, "gradient_relative_difference_max": 3e-7, "per_step": [1, 2]}
    data = {
        "arms": {"fixed": figures, arm: figures | against},
        "noise_floor": {"gradient_relative_difference_max": 1e-7},
    }
    (path / "replay" / "first.json").write_text(json.dumps(data))


def test_replays_are_tables(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    assert 'id="replay"' not in run_page(path).html
    replay(path, "padded,max_tokens_per_gpu=4096")
    (path / "replay" / "other.json").write_text('{"arms": []}')
    page = run_page(path)
    _, _, rest = page.html.partition('<section id="replay">')
    section = rest.partition("</section>")[0]
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", section)
    at = cells.index("padded,max_tokens_per_gpu=4096")
    assert cells[at : at + 7] == [cells[at], "23", "184", "1.5", "3", "1 − 1e-09", "3e-07"]
    assert "noise floor" in cells
    assert ">per step<" not in section
    assert any("other.json" in note for note in page.notes)


def test_a_replay_is_read_at_a_glance(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    (path / "replay").mkdir()
    figures = {"status": "ok", "passed": True, "steps_completed": 3, "rows_consumed": 1184, "rows_expected": 1200,
               "step_seconds_median": 0.26788, "speedup_paired_median": 1.0, "padding_efficiency": 2.5894}  # fmt: skip
    data = {"num_steps": 4, "arms": {"tree": figures}, "noise_floor": {"status": "ok", "steps_completed": 4}}
    (path / "replay" / "20261130T170931Z.json").write_text(json.dumps(data))
    section = run_page(path).html.partition('<section id="replay">')[2].partition("</section>")[0]
    assert "<h3>2026-11-30 17:09:31 UTC</h3>" in section
    table = section.partition("</table>")[0]
    found = ["passed", "3/4", "1,184/1,200", "0.268", "1.00", "2.589"]
    assert re.findall("<td>(.*?)</td>", table) == [*found, "ok", "4/4", *["–"] * 4]
    assert "above 1 where beginnings that rows share are computed once" in section


def test_a_failed_arm_of_a_replay_says_why_and_where(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    where = {"step": 3, "worst_parameter": "model.norm.weight", "worst_row": "g1/r0#1", "worst_row_microbatch": 2,
             "worst_row_rank": 1}  # fmt: skip
    wrong = {"status": "ok", "passed": False, "problem": "its gradient <i>differs</i>", "first_deviation": where}
    arms = {"fixed": {"status": "ok", "passed": True}, "padded": wrong, "tree": {"status": "oom", "passed": False}}
    (path / "replay").mkdir()
    (path / "replay" / "first.json").write_text(json.dumps({"arms": arms}))
    section = run_page(path).html.partition('<section id="replay">')[2].partition("</section>")[0]
    table, _, rest = section.partition("</table>")
    assert re.findall("<td>(.*?)</td>", table) == ["passed", "failed", "oom"]
    assert "<b>padded</b> failed: its gradient &lt;i&gt;differs&lt;/i&gt;" in rest
    assert (
        "<b>padded</b> first left the limit in step 3: most in model.norm.weight, log-probs differ most in row "
        "g1/r0#1, micro-batch 2, of rank 1"
    ) in rest


# --- 9


def test_the_command(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run")
    runner = CliRunner()
    result = runner.invoke(app, ["report", str(path)])
    assert result.exit_code == 0, result.output
    assert (path / "report.html").read_text(encoding="utf-8") == run_page(path).html
    other = tmp_path / "page.html"
    assert runner.invoke(app, ["report", str(path), "--out", str(other)]).exit_code == 0
    assert other.is_file()
    assert not list(tmp_path.rglob("*.tmp"))
    failed = runner.invoke(app, ["report", str(tmp_path / "none")])
    assert failed.exit_code == 2
    assert "found no such folder" in failed.output
