"""A checkpoint that cannot be written, and Ctrl-C while it is: a file that may not grow stands for a full disk."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.errors import StateError
from evenstep.train.checkpoint import Trained, latest_checkpoint, load_checkpoint, save_checkpoint
from tiny_models import tiny_model


@contextlib.contextmanager
def largest_file(size: int, on_excess: Any) -> Iterator[None]:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, on_excess)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "on_excess, error, message",
    [
        (signal.SIG_IGN, StateError, "window_000002: the checkpoint could not be written"),
        (interrupt, KeyboardInterrupt, "^$"),
    ],
)
def test_what_was_written_before_stays(
    tmp_path: Path, on_excess: Any, error: type[BaseException], message: str
) -> None:
    model = tiny_model(dtype=torch.float32)
    trained = {"policy": Trained(model, torch.optim.SGD(model.parameters(), lr=0.1))}
    first = save_checkpoint(tmp_path, trained, {"window": 1}, keep=2)
    with largest_file(3000, on_excess), pytest.raises(error, match=message):
        save_checkpoint(tmp_path, trained, {"window": 2}, keep=1)
    assert latest_checkpoint(tmp_path) == first
    assert load_checkpoint(first, trained)["window"] == 1
    assert latest_checkpoint(tmp_path) != save_checkpoint(tmp_path, trained, {"window": 2}, keep=2)
