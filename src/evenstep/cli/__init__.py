"""The command line; a file per command, and nothing heavy is imported before a command runs."""

from __future__ import annotations

import io
import os
import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from evenstep import __version__
from evenstep.cli import plan as plan_command
from evenstep.cli.replay import replay
from evenstep.cli.report import report
from evenstep.cli.serve import serve
from evenstep.cli.train import train
from evenstep.cli.tune import tune
from evenstep.rank_exit import exits_at_once

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich's takes as long to import as everything else together
    help="Reinforcement learning on rollouts of any shape, with the exact optimizer step of one huge batch.",
)
app.command()(train)
app.command()(report)
app.command(epilog=plan_command.EPILOG)(plan_command.plan)
app.command()(serve)
app.command()(replay)
app.command()(tune)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"evenstep {__version__}")
        raise typer.Exit


@app.callback()
def evenstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    for stream in (sys.stdout, sys.stderr):
        # a sign that a terminal does not have is no reason to end a run
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    with exits_at_once() if "RANK" in os.environ and "WORLD_SIZE" in os.environ else nullcontext():
        app(prog_name="evenstep")
