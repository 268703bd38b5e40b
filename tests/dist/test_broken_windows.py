"""A window that breaks off between two micro-batches, as where memory runs out, leaves nothing behind in the next one.

1. Replicated parameters: the same Trainer runs the window again, and its gradient is that of a run without the break.
2. Sharded ones: FSDP2 keeps gradients of the micro-batches that ran, which would be added to the next window's, so the
   Trainer refuses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import evenstep.train
from evenstep.errors import StateError
from evenstep.train.losses import TokenBatch, ppo_clip
from ranks import once, run_ranks
from step_cases import whole
from tiny_models import tiny_model
from tiny_rows import make_rows

PLACES = ("forward", "loss", "backward")
WAYS = ("replicated", "last", "each")  # parameters, or `sync` of sharded ones


class Breaks:
    """Raises at its second call, once it is armed."""

    def __init__(self) -> None:
        self.is_armed, self.num_calls = False, 0

    def __call__(self, *_: Any) -> None:
        self.num_calls += self.is_armed
        if self.num_calls == 2:
            self.is_armed, self.num_calls = False, 0
            raise MemoryError("made up")


def gradients(way: str, place: str) -> list[dict[str, Tensor] | str]:
    """The whole gradient without a break, and after one, or why there is none; runs on every rank."""
    found: list[dict[str, Tensor] | str] = []
    for is_broken in (False, True):
        model, breaks = tiny_model(dtype=torch.float32, scale=0.15), Breaks()
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_, at=breaks: at() if place == "forward" else None)

        def loss(batch: TokenBatch, at: Breaks = breaks) -> tuple[Tensor, dict[str, Tensor]]:
            if place == "loss":
                at()
            if place == "backward":
                batch.logprobs_N.register_hook(at)
            return ppo_clip(batch)

        if way != "replicated":
            evenstep.train.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"max_tokens_per_gpu": 20, "loss": loss}
        settings |= {} if way == "replicated" else {"sync": way}
        trainer = evenstep.train.Trainer(model, optimizer, **settings)
        if is_broken:
            breaks.is_armed = True
            with pytest.raises(MemoryError):
                trainer.forward_backward(make_rows())
            assert not breaks.is_armed
        try:
            trainer.forward_backward(make_rows())
        except StateError as error:
            found.append(str(error))
        else:
            found.append({name: whole(p.grad) for name, p in model.named_parameters()})
    return found


@once
def launched() -> list[dict[tuple[str, str], Any]]:
    return run_ranks(every_gradient, 2, timeout_s=150)


def every_gradient() -> dict[tuple[str, str], Any]:
    return {(way, place): gradients(way, place) for way in WAYS for place in PLACES}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_a_broken_window_is_left(way: str, place: str) -> None:
    for rank in launched():
        expected, found = rank[way, place]
        if way == "replicated":
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        else:
            assert "broke off between two micro-batches" in found
