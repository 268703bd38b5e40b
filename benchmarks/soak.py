"""A run that is made miserable for as long as you like, and what must hold at its end: ``python benchmarks/soak.py``.

The environment fails, hangs, gives groups of equal rewards, asks the policy itself (sub-agents, forks, answers that are
taken back) and fills the context until it is compacted, all at random; the run is killed (SIGKILL) and resumed. Half of
the time generation runs ahead of training (``max_staleness``). At the end, from the files of the run alone:

- every collection is exact, each rollout in it was trained once per epoch, and what was stored is what was trained,
  dropped or left over: nothing lost, nothing twice;
- over the rows of each window Σ masks = Σ sampled tokens, and the window's line in ``metrics.jsonl`` says the same
  counts and the same mean reward;
- over the last stretch, which nothing interrupts, the memory that every process has in use is flat. That is what malloc
  says of itself, with Python's own small objects in it too (``PYTHONMALLOC=malloc``). Resident memory stands beside it:
  it grows for minutes more, as the allocator keeps pages that it could not give back. MKL's scratch buffers, which it
  keeps for each thread that multiplies matrices (about 4.2 MiB a piece on AVX-512), are given back after every product
  (``MKL_DISABLE_FAST_MM``): which of them happen to be held would hide what the run itself keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from evenstep.files import read_rollouts
from evenstep.rollout.environment import Score, Start
from evenstep.rollout.refill import CollectionBuilder, RefillOptions
from evenstep.rollout.segments import segmentation_of
from evenstep.types import Rollout

NUM_PROMPTS, NUM_GENERATIONS, WINDOWS, EPOCHS = 4, 4, 2, 2
OPTIONS = RefillOptions(drop_zero_spread=True, num_extra_prompts=2, max_replacements=200)
# name -> (max_staleness, what stands in [compaction])
ARMS = {
    "synchronous": (0, 'policy = "recency"'),
    "ahead": (4, 'policy = "summary"'),
}
CONFIG = """
[run]
dir = {folder!r}
seed = {seed}
num_collections = {num_collections}
[model]
path = "evenstep:ledger"
max_context_tokens = 64
[environment]
name = {environment!r}
[rollout]
num_prompts = 4
num_generations = 4
max_tokens_per_call = 4
max_calls = 14
max_segments = 12
generation_batch_rollouts = 8
drop_zero_spread = true
num_extra_prompts = 2
max_staleness = {max_staleness}
max_replacements = 200
step_timeout_s = 1.0
[compaction]
{compaction}
[plan]
max_tokens_per_gpu = 256
layout = "packed"
[train]
rollouts_per_window = 8
windows_per_collection = 2
epochs = 2
lr = 1e-3
[checkpoint]
every = 2
export = false
[evaluation]
num_tasks = 0
"""
SAMPLE_EVERY_S = 1.0
NOTE_EVERY_S = 3.0
FOLDER_OF_MEMORY = "EVENSTEP_SOAK_MEMORY"
NUM_INTERNED = 1_000_000  # more than the table has places
NUM_PARTS = 12  # of what comes after the warm-up
WARM_UP = 1 / 3  # of the last stretch: caches fill, the allocator settles
ENOUGH_S = 300.0  # a slope over less says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How likely each kind of trouble is in a step."""

    fail: float = 0.02
    hang: float = 0.005
    ask: float = 0.15


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``, over all arenas."""

    _fields_: ClassVar[Any] = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "rest",
        )
    ]


def bytes_in_use() -> int:
    """What malloc has given out in this process and not taken back."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


def renew_interned() -> None:
    """Use up the free places of Python's table of interned strings, so that it has the size at which it stays.

    Every part of a path is interned for as long as the path lives, and a place is not used again before all are used
    up. Then the table is made for three times what it holds: from the size that the imports left behind, once, that
    are some MiB more at a moment that depends on the number of files written so far.
    """
    for number in range(NUM_INTERNED):
        sys.intern(f"evenstep soak {number}")


def note_memory(last: list[float] = [0.0]) -> None:  # noqa: B006 the process's own
    """Add a line (time, bytes in use) to this process's file now and then; cycles that wait for Python are no use."""
    if FOLDER_OF_MEMORY in os.environ and time.time() >= last[0] + NOTE_EVERY_S:
        if not last[0]:
            renew_interned()
        last[0] = time.time()
        gc.collect()
        with Path(os.environ[FOLDER_OF_MEMORY], str(os.getpid())).open("a") as notes:
            notes.write(f"{last[0]} {bytes_in_use()}\n")


class Moody:
    """What goes wrong is drawn anew in each episode, from the system's own entropy: siblings of a group differ."""

    Options: ClassVar[type[Rates]] = Rates
    _random = random.SystemRandom()

    def __init__(self, rates: Rates, index: int) -> None:
        self._rates, self._index = rates, index
        self._left = 1 + index % 9

    @classmethod
    def for_task(cls, options: Rates, *, seed: int, split: str, index: int) -> Moody:
        return cls(options, index)

    def use_model(self, converse: Any) -> None:
        self._converse = converse

    async def reset(self) -> Start:
        note_memory()
        if self._random.random() < self._rates.ask:
            await self._converse().ask("first")
        return Start(task="go", observation="a1 b2 c3")

    async def step(self, action: str) -> str | None:
        fate = self._random.random()
        if fate < self._rates.fail:
            raise RuntimeError("moody")
        if fate < self._rates.fail + self._rates.hang:
            await asyncio.sleep(3600)
        await asyncio.sleep(self._random.random() * 0.002)
        if self._random.random() < self._rates.ask:
            await self._ask()
        self._left -= 1
        return "d4 e5 f6 g7" if self._left > 0 else None

    async def _ask(self) -> None:
        talk = self._converse()
        await talk.ask("sub")
        while self._random.random() < 0.6:
            match self._random.choice(("go on", "fork", "take back", "fail")):
                case "go on":
                    await talk.ask("more")
                case "fork":
                    await talk.fork().ask("other")
                case "take back":
                    await talk.ask("more")
                    talk.take_back()
                case _:
                    if self._random.random() < self._rates.fail:
                        raise RuntimeError("moody between two questions")

    async def score(self, episode: Any) -> Score:
        if self._index % 7 == 0:
            return Score(reward=0.7)  # a group without spread
        return Score(reward=self._random.choice([0.1, 0.35, 0.95]))


# --- running ----------------------------------------------------------------------------------------------------------


class SoakError(Exception):
    """A promise that does not hold."""


@dataclass(slots=True, kw_only=True)
class Memory:
    """Memory of one process over the stretch that nothing interrupts."""

    pid: int
    seconds: list[float] = field(default_factory=list[float])  # since the epoch
    sizes: list[int] = field(default_factory=list[int])  # bytes

    def curve(self, num_points: int = 7) -> list[float]:
        """[num_points] MiB, evenly over the stretch."""
        places = np.linspace(0, len(self.seconds) - 1, num_points).round().astype(int)
        return [round(self.sizes[place] / 2**20, 1) for place in places]

    def in_use(self, folder: Path) -> Memory:
        """The same process in the same time by its own notes; what takes none of them, a launcher, stays as it is."""
        notes = folder / str(self.pid)
        if not notes.exists():
            return self
        found = Memory(pid=self.pid)
        for line in notes.read_text().splitlines():
            at, size = line.split()
            if self.seconds[0] <= float(at) <= self.seconds[-1]:
                found.seconds.append(float(at))
                found.sizes.append(int(size))
        return found

    def measured(self) -> tuple[float, float]:
        """(seconds after the warm-up, bytes per second by which the least of each part of them rises).

        What is kept for good raises the least as well; buffers of some MiB that live for a moment only ever add to it.
        """
        seconds, sizes = np.asarray(self.seconds) - self.seconds[0], np.asarray(self.sizes, dtype=np.float64)
        is_warm = seconds >= seconds[-1] * WARM_UP
        seconds, sizes = seconds[is_warm], sizes[is_warm]
        parts = [part for part in np.array_split(np.arange(seconds.size), NUM_PARTS) if part.size]
        least = np.array([part[sizes[part].argmin()] for part in parts])
        slope = float(np.polyfit(seconds[least], sizes[least], 1)[0]) if least.size > 2 else 0.0
        return float(seconds[-1] - seconds[0]), slope


def descendants(pid: int) -> list[int]:
    """All processes below one, in the order of their ids."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return sorted(found)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True, kw_only=True)
class Arm:
    """One run folder, started, killed and resumed."""

    name: str
    folder: Path
    seed: int
    num_kills: int = 0
    num_starts: int = 0
    num_measured: int = 0  # collections of the stretch that nothing interrupts
    memory: dict[str, Memory] = field(default_factory=dict[str, Memory])

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def memory_folder(self) -> Path:
        return self.folder / "memory"

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def start(self, num_collections: int = 1_000_000) -> subprocess.Popen[bytes]:
        max_staleness, compaction = ARMS[self.name]
        self.memory_folder.mkdir(exist_ok=True)
        config = self.folder / "config.toml"
        config.write_text(
            CONFIG.format(
                folder=str(self.run),
                seed=self.seed,
                num_collections=num_collections,
                environment=f"{Path(__file__).resolve()}:Moody",
                max_staleness=max_staleness,
                compaction=compaction,
            )
        )
        flags = ["--resume"] if self.num_starts else []
        self.num_starts += 1
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "evenstep", "train", str(config), "--ranks", "2", *flags],
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONMALLOC": "malloc",
                    "MKL_DISABLE_FAST_MM": "1",
                    FOLDER_OF_MEMORY: str(self.memory_folder),
                },
                start_new_session=True,
            )

    def watch(self, process: subprocess.Popen[bytes], seconds: float, *, is_measured: bool) -> None:
        """Let it train for so long, counted from the first window that this process trained."""
        metrics = self.run / "metrics.jsonl"
        before, started, first = os.stat(metrics).st_mtime_ns if metrics.exists() else 0, None, 0
        deadline = time.monotonic() + 600
        while started is None or time.monotonic() < started + seconds:
            if process.poll() is not None:
                raise SoakError(f"{self.name}: the run ended by itself with {process.returncode}: {self.output()}")
            # a resume rewrites the file before it trains, so its first change is not yet a window
            is_changed = started is None and metrics.exists() and os.stat(metrics).st_mtime_ns > before
            if is_changed and len(self.lines("metrics.jsonl")) > self._num_at_resume():
                started, first = time.monotonic(), len(self.lines("collections.jsonl"))
            if started is None and time.monotonic() > deadline:
                raise SoakError(f"{self.name}: nothing was trained in 600 seconds: {self.output()}")
            if started is not None and is_measured:
                self._sample(process.pid)
            time.sleep(SAMPLE_EVERY_S if started is not None and is_measured else 0.05)
        if is_measured:
            self.num_measured = len(self.lines("collections.jsonl")) - first

    def _num_at_resume(self) -> int:
        """Windows that the newest checkpoint has behind it."""
        found = sorted((self.run / "checkpoints").glob("*/state.json"))
        return json.loads(found[-1].read_text())["window"] if found else 0

    def _sample(self, pid: int) -> None:
        for rank, child in enumerate([pid, *descendants(pid)]):
            name = "launcher" if rank == 0 else f"process {rank}"
            memory = self.memory.setdefault(name, Memory(pid=child))
            memory.seconds.append(time.time())
            memory.sizes.append(resident_bytes(child))

    def kill(self, process: subprocess.Popen[bytes], draw: random.Random) -> None:
        """End all of it, or the launcher or one rank alone, which must take the others along."""
        below = descendants(process.pid)
        for pid in draw.choice([[process.pid, *below], [process.pid], below[:1], below[-1:]]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in below):
            promise(time.monotonic() < deadline, f"{self.name}: ranks outlive the launcher that was killed")
            time.sleep(0.05)
        self.num_kills += 1

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")[-3000:]


def soak(arm: Arm, seconds: float) -> None:
    """Train for so long: a third of it with kills at random, the rest without; then end it the ordinary way."""
    draw = random.Random(f"{arm.seed} {arm.name}")
    left = seconds / 3
    while left > 0:
        stretch = min(left, draw.uniform(0.1, 0.5) * max(seconds / 3, 20.0))
        process = arm.start()
        arm.watch(process, stretch, is_measured=False)
        arm.kill(process, draw)
        left -= stretch
    process = arm.start()
    arm.watch(process, seconds * 2 / 3, is_measured=True)
    arm.kill(process, draw)
    num_collections = len(arm.lines("collections.jsonl")) + 1
    process = arm.start(num_collections)
    if process.wait(timeout=1200) != 0:
        raise SoakError(f"{arm.name}: the last resume ended with {process.returncode}: {arm.output()}")


# --- checking ---------------------------------------------------------------------------------------------------------


def promise(is_kept: bool, what: str) -> None:
    if not is_kept:
        raise SoakError(what)


def check(folder: Path, max_staleness: int) -> tuple[Counter[str], int]:
    """What a run folder's files say happened, and the bytes of a collection's rollouts as JSON.

    Raises:
        SoakError: a collection that is not exact, a rollout lost or trained twice, counts that do not add up.
    """
    windows = _lines(folder / "metrics.jsonl")
    index = _lines(folder / "collections.jsonl")
    promise([w["window"] for w in windows] == list(range(len(windows))), "windows are logged once each, in order")
    promise([line["collection"] for line in index] == list(range(len(index))), "collections are logged once each")
    promise(len(windows) == len(index) * WINDOWS * EPOCHS, f"{len(windows)} windows for {len(index)} collections")
    counts: Counter[str] = Counter(collections=len(index), windows=len(windows))
    trained: Counter[str] = Counter()
    carried: list[Rollout] = []
    task = version = num_bytes = 0
    for collection, line in enumerate(index):
        where = f"collection {collection}"
        stored = list(read_rollouts(folder / "rollouts" / line["file"]))
        builder = CollectionBuilder(
            collection=collection,
            num_prompts=NUM_PROMPTS,
            num_generations=NUM_GENERATIONS,
            first_task=task,
            options=OPTIONS,
            carried=carried,
            weight_versions=range(max(0, version - max_staleness), version + 1),
        )
        builder.add(stored)
        promise(not builder.missing(), f"{where}: rollouts that it closed with are not in its file")
        closed = builder.close()
        rollouts = {r.rollout_id: r for r in closed.rollouts}
        promise(len(closed.rollouts) == len(rollouts) == NUM_PROMPTS * NUM_GENERATIONS, f"{where}: not exact")
        promise(line["groups"] == [group.group_id for group in closed.groups], f"{where}: closed with other groups")
        promise(line["dropped"] == builder.dropped, f"{where}: dropped {line['dropped']}, expected {builder.dropped}")
        promise(line["num_rollouts"] == len(stored), f"{where}: {len(stored)} rollouts in its file")
        left = {r.rollout_id for r in builder.leftovers}
        dropped = {r.rollout_id for r in [*stored, *carried] if r.group_id in builder.dropped}
        everything = Counter(r.rollout_id for r in [*stored, *carried])
        promise(everything == Counter([*rollouts, *left, *dropped]), f"{where}: a rollout is lost, or in two places")
        trained.update(rollouts.keys())
        counts["stored"] += len(stored)
        counts["dropped"] += len(dropped)
        counts["carried"] += len(carried)
        counts["groups dropped"] += len(builder.dropped)
        mine = windows[collection * WINDOWS * EPOCHS : (collection + 1) * WINDOWS * EPOCHS]
        groups = NUM_PROMPTS // WINDOWS
        for place, found in enumerate(mine):
            epoch, at = divmod(place, WINDOWS)
            promise((found["collection"], found["epoch"]) == (collection, epoch), f"{where}: windows out of order")
            members = [r for g in closed.groups[at * groups : (at + 1) * groups] for r in g.rollouts]
            _check_window(found, members, builder.replaced, counts if epoch == 0 else Counter())
        num_bytes += sum(len(repr(rollout)) for rollout in stored)
        task, carried = task + builder.num_tasks, builder.leftovers
        version += sum(window["stepped"] for window in mine)
    counts["trained"] = len(trained)
    counts["left over"] = len(carried)
    promise(set(trained.values()) <= {1}, "a rollout is in two collections")
    promise(
        counts["stored"] == counts["trained"] + counts["dropped"] + counts["left over"],
        f"stored {counts['stored']} = trained {counts['trained']} + dropped {counts['dropped']} + left over "
        f"{counts['left over']} must hold",
    )
    statuses = counts["ok"] + counts["truncated"] + counts["failed"]
    promise(counts["trained"] == statuses, f"{counts['trained']} rollouts trained, {statuses} have a status")
    return counts, num_bytes // max(1, len(index))


def _check_window(
    found: dict[str, Any], rollouts: list[Rollout], replaced: frozenset[str], counts: Counter[str]
) -> None:
    """One line of ``metrics.jsonl`` against the rollouts of its window."""
    voters = [r for r in rollouts if r.is_voter]
    counts.update(r.status for r in rollouts)
    expected: dict[str, int] = {
        "num_rollouts": len(rollouts),
        "num_voters": len(voters),
        "num_failed": sum(r.status == "failed" for r in rollouts),
        "num_truncated": sum(r.status == "truncated" for r in rollouts),
        "num_replaced": len({r.group_id for r in rollouts} & replaced),
    }
    masks = rows = 0
    for rollout in voters:
        segmentation = segmentation_of(rollout)
        masks += sum(sum(segment.loss_mask) for segment in segmentation.segments)
        rows += len(segmentation.segments)
        counts.update({f"{origin} segments": n for origin, n in segmentation.report.num_segments_by_origin.items()})
        counts["rejected calls"] += segmentation.report.num_rejected_calls
        counts["calls"] += len(rollout.calls)
    sampled = sum(r.num_sampled_tokens for r in voters)
    counts["sampled tokens"] += sampled
    counts["trained tokens"] += masks
    promise(masks == sampled, f"window {found['window']}: Σ masks {masks}, Σ sampled {sampled}")
    if voters:
        expected |= {"num_trained_tokens": masks, "num_rows": rows}
        mean = sum(r.reward or 0.0 for r in voters) / len(voters)
        promise(math.isclose(found["reward_mean"], mean, rel_tol=1e-12), f"window {found['window']}: other rewards")
    wrong = {name: (found[name], value) for name, value in expected.items() if found[name] != value}
    promise(not wrong, f"window {found['window']}: (logged, expected) {wrong}")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def memory_of(arm: Arm, num_collections: int, bytes_per_collection: int) -> dict[str, dict[str, Any]]:
    """Of each process: MiB over the stretch that nothing interrupts, and how fast they grow after the warm-up.

    Whatever kept a collection's rollouts, rows or plans for good would grow by about what its rollouts take as text for
    each collection; a tenth of that is the bound for the memory in use.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, resident in arm.memory.items():
        used = resident.in_use(arm.memory_folder)
        seconds, slope = used.measured()
        collections_per_s = max(1, num_collections) / (resident.seconds[-1] - resident.seconds[0])
        found[name] = {
            "mib": used.curve(),
            "resident_mib": resident.curve(),
            "measured_s": round(seconds),
            "measured_collections": round(seconds * collections_per_s),
            "bytes_per_collection": round(slope / collections_per_s),
            "resident_bytes_per_collection": round(resident.measured()[1] / collections_per_s),
            "bound": round(bytes_per_collection / 10),
        }
    return found


def check_memory(memory: dict[str, dict[str, Any]]) -> None:
    """Raise a SoakError for a process that grows, by its slope where that is measured long enough to say something."""
    for name, found in memory.items():
        is_judged = found["measured_s"] >= ENOUGH_S
        promise(
            not is_judged or found["bytes_per_collection"] <= found["bound"],
            f"{name}: memory grows by {found['bytes_per_collection']} bytes a collection, at most {found['bound']}: "
            f"{found['mib']} MiB",
        )
        growth = found["mib"][-1] - found["mib"][0]
        promise(growth < 256, f"{name}: memory grew by {growth:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of training, both kinds of run together")
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the kills, not of the environment")
    parser.add_argument("--arm", choices=list(ARMS), help="one kind alone, for its half of the time; absent: both")
    parser.add_argument("--folder", type=Path, help="where to leave the runs; absent: nowhere")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name, (max_staleness, _) in ARMS.items():
            if options.arm not in (None, name):
                continue
            arm = Arm(name=name, folder=(options.folder or Path(temporary)).resolve() / name, seed=options.seed)
            arm.folder.mkdir(parents=True)
            soak(arm, options.minutes * 60 / len(ARMS))
            counts, num_bytes = check(arm.run, max_staleness)
            counts["kills"] = arm.num_kills
            memory = memory_of(arm, arm.num_measured, num_bytes)
            result = {"arm": name, "max_staleness": max_staleness, "counts": dict(sorted(counts.items()))}
            print(json.dumps(result | {"memory": memory}, indent=1), flush=True)
            check_memory(memory)


if __name__ == "__main__":
    main()
