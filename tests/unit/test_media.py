"""Images in rows, calls and files. What is locked here:

1. A row's images stand in order on runs of placeholders that are never trained; patches, size and digest agree.
2. Patches are cut block by block, as written out pixel by pixel; positions are those of the model's own code.
3. Calls: a prompt with another image on the same placeholders does not continue; a segment has the images of its
   tokens, and one whose images were compacted away has none.
4. Files: pixels lie beside the file, each different image once; what is missing, changed or executable is refused.
"""

from __future__ import annotations

import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_vision as tiny
from evenstep import Call, Rollout, Row
from evenstep.errors import FileFormatError, RowError, SegmentationError
from evenstep.files import RolloutWriter, read_rollouts, write_rollouts
from evenstep.files.pixels import read_pixels, write_pixels
from evenstep.imports.own import own_reader
from evenstep.media import Media, VisionSpec, rope_positions
from evenstep.rollout.segments import rows_of, segmentation_of

IMAGE, START, END = tiny.IMAGE, tiny.START, tiny.END


def at(image: Media, start: int) -> Media:
    return Media(start=start, num_tokens=image.num_tokens, grid=image.grid, pixels=image.pixels)


def row(media: list[Media], ids: list[int] | None = None, mask: list[int] | None = None) -> Row:
    ids = [1, IMAGE, IMAGE, 2, IMAGE, 3, 4] if ids is None else ids
    mask = [0] * (len(ids) - 1) + [1] if mask is None else mask
    return Row(row_id="r", rollout_id="o", group_id="g", token_ids=ids, loss_mask=mask, media=media)


WIDE, SMALL = tiny.picture(1, height=4, width=8), tiny.picture(2)  # two tokens, one token


def test_a_row_knows_its_images() -> None:
    found = row([at(WIDE, 1), at(SMALL, 4)])
    assert [(image.start, image.stop) for image in found.media] == [(1, 3), (4, 5)]
    assert found.num_patches == 8 + 4
    assert row([], ids=[1, 2, 3]).media == ()


@pytest.mark.parametrize(
    "media, mask, message",
    [
        ([at(SMALL, 4), at(WIDE, 1)], None, "in the order of their tokens"),
        ([at(WIDE, 1), at(SMALL, 2)], None, "in the order of their tokens"),
        ([at(WIDE, 1), at(SMALL, 3)], None, "at least one token between"),
        ([at(WIDE, 6)], None, "takes tokens 6 to 7, and there are 7"),
        ([at(WIDE, 2)], None, r"2 equal placeholder ids from token 2 on, found ids \[2, 20\]"),
        ([at(WIDE, 1)], [0, 0, 1, 0, 0, 0, 1], "never sampled, found loss_mask 1"),
    ],
)
def test_rows_with_misplaced_images_are_refused(media: list[Media], mask: list[int] | None, message: str) -> None:
    with pytest.raises(RowError, match=message):
        row(media, mask=mask)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"pixels": WIDE.pixels[:3]}, "has pixels of shape"),  # type: ignore[index]
        ({"pixels": np.full((8, 24), np.inf)}, "finite"),
        ({"digest": SMALL.digest}, "those of another image"),
        ({"pixels": None}, "found neither"),
        ({"start": -1}, "token 0 or later"),
        ({"grid": (1, 0, 4)}, "has patches in time"),
    ],
)
def test_images_that_contradict_themselves_are_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"start": 0, "num_tokens": 2, "grid": (1, 2, 4), "pixels": WIDE.pixels}
    with pytest.raises(RowError, match=message):
        Media(**given | changed)


@pytest.mark.parametrize(
    "media, ids, message",
    [
        ([at(WIDE, 1)], None, "token 4 is an image placeholder .20. without an image, one of 1"),
        ([], [1, 2, IMAGE, 3], "where they were compacted away leave out their tokens"),
        ([Media(start=1, num_tokens=1, grid=(1, 2, 4), pixels=WIDE.pixels)], [1, IMAGE, 2], "which is 2 tokens"),
        ([Media(start=1, num_tokens=1, grid=(2, 2, 2), pixels=WIDE.pixels)], [1, IMAGE, 2], "videos"),
        ([Media(start=1, num_tokens=2, grid=(1, 2, 4), pixels=np.zeros((8, 5)))], [1, IMAGE, IMAGE, 2], "24 numbers"),
        ([at(WIDE, 1)], [1, 5, 5, 2], "placeholder id 20, found 5"),
        ([Media(start=1, num_tokens=2, grid=(1, 2, 4), pixels=None, digest="0" * 32)], [1, IMAGE, IMAGE, 2], "without"),
    ],
)
def test_images_of_another_model_are_refused(media: list[Media], ids: list[int] | None, message: str) -> None:
    found = row(media, ids=ids)
    with pytest.raises(RowError, match=message):
        tiny.spec().check(found.media, found.token_ids, found.loss_mask, "row 'r'")


def test_numbers_of_an_image_are_whole_and_python_s_own() -> None:
    of_numpy = Media(start=np.int64(1), num_tokens=np.int32(2), grid=np.array([1, 2, 4]), pixels=WIDE.pixels)  # type: ignore[arg-type]
    assert repr((of_numpy.start, of_numpy.num_tokens, of_numpy.grid)) == "(1, 2, (1, 2, 4))"
    assert of_numpy == at(WIDE, 1)
    for wrong in ({"start": 1.0}, {"num_tokens": "2"}, {"grid": (1, 2.5, 4)}):
        values: dict[str, Any] = {"start": 1, "num_tokens": 2, "grid": (1, 2, 4), "pixels": WIDE.pixels} | wrong
        with pytest.raises(RowError, match=f"{next(iter(wrong))} is a whole number"):
            Media(**values)


def test_a_moved_image_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    image = at(WIDE, 1)
    monkeypatch.setattr("evenstep.media.pixels_digest", lambda *_: pytest.fail("hashed again"))
    moved = image.moved(5)
    assert (moved.start, image.start) == (5, 1)
    assert moved.pixels is image.pixels
    assert (moved.digest, moved.grid, moved.stop) == (image.digest, image.grid, 7)


def test_a_sampled_placeholder_needs_no_image() -> None:
    found = row([], ids=[1, IMAGE, 2], mask=[0, 1, 1])
    tiny.spec().check(found.media, found.token_ids, found.loss_mask, "row 'r'")


def test_patches_pixel_by_pixel() -> None:
    spec = VisionSpec(
        image_token_id=9,
        start_token_id=7,
        end_token_id=8,
        patch_size=3,
        temporal_patch_size=2,
        merge_size=2,
        num_channels=3,
        mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.25, 2.0),
    )
    image = np.random.default_rng(0).integers(0, 256, size=(6, 12, 3), dtype=np.uint8)
    found = spec.media(image, start=5)
    assert (found.grid, found.num_tokens, found.start) == ((1, 2, 4), 2, 5)
    assert found.pixels is not None
    patch = 0
    for block_column in range(2):  # one block is as high as the image
        for inner_row in range(2):
            for inner_column in range(2):
                numbers = []
                for channel in range(3):
                    for _frame in range(2):
                        for y in range(3):
                            for x in range(3):
                                byte = image[inner_row * 3 + y, (2 * block_column + inner_column) * 3 + x, channel]
                                numbers.append((byte / 255 - spec.mean[channel]) / spec.std[channel])
                assert found.pixels[patch] == pytest.approx(numbers, abs=1e-6)
                patch += 1


@pytest.mark.parametrize(
    "image, message",
    [
        (
            np.zeros((4, 6, 3), dtype=np.uint8),
            "multiples of 4 pixels .2 of a patch x 2 patches of a token., found 4 x 6",
        ),
        (np.zeros((4, 4, 3)), "uint8 .height, width, 3., found float64"),
        (np.zeros((4, 4), dtype=np.uint8), "shape .4, 4."),
        ([[1]], "found list"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.spec().media(image, start=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_positions_are_those_of_the_model(family: str) -> None:
    model = tiny.tiny_vision_model(family)
    for each in tiny.mixed_rows():
        if not each.media:
            continue
        ids = torch.from_numpy(each.token_ids.copy())[None]
        grids = torch.tensor([image.grid for image in each.media])
        expected, _ = model.model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids)
        assert rope_positions(each.num_tokens, each.media, tiny.MERGE).tolist() == expected[:, 0].tolist()


def call(order: int, prompt: list[int], output: list[int], *media: Media, why: Any = None) -> Call:
    logprobs = (-1.0,) * len(output)
    ids = {"prompt_ids": tuple(prompt), "output_ids": tuple(output)}
    return Call(order=order, logprobs=logprobs, media=media, break_reason=why, **ids)


def rollout(*calls: Call, name: str = "o") -> Rollout:
    return Rollout(rollout_id=name, group_id="g", prompt_id="p", reward=1.0, calls=calls)


FIRST = [1, START, IMAGE, IMAGE, END]
SECOND = [*FIRST, 7, 2, START, IMAGE, END]


def test_segments_have_the_images_of_their_tokens() -> None:
    calls = (
        call(0, FIRST, [7], at(WIDE, 2)),
        call(1, SECOND, [8], at(WIDE, 2), at(SMALL, 8)),
        call(2, [1, 2, START, IMAGE, END], [9], at(SMALL, 3), why="compaction"),
        call(3, [1, 6], [5], why="compaction"),
    )
    rows = rows_of([rollout(*calls)])
    assert [[image.start for image in each.media] for each in rows] == [[2, 8], [3], []]
    assert [image.digest for image in rows[0].media] == [WIDE.digest, SMALL.digest]


def test_another_image_on_the_same_tokens_is_no_continuation() -> None:
    other = tiny.picture(9, height=4, width=8)
    changed = rollout(call(0, FIRST, [7], at(WIDE, 2)), call(1, SECOND, [8], at(other, 2), at(SMALL, 8)))
    with pytest.raises(SegmentationError, match="token 2 is of image 1 of the rollout, expected of image 0"):
        segmentation_of(changed)
    found = segmentation_of(changed, on_undeclared="segment")
    assert [segment.num_tokens for segment in found.segments] == [6, 11]
    same = rollout(call(0, FIRST, [7], at(WIDE, 2)), call(1, SECOND, [8], at(WIDE, 2), at(SMALL, 8)))
    assert len(segmentation_of(same).segments) == 1


def test_calls_with_misplaced_images_are_refused() -> None:
    with pytest.raises(SegmentationError, match="call 0: image 0 must stand on 2 equal"):
        segmentation_of(rollout(call(0, FIRST, [7], at(WIDE, 1))))


def test_files_hold_each_image_once(tmp_path: Path) -> None:
    rollouts = [
        rollout(call(0, FIRST, [7], at(WIDE, 2)), call(1, SECOND, [8], at(WIDE, 2), at(SMALL, 8)), name="a"),
        rollout(call(0, FIRST, [6], at(WIDE, 2)), name="b"),
        rollout(call(0, [1, 2], [6]), name="c"),
    ]
    path = tmp_path / "rollouts.jsonl.gz"
    write_rollouts(path, rollouts)
    assert sorted(each.name for each in (tmp_path / "media").iterdir()) == sorted(
        f"{image.digest}.npy" for image in (WIDE, SMALL)
    )
    found = list(read_rollouts(path))
    assert found == rollouts
    assert found[0].calls[1].media[1].pixels is not None
    assert np.array_equal(found[0].calls[1].media[1].pixels, SMALL.pixels)  # type: ignore[arg-type]
    with RolloutWriter(tmp_path / "more.jsonl") as writer:
        writer.append(found)
    lines = [json.loads(line) for line in (tmp_path / "more.jsonl").read_text().splitlines()]
    assert lines[1]["calls"][0]["media"] == [{"start": 2, "num_tokens": 2, "grid": [1, 2, 4], "digest": WIDE.digest}]
    assert "media" not in lines[2]["calls"][0]
    # a dry run counts patches without reading pixels, and shares no tokens of rows with images
    rows = [each for line in lines for each in own_reader("more.jsonl")(json.dumps(line).encode())]
    assert [(each.length, each.token_ids is None) for each in rows if not isinstance(each, str)] == [
        (11 + 12, True),
        (6 + 8, True),
        (3, False),
    ]


def test_a_reader_keeps_no_image_that_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [tiny.picture(seed, height=4, width=8) for seed in (1, 1, 2, 3)]
    write_rollouts(
        tmp_path / "r.jsonl",
        [rollout(call(0, FIRST, [7], at(image, 2)), name=str(i)) for i, image in enumerate(images)],
    )
    read: list[weakref.ref[Any]] = []

    def noted(*args: Any) -> Any:
        found = read_pixels(*args)
        read.append(weakref.ref(found))
        return found

    monkeypatch.setattr("evenstep.files.reading.read_pixels", noted)
    for one in read_rollouts(tmp_path / "r.jsonl"):
        assert sum(each() is not None for each in read) <= 2, one.rollout_id  # its own, and at most the one before
    assert len(list(read_rollouts(tmp_path / "r.jsonl"))) == 4
    assert len(read) == 3 + 3
    found = list(read_rollouts(tmp_path / "r.jsonl", pixels=False))
    assert len(read) == 3 + 3
    assert found[0].calls[0].media[0].pixels is None
    assert found == list(read_rollouts(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("damage", ["missing", "changed", "pickle", "cut", "zip", "huge", "unclosed"])
def test_damaged_pixels_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [rollout(call(0, FIRST, [7], at(WIDE, 2)))])
    pixels = tmp_path / "media" / f"{WIDE.digest}.npy"
    messages = {"missing": "cannot be read", "changed": "not what it was", "pickle": "without objects", "cut": "array"}
    messages |= {"zip": "zip file", "huge": "bytes of numbers were promised", "unclosed": "copy it again"}
    if damage == "missing":
        pixels.unlink()
    elif damage == "changed":
        np.save(pixels, np.zeros((8, 24), dtype=np.float32))
    elif damage == "pickle":
        np.save(pixels, np.array([{}], dtype=object), allow_pickle=True)
    elif damage == "zip":
        pixels.write_bytes(b"PK\x03\x04 and no more")
    elif damage == "huge":  # no memory is asked for
        pixels.write_bytes(pixels.read_bytes().replace(b"(8, 24)", b"(8000000000000, 24)"))
    elif damage == "unclosed":
        pixels.write_bytes(pixels.read_bytes().replace(b"'shape'", b"'shap(("))
    else:
        pixels.write_bytes(pixels.read_bytes()[:-5])
    with pytest.raises(FileFormatError, match=messages[damage]):
        list(read_rollouts(path))


def test_pixels_that_were_cut_off_are_written_again(tmp_path: Path) -> None:
    one = rollout(call(0, FIRST, [7], at(WIDE, 2)))
    pixels = tmp_path / "media" / f"{WIDE.digest}.npy"
    for left in (0, 100, -5):
        write_rollouts(tmp_path / "a.jsonl", [one])
        pixels.write_bytes(pixels.read_bytes()[:left])
        write_rollouts(tmp_path / "b.jsonl", [one])
        assert list(read_rollouts(tmp_path / "b.jsonl")) == [one]
    before = pixels.stat()
    write_rollouts(tmp_path / "c.jsonl", [one])
    assert pixels.stat().st_mtime_ns == before.st_mtime_ns


def test_threads_write_the_same_images_at_once(tmp_path: Path) -> None:
    images = [tiny.picture(seed) for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for written in [pool.submit(write_pixels, tmp_path, images) for _ in range(8)]:
            written.result()
    assert sorted(each.name for each in (tmp_path / "media").iterdir()) == sorted(f"{i.digest}.npy" for i in images)


def test_a_file_name_is_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [rollout(call(0, FIRST, [7], at(WIDE, 2)))])
    path.write_text(path.read_text().replace(WIDE.digest, "../../secret"))
    with pytest.raises(FileFormatError, match=r"media.*digest"):
        list(read_rollouts(path))


def test_pixels_that_are_elsewhere_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    image = Media(start=2, num_tokens=2, grid=(1, 2, 4), pixels=None, digest=WIDE.digest)
    with pytest.raises(FileFormatError, match="written with its pixels"):
        write_rollouts(path, [rollout(call(0, FIRST, [7], image))])
    assert not path.exists()
