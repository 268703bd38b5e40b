"""Process groups of ranks with GPUs, whose NCCL a stand-in is here. What is locked: what ranks say to each other (objects,
agreements, sums of metrics) goes through gloo and the CPU, and nothing of it through the backend of the GPUs; a group
that somebody made with gloo alone serves as well."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from evenstep.errors import DistributedError
from evenstep.train import distributed


def words_of_ranks(backend: str, folder: str) -> tuple[str, list[float], dict[str, float], bool]:
    """Runs on every rank, in a group of its own."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 -- registers a backend that moves nothing

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / backend.replace(":", "-")), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    pixels = np.full((4, 3), float(rank), dtype=np.float32)
    found = distributed.exchange(pixels)
    distributed.agree("plan", "the same")
    with pytest.raises(DistributedError, match="rank 1: other"):
        distributed.agree("plan", "other" if rank else "one")
    sums, _ = distributed.reduce_sums({"loss": 1.5}, {"most": float(rank)})
    share = distributed.scatter([pixels + 1, pixels + 2] if rank == 0 else None)
    assert float(share[0, 0]) == rank + 1
    return dist.get_backend_config(), [float(each[0, 0]) for each in found], sums, bool(distributed.broadcast(rank == 0))


@pytest.mark.parametrize("backend", [distributed.BACKENDS["cuda"].replace("nccl", "fake"), distributed.BACKENDS["cpu"]])
def test_ranks_speak_through_the_cpu(backend: str) -> None:
    assert distributed.BACKENDS[torch.device("cuda").type] == "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_ranks(words_of_ranks, 2, backend, folder)
    for config, found, sums, is_first in outcomes:
        assert "cpu:gloo" in config
        assert (found, sums, is_first) == ([0.0, 1.0], {"loss": 3.0}, True)
