"""``evenstep train``: check everything, then train on as many ranks as fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstep.cli.errors import short_errors

if TYPE_CHECKING:
    from evenstep.config import Config

__all__ = ["train"]


def train(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="TOML files, merged left to right.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes on this machine; default: one per GPU, without a GPU two or the number of cores."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved configuration, and stop.")
    ] = False,
    run_dir: Annotated[str | None, typer.Option(metavar="PATH", help="The run's folder, instead of run.dir.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a policy as the CONFIG files say.

    Starts the ranks by itself, or is one of them under torchrun. A run that was stopped goes on with --resume.
    """
    with short_errors(debug=debug):
        from evenstep.config import load_config
        from evenstep.preflight import check_model, check_ranks

        given = list(overrides or [])
        if run_dir is not None:
            given.append(f"run.dir={json.dumps(run_dir, ensure_ascii=False)}")
        config = load_config(configs, given)
        if dry_run:
            check_ranks(1 if ranks is None else ranks)
            check_model(config)
            typer.echo(config.resolved(), nl=False)
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            _train_as_a_rank(config, ranks, resume)
        else:
            _train_here(config, ranks, resume, debug)


def _train_as_a_rank(config: Config, ranks: int | None, resume: bool) -> None:
    from evenstep.errors import ConfigError
    from evenstep.preflight import check_model, preflight

    num_ranks = int(os.environ["WORLD_SIZE"])
    if ranks is not None and ranks != num_ranks:
        raise ConfigError(f"--ranks must be what torchrun started, found {ranks} and {num_ranks}; leave --ranks out")
    # rank 0 fills the run folder at once, so no other rank may judge it
    if os.environ["RANK"] == "0":
        preflight(config, resume=resume)
    else:
        check_model(config)

    from evenstep.cli.ranks import run_as_rank

    run_as_rank(config, resume=resume)


def _train_here(config: Config, ranks: int | None, resume: bool, debug: bool) -> None:
    from evenstep.preflight import preflight

    preflight(config, ranks=ranks, resume=resume)

    from evenstep.cli.ranks import run_alone, start_ranks
    from evenstep.train.launch import default_ranks

    num_ranks = default_ranks() if ranks is None else ranks
    if num_ranks == 1 and config.train.sharding == "replicated":
        code = run_alone(config, resume=resume)
    else:
        code = start_ranks(config, num_ranks=num_ranks, resume=resume, debug=debug)
    if code:
        raise typer.Exit(code)
