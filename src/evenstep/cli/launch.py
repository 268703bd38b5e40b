"""Ranks on this machine, started and watched through torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import torch
import typer
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from evenstep.cli.errors import USER_ERROR
from evenstep.config import Config

__all__ = ["default_ranks", "launch", "say_how_to_go_on"]

LOOPBACK = "127.0.0.1"


def default_ranks() -> int:
    """One rank per GPU; without a GPU two, or one where there is a single core."""
    return torch.cuda.device_count() or min(2, num_cores())


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def launch(config: Config, *, num_ranks: int, resume: bool, debug: bool) -> int:
    """Start the ranks, wait for them, and return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # all ranks are here, whatever this machine's name resolves to
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks' own words are enough
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        resolved = Path(folder) / "config.toml"
        resolved.write_text(config.resolved(), encoding="utf-8")
        flags = [name for name, is_set in (("--resume", resume), ("--debug", debug)) if is_set]
        launcher = elastic_launch(_launch_config(num_ranks), sys.executable)
        try:
            launcher("-u", "-m", "evenstep", "train", str(resolved), *flags)
        except SignalException as stop:
            return _stopped(config, num_ranks, stop.sigval)
        except ChildFailedError as error:
            return _failed(config, num_ranks, {rank: failure.exitcode for rank, failure in error.failures.items()})
        except KeyboardInterrupt:
            return _stopped(config, num_ranks, signal.SIGINT)
    return 0


def _launch_config(num_ranks: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",  # a free port
        run_id="evenstep",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
    )


def _stopped(config: Config, num_ranks: int, number: int) -> int:
    _show_cursor()
    say_how_to_go_on(config, num_ranks=num_ranks, what="Stopped.")
    return 128 + number


def _failed(config: Config, num_ranks: int, exit_codes: dict[int, int]) -> int:
    _show_cursor()
    if USER_ERROR in exit_codes.values():
        return USER_ERROR  # that rank has said why
    causes = ", ".join(
        f"rank {rank} ended with {f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"
        for rank, code in sorted(exit_codes.items())
    )
    say_how_to_go_on(config, num_ranks=num_ranks, what=f"Training failed: {causes}.")
    return 1


def say_how_to_go_on(config: Config, *, num_ranks: int, what: str) -> None:
    """Tell the user what happened and which command continues the run."""
    recorded = Path(config.run.dir) / "config.toml"
    if recorded.is_file():
        hint = f"Go on with: evenstep train {recorded} --resume --ranks {num_ranks}"
    else:
        hint = "Nothing was trained yet: start again with the same command."
    typer.secho(f"\n{what} {hint}", fg=typer.colors.YELLOW, err=True)


def _show_cursor() -> None:
    """A rank that was ended in the middle of the live table cannot bring the cursor back itself."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
