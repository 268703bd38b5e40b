"""``evenstep replay``: recorded rollouts under several arms, each in processes of its own."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from evenstep.cli.errors import short_errors, stoppable

__all__ = ["replay"]

DEFAULT_ARMS = ("fixed", "padded", "packed")


class Dtype(StrEnum):
    """Of parameters, gradients and moments."""

    float32 = "float32"
    float64 = "float64"


def replay(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|FILE", help="A run's folder, or a file of rollouts (then with --config).")
    ],
    configs: Annotated[
        list[Path] | None,
        typer.Option("--config", metavar="TOML", help="Configuration, merged on top of the run's; may be repeated."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="ARM",
            help="A layout and keys of [plan]: padded,max_tokens_per_gpu=4096; a few others with their section: "
            "packed,train.sharding=fsdp2. The first one is what the others are compared with. "
            "Default: fixed, padded, packed.",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes of each arm; default: as evenstep train.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of parameters, gradients and moments.")] = Dtype.float32,
    steps: Annotated[int | None, typer.Option(help="Windows to replay; default: all that were recorded.")] = None,
    repeats: Annotated[int, typer.Option(help="Times that each arm runs, in turn; times are medians over all.")] = 1,
    warmup: Annotated[
        int | None,
        typer.Option(help="First steps of each run of an arm that are in no time; default: 1, of a single step none."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the permutations behind the noise floor.")] = 0,
    max_rel: Annotated[
        float | None,
        typer.Option(
            help="Fail (exit code 1) when an arm's gradient differs by more than this from the first arm's, relative "
            "to its norm, and by more than 10 times the noise. Arms that crash, hang or lose a row always fail."
        ),
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Also compare with float64, one row at a time, on one rank (slow).")
    ] = False,
    own_weights: Annotated[
        bool,
        typer.Option(
            "--own-weights",
            help="Let each arm go on from its own weights, so that differences add up over the steps; without it every "
            "step begins with the first arm's weights.",
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Start from these weights (as model.path) instead of the run's first ones.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Start from a checkpoint (RUN/checkpoints/window_...), at its window."),
    ] = None,
    step_timeout: Annotated[float, typer.Option(help="Seconds after which a step counts as hung.")] = 600.0,
    compare_steps: Annotated[
        int | None, typer.Option(help="Steps whose gradients and weights are compared; default: all.")
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder for gradients and weights meanwhile; default: the system's for such.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Replay recorded rollouts under several arms from the same weights, and show what differs and what each costs.

    Rollouts, advantages and windows are those of the run, computed once; an arm is how its steps are taken. Each arm
    runs in fresh processes. The noise floor is the first arm against itself with its rows in another order.

    evenstep replay runs/ledger --steps 4 --arm fixed --arm padded --arm packed --max-rel 1e-5
    """
    with short_errors(debug=debug):
        from evenstep.errors import ConfigError
        from evenstep.files.writing import check_place
        from evenstep.preflight import check_extra, check_model, check_ranks
        from evenstep.replay.recorded import is_run_folder
        from evenstep.replay.session import ReplayOptions, write_result
        from evenstep.replay.session import replay as run_replay
        from evenstep.replay.show import make_progress, print_result

        check_place(json_path, makes_folders=True)
        config = _config(source, configs or [], overrides or [], model)
        check_extra("train")
        if ranks is not None:
            check_ranks(ranks)
        check_model(config)
        if checkpoint is not None and not (checkpoint / "state.json").is_file():
            raise ConfigError(
                f"--checkpoint must be a folder that evenstep train wrote (RUN/checkpoints/window_...), found no "
                f"state.json in {str(checkpoint)!r}"
            )
        from evenstep.train.launch import default_ranks, run_ranks

        options = ReplayOptions(
            source=source,
            config=config,
            arms=arms or list(DEFAULT_ARMS),
            num_ranks=default_ranks() if ranks is None else ranks,
            dtype=dtype.value,
            num_steps=steps,
            repeats=repeats,
            warmup=warmup,
            seed=seed,
            max_rel=max_rel,
            has_oracle=oracle,
            checkpoint=checkpoint,
            step_timeout_s=step_timeout,
            has_own_weights=own_weights,
            num_compared=compare_steps,
            scratch=scratch,
        )
        with stoppable(), make_progress(sys.stderr) as progress:
            result = run_replay(options, run_ranks=run_ranks, progress=progress)
        print_result(result, sys.stdout)
        paths = [] if json_path is None else [json_path]
        if is_run_folder(source):
            paths.append(source / "replay" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
        for path in paths:
            write_result(path, result)
            typer.echo(f"{path}: all figures")
    if not result["passed"]:
        raise typer.Exit(1)


def _config(source: Path, configs: list[Path], overrides: list[str], model: str | None) -> Any:
    from evenstep.config import load_config
    from evenstep.errors import ConfigError
    from evenstep.replay.recorded import is_run_folder

    paths = list(configs)
    if is_run_folder(source):
        recorded = source / "config.toml"
        if not recorded.is_file():
            raise ConfigError(
                f"a run folder has a config.toml, found none in {str(source)!r}; give the folder that evenstep train "
                f"wrote (run.dir), or a file of rollouts"
            )
        paths.insert(0, recorded)
    elif not source.exists():
        raise ConfigError(f"found neither a run's folder nor a file of rollouts at {str(source)!r}; check the path")
    elif not paths:
        raise ConfigError(
            f"{str(source)!r} is a file of rollouts: model, credit and windows stand in a configuration; add --config"
        )
    given = [*overrides]
    if model is not None:
        given.append(f"model.path={json.dumps(model, ensure_ascii=False)}")
    return load_config(paths, given)
