"""A tuning from beginning to end: probes in fresh processes, the fits, a cell that was held out, the budget."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenstep.config import Config
from evenstep.errors import ConfigError, PlanError
from evenstep.media import VISION_MODEL_TYPES
from evenstep.model_files import model_settings
from evenstep.plan.cost import CostModel
from evenstep.replay.session import Ended, ReplayStopped
from evenstep.replay.spec import read_errors
from evenstep.tune.fit import MemoryFit, MemoryPoint, fit_memory, largest_budget
from evenstep.tune.spec import CellShape, Measured, Probe, read_measured

__all__ = ["TuneOptions", "machine_memory_bytes", "overlay", "parse_bytes", "tune"]

# -P: files in the current folder do not stand in for modules
RANK_COMMAND = ("-u", "-P", "-m", "evenstep.train.tune_probe")
FIRST_TOKENS = 256  # of the smallest cell, about
LADDER = 14  # cells, each twice the one before
PROBED_SHARE = 0.7  # of the limit that a probe may need
HELD_OUT = 0.7  # of the largest cell
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{name}I": 2 ** (10 * power) for power, name in enumerate("KMGT", start=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What the budget is for."""

    config: Config
    num_ranks: int
    limit_bytes: float | None  # of one rank; None: the GPU's own memory
    margin: float = 0.1  # of the limit, left free
    probe_seconds: float = 5.0  # of the largest micro-batch that is tried, about


def parse_bytes(text: str) -> float:
    """A size as people write it.

    >>> parse_bytes("8GiB"), parse_bytes("500 MB"), parse_bytes("1.5g")
    (8589934592.0, 500000000.0, 1500000000.0)

    Raises:
        ConfigError: anything else.
    """
    wanted = text.strip().upper().removesuffix("B").rstrip()
    number = wanted.rstrip("KMGTI")
    try:
        found = float(number) * UNITS[wanted[len(number) :].strip()]
    except (ValueError, KeyError):
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(f"--memory must be a size like 8GiB or 500MB, found {text!r}")
    return found


def machine_memory_bytes() -> float:
    """Memory that this process may use: of the machine, or of its control group where that has less."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, float(limit)) if limit.isdecimal() else total


def tune(options: TuneOptions, *, run_ranks: Callable[..., Ended], say: Callable[[str], None]) -> dict[str, Any]:
    """Probe, fit, check and propose.

    Args:
        options: see there.
        run_ranks: ``run_ranks(arguments, num_ranks=n)`` starts ``python arguments...`` as n ranks and waits.
        say: shows a line.

    Raises:
        ConfigError: a layout without a budget, or ranks that cannot start.
        PlanError: memory does not grow with the cell, or nothing fits.
        ReplayStopped: Ctrl-C.
    """
    if options.config.plan.layout == "fixed":
        raise ConfigError(
            "evenstep tune finds plan.max_tokens_per_gpu, found plan.layout = 'fixed', which has rows instead of a "
            "budget; add --set plan.layout=padded, or packed"
        )
    if not 0 <= options.margin < 1:
        raise ConfigError(f"--margin must be at least 0 and below 1, found {options.margin}")
    if not 0 < options.probe_seconds < float("inf"):
        raise ConfigError(f"--probe-seconds must be a number above 0, found {options.probe_seconds}")
    work = Path(tempfile.mkdtemp(prefix="evenstep-tune-"))
    try:
        return _Tuning(options, work, run_ranks, say).run()
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Tuning:
    def __init__(
        self, options: TuneOptions, work: Path, run_ranks: Callable[..., Ended], say: Callable[[str], None]
    ) -> None:
        self.options, self.work, self.run_ranks, self.say = options, work, run_ranks, say
        self.row_tokens = options.config.model.max_context_tokens
        self.chunk_tokens = options.config.train.logprob_chunk_tokens
        self.num_probes = 0

    def run(self) -> dict[str, Any]:
        largest = self._climb()
        fitted = [self._probe_alone(size) for size in self._sizes(largest)]
        held_out = self._probe_alone(self._shape(HELD_OUT * largest))
        points = [found[0] for found in fitted]
        # of what any probe needed for a step without activations the most: they differ by what the system left over
        least = max(point.least_bytes for point in (*points, held_out[0]))
        fit = fit_memory(
            [MemoryPoint(footprint=p.shape.footprint, peak_bytes=p.peak_bytes or 0.0) for p in points],
            least_bytes=least,
            chunk_tokens=self.chunk_tokens,
        )
        limit = self.options.limit_bytes or held_out[0].device_bytes
        assert limit is not None
        budget = largest_budget(
            fit,
            limit_bytes=limit,
            margin=self.options.margin,
            largest_measured=largest,
            chunk_tokens=self.chunk_tokens,
        )
        timed = [measured for found in fitted for measured in found[1:]]
        cost = CostModel.fit([(m.shape.footprint, m.shape.pairs, m.seconds) for m in timed])
        settings = model_settings(self.options.config.model.path, needs_weights=False)
        return {
            "format_version": 1,
            "kind": "tune",
            "model": self.options.config.model.path,
            "sees_images": settings.get("model_type") in VISION_MODEL_TYPES,  # which made-up rows have none of
            "layout": self.options.config.plan.layout,
            "num_ranks": self.options.num_ranks,
            "limit_bytes": limit,
            "margin": self.options.margin,
            "points": [_plain(found) for found in points],
            "fit": asdict(fit),
            "logprob_chunk_tokens": self.chunk_tokens,
            "held_out": self._check(fit, cost, held_out),
            "cost": {"c0": cost.c0, "c1": cost.c1, "c2": cost.c2},
            "timed": [_plain(measured) for measured in timed],
            "max_tokens_per_gpu": budget.max_tokens_per_gpu,
            "predicted_bytes": budget.predicted_bytes,
            "limited_by": budget.reason,
            "largest_measured": largest,
        }

    # --- sizes ----------------------------------------------------------------------------------------------------

    def _shape(self, footprint: float) -> CellShape:
        return CellShape(num_rows=max(1, round(footprint / self.row_tokens)), row_tokens=self.row_tokens)

    def _climb(self) -> int:
        """Double a cell until it takes its time or its share of the limit; the largest footprint that did not fail."""
        config, limit = self.options.config, self.options.limit_bytes
        first = self._shape(FIRST_TOKENS).num_rows
        # a window has no more rows than that
        most_rows = -(-config.train.rollouts_per_window * config.rollout.max_segments // self.options.num_ranks)
        sizes = [first * 2**step for step in range(LADDER)]
        sizes = [size for size in sizes if size <= max(most_rows, 4 * first)]
        cells = tuple(CellShape(num_rows=size, row_tokens=self.row_tokens) for size in sizes)
        self.say("how large a micro-batch may be tried: doubling it from " + _tokens(cells[0].footprint))
        probe = Probe(
            cells=cells,
            max_seconds=self.options.probe_seconds / 2,
            max_bytes=None if limit is None else PROBED_SHARE * limit,
        )
        found = self._launch(probe, may_end_early=True)
        for measured in found:
            self.say(_line(measured))
        if len(found) < 3:
            raise PlanError(
                f"memory must hold a few micro-batches of different sizes, found room for {len(found)} (the last of "
                f"{found[-1].shape.footprint if found else 0} tokens) below {PROBED_SHARE:.0%} of the limit, in "
                f"{self.options.probe_seconds / 2:g} s each; give --memory more, --probe-seconds more, or fewer --ranks"
            )
        return found[-1].shape.footprint

    def _sizes(self, largest: int) -> list[CellShape]:
        """Of the fit: from the largest down, and one more where the logits of a chunk have to be told apart."""
        shares = [1 / 4, 1 / 2, 1]
        if largest / 4 < self.chunk_tokens < largest:
            shares.insert(0, 1 / 8)
        return list(dict.fromkeys(self._shape(share * largest) for share in shares))

    # --- probes ---------------------------------------------------------------------------------------------------

    def _probe_alone(self, cell: CellShape) -> list[Measured]:
        """One size in fresh processes, where no larger one was before; then times of it and of shorter rows."""
        short_tokens = max(2, self.row_tokens // 4)
        half = max(1, cell.num_rows // 2)
        timed = (
            cell,
            CellShape(num_rows=half, row_tokens=cell.row_tokens),
            CellShape(num_rows=max(1, cell.footprint // short_tokens), row_tokens=short_tokens),
        )
        found = self._launch(Probe(cells=(cell,), timed=timed))
        self.say(_line(found[0]))
        return list(found)

    def _launch(self, probe: Probe, *, may_end_early: bool = False) -> Sequence[Measured]:
        folder = self.work / f"probe_{self.num_probes}"
        self.num_probes += 1
        folder.mkdir()
        (folder / "config.toml").write_text(self.options.config.resolved(), encoding="utf-8")
        probe.write(folder)
        ended = self.run_ranks([*RANK_COMMAND, str(folder)], num_ranks=self.options.num_ranks)
        if ended.stop_signal is not None:
            raise ReplayStopped(ended.stop_signal)
        found = read_measured(folder)
        if ended.exit_codes:
            errors = read_errors(folder)
            codes = ", ".join(f"rank {rank}: {code}" for rank, code in sorted(ended.exit_codes.items()))
            why = f"{errors[0]['type']}: {errors[0]['text']}" if errors else f"exit codes {codes}"
            is_memory = errors[0]["is_oom"] if errors else -9 in ended.exit_codes.values()
            if not (may_end_early and is_memory):
                raise ConfigError(f"a probe of {probe.cells[0].footprint:,} tokens did not finish: {why}")
            self.say("memory ran out there")
        return found

    def _check(self, fit: MemoryFit, cost: CostModel, held_out: Sequence[Measured]) -> dict[str, Any]:
        cell, timed = held_out[0], held_out[1]
        predicted = fit.peak_bytes(cell.shape.footprint, chunk_tokens=self.chunk_tokens)
        seconds = cost.c0 + cost.c1 * cell.shape.footprint + cost.c2 * cell.shape.pairs
        assert cell.peak_bytes is not None
        return {
            "footprint": cell.shape.footprint,
            "peak_bytes": cell.peak_bytes,
            "predicted_bytes": predicted,
            "memory_relative_error": predicted / cell.peak_bytes - 1,
            "seconds": timed.seconds,
            "predicted_seconds": seconds,
            "time_relative_error": seconds / timed.seconds - 1 if timed.seconds else None,
        }


def overlay(result: dict[str, Any]) -> str:
    """TOML text that goes on top of the configuration which was tuned."""
    fit, held_out = result["fit"], result["held_out"]
    values = [fit[name] for name in ("least_bytes", "fixed_bytes", "bytes_per_token", "bytes_per_logit_token")]
    images = "# Measured on rows of text: a patch of an image was taken for a token.\n" if result["sees_images"] else ""
    return (
        f"# Written by evenstep tune: {result['model']}, layout {result['layout']}, {result['num_ranks']} ranks, "
        f"{result['limit_bytes'] / 2**30:.2f} GiB for each.\n"
        f"# Predicted peak of a rank {result['predicted_bytes'] / 2**30:.2f} GiB; a cell held out was predicted "
        f"{held_out['memory_relative_error']:+.1%}.\n"
        f"# Seconds of a micro-batch: {result['cost']['c0']:.3g} + {result['cost']['c1']:.3g} · tokens + "
        f"{result['cost']['c2']:.3g} · attended pairs.\n"
        f"{images}"
        "[plan]\n"
        f"max_tokens_per_gpu = {result['max_tokens_per_gpu']}\n"
        f"memory_fit = [{', '.join(f'{value:.1f}' for value in values)}]\n"
    )


def _plain(measured: Measured) -> dict[str, Any]:
    return {"footprint": measured.shape.footprint, **asdict(measured)}


def _tokens(count: int) -> str:
    return f"{count:,} tokens"


def _line(measured: Measured) -> str:
    return (
        f"  {_tokens(measured.shape.footprint):>16}: {(measured.peak_bytes or 0.0) / 2**20:>9,.0f} MiB "
        f"({measured.least_bytes / 2**20:,.0f} without), {measured.seconds:.2f} s"
    )
