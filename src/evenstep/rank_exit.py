"""How the process of a rank ends: with its own exit code, whatever threads of libraries still do."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["exits_at_once"]


@contextmanager
def exits_at_once() -> Iterator[None]:
    """End this process with the block's exit code once all exit handlers have run, the interpreter as it is.

    A thread of gloo lets go of a collective's tensors some time after the collective is over. Where it needs the
    interpreter's lock for that while the interpreter is taken apart, CPython ends the thread, and C++ the process, with
    SIGABRT: a rank that did all of its work, or has just said what is wrong, would count as one that crashed.
    """
    code = 1

    def end() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a pipe that nobody reads, or a closed stream
                stream.flush()
        os._exit(code)

    atexit.register(end)  # before all others, so it runs after them
    try:
        yield
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        raise
