"""This process as the only rank, or as one of those that torchrun started."""

from __future__ import annotations

import signal

import torch

from evenstep.cli.launch import say_how_to_go_on
from evenstep.config import Config
from evenstep.report.console import make_reporter
from evenstep.train import distributed
from evenstep.train.run import run_training

__all__ = ["run_alone", "run_as_rank"]

COLLECTIVE_TIMEOUT_S = 1800.0  # the longest wait for another rank: one may convert weights while the rest wait


def run_alone(config: Config, *, resume: bool) -> int:
    """Train in this process; the exit code."""
    try:
        with make_reporter() as reporter:
            run_training(config, resume=resume, reporter=reporter)
    except KeyboardInterrupt:
        say_how_to_go_on(config, num_ranks=1, what="Stopped.")
        return 128 + signal.SIGINT
    return 0


def run_as_rank(config: Config, *, resume: bool) -> None:
    """Train as one of the ranks that torchrun started."""
    # What is finished is on disk, so an interrupted rank just ends; the launcher says how to go on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    distributed.start(timeout_s=COLLECTIVE_TIMEOUT_S)
    try:
        with make_reporter() as reporter:
            run_training(config, resume=resume, reporter=reporter)
    finally:
        torch.distributed.destroy_process_group()
