"""Wrong formulas of images: positions, patches, places, blanks, what continues what.

``contract/test_mutations.py`` puts each into the production code.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_MEDIA = partial(Mutation, module="evenstep.media")
_VISION = partial(Mutation, module="evenstep.train.vision")
_COLLATE = partial(Mutation, module="evenstep.train.collate")
_CALLS = partial(Mutation, module="evenstep.rollout.call_tree")
_WINDOW = partial(Mutation, module="evenstep.train.window")

TEST_MEDIA = "tests/unit/test_media.py::"
TEST_IMAGES = "tests/unit/train/test_images.py::"
TEST_PLANS = "tests/unit/train/test_images_in_plans.py::"
TEST_RANKS = "tests/dist/test_images.py::"

IMAGES: list[Mutation] = [
    _MEDIA(
        name="text goes on after all placeholders",
        why="Text behind an image goes on after as many positions as it has tokens.",
        old="position += max(height, width)",
        new="position += image.num_tokens",
        killed_by=TEST_MEDIA + "test_positions_are_those_of_the_model[qwen2_vl]",
    ),
    _MEDIA(
        name="patches row by row",
        why="Patches come in the order of the image's rows, not block by block.",
        old="blocks.transpose(1, 4, 2, 5, 0, 3, 6)",
        new="blocks.transpose(1, 2, 4, 5, 0, 3, 6)",
        killed_by=TEST_MEDIA + "test_patches_pixel_by_pixel",
    ),
    _CALLS(
        name="any image continues",
        why="Calls are compared by ids alone, whatever stands on the placeholders.",
        old="keys.setdefault(image.digest, -2 - len(keys))",
        new='keys.setdefault("", -2)',
        killed_by=TEST_MEDIA + "test_another_image_on_the_same_tokens_is_no_continuation",
    ),
    _WINDOW(
        name="patches for nothing",
        why="Patches take no room, so that a micro-batch of images exceeds the budget.",
        old=".astype(np.int64) + patches_R",
        new=".astype(np.int64)",
        killed_by=TEST_IMAGES + "test_patches_take_room[packed]",
        is_long=True,
    ),
    _WINDOW(
        name="a rectangle of each row's own patches",
        why="A long text beside rows of many patches computes more than the longest sum of both, times the rows.",
        old="room.widths(tokens_R) + patches_R.max()",
        new="room.widths(tokens_R) + patches_R",
        killed_by=TEST_IMAGES + "test_what_is_computed_keeps_to_the_budget[padded-1-400]",
        is_long=True,
    ),
    _WINDOW(
        name="a blank image takes no room",
        why="A micro-batch of text alone exceeds the budget by the blank image that it runs.",
        old="row.num_patches or blank",
        new="row.num_patches",
        killed_by=TEST_PLANS + "test_what_is_computed_keeps_to_any_budget[packed]",
        is_long=True,
    ),
    _WINDOW(
        name="patches beside a rung for nothing",
        why="A packed micro-batch is widened to a rung of the ladder, and its patches stand beside that.",
        old="(1.0 - (options.bucket or 0.0))",
        new="1.0",
        killed_by=TEST_PLANS + "test_what_is_computed_keeps_to_any_budget[packed]",
        is_long=True,
    ),
    _COLLATE(
        name="images one token late",
        why="An image's features begin a token after its place.",
        old="(image, index[image.start : image.stop])",
        new="(image, index[image.start + 1 : image.stop + 1])",
        killed_by=TEST_RANKS + "test_gradients_are_those_of_one_row_at_a_time_on_two_ranks",
        is_long=True,
    ),
    _VISION(
        name="a blank image counts",
        why="The blank image of a micro-batch without images is seen by its rows.",
        old="flat_NH + 0.0 * features_NH.sum()",
        new="flat_NH + features_NH.sum()",
        killed_by=TEST_RANKS + "test_gradients_are_those_of_one_row_at_a_time_on_two_ranks",
        is_long=True,
    ),
]
