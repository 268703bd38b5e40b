"""``evenstep report``: a run folder as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenstep.cli.errors import short_errors

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; the run may still be going on.")],
    out: Annotated[Path | None, typer.Option(help="The page, instead of RUN/report.html.")] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write one HTML page about the run in RUN: what it learned, its curves, plans and rollouts.

    The page needs no network and no other file.
    """
    with short_errors(debug=debug):
        from evenstep.report.html_page import write_report

        path, page = write_report(run, out)
        typer.echo(f"{path}: {path.stat().st_size / 1000:,.0f} kB")
        for note in page.notes:
            typer.echo(f"note: {note}")
        if is_opened:
            import webbrowser

            if not webbrowser.open(path.resolve().as_uri()):
                typer.echo("note: no browser was found; open the file in one")
