"""Nonsense is refused by name, and on every rank. Locks:

1. a loss function that averages, adds a dimension, or gives such a metric: its shape is named
2. metrics of a user's loss go by name, whatever their order on a rank; other names on a rank are an error on all
3. options are compared as a whole, however long; an error in a constructor or in the window of one rank, of whatever kind,
   is raised on all ranks at once
4. a model of which only parts are sharded, or an optimizer that lacks a trainable parameter
5. a prepared window keeps the settings it was prepared with, and its voters
6. a wrapped or user-written loss may ask for the ratio of its rollout; metrics may not hide evenstep's own
7. wrong kinds of values, each by name
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import evenstep.train
from evenstep.errors import ConfigError, DistributedError
from evenstep.train.losses import TokenBatch, gspo, kl_estimate, ppo_clip
from loss_matrix import near_policies
from ranks import once, run_ranks
from tiny_models import tiny_model
from tiny_rows import make_rows

LIMIT_S = 20.0


def trainer_of(model: Any = None, **options: Any) -> evenstep.train.Trainer:
    model = tiny_model(dtype=torch.float32) if model is None else model
    settings = {"max_tokens_per_gpu": 30} | options
    return evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def changed(loss: Callable[[Tensor], Tensor], metric: Callable[[Tensor], Tensor], batch: TokenBatch) -> Any:
    loss_N, _ = ppo_clip(batch)
    return loss(loss_N), {"own": metric(batch.advantages_N)}


def same(values: Tensor) -> Tensor:
    return values


def as_column(values: Tensor) -> Tensor:
    return values[:, None]


@pytest.mark.parametrize(
    ("loss", "metric", "found"),
    [
        (torch.mean, same, r"a loss of shape \(\)"),
        (as_column, same, r"a loss of shape \(\d+, 1\)"),
        (same, torch.mean, r"own of shape \(\)"),
    ],
)
def test_shapes(loss: Any, metric: Any, found: str) -> None:
    trainer = trainer_of(loss=functools.partial(changed, loss, metric))
    with pytest.raises(ConfigError, match=rf"one number per trained token, shape \(\d+,\), found {found}"):
        trainer.forward_backward(make_rows())


def ordered(names: tuple[str, ...], batch: TokenBatch) -> Any:
    loss_N, _ = ppo_clip(batch)
    return loss_N, {name: torch.full_like(loss_N, len(name)) for name in names}


class Ordered:
    """A loss whose metrics come in another order on every rank; equal everywhere by its name."""

    def __call__(self, batch: TokenBatch) -> Any:
        names = ("low", "higher")
        return ordered(names[:: 1 - 2 * torch.distributed.get_rank()], batch)


class Sometimes:
    """A loss whose metric is missing on one rank."""

    def __call__(self, batch: TokenBatch) -> Any:
        return ordered(("low",) * torch.distributed.get_rank(), batch)


def table_loss(batch: TokenBatch, table: tuple[int, ...] = ()) -> Any:
    return ppo_clip(batch)


def other_vocabulary(rank: int) -> Any:
    model = tiny_model(dtype=torch.float32)
    other = tiny_model(dtype=torch.float32)
    return evenstep.train.Trainer(model, torch.optim.SGD((other if rank else model).parameters(), lr=0.1))


def partly_sharded(rank: int) -> Any:
    model = tiny_model(dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    return trainer_of(model)


def long_options(rank: int) -> Any:
    loss = functools.partial(table_loss, table=tuple(range(600)))
    return trainer_of(loss=loss, temperature=1.0 + rank)


def wrong_voters(rank: int) -> Any:
    return trainer_of().forward_backward(make_rows(), voters=5 if rank else None)  # type: ignore[arg-type]


def missing_metric(rank: int) -> Any:
    return trainer_of(loss=Sometimes()).forward_backward(make_rows())


def reordered_metrics(rank: int) -> Any:
    return trainer_of(loss=Ordered()).forward_backward(make_rows()).metrics


ATTEMPTS = (other_vocabulary, partly_sharded, long_options, wrong_voters, missing_metric, reordered_metrics)


def attempt_all() -> dict[str, tuple[str, Any, float]]:
    found = {}
    for attempt in ATTEMPTS:
        started = time.monotonic()
        try:
            result: Any = attempt(torch.distributed.get_rank())
            kind = "done"
        except Exception as error:  # noqa: BLE001 -- what it is, is what the tests look at
            kind, result = type(error).__name__, str(error)
        found[attempt.__name__] = (kind, result, time.monotonic() - started)
        torch.distributed.barrier()
    return found


@once
def attempts() -> list[dict[str, tuple[str, Any, float]]]:
    return run_ranks(attempt_all, 2, timeout_s=120, group_timeout_s=60)


@pytest.mark.parametrize(
    ("name", "kinds", "text"),
    [
        ("other_vocabulary", (DistributedError, ConfigError), "trainable parameters"),
        ("partly_sharded", (ConfigError, ConfigError), "sharded as a whole"),
        ("long_options", (DistributedError, DistributedError), "Trainer options"),
        ("wrong_voters", (DistributedError, None), ""),
        ("missing_metric", (DistributedError, DistributedError), "names of metrics"),
    ],
)
def test_every_rank_raises(name: str, kinds: tuple[Any, Any], text: str) -> None:
    for by_name, kind in zip(attempts(), kinds, strict=True):
        found, message, seconds = by_name[name]
        assert found != "done"
        assert kind is None or found == kind.__name__, message
        assert text in message
        assert seconds < LIMIT_S


def test_metrics_go_by_name() -> None:
    for by_name in attempts():
        kind, metrics, _ = by_name["reordered_metrics"]
        assert kind == "done", metrics
        assert (metrics["low"], metrics["higher"]) == (3.0, 6.0)


def test_prepared_windows_keep_their_settings() -> None:
    rows, trainer = make_rows(), trainer_of(normaliser="rollout")
    other = evenstep.train.Scorer(tiny_model(dtype=torch.float32), max_tokens_per_gpu=30)
    with pytest.raises(ConfigError, match=r"settings of the Trainer .*'normaliser': 'token'.*'normaliser': 'rollout'"):
        trainer.forward_backward(other.prepare(rows))
    with pytest.raises(ConfigError, match="has its voters already"):
        trainer.forward_backward(trainer.prepare(rows), voters={"x": "y"})
    trainer.forward_backward(trainer.prepare(rows, max_tokens_per_gpu=60))  # a budget of its own is fine


def test_own_losses_may_ask_for_the_ratio() -> None:
    rows = near_policies(make_rows(((1, 2), (1,))))
    expected = trainer_of(tiny_model(), loss="gspo").forward_backward(rows).loss

    def own(batch: TokenBatch) -> Any:
        return gspo(batch)

    own.needs_sequence_ratio = True  # type: ignore[attr-defined]
    for loss in (functools.partial(gspo), own):
        assert trainer_of(tiny_model(), loss=loss).forward_backward(rows).loss == expected


def test_own_metrics_hide_nothing() -> None:
    for name in ("num_rows", "num_trained_tokens", "padding_efficiency"):
        with pytest.raises(ConfigError, match=f"names of their own, found {name}"):
            trainer_of(loss=functools.partial(ordered, (name,))).forward_backward(make_rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": "x"}, "clip_low must be a number, found 'x'"),
        ({"loss": 3}, "loss must be a name or a function, found 3"),
        ({"logprob_chunk_tokens": 2.5}, "logprob_chunk_tokens must be a whole number of at least 1, found 2.5"),
        ({"max_tokens_per_gpu": -5}, "max_tokens_per_gpu must be a whole number of at least 1, found -5"),
        ({"pad_to_multiple": 0}, "pad_to_multiple must be a whole number"),
        ({"activation_checkpointing": "no"}, "activation_checkpointing must be True or False, found 'no'"),
        ({"allow_row_splits": "no"}, "allow_row_splits must be True or False"),
        ({"sequence_mask": 3}, r"sequence_mask must be \(low, high\)"),
        ({"sequence_mask": (0.5, 2, 3)}, r"sequence_mask must be \(low, high\)"),
        ({"normaliser": "constant"}, "normaliser_constant belongs to normaliser 'constant' alone, found None"),
        ({"normaliser_constant": 7.0}, "normaliser_constant belongs to normaliser 'constant' alone, found 7.0"),
    ],
)
def test_wrong_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(**options)


def test_k1_is_no_loss() -> None:
    with pytest.raises(ConfigError, match="k2 or k3, found 'k1'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k1")
