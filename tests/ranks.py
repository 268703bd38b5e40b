"""Run a test function on real gloo ranks: one process each, one file store, one thread, never a hang.

``run_ranks(fn, world_size, *args)`` calls ``fn(*args)`` on every rank inside an initialised process group and returns
the results in rank order. A rank that raises fails the call with that rank's traceback; ranks that do not end in time
fail it with the stack each of them stands in. No process outlives the call.

Ranks are forked from one server process that has imported torch and transformers and started no thread: a launch of
four ranks costs 0.2 s, where four fresh interpreters cost 15 s of imports on two cores.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

T = TypeVar("T")

PRELOADED = (
    "evenstep.train",
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
start_method = "forkserver"  # "fork" where ranks are to have what this process changed in its modules
GRACE_S = 5.0  # what the other ranks get, to end by themselves, after the first rank has failed


class RanksError(AssertionError):
    """A rank raised, died, or did not end in time; the message holds what every rank had to say."""


def once(launch: Callable[..., T]) -> Callable[..., T]:
    """Remember what a launch returned or raised, by its arguments: many tests look at one launch."""
    known: dict[Any, tuple[T | None, Exception | None]] = {}

    @functools.wraps(launch)
    def wrapper(*args: Any) -> T:
        if args not in known:
            try:
                known[args] = launch(*args), None
            except RanksError as error:
                known[args] = None, error
        result, error = known[args]
        if error is not None:
            raise error
        return cast(T, result)

    return wrapper


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 20.0,
) -> list[Any]:
    """``[fn(*args) on rank 0, on rank 1, ...]``; ``fn`` is a function at the top of its module.

    Args:
        timeout_s: after this many seconds all ranks are ended and the call fails.
        group_timeout_s: how long a collective may wait for the other ranks.

    Raises:
        RanksError: with the failing ranks' tracebacks.
    """
    context = server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        job = (fn.__module__, inspect.getfile(fn), fn.__qualname__, timeout_s, group_timeout_s)
        (folder / "args").write_bytes(pickle.dumps(args))
        processes: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, job)) for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    if process.is_alive():
                        process.kill()
                    process.join()
        _raise_failures(processes, folder, timeout_s)
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def server() -> Any:
    """The multiprocessing context that forks from the running server."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when the server starts
        context.set_forkserver_preload(list(PRELOADED))
        multiprocessing.forkserver.ensure_running()  # the first start imports torch: not part of the ranks' time
    return context


def _wait(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Return when all have ended, when the time is up, or a little after the first one has failed."""
    deadline = time.monotonic() + timeout_s
    has_failed = False
    while running := [process for process in processes if process.is_alive()]:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return
        multiprocessing.connection.wait([process.sentinel for process in running], remaining_s)
        if not has_failed and any(process.exitcode for process in processes):
            has_failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _raise_failures(processes: Sequence[BaseProcess], folder: Path, timeout_s: float) -> None:
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    if not failed:
        return
    files = {rank: folder / f"stderr{rank}" for rank in failed if (folder / f"stderr{rank}").exists()}
    reports = []
    for rank in sorted(files, key=lambda rank: files[rank].stat().st_mtime_ns):  # the first to fail comes first
        code = processes[rank].exitcode
        what = "raised" if code == 1 else f"did not end (exit code {code}, limit {timeout_s:.0f} s)"
        reports.append(f"rank {rank} {what}:\n{files[rank].read_text(errors='replace')}")
    raise RanksError(f"{len(failed)} of {len(processes)} ranks failed: {failed}\n" + "\n".join(reports))


def _rank_main(rank: int, world_size: int, folder: Path, job: tuple[str, str, str, float, float]) -> None:
    import torch
    import torch.distributed as dist

    # An exception ends the process at once (its sockets close, no other rank waits for it) after its traceback is
    # written to stderr, and so are the stacks of a rank that hangs.
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    module_name, file, qualname, timeout_s, group_timeout_s = job
    faulthandler.dump_traceback_later(max(0.5, timeout_s - 1.0), file=sys.stderr.fileno())
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    fn = vars(_load(module_name, file))[qualname]
    args = pickle.loads((folder / "args").read_bytes())
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout_s),
    )
    dist.barrier()  # a rank that ends at once would close connections that another one is still making
    result = fn(*args)
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _load(module_name: str, file: str) -> ModuleType:
    """The module of the function: test modules are not importable by name, so it is loaded from its file."""
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
