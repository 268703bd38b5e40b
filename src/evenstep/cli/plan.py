"""``evenstep plan``: what each layout, budget and planner would cost on somebody's own rows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenstep.cli.errors import short_errors

if TYPE_CHECKING:
    from evenstep.dry_run.summary import DryRun, Question

__all__ = ["plan"]

EPILOG = """\b
Examples:
  evenstep plan lengths.txt                                  a length on each line
  evenstep plan rows.csv --column tokens --ranks 8,64        a column of a table
  evenstep plan runs/demo                                    each window of a run, as planned and otherwise
  evenstep plan train_data_step7.jsonl --compare             against the public planners, re-described
  evenstep plan traces.jsonl.gz --windows 128 --sweep 16384,32768,65536
  evenstep plan rollouts.jsonl --model qwen3-4b --device h200 --json
  evenstep plan lengths.txt --picture plan.svg --trace plan.json --out best.json

\b
Reads, told by their content or by --format:
  numbers, csv, lengths (JSONL or Parquet), evenstep (rollouts, rows, lengths, a run's folder), nemo-rl, prime-rl,
  verifiers, nemo-gym, verl, completions (TRL). Gzipped files as they are; no pickle is ever loaded.

\b
Exit codes: 0 planned, 2 a mistake in the input (the message names file and line).
docs/plan_command.md explains every column, formula and JSON key."""


def plan(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files or folders, all of one format.")],
    ranks: Annotated[
        str | None, typer.Option(help="Data-parallel ranks, e.g. 8 or 8,64; default: 8, or those of the run.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Budgets in tokens, e.g. 8192,16384; default: the longest row's power of two, and larger."),
    ] = None,
    layouts: Annotated[str | None, typer.Option("--layout", help="Layouts, e.g. padded,packed; default: all.")] = None,
    windows: Annotated[
        int | None,
        typer.Option(help="Rollouts per window, whole groups; default: the file's own steps, or one window."),
    ] = None,
    per_window: Annotated[bool, typer.Option("--per-window", help="Also a line for each planned window.")] = False,
    max_windows: Annotated[int, typer.Option(help="Windows to plan, evenly spaced; 0: all.")] = 16,
    compare: Annotated[bool, typer.Option("--compare", help="Also the public planners, as published.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Preset (qwen3-4b, llama-3.1-8b, …) or config.json, for seconds and memory.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the estimates: a100, h100 or h200.")] = "h100",
    mfu: Annotated[float, typer.Option(help="Share of the device's peak that a step is assumed to reach.")] = 0.4,
    sharding: Annotated[
        str | None, typer.Option(help="fsdp2 (ranks meet in every micro-batch; default) or replicated (once).")
    ] = None,
    keep_activations: Annotated[
        bool, typer.Option("--keep-activations", help="Estimate without activation checkpointing.")
    ] = False,
    pad_to_multiple: Annotated[
        int | None, typer.Option(help="Widths are rounded up to a multiple of it; default: 1.")
    ] = None,
    effort: Annotated[str | None, typer.Option(help="How hard evenstep's planner searches: default or high.")] = None,
    format: Annotated[str | None, typer.Option(help="The files' format, where the content does not tell.")] = None,
    column: Annotated[str | None, typer.Option(help="Column or field that holds lengths or token ids.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count and show lines that cannot be read.")] = False,
    bytes_per_token: Annotated[float, typer.Option(help="How long a token of text is taken to be.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    window: Annotated[int, typer.Option(help="Which planned window --out, --picture and --trace show.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the cheapest arm's plan of the window (JSON).")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it: ranks × micro-batches (SVG).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write it as a trace for Perfetto or Chrome (JSON).")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show what each layout, budget and planner would cost on the rows of FILE, without training anything."""
    with short_errors(debug=debug):
        from evenstep.dry_run.summary import dry_run
        from evenstep.errors import PlanError
        from evenstep.files.writing import check_place
        from evenstep.imports import import_rows
        from evenstep.imports.own import is_run_folder
        from evenstep.report.plan_table import print_dry_run

        question = _question(
            ranks=ranks,
            sweep=sweep,
            layouts=layouts,
            windows=windows,
            max_windows=max_windows,
            compare=compare,
            model=model,
            device=device,
            mfu=mfu,
            sharding=sharding,
            keep_activations=keep_activations,
            pad_to_multiple=pad_to_multiple,
            effort=effort,
        )
        for place in (out, picture, trace):
            check_place(place)
        logging.getLogger("evenstep.plan").setLevel(logging.ERROR)  # the table counts over-long rows
        rows = import_rows(
            *files,
            format=format,
            column=column,
            skip_bad=skip_bad,
            keep_token_ids=not question.layouts or "tree" in question.layouts,
            bytes_per_token=bytes_per_token,
        )
        folder = files[0].parent if files[0].name == "rollouts" else files[0]
        run_folder = folder if len(files) == 1 and is_run_folder(folder) else None
        found = dry_run(", ".join(map(str, files)), rows, question, run=run_folder)
        if as_json:
            typer.echo(json.dumps(found.to_dict(), indent=1))
        else:
            print_dry_run(found, typer.echo, has_windows=per_window)
        if found.best() is None:
            raise PlanError("at least one arm must be planned, found none that can be; its reason is named with it")
        _write_files(found, window, out=out, picture=picture, trace=trace)


def _question(
    *,
    ranks: str | None,
    sweep: str | None,
    layouts: str | None,
    windows: int | None,
    max_windows: int,
    compare: bool,
    model: str | None,
    device: str,
    mfu: float,
    sharding: str | None,
    keep_activations: bool,
    pad_to_multiple: int | None,
    effort: str | None,
) -> Question:
    """The options as a question; everything wrong in them is refused before a file is read."""
    from evenstep.dry_run.arms import Rules
    from evenstep.dry_run.estimate import DEVICES, Assumptions, read_shape
    from evenstep.dry_run.summary import Question
    from evenstep.plan import CostModel
    from evenstep.plan.footprint import LAYOUTS

    _choice("--device", device, DEVICES)
    _choice("--sharding", sharding or "fsdp2", ("fsdp2", "replicated"))
    _choice("--effort", effort or "default", ("default", "high"))
    chosen = [] if layouts is None else [name.strip() for name in layouts.split(",")]
    for name in chosen:
        _choice("--layout", name, LAYOUTS)
    shape = None if model is None else read_shape(model)
    cost = CostModel() if shape is None else CostModel.from_model_shape(shape[1])
    given: dict[str, Any] = {
        "sync": None if sharding is None else "step" if sharding == "replicated" else "micro_batch",
        "pad_to_multiple": pad_to_multiple,
        "effort": effort,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return Question(
        layouts=tuple(name for name in LAYOUTS if name in chosen),
        ranks=() if ranks is None else _numbers("--ranks", ranks),
        budgets=() if sweep is None else _numbers("--sweep", sweep),
        rollouts_per_window=windows,
        max_windows=max_windows,
        has_public=compare,
        rules=Rules(cost=cost, **given),
        asked=frozenset(given),
        model=shape,
        assumptions=Assumptions(
            device=DEVICES[device],
            utilisation=mfu,
            is_sharded=sharding != "replicated",
            is_checkpointed=not keep_activations,
        ),
    )


def _choice(flag: str, value: str, choices: Any) -> None:
    from evenstep.errors import ConfigError
    from evenstep.validation import nearest

    if value not in choices:
        hint = nearest(value, choices)
        raise ConfigError(
            f"{flag} must be one of {', '.join(choices)}, found {value!r}" + (f"; did you mean {hint}?" if hint else "")
        )


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    from evenstep.errors import ConfigError

    try:
        return tuple(dict.fromkeys(int(part.replace("_", "")) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} must be whole numbers with commas between them, found {text!r}") from None


def _write_files(found: DryRun, index: int, *, out: Path | None, picture: Path | None, trace: Path | None) -> None:
    if out is None and picture is None and trace is None:
        return
    import numpy as np

    from evenstep.dry_run.arms import plan_of
    from evenstep.dry_run.summary import labels_of, plan_window
    from evenstep.files.writing import write_text
    from evenstep.report.plan_picture import plan_svg
    from evenstep.report.plan_trace import plan_trace

    window, best = plan_window(found, index)
    lengths = found.rows.lengths_R[window.rows]
    step_plan = plan_of(best.arm, found.question.rules, lengths, window.prefixes)
    prefixes = window.prefixes if best.arm.layout == "tree" else None
    if out is not None:
        # indices into the file's rows, as plan_step(windows=...) gives them
        rows = window.rows.tolist()
        cells = tuple(tuple(tuple(rows[i] for i in cell) for cell in rank) for rank in step_plan.cells)
        overlong = tuple(item._replace(row=rows[item.row]) for item in step_plan.overlong)
        whole = np.array_equal(window.rows, np.arange(found.rows.num_rows))
        written = replace(step_plan, cells=cells, overlong=overlong, window=None if whole else tuple(rows))
        write_text(out, written.to_json())
    if picture is not None:
        labels = labels_of(found.rows, window.rows.tolist())
        title = f"{found.source}, {window.name}"
        write_text(picture, plan_svg(step_plan, lengths, labels, prefixes=prefixes, title=title))
    if trace is not None:
        model, given = found.question.model, found.question.assumptions
        seconds = None if model is None else given.step_seconds(model[1], 1.0)
        write_text(trace, plan_trace(step_plan, lengths, prefixes=prefixes, seconds_per_cost=seconds))
