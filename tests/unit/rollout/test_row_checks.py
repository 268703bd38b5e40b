"""Locks: consistent rows pass, the seed's 13 rows and 3 fillers among them; each of these is refused, and named, before
anything is written:

1. a missing tag
2. mixed tags: segment tags on some rows only, or one of the two
3. a missing segment
4. a segment twice
5. a segment outside the number of segments
6. unequal numbers of segments in a rollout
7. a wrong owner: a rollout whose rows are in two groups
8. a row id that is not that of its rollout and segment
9. a group that is not of its size
10. unequal group sizes in a group
11. a reward that is not finite, or no number
12. unequal rewards in a rollout
13. unequal original prompts in a group
14. a filler with an owner
15. a filler with a mask
16. a mask that is not of 0 and 1
17. a row id twice
18. booleans as integers
19. fillers only

and besides: unequal lengths, a trained first token, a filler with a reward, ids that are no texts, a failed rollout
with rows, wrong types.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from evenstep.errors import CollectionError, EvenstepError, RowError
from evenstep.files import RowRecord, read_rows, write_rows
from evenstep.rollout.row_checks import CheckedRows, TaggedRow, check_rows

Record = dict[str, Any]


def row(rollout: str, segment: int, num_segments: int, group: str = "g0", **changes: Any) -> Record:
    record: Record = {"row_id": f"{group}/{rollout}/s{segment}", "rollout_id": f"{group}/{rollout}", "group_id": group}
    record |= {"num_generations": 2, "reward": 0.5, "prompt_ids": [1, 2], "is_filler": False}
    record |= {"token_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "segment": segment, "num_segments": num_segments}
    return record | changes


def filler(name: str = "filler 0", **changes: Any) -> Record:
    """As the seed has it: a copy of a real row's input, with reward 0 and nothing in its mask."""
    nobody = {"row_id": name, "rollout_id": None, "num_generations": None, "segment": None, "num_segments": None}
    return row("r0", 0, 1) | nobody | {"is_filler": True, "reward": 0.0, "loss_mask": [0, 0, 0, 0]} | changes


def rows() -> list[Record]:
    """One group: a rollout in two rows, one in a single row, a filler."""
    return [row("r0", 0, 2), row("r0", 1, 2), row("r1", 0, 1, reward=-1.0), filler()]


def changed(index: int, **changes: Any) -> list[Record]:
    records = rows()
    records[index] |= changes
    return records


def without(index: int, *tags: str) -> list[Record]:
    records = rows()
    for tag in tags:
        del records[index][tag]
    return records


def test_the_seeds_batch_passes() -> None:
    """3 prompts × 2 rollouts of (1, 3), (2, 5), (1, 1) segments, filled up from 4, 7, 2 to 4, 8, 4 rows."""
    counts = {"g0": (1, 3), "g1": (2, 5), "g2": (1, 1)}
    records = [
        row(f"r{generation}", segment, num_segments, group)
        for group, numbers in counts.items()
        for generation, num_segments in enumerate(numbers)
        for segment in range(num_segments)
    ]
    fillers = [filler(f"filler {i}", group_id=group) for i, group in enumerate(["g1", "g2", "g2"])]
    expected = CheckedRows(num_rows=13, num_fillers=3, num_rollouts=6, num_groups=3, num_trained_tokens=26)
    assert check_rows([*records, *fillers]) == expected
    assert check_rows([*fillers, *reversed(records)]) == expected
    assert check_rows(iter([TaggedRow(**record) for record in [*records, *fillers]])) == expected


def test_rows_without_segment_tags_are_whole_rollouts() -> None:
    bare = [row("r0", 0, 1), row("r1", 0, 1)]
    for record in bare:
        del record["segment"], record["num_segments"]
    assert check_rows(bare).num_rollouts == 2


def test_arrays_are_lists() -> None:
    arrays = changed(0, **{tag: np.asarray(rows()[0][tag]) for tag in ("prompt_ids", "token_ids", "loss_mask")})
    assert check_rows(arrays) == check_rows(rows())
    with pytest.raises(RowError, match="loss_mask must be an integer"):
        check_rows(changed(0, loss_mask=np.asarray([False, False, True, True])))


def test_a_failed_rollout_counts_in_its_group() -> None:
    alone = [row("r0", 0, 1)]
    with pytest.raises(CollectionError, match="2 rollouts were promised, found 1: g0/r0"):
        check_rows(alone)
    assert check_rows(alone, failed={"g0/r1": "g0"}).num_rollouts == 2
    with pytest.raises(CollectionError, match="'g0/r1': a failed rollout must have no rows"):
        check_rows(rows(), failed={"g0/r1": "g0"})


NAN = float("nan")
CASES: dict[str, list[tuple[list[Record], type[EvenstepError], str]]] = {
    "1 missing tag": [
        (without(0, tag), RowError, f"none of {tag}")
        for tag in TaggedRow.__dataclass_fields__
        if tag not in ("segment", "num_segments")
    ],
    "2 mixed tags": [
        (without(2, "segment", "num_segments"), CollectionError, "1 of 3 rows, the first is 'g0/r1/s0'"),
        (without(2, "segment"), CollectionError, "1 of 3 rows"),
        (changed(2, num_segments=None), CollectionError, "1 of 3 rows"),
    ],
    "3 missing segment": [
        (rows()[1:], CollectionError, "'g0/r0': its rows must be segments 0 to 1, each once; found 1"),
        ([rows()[0], *rows()[2:]], CollectionError, "segments 0 to 1, each once; found 0"),
    ],
    "4 segment twice": [
        (changed(1, segment=0), CollectionError, "found segment 0 in 'g0/r0/s0' and 'g0/r0/s1'"),
        ([*rows()[:2], row("r1", 0, 1), row("r1", 0, 1, row_id="again")], CollectionError, "in 'g0/r1/s0' and 'again'"),
    ],
    "5 segment outside": [
        (changed(1, segment=2, row_id="g0/r0/s2"), CollectionError, "num_segments = 2, found segment 2"),
        (changed(1, segment=-1, row_id="g0/r0/s-1"), RowError, "segment must be an integer ≥ 0"),
    ],
    "6 unequal numbers of segments": [(changed(1, num_segments=3), CollectionError, "num_segments 2 .* and 3")],
    "7 wrong owner": [
        (changed(1, group_id="g1"), CollectionError, "'g0/r0': all of its rows must belong to one group"),
        (changed(1, rollout_id="g0/r1"), RowError, "must be 'g0/r1/s1'"),
        (changed(2, rollout_id="g0/r0"), CollectionError, "segment 0 in 'g0/r0/s0' and 'g0/r1/s0'"),
    ],
    "8 wrong row id": [(changed(1, row_id="g0/r0/s7"), RowError, "'g0/r0/s7': the id of segment 1")],
    "9 wrong group size": [
        ([r | ({} if r["is_filler"] else {"num_generations": 3}) for r in rows()], CollectionError, "= 3 .*found 2"),
        ([*rows(), row("r2", 0, 1)], CollectionError, "2 rollouts were promised, found 3"),
    ],
    "10 unequal group sizes": [(changed(2, num_generations=3), CollectionError, "say the same group size")],
    "11 reward": [
        (changed(1, reward=value), RowError, "'g0/r0/s1': reward must be a finite number")
        for value in (NAN, float("inf"), None, "1.0", True)
    ],
    "12 unequal rewards": [(changed(1, reward=0.25), CollectionError, "reward 0.5 in 'g0/r0/s0' and 0.25")],
    "13 unequal prompts": [
        (changed(2, prompt_ids=[1, 3]), CollectionError, "'g0': .* one original prompt"),
        (changed(1, prompt_ids=[1]), CollectionError, "'g0': .* one original prompt"),
    ],
    "14 filler with an owner": [
        (changed(3, **{tag: value}), RowError, f"belongs to no rollout, found {tag}")
        for tag, value in (("rollout_id", "g0/r0"), ("segment", 0), ("num_segments", 1), ("num_generations", 2))
    ],
    "15 filler with a mask": [(changed(3, loss_mask=[0, 0, 0, 1]), RowError, "trains nothing, found 1 tokens")],
    "16 mask": [
        (changed(0, loss_mask=[0, 0, 2, 1]), RowError, r"only 0 and 1, found \[2\]"),
        (changed(0, loss_mask=[0, 0, 0.5, 1]), RowError, "loss_mask must be an integer"),
        (changed(0, loss_mask=[0, 0, -1, 1]), RowError, "loss_mask must be an integer"),
    ],
    "17 row id twice": [
        ([*rows(), row("r1", 0, 1)], CollectionError, "'g0/r1/s0' twice"),
        ([*rows(), filler()], CollectionError, "'filler 0' twice"),
    ],
    "18 booleans": [
        (changed(0, **{tag: value}), RowError, f"{tag} must be an integer .* found (True|False)")
        for tag, value in (
            ("segment", False),
            ("num_segments", True),
            ("num_generations", True),
            ("token_ids", [1, 2, True, 4]),
            ("prompt_ids", [True, 2]),
            ("loss_mask", [False, False, True, True]),
        )
    ],
    "19 fillers only": [
        ([filler(), filler("filler 1")], CollectionError, "found 2 fillers and nothing else"),
        ([], CollectionError, "found 0 fillers"),
    ],
    "besides": [
        (changed(0, loss_mask=[0, 0, 1]), RowError, "one length, at least 1, found 4 and 3"),
        (changed(0, loss_mask=[], token_ids=[]), RowError, "found 0 and 0"),
        (changed(0, loss_mask=[1, 0, 1, 1]), RowError, r"loss_mask\[0\] must be 0"),
        (changed(3, reward=0.5), RowError, "a filler has no reward, found 0.5"),
        (changed(0, rollout_id=7), RowError, "rollout_id must be a text"),
        (changed(0, rollout_id=None), RowError, "rollout_id must be a text"),
        (changed(0, is_filler=0), RowError, "is_filler must be true or false"),
        (changed(0, token_ids="1234"), RowError, "token_ids must be a list"),
        (changed(0, num_generations=None), RowError, "num_generations must be an integer"),
        (changed(0, token_ids=[1, 2, -3, 4]), RowError, "token_ids must be an integer ≥ 0"),
    ],
}


def test_the_rows_that_are_changed_pass() -> None:
    assert check_rows(rows()) == CheckedRows(
        num_rows=3, num_fillers=1, num_rollouts=2, num_groups=1, num_trained_tokens=6
    )
    as_numpy = [row | {"reward": np.float32(row["reward"]), "token_ids": np.array(row["token_ids"])} for row in rows()]
    assert check_rows(as_numpy) == check_rows(rows())
    assert [name.split()[0] for name in CASES] == [*(str(i) for i in range(1, 20)), "besides"]


@pytest.mark.parametrize("name", list(CASES))
def test_refused(name: str) -> None:
    for records, error, message in CASES[name]:
        with pytest.raises(error, match=message):
            check_rows(records)


def test_nothing_is_written(tmp_path: Any) -> None:
    """A producer that checks first leaves no file behind."""

    def hand_over(records: list[Record]) -> None:
        check_rows(records)
        tags = ("row_id", "rollout_id", "group_id", "reward", "token_ids", "loss_mask")
        real = [r for r in records if not r["is_filler"]]
        lines = [
            RowRecord(**{tag: r[tag] if isinstance(r[tag], str | float) else tuple(r[tag]) for tag in tags},
                      logprobs=tuple(-0.5 * m for m in r["loss_mask"]))
            for r in real
        ]  # fmt: skip
        write_rows(tmp_path / "rows.jsonl", lines)

    for records, error, _ in itertools.chain.from_iterable(CASES.values()):
        with pytest.raises(error):
            hand_over(records)
    assert list(tmp_path.iterdir()) == []
    hand_over(rows())
    assert [record.row_id for record in read_rows(tmp_path / "rows.jsonl")] == ["g0/r0/s0", "g0/r0/s1", "g0/r1/s0"]
