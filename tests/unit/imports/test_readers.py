"""Readers of other people's files.

1. Each format is told by its content, also gzipped and without its name, and gives the rows that its file holds.
2. What is taken from a line: tokens and not padding, branches and not messages, segments and not calls, ids, steps;
   what branches share is trained once, and the rows of a line that names no rollout are one.
3. Lengths from text are approximate and counted as such; ids, where a dump has them, are exact.
4. A broken line names file, line, what must be there, what is, and the fix; skipping lists it and keeps the rest.
5. No format, no rows, no file, a pickle, a cut-off archive: errors, never rows.
6. Folders are read in the order of their numbers; files of two formats are not mixed; what is hidden is not read.
7. A column that is asked for is read, or refused; steps that only some rows name are counted.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstep.errors import FileFormatError
from evenstep.experts import RoutedExperts
from evenstep.files import RowLengths, RowRecord, write_lengths, write_rollouts, write_rows
from evenstep.imports import FORMATS, import_rows
from evenstep.imports import rows as rows_module
from evenstep.types import Call, Rollout

DATA = Path(__file__).parents[2] / "data" / "imports"
ROOT = Path(__file__).parents[3]


def write_json(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def objects(name: str) -> list[Any]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


# ------------------------------------------------------------------------------------------------ formats

CASES = {
    "train_data_step7.jsonl": ("nemo-rl", [5, 8]),
    "token_exports": ("prime-rl", [4, 3, 6]),
    "traces.jsonl": ("verifiers", [8, 7, 6, 5]),
    "nemo_gym.jsonl": ("nemo-gym", [10, 4]),
    "verl_21.jsonl": ("verl", [12, 23]),
    "completions.jsonl": ("completions", [12, 4]),
}


@pytest.mark.parametrize("name", CASES)
def test_formats_are_told_by_content(name: str, tmp_path: Path) -> None:
    expected, lengths = CASES[name]
    found = import_rows(DATA / name)
    assert (found.format, found.lengths_R.tolist()) == (expected, lengths)
    if (DATA / name).is_file():
        packed = tmp_path / "dump"
        packed.write_bytes(gzip.compress((DATA / name).read_bytes()))
        found = import_rows(packed)
        assert (found.format, found.lengths_R.tolist()) == (expected, lengths)
    assert import_rows(DATA / name, format=expected).lengths_R.tolist() == lengths


def test_nemo_rl_rows_are_as_long_as_their_tokens() -> None:
    found = import_rows(DATA / "train_data_step7.jsonl", keep_token_ids=True)
    assert found.token_ids is not None
    assert found.token_ids[0].tolist() == [11, 12, 13, 14, 15]  # the padding behind it is none of its tokens
    assert found.num_trained_R is not None
    assert found.num_trained_R.tolist() == [2, 5]
    assert found.steps_R is not None
    assert found.steps_R.tolist() == [7, 7]
    assert found.rollout_ids == ("step 7, 0", "step 7, 1")


def test_prime_rl_rows() -> None:
    found = import_rows(DATA / "token_exports", keep_token_ids=True)
    assert found.rollout_ids == ("s0", "s1", "s2")
    assert found.steps_R is not None
    assert found.steps_R.tolist() == [3, 3, 3]
    assert found.num_trained_R is not None
    assert found.num_trained_R.tolist() == [2, 1, 5]
    assert found.token_ids is not None
    assert found.token_ids[1].tolist() == [5, 6, 9]


def test_each_branch_of_a_trace_is_a_row() -> None:
    found = import_rows(DATA / "traces.jsonl", keep_token_ids=True)
    assert found.token_ids is not None
    assert [ids.tolist() for ids in found.token_ids] == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6, 9],
        [1, 2, 10, 11, 6, 12],
        [3, 4, 5, 6, 13],
    ]
    assert found.rollout_ids == ("t0", "t0", "t0", "t1")
    assert found.group_ids == ("sum-0",) * 4
    assert found.num_approximate == 0


def test_what_branches_share_is_trained_once(tmp_path: Path) -> None:
    nodes = [(None, [1, 2], [0, 0]), (0, [3], [1]), (1, [4, 5], [0, 1]), (1, [6, 7], [0, 1]), (2, [8], [1])]
    trace = {"id": "t", "nodes": [dict(zip(("parent", "token_ids", "mask"), node, strict=True)) for node in nodes]}
    found = import_rows(write_json(tmp_path / "traces.jsonl", trace))
    assert found.lengths_R.tolist() == [5, 6]
    # four tokens were sampled; the first one is of the branch that goes on with its first child, where it ends later
    assert found.num_trained_R is not None
    assert found.num_trained_R.tolist() == [1, 3]


@pytest.mark.parametrize(
    "name, id_field, num_rows", [("traces.jsonl", "id", 3), ("nemo_gym.jsonl", "_ng_task_index", 2)]
)
def test_rows_of_a_line_without_ids_are_one_rollout(name: str, id_field: str, num_rows: int, tmp_path: Path) -> None:
    trace = objects(name)[0]
    del trace[id_field]
    if name == "nemo_gym.jsonl":
        trace["response"]["output"][2]["prompt_token_ids"] = [1, 2, 77]  # a history that was rewritten: two rows
    found = import_rows(write_json(tmp_path / name, trace, trace))
    assert found.rollout_ids == ("row 0",) * num_rows + (f"row {num_rows}",) * num_rows


def test_traces_without_ids_are_approximate(tmp_path: Path) -> None:
    trace = objects("traces.jsonl")[1]
    for node in trace["nodes"]:
        node["token_ids"] = node["mask"] = []
    counted = {**trace, "calls": [{"node": 1, "usage": {"prompt_tokens": 30, "completion_tokens": 12}}]}
    found = import_rows(write_json(tmp_path / "traces.jsonl", counted, trace))
    assert found.lengths_R.tolist() == [42, 1]  # the provider's count; else the text "2+2?" + "5"
    assert found.num_approximate == 2


def test_attempts_and_untrained_agents_are_left_out(tmp_path: Path) -> None:
    trace, other = objects("traces.jsonl")
    trace["nodes"][3]["semantic_parents"] = [{"type": "compaction_attempt", "node": 2}]
    other["agent"]["trainable"] = False
    path = write_json(tmp_path / "traces.jsonl", trace, other)
    found = import_rows(path)
    assert found.lengths_R.tolist() == [8, 6]
    assert len(found.notes) == 2
    trace["nodes"][5]["semantic_parents"] = [{"type": "compaction", "node": 3}]  # the agent did go on from it
    assert import_rows(write_json(path, trace)).lengths_R.tolist() == [8, 7, 6]


def test_nemo_gym_calls_become_segments(tmp_path: Path) -> None:
    rollout = objects("nemo_gym.jsonl")[0]
    found = import_rows(DATA / "nemo_gym.jsonl", keep_token_ids=True)
    assert found.token_ids is not None
    assert found.token_ids[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert found.num_trained_R is not None
    assert found.num_trained_R.tolist() == [5, 1]
    assert found.group_ids == ("task 0", "task 0")
    rollout["response"]["output"][2]["prompt_token_ids"] = [1, 2, 77]  # a history that was rewritten
    assert import_rows(write_json(tmp_path / "g.jsonl", rollout)).lengths_R.tolist() == [5, 6]
    for item in rollout["response"]["output"]:
        item.pop("generation_token_ids", None)
    found = import_rows(write_json(tmp_path / "g.jsonl", rollout))
    assert found.lengths_R.tolist() == [round(len("weather?" + "{}" + "sunny" + "It is sunny.") / 4)]
    assert found.num_approximate == 1


def test_text_is_approximate_unless_it_was_counted(tmp_path: Path) -> None:
    found = import_rows(DATA / "verl_21.jsonl")
    assert found.num_approximate == 2
    assert found.steps_R is not None
    assert found.steps_R.tolist() == [21, 21]
    assert import_rows(DATA / "verl_21.jsonl", bytes_per_token=2.0).lengths_R.tolist() == [23, 46]
    counted = {**objects("verl_21.jsonl")[0], "prompt_length": 9, "response_length": 5, "uid": "u"}
    found = import_rows(write_json(tmp_path / "1.jsonl", counted))
    assert (found.lengths_R.tolist(), found.num_approximate, found.group_ids) == ([14], 0, ("u",))
    with_ids = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5]}
    found = import_rows(write_json(tmp_path / "2.jsonl", with_ids))
    assert (found.format, found.lengths_R.tolist(), found.num_approximate) == ("completions", [5], 0)


@pytest.mark.parametrize(
    "text, lengths",
    [
        ("12\n\n# a remark\n 7 \n9.0\n", [12, 7, 9]),
        ("id,Num-Tokens\n1,5\n2,6\n", [5, 6]),
        ("id;length\n1;5\n2;6\n", [5, 6]),
        ("tokens\n5\n6\n", [5, 6]),
        ('note\tlength\n"two\nlines"\t5\nx\t6\n', [5, 6]),
        ("\ufefflength,id\n5,1\n", [5]),
    ],
)
def test_numbers_and_tables(text: str, lengths: list[int], tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text(text, encoding="utf-8")
    assert import_rows(path).lengths_R.tolist() == lengths


@pytest.mark.parametrize(
    "values, length",
    [
        ({"length": 5}, 5),
        ({"num_tokens": 5, "length": 9}, 5),
        ({"prompt_length": 2, "response_length": 3}, 5),
        ({"token_ids": [1, 2, 3]}, 3),
        ({"input_ids": [1, 2]}, 2),
    ],
)
def test_objects_with_lengths(values: dict[str, Any], length: int, tmp_path: Path) -> None:
    found = import_rows(write_json(tmp_path / "x.jsonl", {**values, "rollout_id": 3, "group_id": "g", "step": 4}))
    assert (found.format, found.lengths_R.tolist()) == ("lengths", [length])
    assert (found.rollout_ids, found.group_ids) == (("3",), ("g",))


def test_a_named_column(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("length,mine\n5,7\n")
    assert import_rows(table, column="mine").lengths_R.tolist() == [7]
    ids = write_json(tmp_path / "t.jsonl", {"length": 5, "mine": [1, 2, 3]})
    assert import_rows(ids, column="mine").lengths_R.tolist() == [3]
    with pytest.raises(
        FileFormatError, match=r"t.csv, line 1: --column must name one of 'length', 'mine', found 'mime'; "
    ):
        import_rows(table, column="mime")


def test_our_own_files(tmp_path: Path) -> None:
    def call(order: int, prompt: tuple[int, ...], output: tuple[int, ...], why: Any = None) -> Call:
        logprobs = (-1.0,) * len(output)
        return Call(order=order, prompt_ids=prompt, output_ids=output, logprobs=logprobs, break_reason=why)

    calls = (call(0, (1, 2), (3, 4)), call(1, (1, 2, 3, 4, 5), (6,)), call(2, (1, 9), (8,), "compaction"))
    good = Rollout(rollout_id="a", group_id="g", prompt_id="p", reward=1.0, calls=calls)
    failed = Rollout(rollout_id="b", group_id="g", prompt_id="p", status="failed")
    write_rollouts(tmp_path / "collection_000004.jsonl.gz", [good, failed])
    found = import_rows(tmp_path / "collection_000004.jsonl.gz")
    assert (found.format, found.lengths_R.tolist(), found.rollout_ids) == ("evenstep", [6, 3], ("a", "a"))
    assert found.notes == ("1 failed or masked rollouts, which have no rows",)
    write_lengths(
        tmp_path / "l.jsonl", [RowLengths(row_id="r", rollout_id="a", group_id="g", num_tokens=9, num_trained_tokens=3)]
    )
    assert import_rows(tmp_path / "l.jsonl").lengths_R.tolist() == [9]
    record = RowRecord(
        row_id="r", rollout_id="a", group_id="g", reward=0.0, token_ids=(5, 6), loss_mask=(0, 1), logprobs=(0.0, -1.0)
    )
    write_rows(tmp_path / "r.jsonl", [record])
    assert import_rows(tmp_path / "r.jsonl").lengths_R.tolist() == [2]
    (tmp_path / "r.jsonl").write_text((tmp_path / "r.jsonl").read_text() * 2)
    with pytest.raises(
        FileFormatError, match=r'r.jsonl, line 2, field `row_id`: must be unique in the file, found "r"'
    ):
        import_rows(tmp_path / "r.jsonl")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(name: str, **columns: list[Any]) -> Path:
        parquet.write_table(pyarrow.table(columns), tmp_path / name)
        return tmp_path / name

    texts = {"prompt": ["Name a colour."] * 2, "completion": ["Red.", "Blue, as the sky on a clear day."]}
    found = import_rows(write("completions_00001.parquet", step=[1, 1], **texts, accuracy_reward=[0.0, 1.0]))
    assert (found.format, found.lengths_R.tolist(), found.num_approximate) == ("completions", [4, 12], 2)
    assert import_rows(write("l.parquet", num_tokens=[5, 6])).lengths_R.tolist() == [5, 6]
    found = import_rows(write("i.parquet", input_ids=[[1, 2, 3], [4]]), keep_token_ids=True)
    assert found.lengths_R.tolist() == [3, 1]
    assert found.token_ids is not None
    with pytest.raises(
        FileFormatError, match=r"n.parquet, record 2, field `length`: must be a whole number ≥ 1, found null"
    ):
        import_rows(write("n.parquet", length=[5, None]))
    assert import_rows(tmp_path / "n.parquet", skip_bad=True).lengths_R.tolist() == [5]
    with pytest.raises(FileFormatError, match="a column of lengths must be known by its name"):
        import_rows(write("x.parquet", reward=[1.0], other=[2.0]))
    (tmp_path / "broken.parquet").write_bytes((tmp_path / "l.parquet").read_bytes()[:-20])
    with pytest.raises(FileFormatError, match=r"broken.parquet: must be a Parquet file"):
        import_rows(tmp_path / "broken.parquet")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(FileFormatError, match=r"pip install 'evenstep\[parquet\]'"):
        import_rows(tmp_path / "x.parquet")


# ------------------------------------------------------------------------------------------------ broken files


def changed(name: str, change: Callable[[Any], Any]) -> list[Any]:
    values = objects(name)
    change(values[1])
    return values


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("train_data_step7.jsonl", lambda v: v.pop("input_lengths"), "field `input_lengths`: is required"),
        ("train_data_step7.jsonl", lambda v: v.update(input_lengths=0), "whole number ≥ 1, found 0"),
        (
            "train_data_step7.jsonl",
            lambda v: v.update(input_lengths=9),
            "at least the 9 tokens of input_lengths, found 8",
        ),
        ("train_data_step7.jsonl", lambda v: v.update(token_ids=[1, -2]), r"must hold token ids .*, found -2"),
        ("token_exports/step_3/rank_0.jsonl", lambda v: v.update(token_ids="abc"), 'array of token ids, found "abc"'),
        (
            "token_exports/step_3/rank_0.jsonl",
            lambda v: v["loss_mask"].pop(),
            "one value for each of 3 tokens, found 2",
        ),
        ("token_exports/step_3/rank_0.jsonl", lambda v: v.update(token_ids=[], loss_mask=[]), "between 1 and"),
        (
            "traces.jsonl",
            lambda v: v["nodes"][1].update(parent=1),
            r"`nodes\[1\].parent`: .*earlier node \(below 1\), found 1",
        ),
        (
            "traces.jsonl",
            lambda v: v["nodes"][1].update(mask=[True]),
            r"`nodes\[1\].mask`: must have one value for each of 2",
        ),
        ("traces.jsonl", lambda v: v.update(nodes=None), "field `nodes`: must be an array of messages, found null"),
        ("nemo_gym.jsonl", lambda v: v["response"].update(output="x"), 'field `response.output`: .*found "x"'),
        (
            "nemo_gym.jsonl",
            lambda v: v["response"]["output"][0].pop("prompt_token_ids"),
            r"field `response.output\[0\].prompt_token_ids`: is required",
        ),
        ("verl_21.jsonl", lambda v: v.update(output=None), "field `output`: must be a text, found null"),
        ("completions.jsonl", lambda v: v.pop("prompt"), "field `prompt`: must be a text or messages"),
    ],
)
def test_a_broken_line_is_named(name: str, change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    values = changed(name, change)
    path = write_json(tmp_path / Path(name).name, *values)
    with pytest.raises(FileFormatError, match=rf"{path.name}, line 2.*{message}.*--skip-bad"):
        import_rows(path)
    good = import_rows(write_json(tmp_path / f"good_{path.name}", values[0]))
    found = import_rows(path, skip_bad=True)
    assert found.lengths_R.tolist() == good.lengths_R.tolist()
    assert [line.where for line in found.skipped] == [f"{path}, line 2"]


@pytest.mark.parametrize(
    "text, lengths",
    [("812\n96\n", [812, 96]), ("812", [812]), ('{"length": 5}\n', [5]), ("length\n5\n", [5]), ("step,len\n1,5", [5])],
)
def test_a_byte_order_mark_is_passed_over(text: str, lengths: list[int], tmp_path: Path) -> None:
    path = tmp_path / "dump"
    for data in (text.encode("utf-8-sig"), gzip.compress(text.replace("\n", "\r\n").encode("utf-8-sig"))):
        path.write_bytes(data)
        assert import_rows(path).lengths_R.tolist() == lengths


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".jsonl")])
def test_half_a_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    text = (DATA / name).read_text()
    path.write_text(text[: text.index("\n") + 40])  # as after a crash
    with pytest.raises(FileFormatError, match=rf"{name}, line 2: must be one complete JSON object"):
        import_rows(path)
    found = import_rows(path, skip_bad=True)
    assert len(found.skipped) == 1
    assert found.num_rows >= 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("12\nabc\n", 'line 2: must be a whole number of tokens, found "abc"'),
        ("12\n1.5\n", 'line 2: .*found "1.5"'),
        ("12\n0\n", "line 2: a row must have between 1 and 2147483647 tokens, found 0"),
        ("12\nnan\n", 'line 2: .*found "nan"'),
        ("length,id\n5,1\n6\n", "line 3: must have 2 columns as the header has, found 1"),
        ("length,id\n5,1\nx,2\n", 'line 3, field `length`: .*found "x"'),
        ('{"length": 5}\n[1]\n', r"line 2: must be a JSON object, found \[1\]"),
        ('{"length": 5}\n{"length": true}\n', "line 2, field `length`: .*found true"),
        ('{"length": 5}\n{"reward": 1}\n', "line 2: an object must have a length .*found the fields reward"),
        ('{"length": 5}\n\udcff\n', "line 2: must be one complete JSON object"),
    ],
)
def test_half_broken_lengths(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(FileFormatError, match=message):
        import_rows(path)
    found = import_rows(path, skip_bad=True)
    assert found.num_rows == 1
    assert len(found.skipped) == 1


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "must hold at least one row, found an empty file"),
        (b"# nothing\n", "found an empty file"),
        (b'{"a": 1}\n', r"must look like one of evenstep, .*found \"{"),
        (b"1,2,3\n4,5,6\n", "line 1: must be a header, found the numbers"),
        (b"a,b\n1,2\n", "line 1: a column of lengths must be known by its name .*found 'a', 'b'"),
        (
            b"length,id\r10,a\r20,b\r",
            "line 1: must be a header, found new-line .*; end lines with a line feed",
        ),
        ("length,id\n10,a\n".encode("utf-16"), "must be UTF-8 text or Parquet, found UTF-16"),
        (pickle.dumps([1, 2, 3]), "may hold a pickle, which is never loaded"),
        (b"PK\x03\x04", "may hold a pickle"),
        (b"PAR1nonsense", "must be a Parquet file"),
        (b"\x1f\x8b\x08\x00broken", "gzip data"),
        (b"Once upon a time\nthere was a file\n", "line 2"),
    ],
)
def test_files_that_are_none(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        import_rows(path)


def test_a_cut_off_archive(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt.gz"
    # a stream that the first block of lines survives
    whole = gzip.compress("".join(f"{i % 97 + 1}\n" for i in range(200_000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileFormatError, match=r"lengths.txt.gz: the rest of the file must be intact gzip data"):
        import_rows(path)
    found = import_rows(path, skip_bad=True)
    assert 1000 < found.num_rows < 200_000
    assert len(found.skipped) == 1


def test_paths_and_formats_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"absent: cannot be read \(No such file or directory\)"):
        import_rows(tmp_path / "absent")
    with pytest.raises(FileFormatError, match="a folder must hold files to read"):
        import_rows(tmp_path)
    with pytest.raises(FileFormatError, match=r"--format must be one of .*found 'nemorl'; did you mean nemo-rl\?"):
        import_rows(DATA / "traces.jsonl", format="nemorl")
    with pytest.raises(FileFormatError, match="field `input_lengths`: is required"):
        import_rows(DATA / "traces.jsonl", format="nemo-rl")
    with pytest.raises(FileFormatError, match="all files must have one format"):
        import_rows(DATA / "traces.jsonl", DATA / "verl_21.jsonl")
    with pytest.raises(FileFormatError, match="must hold at least one row, found 2 lines that could not be read"):
        import_rows(DATA / "traces.jsonl", format="nemo-rl", skip_bad=True)
    with pytest.raises(FileFormatError, match="--bytes-per-token must be above 0"):
        import_rows(DATA / "verl_21.jsonl", bytes_per_token=0)


def test_a_broken_first_line_does_not_hide_the_format(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text('{"version": 1, "id"\n' + (DATA / "traces.jsonl").read_text())
    with pytest.raises(FileFormatError, match="line 1: must be one complete JSON object"):
        import_rows(path)
    found = import_rows(path, skip_bad=True)
    assert (found.format, found.num_rows, len(found.skipped)) == ("verifiers", 4, 1)


def test_folders_are_read_by_number(tmp_path: Path) -> None:
    for step in (9, 10):
        shutil.copytree(DATA / "token_exports" / "step_3", tmp_path / f"step_{step}")
    (tmp_path / "step_9" / "STABLE").touch()
    found = import_rows(tmp_path)
    assert [line.split("step_")[1].split("/")[0] for line in found.lines] == ["9"] * 3 + ["10"] * 3


def test_what_is_hidden_in_a_folder_is_not_read(tmp_path: Path) -> None:
    for name in ("a/2.jsonl", "a/10.jsonl", "a/1²2.jsonl", "a/.ipynb_checkpoints/2-checkpoint.jsonl", "a/._2.jsonl"):
        path = tmp_path / ".dumps" / name  # the folder that was named may be hidden itself
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"length": 3 if name == "a/10.jsonl" else 7})
    assert sorted(import_rows(tmp_path / ".dumps").lengths_R.tolist()) == [3, 7, 7]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_can_be_read_once_is_refused(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(FileFormatError, match="must be a file, found a pipe or device"):
        import_rows(path)


def test_a_column_is_read_whoever_wrote_the_file(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", {"input": "x", "output": "y" * 400, "num": 12, "uid": "g"})
    found = import_rows(path, column="num")
    assert (found.format, found.lengths_R.tolist(), found.num_approximate) == ("lengths", [12], 0)
    assert found.group_ids == ("g",)


def test_a_column_that_a_format_has_not_is_refused(tmp_path: Path) -> None:
    numbers = tmp_path / "a.txt"
    numbers.write_text("7\n8\n")
    with pytest.raises(FileFormatError, match="--column belongs to formats csv and lengths, found 'x' with numbers"):
        import_rows(numbers, column="x")
    with pytest.raises(FileFormatError, match="found 'x' with verl"):
        import_rows(DATA / "verl_21.jsonl", column="x", format="verl")


def test_names_that_come_again_in_another_step_are_others(tmp_path: Path) -> None:
    values = [{"length": 7, "rollout_id": i // 2, "group_id": 0, "step": step} for step in (1, 2) for i in range(4)]
    found = import_rows(write_json(tmp_path / "a.jsonl", *values))
    assert len(set(found.rollout_ids)) == 4
    assert found.group_ids == ("step 1, 0",) * 4 + ("step 2, 0",) * 4
    once = [value | {"rollout_id": f"{value['step']}/{value['rollout_id']}"} for value in values]
    found = import_rows(write_json(tmp_path / "a.jsonl", *once))
    assert found.rollout_ids[:3] == ("1/0", "1/0", "1/1")


def test_steps_that_some_rows_name_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("length,step\n10,1\n20,\n30,2\n")
    found = import_rows(path)
    assert found.steps_R is None
    assert found.notes == ("1 rows name no step, so the steps of the others are no windows",)


@pytest.mark.parametrize("digits", [30, 400])
def test_a_step_beyond_all_integers_is_refused(digits: int, tmp_path: Path) -> None:
    step = "1" + "0" * digits
    texts = {
        "a.csv": f"length,step\n10,{step}\n",
        "a.jsonl": f'{{"length": 10, "step": {step}}}\n',
        "b.jsonl": f'{{"prompt": "a", "completion": "b", "step": {step}}}\n',
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(FileFormatError, match=rf"{name}, line .: a step must be a 64-bit integer, found 1000"):
            import_rows(path)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_names_of_columns_may_hold_separators(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'"a,;\t b, c;; \t\t"{mark}length\n"x,{mark}"{mark}10\n')
    assert import_rows(path).lengths_R.tolist() == [10]


def test_a_table_may_hold_long_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'text,length\n"{"x, " * 100_000}",10\nabc,20\n')
    assert import_rows(path).lengths_R.tolist() == [10, 20]


@pytest.mark.parametrize("ids", [{"prompt_ids": (1, 2**31)}, {"output_ids": (2**32 - 1,)}])
def test_an_id_that_no_vocabulary_has_is_refused(ids: dict[str, Any], tmp_path: Path) -> None:
    call = {"order": 0, "prompt_ids": (1,), "output_ids": (2,), "logprobs": (-0.5,), "weight_version": 0}
    call |= {"sampling": {"temperature": 1.0}} | ids
    line = {"format_version": 1, "kind": "rollout", "rollout_id": "a", "group_id": "g", "prompt_id": "p"}
    path = write_json(tmp_path / "a.jsonl", line | {"status": "ok", "reward": 1.0, "calls": [call]})
    with pytest.raises(FileFormatError, match=r"line 1: token ids must be within 0 and 2147483647, found \d{10};"):
        import_rows(path, keep_token_ids=True)
    assert import_rows(path).num_rows == 1


def test_ids_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_KEPT_TOKENS", 7)
    found = import_rows(DATA / "token_exports", keep_token_ids=True)
    assert found.token_ids is None
    assert found.num_rows == 3
    assert "layout tree" in found.notes[0]


def test_experts_are_kept_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(name: str, *experts: list[list[int]]) -> RowRecord:
        fields: dict[str, Any] = {"rollout_id": name, "group_id": "g", "reward": 0.0, "logprobs": (0.0, -1.0)}
        fields |= {"token_ids": (5, 6), "loss_mask": (0, 1)}
        return RowRecord(row_id=name, routed_experts=RoutedExperts.of(experts) if experts else None, **fields)

    path = tmp_path / "rows.jsonl"
    write_rows(path, [record("a", [[1]], [[2]]), record("b")])
    found = import_rows(path, keep_token_ids=True)
    assert found.num_with_experts == 1
    assert found.routed_experts == (RoutedExperts.of([[[1]], [[2]]]), None)
    assert import_rows(path).routed_experts == (None, None)
    write_rows(path, [record("a", [[1]], [[2]]), record("b", [[1], [0]], [[2], [0]])])
    with pytest.raises(FileFormatError, match=r"line 2, field `routed_experts`: .* have \(1, 1\), found \(2, 1\)"):
        import_rows(path, keep_token_ids=True)
    write_rows(path, [record("a", [[1]], [[2]]), record("b")])
    monkeypatch.setattr(rows_module, "MAX_KEPT_EXPERT_BYTES", 3)
    found = import_rows(path, keep_token_ids=True)
    assert (found.token_ids, found.routed_experts) == (None, (None, None))
    assert found.notes == ("3 bytes of routed experts are the most that are kept, so layout tree",)


def test_every_format_has_a_case() -> None:
    assert set(FORMATS) - {found for found, _ in CASES.values()} == {"evenstep", "lengths", "csv", "numbers"}


def test_the_example_reads() -> None:
    found = import_rows(ROOT / "examples" / "lengths.csv")
    assert (found.num_rows, len(set(found.rollout_ids)), len(set(found.group_ids or ()))) == (302, 128, 16)
