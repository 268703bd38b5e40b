"""What a replay replays: the windows of a run, or of a file of rollouts, as they were trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from evenstep.config import Config
from evenstep.errors import CollectionError, FileFormatError
from evenstep.files import read_rollouts
from evenstep.rollout.collector import as_closed, windows_of
from evenstep.rollout.refill import with_vote
from evenstep.train.run_folder import RunFolder
from evenstep.types import Collection, Group, Rollout, Window

__all__ = ["Recording", "is_run_folder", "read_recording"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Windows in the order they were trained, every epoch's pass one of its own."""

    windows: tuple[Window, ...]
    num_unused_rollouts: int  # of a file, too few for another window


def is_run_folder(path: Path) -> bool:
    """Whether a path is the folder of a run, and not a file of rollouts."""
    return path.is_dir()


def read_recording(
    source: Path, config: Config, *, num_windows: int | None = None, first_collection: int = 0
) -> Recording:
    """Read the windows of a run folder, or of a file of rollouts.

    A run's collections close with the groups they were closed with. The groups of a file are taken in the order in
    which they appear, ``rollout.num_prompts`` to a collection.

    Args:
        source: run folder or file.
        config: of the run; cuts collections into windows.
        num_windows: most windows; None: all that were recorded.
        first_collection: where to begin.

    Raises:
        FileFormatError: a file is missing or broken, or has no whole window.
        CollectionError: a group lacks rollouts.
    """
    found = _of_run(source, config, first_collection) if is_run_folder(source) else _of_file(source, config)
    train = config.train
    windows: list[Window] = []
    num_unused = 0
    for collection in found:
        if num_windows is not None and len(windows) >= num_windows:
            break
        if not is_run_folder(source) and len(collection.groups) < config.rollout.num_prompts:
            num_unused += len(collection.rollouts)
            continue
        windows += windows_of(
            collection,
            rollouts_per_window=train.rollouts_per_window,
            epochs=train.epochs,
            first_window=len(windows) + first_collection * train.windows_per_collection * train.epochs,
            num_windows=train.windows_per_collection,
        )
    windows = list(islice(windows, num_windows))
    if not windows:
        raise FileFormatError(
            f"{source}: at least one whole window of {train.rollouts_per_window} rollouts was promised (collections "
            f"from {first_collection} on), found {num_unused} rollouts; give a longer recording, or a smaller "
            f"train.rollouts_per_window"
        )
    return Recording(windows=tuple(windows), num_unused_rollouts=num_unused)


def _of_run(folder: Path, config: Config, first_collection: int) -> Iterator[Collection]:
    files = RunFolder(folder)
    known: dict[str, list[Rollout]] = {}  # groups that no collection has used yet: leftovers are carried
    for record in files.read_index():
        index = int(record["collection"])
        for rollout in read_rollouts(files.rollouts / record["file"]):
            known.setdefault(rollout.group_id, []).append(rollout)
        groups = [_group(group_id, known.pop(group_id, []), config, str(folder)) for group_id in record["groups"]]
        if index >= first_collection:
            yield Collection(collection=index, groups=tuple(groups))


def _of_file(path: Path, config: Config) -> Iterator[Collection]:
    by_group: dict[str, list[Rollout]] = {}
    for rollout in read_rollouts(path):
        by_group.setdefault(rollout.group_id, []).append(rollout)
    groups = [_group(group_id, members, config, str(path)) for group_id, members in by_group.items()]
    size = config.rollout.num_prompts
    for index, start in enumerate(range(0, len(groups), size)):
        yield Collection(collection=index, groups=tuple(groups[start : start + size]))


def _group(group_id: str, members: Sequence[Rollout], config: Config, where: str) -> Group:
    promised = config.rollout.num_generations
    if len(members) != promised:
        raise CollectionError(
            f"{where}: group {group_id} must have rollout.num_generations = {promised} rollouts, found {len(members)}; "
            f"replay whole groups, with the configuration they were recorded with"
        )
    rollouts = tuple(as_closed(with_vote(rollout, config.rollout.truncated)) for rollout in members)
    return Group(group_id=group_id, prompt_id=rollouts[0].prompt_id, rollouts=rollouts)
