"""``evenstep tune``: the token budget for a model, a layout and this machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenstep.cli.errors import short_errors, stoppable

if TYPE_CHECKING:
    from evenstep.config import Config

__all__ = ["tune"]

# a configuration that is to be tuned may have no budget yet
PLACEHOLDER = 1 << 30


def tune(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="TOML files, merged left to right.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be repeated.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes, as many as will train.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory of one rank, such as 8GiB; default: the GPU's, without a GPU the machine's shared by the "
            "ranks.",
        ),
    ] = None,
    margin: Annotated[float, typer.Option(help="Share of it that stays free.")] = 0.1,
    probe_seconds: Annotated[
        float, typer.Option(help="Seconds that the largest micro-batch tried may take; more gives a better fit.")
    ] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Write the budget and the fit to this TOML file.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Find plan.max_tokens_per_gpu for the model, layout and ranks of the CONFIG files.

    Runs steps on made-up rows of a few sizes, in fresh processes as evenstep train starts them, fits memory and time,
    checks the fit on a size that it has not seen, and proposes the largest budget that fits. Then:

    evenstep train CONFIG tuned.toml
    """
    with short_errors(debug=debug):
        from evenstep.config import load_config
        from evenstep.files.writing import check_place, write_text
        from evenstep.preflight import check_extra, check_model, check_ranks
        from evenstep.replay.session import write_result
        from evenstep.tune.session import TuneOptions, machine_memory_bytes, overlay, parse_bytes
        from evenstep.tune.session import tune as run_tune

        check_place(out)
        check_place(json_path, makes_folders=True)
        config = load_config(configs, [*(overrides or []), f"plan.max_tokens_per_gpu={PLACEHOLDER}"])
        limit = None if memory is None else parse_bytes(memory)
        check_extra("train")
        if ranks is not None:
            check_ranks(ranks)
        check_model(config)
        from evenstep.train.launch import default_ranks, has_gpu, run_ranks

        num_ranks = default_ranks() if ranks is None else ranks
        if limit is None and not has_gpu():
            limit = machine_memory_bytes() / num_ranks
        options = TuneOptions(
            config=config, num_ranks=num_ranks, limit_bytes=limit, margin=margin, probe_seconds=probe_seconds
        )
        with stoppable():
            result = run_tune(options, run_ranks=run_ranks, say=lambda text: typer.echo(text, err=True))
        for line in _lines(result, config):
            typer.echo(line)
        if json_path is not None:
            write_result(json_path, result)
            typer.echo(f"{json_path}: all figures")
        text = overlay(result)
        if out is None:
            typer.echo(f"\n{text}", nl=False)
        else:
            write_text(out, text)
            typer.echo(f"{out}: train with: evenstep train {' '.join(map(str, configs))} {out}")


def _lines(result: dict[str, Any], config: Config) -> list[str]:
    fit, held_out, mib = result["fit"], result["held_out"], 2**20
    time_error = held_out["time_relative_error"]
    logits = f" + {fit['bytes_per_logit_token'] / 1024:,.1f} KiB a token of one chunk's logits"
    lines = [
        f"peak of a rank: {fit['fixed_bytes'] / mib:,.0f} MiB + {fit['bytes_per_token'] / 1024:,.1f} KiB a token"
        f"{logits if fit['bytes_per_logit_token'] else ''}, at least {fit['least_bytes'] / mib:,.0f} MiB "
        f"(± {fit['relative_error']:.1%})",
        f"held out, {held_out['footprint']:,} tokens: predicted {held_out['predicted_bytes'] / mib:,.0f} MiB, measured "
        f"{held_out['peak_bytes'] / mib:,.0f} MiB ({held_out['memory_relative_error']:+.1%}); time "
        f"{'not measured' if time_error is None else f'{time_error:+.0%}'}",
        f"plan.max_tokens_per_gpu = {result['max_tokens_per_gpu']}: predicted peak "
        f"{result['predicted_bytes'] / mib:,.0f} MiB of {result['limit_bytes'] / mib:,.0f} MiB, limited by "
        f"{result['limited_by']}",
    ]
    if result["sees_images"]:
        lines.append(
            "note: this model sees images, and the rows measured were text; the budget takes a patch for a token, so "
            "leave more free (--margin) where rows have many patches, and watch peak_memory_bytes in the first windows"
        )
    if result["max_tokens_per_gpu"] < config.model.max_context_tokens:
        lines.append(
            f"note: the longest row has {config.model.max_context_tokens} tokens and needs more than this budget; it "
            f"would stand alone, at {fit['fixed_bytes'] / mib:,.0f} MiB and more"
        )
    return lines
