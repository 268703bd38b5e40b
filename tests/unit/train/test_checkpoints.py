"""What is locked here:

1. A checkpoint that cannot be written, or is interrupted, leaves those before it: a file that may not grow stands for a
   full disk.
2. A parameter that no gradient has reached yet, as those of a vision tower in windows of text, goes on bit for bit.
3. The newest checkpoint is the one of the highest window, however many digits it has.
"""

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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parameters_without_a_gradient_go_on(tmp_path: Path) -> None:
    def made() -> Trained:
        model = tiny_model(dtype=torch.float32)
        model.model.register_parameter("unseen", torch.nn.Parameter(torch.ones(3)))
        return Trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))

    def step(trained: Trained, *, with_all: bool) -> None:
        model: Any = trained.model
        loss = model(input_ids=torch.tensor([[1, 2, 3]])).logits[..., 0].sum()
        (loss + (model.model.unseen**2).sum() if with_all else loss).backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()

    uninterrupted, stopped, resumed = made(), made(), made()
    step(uninterrupted, with_all=False)
    step(stopped, with_all=False)
    load_checkpoint(save_checkpoint(tmp_path, {"policy": stopped}, {"window": 1}, keep=1), {"policy": resumed})
    for trained in (uninterrupted, stopped, resumed):
        step(trained, with_all=False)
        step(trained, with_all=True)
        for found, expected in zip(trained.model.parameters(), uninterrupted.model.parameters(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_newest_has_the_highest_window(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    trained = {"policy": Trained(model, torch.optim.SGD(model.parameters(), lr=0.1))}
    for window in (999_998, 999_999, 1_000_000):
        newest = save_checkpoint(tmp_path, trained, {"window": window}, keep=2)
        assert latest_checkpoint(tmp_path) == newest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["window_1000000", "window_999999"]
