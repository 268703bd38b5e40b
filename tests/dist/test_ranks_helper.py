"""The helper that runs functions on real ranks.

1. Results come back in rank order, from separate processes inside one group.
2. A rank that raises fails the call quickly, with its own traceback first, and no process is left.
3. Ranks that hang are ended at the limit, and the report holds the line they stand in.
4. A second launch starts from fresh processes.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RanksError, run_ranks

STATE: list[int] = []


def add_ranks(value: int) -> tuple[int, int, int]:
    STATE.append(value)
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total) + value, os.getpid(), len(STATE)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def sleep_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


@pytest.mark.parametrize("world_size", [1, 4])
def test_results_in_rank_order(world_size: int) -> None:
    found = [run_ranks(add_ranks, world_size, 10) for _ in range(2)]
    pids = {pid for results in found for _, pid, _ in results}
    assert len(pids | {os.getpid()}) == 2 * world_size + 1
    assert [(total, calls) for total, _, calls in found[0] + found[1]] == [
        (10 + sum(range(world_size)), 1)
    ] * 2 * world_size


def test_failing_rank_shows_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError, match=r"(?s)ranks failed.*rank 1 raised.*fail_on_rank_1.*rank 1 has had enough"):
        run_ranks(fail_on_rank_1, 3)
    assert time.monotonic() - start < 15


def test_hanging_rank_is_ended() -> None:
    run_ranks(add_ranks, 2, 10)  # the server that ranks are forked from has started
    start = time.monotonic()
    with pytest.raises(RanksError, match=r"(?s)rank 0 did not end.*in sleep_on_rank_0"):
        run_ranks(sleep_on_rank_0, 2, timeout_s=3)
    assert time.monotonic() - start < 15
