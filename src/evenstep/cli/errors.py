"""How an error or a stop reaches the user: a short message, and the traceback only when asked for."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from evenstep.errors import EvenstepError

__all__ = ["USER_ERROR", "short_errors", "stoppable"]

USER_ERROR = 2  # exit code of an error that evenstep raised on purpose
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}


@contextmanager
def short_errors(*, debug: bool) -> Iterator[None]:
    """Print an ``EvenstepError``, or what a disk refuses, as one red message and exit with code 2; with ``debug`` let
    it through.
    """
    try:
        yield
    except (EvenstepError, OSError) as error:
        if debug or (isinstance(error, OSError) and error.errno not in OF_THE_DISK):
            raise
        rank = os.environ.get("RANK", "0")
        typer.secho(f"{'error' if rank == '0' else f'error on rank {rank}'}: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(USER_ERROR) from None


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what starts ranks of its own alike: its files and processes are gone, and it says so."""
    from evenstep.replay.session import ReplayStopped

    def stop(number: int, _: object) -> None:
        raise ReplayStopped(number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
        return
    except ReplayStopped as stopped:
        number = stopped.number
    except KeyboardInterrupt:
        number = signal.SIGINT
    typer.secho("\nStopped; nothing is left behind.", fg=typer.colors.YELLOW, err=True)
    raise typer.Exit(128 + number)
