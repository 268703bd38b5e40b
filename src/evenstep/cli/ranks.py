"""Training in this process, as one rank of several, or as the process that starts the ranks."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import typer

from evenstep.cli.errors import USER_ERROR
from evenstep.config import Config
from evenstep.report.console import make_reporter

__all__ = ["run_alone", "run_as_rank", "start_ranks"]

# -P: files in the current folder do not stand in for modules, as with the `evenstep` script itself
RANK_COMMAND = ("-u", "-P", "-m", "evenstep", "train")


def run_alone(config: Config, *, resume: bool) -> int:
    """Train in this process; the exit code."""
    from evenstep.train.run import run_training

    try:
        with make_reporter() as reporter:
            run_training(config, resume=resume, reporter=reporter)
    except KeyboardInterrupt:
        return _stopped(config, 1, signal.SIGINT)
    return 0


def run_as_rank(config: Config, *, resume: bool) -> None:
    """Train as one of the ranks that torchrun started."""
    from evenstep.train.launch import joined
    from evenstep.train.run import run_training

    # What is finished is on disk, so an interrupted rank just ends; the launcher says how to go on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with joined(), make_reporter() as reporter:
        run_training(config, resume=resume, reporter=reporter)


def start_ranks(config: Config, *, num_ranks: int, resume: bool, debug: bool) -> int:
    """Start the ranks, wait for them; the exit code."""
    from evenstep.train.launch import run_ranks

    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        resolved = Path(folder) / "config.toml"
        resolved.write_text(config.resolved(), encoding="utf-8")
        flags = [name for name, is_set in (("--resume", resume), ("--debug", debug)) if is_set]
        try:
            ended = run_ranks([*RANK_COMMAND, str(resolved), *flags], num_ranks=num_ranks)
        except KeyboardInterrupt:  # before the launcher listens for it
            return _stopped(config, num_ranks, signal.SIGINT)
    if ended.stop_signal is not None:
        return _stopped(config, num_ranks, ended.stop_signal)
    return _failed(config, num_ranks, ended.exit_codes) if ended.exit_codes else 0


def _stopped(config: Config, num_ranks: int, number: int) -> int:
    _show_cursor()
    _say(f"Stopped. {_how_to_go_on(config, num_ranks)}")
    return 128 + number


def _failed(config: Config, num_ranks: int, exit_codes: Mapping[int, int]) -> int:
    _show_cursor()
    if USER_ERROR in exit_codes.values():
        return USER_ERROR  # that rank has said why
    causes = ", ".join(
        f"rank {rank} ended with {f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"
        for rank, code in sorted(exit_codes.items())
    )
    _say(f"Training failed: {causes}. {_how_to_go_on(config, num_ranks)}")
    return 1


def _how_to_go_on(config: Config, num_ranks: int) -> str:
    recorded = Path(config.run.dir) / "config.toml"
    if recorded.is_file():
        return f"Go on with: evenstep train {recorded} --resume --ranks {num_ranks}"
    return "Nothing was trained yet: start again with the same command."


def _say(text: str) -> None:
    typer.secho(f"\n{text}", fg=typer.colors.YELLOW, err=True)


def _show_cursor() -> None:
    """A rank that was ended in the middle of the live table cannot bring the cursor back itself."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
