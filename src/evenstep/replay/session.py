"""A replay from beginning to end: arm after arm in ranks of its own, and what came of each."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from evenstep.config import Config
from evenstep.errors import ConfigError
from evenstep.files.writing import write_text
from evenstep.replay.arms import arm_config
from evenstep.replay.measures import ArmRun, first_deviation, measured_noise, noise_floor, problem_of, summary
from evenstep.replay.recorded import read_recording
from evenstep.replay.spec import Launch, Role, read_errors, read_stacks, read_steps

__all__ = ["Ended", "Progress", "ReplayOptions", "ReplayStopped", "replay", "write_result"]

FORMAT_VERSION = 1
# -P: files in the current folder do not stand in for modules
RANK_COMMAND = ("-u", "-P", "-m", "evenstep.train.replay_arm")
REFERENCE, ORACLE = "reference", "oracle"
NOISE = {"again": "the first arm again", "permuted": "the first arm, rows permuted"}


class Ended(Protocol):
    """How the ranks of a launch ended; see ``evenstep.train.launch.RanksEnded``."""

    @property
    def stop_signal(self) -> int | None: ...
    @property
    def exit_codes(self) -> Mapping[int, int]: ...


class Progress(Protocol):
    """What a replay says while it goes on."""

    def launch(self, name: str, index: int, total: int, num_steps: int, folder: Path) -> None:
        """A launch begins; its folder gets a line in ``steps.jsonl`` for each step."""
        ...

    def finished(self, name: str, run: ArmRun) -> None: ...
    def notice(self, text: str) -> None: ...


class ReplayStopped(Exception):  # noqa: N818 -- asked for, no error
    """The user stopped the replay; all ranks have ended."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number  # of the signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What to replay, under which arms, and what to measure."""

    source: Path  # run folder, or file of rollouts
    config: Config
    arms: Sequence[str]  # the first is what the others are compared with
    num_ranks: int
    dtype: Literal["float32", "float64"] = "float32"
    num_steps: int | None = None  # None: all that were recorded
    repeats: int = 1  # launches of each arm
    warmup: int | None = None  # steps of each launch that are in no time; None: 1, of a single step 0
    seed: int = 0  # of the noise arm's permutations
    max_rel: float | None = None  # largest relative gradient difference of an arm that passes
    has_oracle: bool = False  # also against float64, one row at a time, on one rank
    checkpoint: Path | None = None  # of a run, to start from instead of the model's weights
    step_timeout_s: float = 600.0
    has_own_weights: bool = False  # arms go on from their own weights, where else each step begins with the first arm's
    num_compared: int | None = None  # steps whose gradients and weights are compared; None: all
    scratch: Path | None = None  # where gradients and weights are kept meanwhile; None: the system's temporary folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """An arm in one of its rôles."""

    key: str
    title: str
    config: Config
    role: Role
    is_permuted: bool = False
    num_ranks: int
    dtype: Literal["float32", "float64"]


def replay(options: ReplayOptions, *, run_ranks: Callable[..., Ended], progress: Progress) -> dict[str, Any]:
    """Run all arms and measure them; an arm that fails is part of the result.

    Args:
        options: see there.
        run_ranks: ``run_ranks(arguments, num_ranks=n)`` starts ``python arguments...`` as n ranks and waits.
        progress: what is shown meanwhile.

    Raises:
        ConfigError, FileFormatError, CollectionError: the arms or the recording are not what they must be.
        ReplayStopped: Ctrl-C.
    """
    _check(options)
    with _work_folder(options.scratch) as work:
        return _Replay(options, work, run_ranks, progress).run()


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a replay's result; it appears under its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, indent=1) + "\n")


def _check(options: ReplayOptions) -> None:
    if not options.arms:
        raise ConfigError("a replay needs at least one --arm, found none; for example --arm fixed --arm packed")
    twice = sorted({arm for arm in options.arms if options.arms.count(arm) > 1})
    if twice:
        raise ConfigError(f"every --arm is given once, found {', '.join(twice)} again; use --repeats to run it again")
    for name, value, least in (
        ("--steps", options.num_steps, 1),
        ("--repeats", options.repeats, 1),
        ("--warmup", options.warmup, 0),
        ("--compare-steps", options.num_compared, 1),
        ("--ranks", options.num_ranks, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, found {value}")
    for name, value in (("--max-rel", options.max_rel), ("--step-timeout", options.step_timeout_s)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be a number above 0, found {value}")
    if options.scratch is not None and not options.scratch.is_dir():
        raise ConfigError(f"--scratch must be a folder, found none at {str(options.scratch)!r}; make it first")


@contextmanager
def _work_folder(scratch: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="evenstep-replay-", dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Replay:
    def __init__(self, options: ReplayOptions, work: Path, run_ranks: Callable[..., Ended], progress: Progress) -> None:
        self.options, self.work, self.run_ranks, self.progress = options, work, run_ranks, progress
        self.num_launches = 0
        self.planned = self._plan_arms()
        self._read()

    def _plan_arms(self) -> list[_Planned]:
        options = self.options
        configs: list[Config] = []
        for index, text in enumerate(options.arms):
            folder = self.work / f"arm_{index}"
            folder.mkdir()
            configs.append(arm_config(text, options.config, folder))
        shape: dict[str, Any] = {"num_ranks": options.num_ranks, "dtype": options.dtype}
        first = configs[0]
        planned = [_Planned(key=options.arms[0], title=options.arms[0], config=first, role="reference", **shape)]
        if options.has_oracle:
            folder = self.work / "oracle"
            folder.mkdir()
            # one row at a time: nothing is padded, nothing is summed over ranks
            alone = arm_config("fixed,micro_batch_rows=1,train.sharding=replicated,train.compute_dtype=float32,"
                               "plan.pad_to_multiple=1", first, folder)  # fmt: skip
            planned.append(
                _Planned(key=ORACLE, title=ORACLE, config=alone, role="oracle", num_ranks=1, dtype="float64")
            )
        for text, config in zip(options.arms[1:], configs[1:], strict=True):
            planned.append(_Planned(key=text, title=text, config=config, role="arm", **shape))
        for key, title in NOISE.items():
            planned.append(
                _Planned(key=key, title=title, config=first, role="arm", is_permuted=key == "permuted", **shape)
            )
        return planned

    def _read(self) -> None:
        options, config = self.options, self.options.config
        self.state = {"collection": 0, "optimizer_step": 0}
        if options.checkpoint is not None:
            from evenstep.train.checkpoint import read_state

            self.state = read_state(options.checkpoint)
        recording = read_recording(
            options.source, config, num_windows=options.num_steps, first_collection=self.state["collection"]
        )
        self.windows = recording.windows
        if options.num_steps is not None and len(self.windows) < options.num_steps:
            raise ConfigError(
                f"--steps {options.num_steps}: found {len(self.windows)} windows in {options.source}; ask for at most "
                f"that many"
            )
        self.warmup = min(1, len(self.windows) - 1) if options.warmup is None else options.warmup
        if self.warmup >= len(self.windows):
            raise ConfigError(
                f"--warmup must leave a step to be timed, found {self.warmup} of {len(self.windows)} steps; lower it"
            )
        if recording.num_unused_rollouts:
            self.progress.notice(
                f"{recording.num_unused_rollouts} rollouts at the end make no whole collection and are not replayed"
            )
        (self.work / "scored").mkdir()
        num = min(options.num_compared or len(self.windows), len(self.windows))
        last = len(self.windows) - 1
        self.compared = tuple(sorted({round(i * last / max(1, num - 1)) for i in range(num)}))

    def run(self) -> dict[str, Any]:
        options = self.options
        runs: dict[str, list[ArmRun]] = {planned.key: [] for planned in self.planned}
        repeated = [planned for planned in self.planned if planned.role != "oracle" and planned.key not in NOISE]
        total = len(self.planned) + (options.repeats - 1) * len(repeated)
        for planned in self.planned:
            runs[planned.key].append(self._launch(planned, total))
            if planned.role == "reference":
                self._require_start(planned, runs[planned.key][0])
        for _ in range(options.repeats - 1):
            for planned in repeated:
                # only to be timed: the same steps again
                runs[planned.key].append(self._launch(replace(planned, role="timed"), total))
        return self._result(runs)

    def _launch(self, planned: _Planned, total: int) -> ArmRun:
        options = self.options
        folder = self.work / f"launch_{self.num_launches}"
        folder.mkdir()
        shutil.copy(self._config_file(planned), folder / "config.toml")
        references = {
            name: str(self.work / f"stored_{name}")
            for name in (REFERENCE, ORACLE)
            if planned.role in ("arm", "oracle") and (self.work / f"stored_{name}").is_dir()
        }
        stores = None
        if planned.role in ("reference", "oracle"):
            stores = self.work / f"stored_{planned.role}"
            stores.mkdir()
        Launch(
            name=planned.title,
            role=planned.role,
            source=str(options.source.resolve()),
            num_windows=len(self.windows),
            first_collection=self.state["collection"],
            optimizer_step=self.state["optimizer_step"],
            dtype=planned.dtype,
            total_windows=options.config.num_windows,
            compared=self.compared if planned.role != "timed" else (),
            step_timeout_s=options.step_timeout_s,
            has_own_weights=options.has_own_weights,
            permutation_seed=options.seed if planned.is_permuted else None,
            checkpoint=None if options.checkpoint is None else str(options.checkpoint.resolve()),
            extra_copies=2 * len(self.compared) * options.has_oracle + 2 * options.has_own_weights,
            scored=str(self.work / "scored"),
            stores=None if stores is None else str(stores),
            references=references,
        ).write(folder)
        self.num_launches += 1
        self.progress.launch(planned.title, self.num_launches, total, len(self.windows), folder)
        ended = self.run_ranks([*RANK_COMMAND, str(folder)], num_ranks=planned.num_ranks)
        if ended.stop_signal is not None:
            raise ReplayStopped(ended.stop_signal)
        run = _run_of(folder, ended, options.step_timeout_s)
        if planned.role == "reference":
            self._say_disk(folder)
        self.progress.finished(planned.title, run)
        return run

    def _config_file(self, planned: _Planned) -> Path:
        if planned.role == "oracle":
            return self.work / "oracle" / "config.toml"
        index = 0 if planned.key in NOISE else list(self.options.arms).index(planned.key)
        return self.work / f"arm_{index}" / "config.toml"

    def _say_disk(self, folder: Path) -> None:
        path = folder / "disk.json"
        if path.exists():
            disk = json.loads(path.read_text())
            self.progress.notice(
                f"keeps {_size(disk['needed'])} of gradients and weights in {self.work} until it ends "
                f"({_size(disk['free'])} were free)"
            )

    def _require_start(self, planned: _Planned, run: ArmRun) -> None:
        """Nothing can be compared when the first arm does not make a step: then its error is the user's."""
        if not run.steps and run.status == "crashed":
            raise ConfigError(f"the first arm, {planned.title}, made no step: {run.reason}")

    def _result(self, runs: Mapping[str, Sequence[ArmRun]]) -> dict[str, Any]:
        options, num_steps = self.options, len(self.windows)
        reference = runs[options.arms[0]]
        arms: dict[str, dict[str, Any]] = {}
        for name in options.arms:
            is_first = name == options.arms[0]
            arms[name] = summary(
                runs[name],
                reference,
                num_steps=num_steps,
                warmup=self.warmup,
                against=None if is_first else REFERENCE,
            )
        noise = {
            NOISE[key]: summary(runs[key], reference, num_steps=num_steps, warmup=self.warmup, against=REFERENCE)
            for key in NOISE
        }
        noise_measured = measured_noise(noise.values())
        limit = None if options.max_rel is None else max(options.max_rel, 10 * noise_measured)
        if options.has_oracle:
            self._add_oracle(arms, runs, num_steps)
        for name, arm in arms.items():
            problem = problem_of(arm, num_steps=num_steps, limit=limit)
            arm["passed"], arm["problem"] = problem is None, problem
            arm["first_deviation"] = None if limit is None else first_deviation(arm, limit, REFERENCE)
            if name == options.arms[0] and problem is not None:
                self.progress.notice(f"the first arm, {name}, did not finish: {problem}")
        for title, arm in noise.items():
            if arm["status"] != "ok":
                self.progress.notice(f"{title}: {arm['status']}, {arm['reason']}; the noise floor lacks it")
        return {
            "format_version": FORMAT_VERSION,
            "kind": "replay",
            "source": str(options.source),
            "model": options.config.model.path,
            "checkpoint": None if options.checkpoint is None else str(options.checkpoint),
            "first_arm": options.arms[0],
            "num_ranks": options.num_ranks,
            "dtype": options.dtype,
            "num_steps": num_steps,
            "num_steps_compared": len(self.compared),
            "repeats": options.repeats,
            "warmup": self.warmup,
            "seed": options.seed,
            "own_weights": options.has_own_weights,
            "max_rel": options.max_rel,
            "limit": limit,
            "passed": all(arm["passed"] for arm in arms.values()),
            "arms": arms,
            "noise_floor": noise_floor(noise.values()),
            "noise_measured": noise_measured,
            "noise_arms": noise,
        }

    def _add_oracle(
        self, arms: Mapping[str, dict[str, Any]], runs: Mapping[str, Sequence[ArmRun]], num_steps: int
    ) -> None:
        """How far each arm is from float64; of the first arm it is the oracle that was compared."""
        keys = ("gradient_cosine_min", "gradient_relative_difference_max", "loss_max_abs_difference",
                "logprob_max_abs_difference")  # fmt: skip
        oracle = runs[ORACLE]
        for name, arm in arms.items():
            is_first = name == self.options.arms[0]
            one, other, against = (oracle, runs[name], REFERENCE) if is_first else (runs[name], oracle, ORACLE)
            figures = summary(one, other, num_steps=num_steps, warmup=self.warmup, against=against)
            arm["against_oracle"] = {key: figures[key] for key in keys}
            if oracle[0].status != "ok":
                arm["against_oracle"]["reason"] = f"the oracle did not finish: {oracle[0].reason}"


def _run_of(folder: Path, ended: Ended, timeout_s: float) -> ArmRun:
    """How a launch ended, from what its ranks left and how they exited."""
    steps = read_steps(folder)
    if not ended.exit_codes:
        return ArmRun(steps=steps, status="ok")
    step = f"in step {len(steps)}" if steps else "before its first step was done"
    stacks = read_stacks(folder)
    if any("Timeout" in text for text in stacks.values()):
        places = "; ".join(f"rank {rank} stood in {_place(text)}" for rank, text in stacks.items())
        reason = f"{step}: no progress in {timeout_s:g} s; {places}"
        return ArmRun(steps=steps, status="hung", reason=reason)
    causes = read_errors(folder)
    # the launcher ends the other ranks with SIGTERM
    own = {rank: code for rank, code in ended.exit_codes.items() if code != -signal.SIGTERM} or ended.exit_codes
    if causes:
        cause = causes[0]
        said = f"{step}: rank {cause['rank']}: {cause['type']}: {cause['text']}"
        return ArmRun(steps=steps, status="oom" if cause["is_oom"] else "crashed", reason=said)
    first = min(own, key=lambda rank: (own[rank] > 0, rank))
    code = own[first]
    hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    how = f"signal {-code}{hint}" if code < 0 else f"exit code {code}"
    said = f"{step}: rank {first} {'was ended by' if code < 0 else 'ended with'} {how}"
    if "Fatal" in stacks.get(first, ""):
        said += f", in {_place(stacks[first])}"
    return ArmRun(steps=steps, status="crashed", reason=said)


def _place(stack: str) -> str:
    """The innermost lines of a stack, without their folders."""
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    shown = [re.sub(r'File ".*?([^/"]+)", line (\d+) in (.*)', r"\1:\2 \3", line) for line in lines[:4]]
    return " < ".join(shown) or "an unknown place"


def _size(num_bytes: float) -> str:
    unit, name = (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")
    return f"{num_bytes / unit:.1f} {name}"
