"""Ranks on one machine: started and watched by torch's elastic launcher, joined to a process group by themselves."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from evenstep.errors import DistributedError

__all__ = ["RanksEnded", "default_ranks", "has_gpu", "joined", "run_ranks"]

COLLECTIVE_TIMEOUT_S = 1800.0  # the longest wait for another rank: one may convert weights while the rest wait
PARENT_POLL_S = 0.5
LOOPBACK = "127.0.0.1"
CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # as gloo puts it


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnded:
    """How ranks ended; without a signal and without failures they all succeeded."""

    stop_signal: int | None  # that this process was stopped by, and the ranks with it
    exit_codes: dict[int, int]  # of ranks that failed, minus the signal's number where a signal ended them


def default_ranks() -> int:
    """One rank per GPU; without a GPU two, or one where there is a single core."""
    return torch.cuda.device_count() or min(2, num_cores())


def has_gpu() -> bool:
    """Whether ranks will compute on GPUs."""
    return torch.cuda.device_count() > 0


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def joined() -> Iterator[None]:
    """Be one of the ranks that torchrun started, from entering to leaving.

    Raises:
        DistributedError: another rank ended while this one waited for it.
    """
    from evenstep.train import distributed

    _end_with_parent()
    distributed.start(timeout_s=COLLECTIVE_TIMEOUT_S)
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in CONNECTION_LOST):
            raise
        raise DistributedError(
            "the connection to another rank was lost; it ended first, and its own message says why"
        ) from error
    finally:
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this rank when the process that started it is gone: it would go on writing into a run that is resumed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="watch the launcher", daemon=True).start()


def run_ranks(arguments: Sequence[str], *, num_ranks: int) -> RanksEnded:
    """Run ``python arguments...`` as every rank and wait for all; when one fails, the others are ended.

    Ranks meet on the loopback interface at a free port and share the cores evenly.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # wherever this machine's own name may resolve to
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks' own words are enough
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        run_id="evenstep",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(settings, sys.executable)(*arguments)
    except SignalException as stop:
        return RanksEnded(stop_signal=int(stop.sigval), exit_codes={})
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return RanksEnded(stop_signal=None, exit_codes=failures)
    return RanksEnded(stop_signal=None, exit_codes={})
