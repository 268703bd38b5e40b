"""Everything that ranks say to each other: sharding, sums, agreement, objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from evenstep.errors import ConfigError, DistributedError, EvenstepError, StateError

__all__ = [
    "agree",
    "broadcast",
    "copy_full_weights",
    "device",
    "exchange",
    "full_gradient_norm",
    "gather",
    "is_sharded",
    "rank_and_size",
    "rank_zero_first",
    "reduce_sums",
    "scatter",
    "set_sync",
    "shard",
    "start",
    "sum_gradients",
    "together",
    "use_gradient_sums",
]

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # by the device that computes
STATUS_BYTES = 1024  # of a rank's message in `agree`
DIGEST_BYTES = 16  # of the whole message, in front of it


def rank_and_size() -> tuple[int, int]:
    """(this rank, number of ranks); (0, 1) where no process group is up."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def shard(model: nn.Module) -> nn.Module:
    """Shard a transformers model over all ranks with FSDP2, one group per decoder layer, and return it.

    Gradients are summed over ranks, not averaged. Call it before the optimizer is built. The output head stays in the
    root group, so that log-probs can be computed in chunks.

    Raises:
        StateError: no process group is up.
    """
    if not dist.is_initialized():
        raise StateError(
            "shard() needs a process group; start under torchrun and call torch.distributed.init_process_group() first"
        )
    names = set(model._no_split_modules or ())  # type: ignore[union-attr,arg-type]
    layers = [module for module in model.modules() if type(module).__name__ in names]
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    layers = [layer for layer in layers if layer not in inner]  # some models name a block and its mixer
    if not layers:
        raise StateError(
            f"shard() wraps the decoder layers that {type(model).__name__} names in _no_split_modules, and found none; "
            f"call fully_shard on its layers and on the model yourself"
        )
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    use_gradient_sums(model)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether any part of a model was given to ``fully_shard``."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def use_gradient_sums(model: nn.Module) -> None:
    """Undo the averaging over ranks that FSDP2 does by default: the one place where it is undone.

    Raises:
        ConfigError: a model of which only parts are sharded, or a group whose gradients are accumulated or reduced in
            half precision.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # whoever ran the model before may have left it gathered
    plain = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if plain or not isinstance(model, FSDPModule):
        raise ConfigError(
            f"a sharded model is sharded as a whole, found {len(plain)} parameters that are on every rank "
            f"({', '.join(plain[:3])}{' …' if len(plain) > 3 else ''}); call fully_shard(model) after its layers, or "
            f"evenstep.train.shard(model)"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy = module._get_fsdp_state()._mp_policy
            if {policy.param_dtype, policy.reduce_dtype} & {torch.bfloat16, torch.float16}:
                raise ConfigError(
                    f"sharded gradients must add up in float32, found a fully_shard with {policy}; shard without "
                    f"mp_policy and give the Trainer compute_dtype='bfloat16'"
                )
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum; a plain one followed by a division by 1 is exact everywhere
            module.set_force_sum_reduction_for_comms(True)


def set_sync(model: nn.Module, *, is_last: bool) -> None:
    """Tell a sharded model whether this backward pass is the window's last: only then gradients are reduced.

    Parameters stay gathered between micro-batches and are given back after the last one; leaving them gathered for good
    would leave ``.grad`` unset without a word.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        model.set_reshard_after_backward(is_last)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of replicated parameters over ranks, in one collective per dtype and device.

    A parameter that got no gradient on any rank keeps None; one that got a gradient anywhere gets the sum everywhere.
    """
    if rank_and_size()[1] == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for (dtype, device), members in by_kind.items():
        sizes = [parameter.numel() for parameter in members]
        has_grad = torch.tensor([p.grad is not None for p in members], dtype=dtype, device=device)
        grads = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in members]
        flat = torch.cat([has_grad, *grads])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        counts, *sums = flat.split([len(members), *sizes])
        for parameter, count, grad in zip(members, counts.tolist(), sums, strict=True):
            if count > 0:
                parameter.grad = grad.view_as(parameter)


def reduce_sums(sums: Mapping[str, float], maxima: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Sum and maximise named float64 scalars over ranks with one collective; every rank has the same names."""
    sums, maxima = dict(sorted(sums.items())), dict(sorted(maxima.items()))
    local = torch.tensor([*sums.values(), *maxima.values()], dtype=torch.float64)
    table_WX = _all_gather(local).double()
    total = table_WX[:, : len(sums)].sum(0).tolist()
    highest = table_WX[:, len(sums) :].max(0).values.tolist()
    return dict(zip(sums, total, strict=True)), dict(zip(maxima, highest, strict=True))


def agree(what: str, value: str, error: Exception | None = None) -> None:
    """Compare a short string over all ranks before a collective could hang on the difference.

    Args:
        what: what is compared, for the message.
        value: e.g. a plan's hash.
        error: an error this rank met on the way; the other ranks then raise too.

    Raises:
        DistributedError: on every rank, with each rank's value.
        Exception: ``error`` itself, on the rank that met it.
    """
    rank, size = rank_and_size()
    if size == 1:
        if error is not None:
            raise error
        return
    message = f"={value}" if error is None else f"!{type(error).__name__}: {error}"
    # what is too long to be sent is compared all the same
    encoded = blake2b(message.encode(), digest_size=DIGEST_BYTES).hexdigest().encode() + message.encode()
    encoded = encoded[:STATUS_BYTES]
    buffer = torch.zeros(STATUS_BYTES, dtype=torch.uint8)
    buffer[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    table_WX = _all_gather(buffer).cpu().numpy().astype(np.uint8)
    found = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in table_WX]
    if error is not None:
        raise error
    if len(set(found)) == 1:
        return
    lines = "\n".join(f"  rank {r}: {text[2 * DIGEST_BYTES + 1 :]}" for r, text in enumerate(found))
    raise DistributedError(
        f"every rank must bring the same {what}, and they differ (this is rank {rank}):\n{lines}\n"
        f"give forward_backward the same rows, in the same order and with the same settings, on every rank"
    )


def exchange(value: T) -> list[T]:
    """[W] Every rank's value, on every rank."""
    size = rank_and_size()[1]
    if size == 1:
        return [value]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, value)
    return found


def together(work: Callable[[], T]) -> T:
    """Do work on every rank; what fails on one of them ends it on all, with one error: that of the lowest rank.

    Raises:
        EvenstepError: the error; of one that is none the rank, kind and text.
    """
    error: EvenstepError | None = None
    found: list[T] = []
    try:
        found.append(work())
    except EvenstepError as caught:
        error = caught
    except Exception as caught:  # noqa: BLE001 -- the other ranks wait for this one: whatever it is, they must hear of it
        error = DistributedError(
            f"rank {rank_and_size()[0]} failed where all must go on together, with {type(caught).__name__}: {caught}; "
            f"what is finished is on disk, go on with --resume once the cause is gone (--debug shows where it was)"
        )
        error.__cause__ = caught
    # pickled, an error has its class and words
    failures = [(rank, failed) for rank, failed in enumerate(exchange(error)) if failed is not None]
    if failures:
        rank, first = failures[0]
        raise error if error is not None and rank == rank_and_size()[0] else first
    return found[0]


def gather(value: T) -> list[T] | None:
    """[W] Every rank's value, on rank 0; None elsewhere."""
    rank, size = rank_and_size()
    if size == 1:
        return [value]
    found: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(value, found, dst=0)
    return found


def scatter(values: Sequence[T] | None) -> T:
    """Rank r gets ``values[r]`` of rank 0; the other ranks pass None."""
    if rank_and_size()[1] == 1:
        assert values is not None
        return values[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(values) if values is not None else None, src=0)
    return mine[0]


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank."""
    if rank_and_size()[1] == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the block on rank 0 before the other ranks run it, for work whose result is cached on disk."""
    rank, size = rank_and_size()
    if size > 1 and rank > 0:
        dist.barrier()
    yield
    if size > 1 and rank == 0:
        dist.barrier()


def copy_full_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy what trains of a sharded model into a whole copy of it, one parameter at a time."""
    theirs = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if not parameter.requires_grad:
                continue
            theirs[name].copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)


def start(timeout_s: float) -> None:
    """Join the process group that torchrun set up, NCCL for tensors on CUDA devices and gloo for everything else.

    Objects that ranks exchange, rows with their images among them, so stay out of the GPUs' memory.
    """
    if torch.cuda.is_available():
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"every rank needs a GPU of its own, found {torch.cuda.device_count()} GPUs for local rank "
                f"{local_rank}; start fewer ranks with --ranks"
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group(BACKENDS[device().type], timeout=timedelta(seconds=timeout_s))


def device() -> torch.device:
    """Where this rank computes: the GPU that ``start`` chose, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _all_gather(local: Tensor) -> Tensor:
    size = rank_and_size()[1]
    if size == 1:
        return local[None]
    local = local if "cpu:" in dist.get_backend_config() else local.cuda()
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local)
    return torch.stack(parts).cpu()


def full_gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Global 2-norm of all gradients, over all shards: a scalar tensor that is the same on every rank."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
