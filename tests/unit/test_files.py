"""What is locked here:

1. Rollouts, rows and lengths come back equal, plain and gzipped, unknown fields included.
2. Every malformed line raises, naming file, line, field, what was found and a fix.
3. A file cut at any byte is either read up to its last complete line, on request, or refused as cut off.
4. Appending after a crash needs the explicit repair and loses only the incomplete line.
5. NaN, infinities and values a reader would refuse are never written, and a failed write leaves nothing behind.
6. Reading streams: a wrong line does not hide the lines before it.
7. docs/files.md names every field.
8. A name that leads to a device, a pipe or another file stays what it is; no text is too odd to be written.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import FileFormatError
from evenstep.files import (
    RolloutWriter,
    RowLengths,
    RowRecord,
    read_lengths,
    read_rollouts,
    read_rows,
    write_lengths,
    write_rollouts,
    write_rows,
)
from evenstep.files.lines import CallObject, LengthsLine, RolloutLine, RowLine, SamplingObject
from evenstep.files.writing import check_place, write_text
from evenstep.types import BREAK_REASONS, Call, Rollout, Sampling
from evenstep.validation import MAX_DEPTH


def make_rollout(rollout_id: str = "p0/0", **changes: Any) -> Rollout:
    calls = (
        Call(order=0, prompt_ids=(5, 6), output_ids=(7, 2), logprobs=(-0.5, -0.1), weight_version=3),
        Call(
            order=2,
            prompt_ids=(5, 9),
            output_ids=(4,),
            logprobs=(-0.1 - 0.2,),
            parent=0,
            break_reason="compaction",
            finish_reason="length",
            sampling=Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=16, seed=12, extra={"min_p": 0.1}),
            extra={"latency_s": 0.25},
        ),
    )
    values: dict[str, Any] = {"rollout_id": rollout_id, "group_id": "p0", "prompt_id": "prompt-0", "calls": calls}
    values |= {"reward": 0.1, "info": {"pages": [1, 2], "note": "é"}, "extra": {"tool": {"name": "x", "ok": None}}}
    return Rollout(**(values | changes))


def valid_line(**changes: Any) -> dict[str, Any]:
    call = {"order": 0, "prompt_ids": [5, 6], "output_ids": [7, 2], "logprobs": [-0.5, -0.1]}
    call |= {"weight_version": 0, "sampling": {"temperature": 1.0}}
    line = {"format_version": 1, "kind": "rollout", "rollout_id": "a", "group_id": "g", "prompt_id": "p"}
    return line | {"status": "ok", "reward": 1.0, "calls": [call]} | changes


def valid_call(**changes: Any) -> dict[str, Any]:
    return valid_line()["calls"][0] | changes


def with_call(**changes: Any) -> dict[str, Any]:
    return valid_line(calls=[valid_call(**changes)])


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rollouts = [
        make_rollout(),
        make_rollout("p0/1", status="failed", reward=None, calls=(), status_reason="tool crashed"),
        make_rollout("p0/2", status="truncated", reward=-3),
    ]
    write_rollouts(path, rollouts)
    assert list(read_rollouts(path)) == rollouts
    rows = [
        RowRecord(
            row_id="a", rollout_id="r", group_id="g", reward=1.0, token_ids=(1, 2), loss_mask=(0, 1),
            logprobs=(0.0, -0.5), advantage=-0.25, extra={"source": "import"},
        )
    ]  # fmt: skip
    write_rows(path, rows)
    assert list(read_rows(path)) == rows
    lengths = [RowLengths(row_id="a", rollout_id="r", group_id="g", num_tokens=9, num_trained_tokens=4, extra={"x": 1})]
    write_lengths(path, lengths)
    assert list(read_lengths(path)) == lengths
    assert [entry.name for entry in tmp_path.iterdir()] == [name]  # no temporary file stays


def test_line_holds_the_whole_format(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_rollouts(path, [make_rollout()])
    line = json.loads(path.read_text())
    assert line["format_version"] == 1
    assert line["tool"] == {"name": "x", "ok": None}  # unknown fields lie beside the known ones
    call = line["calls"][1]
    assert (call["order"], call["parent"], call["weight_version"], call["break_reason"]) == (2, 0, 0, "compaction")
    assert call["sampling"] == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 16, "seed": 12, "min_p": 0.1
    }  # fmt: skip


def test_gzip_bytes_depend_on_the_content_alone(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.gz", [make_rollout()])
    write_rollouts(tmp_path / "b.gz", [make_rollout()])
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


finite_floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
free_json = st.dictionaries(st.text(min_size=1).map(lambda text: "x-" + text), json_values, max_size=3)


@st.composite
def calls(draw: st.DrawFn, order: int) -> Call:
    output_ids = tuple(draw(st.lists(st.integers(0, 2**40), max_size=4)))
    logprob = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
    return Call(
        order=order,
        prompt_ids=tuple(draw(st.lists(st.integers(0, 50_000), min_size=1, max_size=4))),
        output_ids=output_ids,
        logprobs=tuple(draw(st.lists(logprob, min_size=len(output_ids), max_size=len(output_ids)))),
        parent=draw(st.none() | st.integers(0, order - 1)) if order else None,
        weight_version=draw(st.integers(0, 9)),
        sampling=Sampling(
            temperature=draw(st.floats(0, 2)), seed=draw(st.none() | st.integers()), extra=draw(free_json)
        ),
        break_reason=draw(st.none() | st.sampled_from(BREAK_REASONS)),
        finish_reason=draw(st.none() | st.text()),
        extra=draw(free_json),
    )


@given(data=st.data(), suffix=st.sampled_from(["", ".gz"]))
def test_any_rollout_comes_back_bit_equal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.jsonl{suffix}"
    rollout = Rollout(
        rollout_id=data.draw(st.text(min_size=1)),
        group_id=data.draw(st.text(min_size=1)),
        prompt_id="p",
        calls=tuple(data.draw(calls(order)) for order in range(data.draw(st.integers(0, 3)))),
        reward=data.draw(finite_floats),
        info=data.draw(free_json),
        extra=data.draw(free_json),
    )
    write_rollouts(path, [rollout])
    assert list(read_rollouts(path)) == [rollout]


BAD_LINES = {
    "unknown version": (valid_line(format_version=2), "format_version", "found 2", "newer"),
    "version as text": (valid_line(format_version="1"), "format_version", 'found "1"', "correct"),
    "other kind": (valid_line(kind="row"), "kind", 'found "row"', "read_rows"),
    "no status": ({k: v for k, v in valid_line().items() if k != "status"}, "status", "no such field", "add it"),
    "no reward field": ({k: v for k, v in valid_line().items() if k != "reward"}, "reward", "no such field", "failed"),
    "null reward": (valid_line(reward=None), "reward", "found null", "failed"),
    "reward is NaN": (json.dumps(valid_line(reward=float("nan"))), "reward", "found NaN", "NaN and infinities"),
    "boolean reward": (valid_line(reward=True), "reward", "found true", "correct"),
    "unknown status": (valid_line(status="done"), "status", 'found "done"', "correct"),
    "empty id": (valid_line(group_id=""), "group_id", 'found ""', "correct"),
    "NaN in info": (json.dumps(valid_line(info={"a": [float("inf")]})), "info.a[0]", "found Infinity", "no place"),
    "NaN in an unknown field": (json.dumps(valid_line(speed=float("nan"))), "speed", "found NaN", "no place"),
    "calls is an object": (valid_line(calls={}), "calls", "found {}", "correct"),
    "negative token": (with_call(output_ids=[7, -2]), "calls[0].output_ids[1]", "found -2", "correct"),
    "float token": (with_call(prompt_ids=[5.0]), "calls[0].prompt_ids[0]", "found 5.0", "correct"),
    "empty prompt": (with_call(prompt_ids=[]), "calls[0].prompt_ids", "found []", "correct"),
    "one log-prob too few": (with_call(logprobs=[-1.0]), "calls[0].logprobs", "found 1 values", "engine"),
    "null log-prob": (with_call(logprobs=[-1, None]), "calls[0].logprobs[1]", "found null", "logarithm"),
    "probability": (with_call(logprobs=[0.9, -1]), "calls[0].logprobs[0]", "found 0.9", "logarithm"),
    "NaN log-prob": (
        json.dumps(with_call(logprobs=[-1, float("nan")])), "calls[0].logprobs[1]", "found NaN", "NaN",
    ),
    "no sampling": (
        valid_line(calls=[{k: v for k, v in valid_call().items() if k != "sampling"}]),
        "calls[0].sampling", "no such field", "temperature",
    ),
    "no weight version": (
        valid_line(calls=[{k: v for k, v in valid_call().items() if k != "weight_version"}]),
        "calls[0].weight_version", "no such field", "optimizer steps",
    ),
    "unknown break reason": (
        with_call(break_reason="context"), "calls[0].break_reason", 'found "context"', "correct",
    ),
    "order twice": (valid_line(calls=[valid_call(), valid_call()]), "calls[1].order", "found 0", "number the calls"),
    "parent of nobody": (with_call(parent=4), "calls[0].parent", "found 4", "name the call"),
    "parent comes later": (
        valid_line(calls=[valid_call(parent=1), valid_call(order=1)]), "calls[0].parent", "found 1", "name the call",
    ),
    "not JSON": ('{"format_version": 1, "kind": rollout}', "JSON", "expected value", "line of its own"),
    "an array": ("[1]", "object", "found [1]", "one object per line"),
    "blank": ("", "JSON object", "blank line", "remove it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_rollout_line(tmp_path: Path, case: str) -> None:
    line, *expected = BAD_LINES[case]
    path = write_lines(tmp_path / "rollouts.jsonl", valid_line(rollout_id="first"), line, valid_line(rollout_id="last"))
    reader = read_rollouts(path)
    assert next(reader).rollout_id == "first"
    with pytest.raises(FileFormatError) as error:
        next(reader)
    for text in (f"{path}, line 2", *expected):
        assert text in str(error.value)


ROW = {"format_version": 1, "kind": "row", "row_id": "a", "rollout_id": "r", "group_id": "g", "reward": 0.5}
ROW |= {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -0.5]}
LENGTHS = {"format_version": 1, "kind": "lengths", "row_id": "a", "rollout_id": "r", "group_id": "g"}
LENGTHS |= {"num_tokens": 4, "num_trained_tokens": 2}


@pytest.mark.parametrize(
    "reader, line, field, found",
    [
        (read_rows, ROW | {"loss_mask": [0]}, "loss_mask", "found 1 values"),
        (read_rows, ROW | {"loss_mask": [0, 2]}, "loss_mask[1]", "found 2"),
        (read_rows, ROW | {"loss_mask": [1, 1]}, "loss_mask[0]", "found 1"),
        (read_rows, ROW | {"logprobs": [0.0]}, "logprobs", "found 1 values"),
        (read_rows, ROW | {"token_ids": []}, "token_ids", "found []"),
        (read_rows, ROW | {"reward": None}, "reward", "found null"),
        (read_rows, LENGTHS, "kind", 'found "lengths"'),
        (read_lengths, LENGTHS | {"num_tokens": 0}, "num_tokens", "found 0"),
        (read_lengths, LENGTHS | {"num_trained_tokens": 4}, "num_trained_tokens", "found 4"),
        (read_lengths, LENGTHS | {"num_tokens": 4.5}, "num_tokens", "found 4.5"),
    ],
)
def test_bad_row_or_lengths_line(tmp_path: Path, reader: Any, line: Any, field: str, found: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", line)
    with pytest.raises(FileFormatError) as error:
        list(reader(path))
    assert f"line 1, field `{field}`" in str(error.value)
    assert found in str(error.value)


def test_ids_are_unique_in_a_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", valid_line(), valid_line(rollout_id="b"), valid_line())
    with pytest.raises(FileFormatError, match=r'line 3, field `rollout_id`.*"a" also on line 1'):
        list(read_rollouts(path))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"absent\.jsonl: cannot be read \(No such file"):
        list(read_rollouts(tmp_path / "absent.jsonl"))
    with pytest.raises(FileFormatError, match="cannot be read"):
        list(read_rollouts(tmp_path))
    (tmp_path / "a.gz").write_text(json.dumps(valid_line()) + "\n")
    with pytest.raises(FileFormatError, match="promises intact gzip data"):
        list(read_rollouts(tmp_path / "a.gz", allow_truncated_tail=True))
    with pytest.raises(FileFormatError, match="promises intact gzip data"):
        RolloutWriter(tmp_path / "a.gz")


def test_corrupt_gzip_is_not_taken_for_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    with RolloutWriter(path) as writer:
        writer.append([make_rollout("a")])
        writer.append([make_rollout("b")])
    data = bytearray(path.read_bytes())
    data[-6] ^= 0xFF  # the last member's checksum
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match="promises intact gzip data"):
        list(read_rollouts(path, allow_truncated_tail=True))


def test_a_last_line_without_newline_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(valid_line()))
    assert len(list(read_rollouts(path))) == 1
    with RolloutWriter(path) as writer:
        writer.append([make_rollout("b")])
    assert [rollout.rollout_id for rollout in read_rollouts(path)] == ["a", "b"]
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress(json.dumps(valid_line()).encode()))
    with RolloutWriter(zipped) as writer:
        writer.append([make_rollout("b")])
    assert [rollout.rollout_id for rollout in read_rollouts(zipped)] == ["a", "b"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_cut_at_every_byte(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    ends = [0]
    with RolloutWriter(path) as writer:
        for name in ("a", "b", "c"):
            writer.append([make_rollout(name, calls=(), info={}, extra={})])
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        names = [rollout.rollout_id for rollout in read_rollouts(path, allow_truncated_tail=True)]
        assert len(names) >= sum(end <= size for end in ends[1:])  # what was synced is there
        assert names == list("abc"[: len(names)])
        # a plain line is whole with its closing brace, one byte before its newline
        is_cut = size not in ends and (suffix == ".gz" or size + 1 not in ends)
        if is_cut:
            with pytest.raises(FileFormatError, match=f"cut off after {len(names)} complete lines"):
                list(read_rollouts(path))
            with pytest.raises(FileFormatError, match="repair_truncated_tail=True"):
                RolloutWriter(path)
            assert path.stat().st_size == size
        with RolloutWriter(path, repair_truncated_tail=True) as writer:
            assert writer.was_repaired == is_cut
            writer.append([make_rollout("next")])
        assert [rollout.rollout_id for rollout in read_rollouts(path)] == [*names, "next"]


@pytest.mark.parametrize("num_zeros", [1, 4096, 200_000])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_zeros_where_a_crash_lost_what_was_appended(tmp_path: Path, suffix: str, num_zeros: int) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    append_rollouts(path, [make_rollout("first")])
    with path.open("ab") as file:
        file.write(bytes(num_zeros))
    assert [rollout.rollout_id for rollout in read_rollouts(path, allow_truncated_tail=True)] == ["first"]
    with pytest.raises(FileFormatError, match="repair_truncated_tail=True"):
        RolloutWriter(path)
    with RolloutWriter(path, repair_truncated_tail=True) as writer:
        assert writer.was_repaired
        writer.append([make_rollout("second")])
    assert [rollout.rollout_id for rollout in read_rollouts(path)] == ["first", "second"]
    with path.open("ab") as file:
        file.write(bytes(10) + b"x")  # that is no crash
    with pytest.raises(FileFormatError):
        RolloutWriter(path) if suffix else list(read_rollouts(path))


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("where", ["info", "extra", "call", "sampling"])
def test_what_is_nested_as_deep_as_may_be_comes_back(tmp_path: Path, where: str) -> None:
    given = {where: {"a": nested(MAX_DEPTH - 1)}}
    sampling = Sampling(extra=given.get("sampling", {}))
    call = Call(order=0, prompt_ids=(1,), output_ids=(), logprobs=(), sampling=sampling, extra=given.get("call", {}))
    rollout = make_rollout(calls=(call,), info=given.get("info", {}), extra=given.get("extra", {}))
    write_rollouts(tmp_path / "a.jsonl", [rollout])
    assert list(read_rollouts(tmp_path / "a.jsonl")) == [rollout]


def append_rollouts(path: Path, rollouts: list[Rollout]) -> None:
    with RolloutWriter(path) as writer:
        writer.append(rollouts)


@pytest.mark.parametrize(
    "rollout, found",
    [
        (make_rollout("bad", reward=float("nan")), "reward"),
        (make_rollout("bad", info={"a": float("inf")}), "info.a"),
        (make_rollout("bad", info={"a": object()}), "info.a"),
        (make_rollout("bad", info={"a": ["\ud83d"]}), r"`info.a[0]`: must be UTF-8 text, found "),
        (make_rollout("bad", info={"a": {"\ud83d": 1}}), r"`info.a`: must have keys of UTF-8 text, found "),
        (make_rollout("bad", extra={"a": "\udc00"}), r"`a`: must be UTF-8 text, found "),
        (make_rollout("bad", status_reason="caf\udce9"), r"`status_reason`: must be UTF-8 text, found "),
        (make_rollout("bad", info={"a": nested(MAX_DEPTH)}), f"must be nested at most {MAX_DEPTH} deep"),
        (make_rollout("bad", extra={"a": nested(2_000)}), "nested too deep"),
        (make_rollout("bad", extra={"a": float("nan")}), "`a"),
        (make_rollout("bad", extra={"reward": 1.0}), "known fields, found ['reward']"),
        (make_rollout("bad", reward=None), "reward"),
        (make_rollout("bad", calls=(Call(order=0, prompt_ids=(1,), output_ids=(1,), logprobs=()),)), "found 0 values"),
    ],
)
def test_what_a_reader_refuses_is_not_written(tmp_path: Path, rollout: Rollout, found: str) -> None:
    path = tmp_path / "a.jsonl"
    write_rollouts(path, [make_rollout("old")])
    before = path.read_bytes()
    for write in (write_rollouts, append_rollouts):
        with pytest.raises(FileFormatError, match="rollout 'bad'") as error:
            write(path, [make_rollout("good"), rollout])
        assert found in str(error.value)
        assert path.read_bytes() == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


def test_lists_are_written_like_tuples(tmp_path: Path) -> None:
    call = Call(order=0, prompt_ids=[1], output_ids=[2], logprobs=[-1.0])  # type: ignore[arg-type]
    write_rollouts(tmp_path / "a.jsonl", [make_rollout(calls=(call,))])
    (rollout,) = read_rollouts(tmp_path / "a.jsonl")
    assert rollout.calls[0].output_ids == (2,)


def test_the_page_about_files_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    for model in (RolloutLine, CallObject, SamplingObject, RowLine, LengthsLine):
        for name in model.model_fields:
            assert f"`{name}`" in page, name


def test_an_id_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lengths = RowLengths(row_id="a", rollout_id="r", group_id="g", num_tokens=3, num_trained_tokens=1)
    write_lengths(path, [lengths])
    before = path.read_bytes()
    with pytest.raises(FileFormatError, match=r"field `row_id`: must be unique in the file, found 'a' twice"):
        write_lengths(path, [lengths, lengths])
    rollout = Rollout(rollout_id="r", group_id="g", prompt_id="p", reward=1.0)
    with pytest.raises(FileFormatError, match=r"field `rollout_id`: must be unique in the file, found 'r' twice"):
        write_rollouts(path, [rollout, rollout])
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_an_id_is_appended_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    first, second = make_rollout('of "Ω"\\'), make_rollout("second")
    with RolloutWriter(path) as writer:
        writer.append([first])
        for batch in ([first], [second, first], [second, second]):
            with pytest.raises(FileFormatError, match="field `rollout_id`: must be unique in the file"):
                writer.append(batch)
        writer.append(iter([second]))  # the batches with it were refused as a whole
    foreign = {"kind": "rollout", **valid_line(rollout_id="foreign")}  # its fields in another order
    if name == "a.jsonl":
        with path.open("a") as file:
            file.write(json.dumps(foreign) + "\n")
    with RolloutWriter(path) as writer:  # a program that is run again
        for rollout in (first, second) + ((make_rollout("foreign"),) if name == "a.jsonl" else ()):
            with pytest.raises(FileFormatError, match="must be unique in the file"):
                writer.append([rollout])
        writer.append([make_rollout("third")])
    assert [rollout.rollout_id for rollout in read_rollouts(path)][:2] == [first.rollout_id, "second"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, name: str) -> None:
    resource = pytest.importorskip("resource")

    def text(num_bytes: int) -> str:
        return random.Random(0).randbytes(num_bytes).hex()

    path = tmp_path / name
    first, second = (
        Rollout(
            rollout_id=name,
            group_id="g",
            prompt_id="p",
            calls=(),
            reward=1.0,
            info={"x": random.Random(0).randbytes(n).hex()},
        )
        for name, n in (("first", 1), ("second", 20_000))
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with RolloutWriter(path) as writer:
        writer.append([first])
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1000, hard))
        try:
            for _ in range(2):
                with pytest.raises(OSError, match="too large"):
                    writer.append([second])
                assert path.read_bytes() == before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        writer.append([second])
    assert [rollout.rollout_id for rollout in read_rollouts(path)] == ["first", "second"]


def test_8_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "whole\n")
    reader.join(10)
    assert read == ["whole\n"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_8_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "plan.json", tmp_path / "elsewhere" / "plan.json"
    link.symlink_to(target)
    for text in ("first", "second"):  # to a file that is not there yet, and to one that is
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_8_a_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileFormatError, match=r"cannot be written there \(Is a directory"):
        write_text(name, "x")


def test_8_half_a_pair_is_written_as_an_escape(tmp_path: Path) -> None:
    write_text(tmp_path / "a.svg", "x\udcff\n")
    assert (tmp_path / "a.svg").read_bytes() == b"x\\udcff\n"


def test_an_id_beyond_all_integers_is_refused(tmp_path: Path) -> None:
    call = Call(order=0, prompt_ids=(5, 2**63), output_ids=(7,), logprobs=(-0.5,))
    with pytest.raises(FileFormatError, match=r"field `calls\[0\].prompt_ids\[1\]`: must be < 9223372036854775808"):
        write_rollouts(tmp_path / "a.jsonl", [make_rollout(calls=(call,))])


def test_8_a_place_is_judged_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "absent" / "a.json", "No such file or directory"),
        (tmp_path / "file" / "a.json", "Not a directory"),
    ):
        with pytest.raises(FileFormatError, match=re.escape(f"{place}: cannot be written there ({reason})")):
            check_place(place)
    with pytest.raises(FileFormatError, match="Not a directory"):
        check_place(tmp_path / "file" / "b" / "a.json", makes_folders=True)
    check_place(tmp_path / "absent" / "b" / "a.json", makes_folders=True)
    for place in (None, tmp_path / "file", tmp_path / "new", Path("/dev/stdout")):
        check_place(place)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]
