"""What a rank leaves behind when it ends too early: its error in a file, or the stack that it stood in."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from evenstep.errors import EvenstepError
from evenstep.train import distributed

__all__ = ["Watch", "reported"]

FAILED = 3  # exit code of a rank whose error is in its file


class Watch:
    """Ends this process when a step takes too long, whatever it waits for, and leaves the stack it stood in."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._file = (folder / f"stack.{distributed.rank_and_size()[0]}").open("w")

    def renew(self) -> None:
        # a thread of C: it ends the process also where Python's own threads wait for a collective
        faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._file)

    def __enter__(self) -> Watch:
        faulthandler.enable(self._file)  # of a crash in compiled code
        # where another rank's time was up first, the launcher ends this one
        faulthandler.register(signal.SIGTERM, file=self._file, chain=True)
        self.renew()
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)
        faulthandler.disable()
        self._file.close()


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Leave an error in a file for the process that started the ranks, and end with exit code 3."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- whatever it is becomes a result
        _report(folder, error)
        sys.exit(FAILED)


def _report(folder: Path, error: Exception) -> None:
    """Write what ended this rank."""
    rank = int(os.environ.get("RANK", "0"))
    is_oom = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    record = {
        "time": time.time(),
        "rank": rank,
        "type": type(error).__name__,
        "is_evenstep": isinstance(error, EvenstepError),
        "is_oom": is_oom,
        "text": str(error)[:2000],
        "traceback": "".join(traceback.format_exception(error))[-8000:],
    }
    path = folder / f"error.{rank}.partial"
    path.write_text(json.dumps(record))
    path.rename(folder / f"error.{rank}.json")
