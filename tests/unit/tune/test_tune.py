"""What is locked here:

1. The fit finds the terms that peaks were made of, noise included, and says how sure it is; cells that need no more
   than a step without activations do not bend it; peaks that do not grow are refused.
2. The budget keeps two standard errors and the margin below the limit, is never far beyond what was measured, and
   nothing is proposed where nothing fits.
3. A tuning probes fresh processes from small to large, holds a cell out, and its overlay loads on top of the
   configuration; memory that runs out while climbing ends the climb, and elsewhere the command.
4. Sizes are read as people write them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pytest

from evenstep.cli.tune import _lines
from evenstep.config import Config, load_config
from evenstep.errors import ConfigError, PlanError
from evenstep.tune.fit import EXTRAPOLATION, MemoryFit, MemoryPoint, fit_memory, largest_budget
from evenstep.tune.session import TuneOptions, overlay, parse_bytes, tune
from evenstep.tune.spec import ANSWER, CellShape, Measured, Probe

MIB = 2.0**20
CONFIG = """
run = {dir = "unused", num_collections = 1}
model = {path = "evenstep:ledger", max_context_tokens = 64}
environment = {name = "ledger"}
rollout = {num_prompts = 64, num_generations = 2, max_tokens_per_call = 8}
plan = {max_tokens_per_gpu = 64}
train = {rollouts_per_window = 128, lr = 1e-3}
"""


def points(noise: float, *footprints: int) -> list[MemoryPoint]:
    draw = np.random.default_rng(0)
    peaks = [(300.0 + 0.1 * f + 0.3 * min(f, 1000)) * MIB * (1 + noise * draw.normal()) for f in footprints]
    return [MemoryPoint(footprint=f, peak_bytes=peak) for f, peak in zip(footprints, peaks, strict=True)]


@pytest.mark.parametrize("noise, tolerance", [(0.0, 1e-9), (0.01, 0.05)])
def test_fit(noise: float, tolerance: float) -> None:
    fit = fit_memory(points(noise, 250, 500, 2000, 4000, 8000), least_bytes=200 * MIB, chunk_tokens=1000)
    for footprint in (300, 1000, 6000, 16000):
        true = (300.0 + 0.1 * footprint + 0.3 * min(footprint, 1000)) * MIB
        assert fit.peak_bytes(footprint, chunk_tokens=1000) == pytest.approx(true, rel=tolerance)
    assert fit.relative_error == pytest.approx(max(0.01, noise), rel=0.6)


def test_small_cells_do_not_bend_the_fit() -> None:
    flat = [MemoryPoint(footprint=f, peak_bytes=900 * MIB) for f in (10, 20)]
    fit = fit_memory([*flat, *points(0.0, 4000, 8000, 16000)], least_bytes=900 * MIB, chunk_tokens=1000)
    assert fit.bytes_per_token == pytest.approx(0.1 * MIB)
    assert fit.peak_bytes(10, chunk_tokens=1000) == 900 * MIB


@pytest.mark.parametrize("peaks, expected", [([500.0, 500.0], "found 0 of 2"), ([900.0, 800.0], "memory must grow")])
def test_no_fit(peaks: Sequence[float], expected: str) -> None:
    found = [MemoryPoint(footprint=100 * (i + 1), peak_bytes=peak) for i, peak in enumerate(peaks)]
    with pytest.raises(PlanError, match=expected):
        fit_memory(found, least_bytes=500.0, chunk_tokens=1000)


def test_budget() -> None:
    fit = MemoryFit(
        least_bytes=0.0, fixed_bytes=1e9, bytes_per_token=1e6, bytes_per_logit_token=0.0, relative_error=0.05
    )
    found = largest_budget(fit, limit_bytes=4e9, margin=0.1, largest_measured=2000, chunk_tokens=1000)
    assert found.max_tokens_per_gpu == (4e9 * 0.9 / 1.1 - 1e9) // 1e6 // 16 * 16
    assert found.reason == "memory"
    near = largest_budget(fit, limit_bytes=4e12, margin=0.1, largest_measured=2000, chunk_tokens=1000)
    assert near.max_tokens_per_gpu == EXTRAPOLATION * 2000
    assert "largest cell" in near.reason
    with pytest.raises(PlanError, match="no micro-batch fits: a step without one needs 954 MiB"):
        largest_budget(fit, limit_bytes=1e9, margin=0.1, largest_measured=2000, chunk_tokens=1000)


@dataclass(frozen=True)
class Ended:
    stop_signal: int | None = None
    exit_codes: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Machine:
    """Ranks that need what they are said to need, and die where it is more than there is."""

    memory: float = 1e12
    probes: list[Probe] = field(default_factory=list)

    def run_ranks(self, arguments: Sequence[str], *, num_ranks: int) -> Ended:
        folder = Path(arguments[-1])
        probe = Probe.read(folder)
        self.probes.append(probe)
        with (folder / ANSWER).open("w") as file:
            for index, cell in enumerate((*probe.cells, *probe.timed)):
                peak = (300.0 + 0.1 * cell.footprint) * MIB
                if index < len(probe.cells) and peak > self.memory:
                    return Ended(exit_codes={0: -9})
                measured = Measured(
                    num_rows=cell.num_rows,
                    row_tokens=cell.row_tokens,
                    least_bytes=310 * MIB,
                    peak_bytes=max(310 * MIB, peak) if index < len(probe.cells) else None,
                    seconds=0.01 + 1e-4 * cell.footprint + 1e-7 * cell.pairs,
                    device_bytes=None,
                )
                file.write(json.dumps(asdict(measured)) + "\n")
                if probe.max_seconds is not None and measured.seconds > probe.max_seconds:
                    break
        return Ended()


def config_of(folder: Path, *overrides: str) -> Config:
    (folder / "config.toml").write_text(CONFIG)
    return load_config([folder / "config.toml"], overrides)


def test_a_tuning(tmp_path: Path) -> None:
    machine, said = Machine(), list[str]()
    options = TuneOptions(config=config_of(tmp_path), num_ranks=2, limit_bytes=1024 * MIB)
    result = tune(options, run_ranks=machine.run_ranks, say=said.append)
    climb, *alone, held_out = machine.probes
    assert [cell.footprint for cell in climb.cells][:3] == [256, 512, 1024]
    assert all(len(probe.cells) == 1 for probe in alone)
    assert held_out.cells[0].footprint not in [probe.cells[0].footprint for probe in alone]
    assert abs(result["held_out"]["memory_relative_error"]) < 1e-6
    assert abs(result["held_out"]["time_relative_error"]) < 1e-6
    assert result["cost"]["c1"] == pytest.approx(1e-4)
    budget = result["max_tokens_per_gpu"]
    assert (300 + 0.1 * budget) * MIB <= 0.9 * 1024 * MIB
    (tmp_path / "tuned.toml").write_text(overlay(result))
    tuned = load_config([tmp_path / "config.toml", tmp_path / "tuned.toml"])
    assert tuned.plan.max_tokens_per_gpu == budget
    assert tuned.plan.memory_fit is not None
    assert tuned.plan.memory_fit[2] == pytest.approx(0.1 * MIB, rel=1e-3)


def test_a_model_that_sees_images_was_measured_on_text(tmp_path: Path) -> None:
    found: dict[str, tuple[str, str]] = {}
    for model_type in ("qwen2_vl", "qwen3"):
        model = tmp_path / model_type
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": model_type}))
        for name in ("tokenizer.json", "chat_template.jinja"):
            (model / name).touch()
        config = config_of(tmp_path, f"model.path={model}")
        options = TuneOptions(config=config, num_ranks=2, limit_bytes=1024 * MIB)
        result = tune(options, run_ranks=Machine().run_ranks, say=lambda _: None)
        found[model_type] = "\n".join(_lines(result, config)), overlay(result)
        tomllib.loads(found[model_type][1])
    assert all("text" in part and "a patch" in part for part in found["qwen2_vl"])
    assert not any("patch" in part for part in found["qwen3"])


def test_memory_runs_out(tmp_path: Path) -> None:
    machine, said = Machine(memory=900 * MIB), list[str]()
    options = TuneOptions(config=config_of(tmp_path), num_ranks=2, limit_bytes=2048 * MIB)
    result = tune(options, run_ranks=machine.run_ranks, say=said.append)
    assert "memory ran out there" in said
    assert result["largest_measured"] == 4096
    with pytest.raises(PlanError, match="found room for 0"):
        tune(options, run_ranks=Machine(memory=0.0).run_ranks, say=said.append)


def test_mistakes(tmp_path: Path) -> None:
    config = config_of(tmp_path, "plan.layout=fixed")
    with pytest.raises(ConfigError, match=r"found plan.layout = 'fixed'"):
        tune(TuneOptions(config=config, num_ranks=1, limit_bytes=1e9), run_ranks=Machine().run_ranks, say=print)
    options = TuneOptions(config=config_of(tmp_path), num_ranks=1, limit_bytes=1e9, margin=1.0)
    with pytest.raises(ConfigError, match="--margin"):
        tune(options, run_ranks=Machine().run_ranks, say=print)
    for text in ("", "8", "GiB", "-1GiB", "8 potatoes", "nan"):
        if text == "8":
            assert parse_bytes(text) == 8.0
            continue
        with pytest.raises(ConfigError, match="--memory must be a size"):
            parse_bytes(text)
    assert CellShape(num_rows=3, row_tokens=4).pairs == 30
