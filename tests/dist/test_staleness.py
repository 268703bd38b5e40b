"""Generation beside training, on two ranks with sharded parameters:

1. with ``max_staleness = 0`` a run is bit-equal to one that does not know the key, and two such runs are; with
   ``max_staleness`` above 0 its first collection is: rollouts, metrics and the weights after it
2. with ``in_flight_updates`` rollouts straddle updates, are counted, and no rank waits for ever, whichever is slower;
   each call has the log-probs of the very weights whose version it carries, and not those of the next
3. without it no rollout straddles
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import once, run_ranks

from evenstep.config import load_config
from evenstep.files import read_rollouts
from evenstep.rollout import environment
from evenstep.rollout.ledger import Ledger
from evenstep.train import distributed
from evenstep.train.engines import InProcessPolicyEngine
from evenstep.types import Rollout

CONFIG = """
[run]
dir = {folder!r}
num_collections = {num_collections}
[model]
path = "evenstep:ledger"
max_context_tokens = 64
[environment]
name = {environment!r}
max_pages = 4
[rollout]
num_prompts = 4
num_generations = 4
max_tokens_per_call = 4
generation_batch_rollouts = 4
{rollout}
[compaction]
policy = "summary"
[plan]
max_tokens_per_gpu = 256
layout = "packed"
[train]
rollouts_per_window = 8
windows_per_collection = 2
epochs = 2
lr = 1e-3
old_logprobs = "scored"
sharding = "fsdp2"
[checkpoint]
every = 1
keep = 9
export = false
[evaluation]
num_tasks = 0
"""
# name -> (environment, collections, keys of [rollout])
RUNS = {
    "plain": ("ledger", 2, ""),
    "zero": ("ledger", 2, "max_staleness = 0"),
    "four": ("ledger", 2, "max_staleness = 4"),  # the steps of a collection: the least that overlaps
    "ahead": ("patient", 2, "max_staleness = 4"),
    "straddling": ("patient", 3, "max_staleness = 8\nin_flight_updates = true"),
}
TIMINGS = ("tokens_per_second", "peak_memory_bytes", "seconds_generate", "seconds_score", "seconds_train")
WEIGHTS: dict[int, dict[str, torch.Tensor]] = {}  # of the rank's engine, by version, in the last run


class Patient(Ledger):
    """Waits after its first page until the engine has newer weights, for a while; one rank is slower than the other."""

    async def step(self, action: str) -> str | None:
        found, before = await super().step(action), max(WEIGHTS)
        if self._num_observations == 2:
            for _ in range(20):
                if max(WEIGHTS) > before:
                    break
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.01 * distributed.rank_and_size()[0])
        return found


def run_all(folder: str) -> dict[int, dict[str, torch.Tensor]]:
    """The weights of the last run's engine on rank 0, by version."""
    from evenstep.train.run import run_training

    environment.ENVIRONMENTS["patient"] = lambda: Patient
    update = InProcessPolicyEngine.update_weights

    def recorded(self: Any, version: int) -> None:
        update(self, version)
        WEIGHTS[version] = {name: value.clone() for name, value in self._models.sampler.state_dict().items()}

    InProcessPolicyEngine.update_weights = recorded  # type: ignore[method-assign]
    for name in RUNS:
        WEIGHTS.clear()
        run_training(load_config([Path(folder) / f"{name}.toml"]))
    return WEIGHTS if distributed.rank_and_size()[0] == 0 else {}


@once
def runs() -> tuple[dict[str, Path], dict[int, dict[str, torch.Tensor]]]:
    folder = Path(tempfile.mkdtemp())
    for name, (environment_name, num_collections, rollout) in RUNS.items():
        (folder / f"{name}.toml").write_text(
            CONFIG.format(
                folder=str(folder / name),
                num_collections=num_collections,
                environment=environment_name,
                rollout=rollout,
            )
        )
    weights, _ = run_ranks(run_all, 2, str(folder), timeout_s=280, group_timeout_s=60)
    return {name: folder / name for name in RUNS}, weights


def windows(run: str) -> list[dict[str, Any]]:
    lines = (runs()[0][run] / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines]


def rollouts(run: str, collection: int) -> list[Rollout]:
    return list(read_rollouts(runs()[0][run] / "rollouts" / f"collection_{collection:06d}.jsonl.gz"))


def weights_after(run: str, window: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    path = runs()[0][run] / "checkpoints" / f"window_{window:06d}" / "dcp"
    kept = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in kept.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, checkpoint_id=path, no_dist=True)
    return found


def assert_bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert len(a) > 10
    assert all(torch.equal(a[name], b[name]) for name in a)


pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore::UserWarning:torch.*")]


def test_zero_is_synchronous_bit_for_bit() -> None:
    assert windows("zero") == windows("plain")
    assert {window["staleness_max"] for window in windows("zero")} == {0, 1, 2, 3}
    for collection in range(2):
        assert rollouts("zero", collection) == rollouts("plain", collection)
        assert_bit_equal(weights_after("zero", 4 * collection + 4), weights_after("plain", 4 * collection + 4))


def test_the_first_collection_ahead_is_too() -> None:
    assert windows("four")[:4] == windows("plain")[:4]
    assert rollouts("four", 0) == rollouts("plain", 0)
    assert_bit_equal(weights_after("four", 4), weights_after("plain", 4))
    assert rollouts("four", 1) != rollouts("plain", 1)  # sampled by older weights


def test_rollouts_straddle_updates() -> None:
    straddling = 0
    for collection in range(3):
        found = rollouts("straddling", collection)
        lines = [line for line in windows("straddling") if line["collection"] == collection]
        apart = [{call.weight_version for call in rollout.calls} for rollout in found]
        assert sum(line["num_straddling"] for line in lines if line["epoch"] == 0) == sum(len(v) > 1 for v in apart)
        assert max(max(v) for v in apart) <= lines[0]["optimizer_step"]
        for line in lines[:2]:
            assert 0 <= line["staleness_max"] <= 8
        straddling += sum(len(v) > 1 for v in apart)
        for rollout in found:
            versions = [call.weight_version for call in rollout.calls]
            assert versions == sorted(versions)
    assert straddling > 0


def test_each_call_is_of_the_weights_of_its_version() -> None:
    from evenstep.train.models import load_model

    model, _ = load_model("evenstep:ledger", dtype=torch.float32)
    model.eval()
    checked = {version: 0.0 for version in runs()[1]}
    moved = 0.0
    for rollout in (r for collection in range(3) for r in rollouts("straddling", collection)):
        versions = {call.weight_version for call in rollout.calls}
        for call in rollout.calls if len(versions) > 1 else ():
            for version in (call.weight_version, call.weight_version + 1):
                if version not in runs()[1]:
                    continue
                model.load_state_dict(runs()[1][version])
                ids = torch.tensor([[*call.prompt_ids, *call.output_ids]])
                with torch.no_grad():
                    logprobs = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
                sampled = logprobs[len(call.prompt_ids) - 1 : -1].gather(1, torch.tensor(call.output_ids)[:, None])[:, 0]
                apart = float((sampled - torch.tensor(call.logprobs, dtype=torch.float64)).abs().max())
                if version == call.weight_version:
                    checked[version] = max(checked[version], apart)
                else:
                    moved = max(moved, apart)
    assert max(checked.values()) < 1e-4
    assert moved > 1e-3  # the next version's differ, so the comparison can fail


def test_none_straddles_without_the_key() -> None:
    for run in ("plain", "four", "ahead"):
        assert {line["num_straddling"] for line in windows(run)} == {0}
    assert {call.weight_version for rollout in rollouts("ahead", 1) for call in rollout.calls} == {0}
