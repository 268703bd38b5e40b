"""One self-contained HTML page of a run: sentences and tables, the data of its pictures, a script that draws."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from evenstep import __version__
from evenstep.files.writing import write_text
from evenstep.report.curves import charts_json, curves, evaluation_curves
from evenstep.report.history import counted
from evenstep.report.plans_shown import PlansShown, plans_shown
from evenstep.report.replay_tables import replay_section
from evenstep.report.rollouts_shown import RolloutsShown, rollouts_shown
from evenstep.report.run_records import RunRecords, read_run, setting
from evenstep.report.summary import Card, cards
from evenstep.report.text import embedded_json, escaped
from evenstep.report.token_text import decoder_for

__all__ = ["Page", "run_page", "write_report"]

SCRIPTS = ("draw.js", "charts.js", "plan.js", "rollouts.js", "start.js")
MAX_NOTES = 20
MAX_CONFIG = 40_000  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A finished page."""

    html: str
    notes: Sequence[str]  # what was left out or could not be read, as plain text


def write_report(folder: Path, out: Path | None = None) -> tuple[Path, Page]:
    """Write the page of a run, by default ``report.html`` in its folder; it replaces an older one whole.

    Raises:
        FileFormatError: not a run folder, nothing in it yet, or ``out`` cannot be written.
    """
    page = run_page(folder)
    path = folder / "report.html" if out is None else out
    write_text(path, page.html)
    return path, page


def run_page(folder: Path) -> Page:
    """The page of a run folder: the same files give the same page."""
    records = read_run(folder)
    decoder = decoder_for(folder, setting(records.config, "model", "path"))
    plans = plans_shown(folder / "plans", records.windows)
    rollouts = rollouts_shown(records, decoder)
    data = {
        "curves": curves(records.windows),
        "evaluations": evaluation_curves(records.evaluations),
        "skipped": [w["window"] for w in records.windows if w.get("stepped") is False][:2000],
        "charts": charts_json(),
        "plans": plans.plans,
        "rollouts": rollouts.rollouts,
    }
    notes = _notes(records, plans, rollouts)
    replay, replay_problems = replay_section(folder / "replay")
    notes += replay_problems
    script = "\n".join(_part(name) for name in SCRIPTS)
    parts = {
        "title": escaped(f"{folder.resolve().name}: evenstep report", 200),
        "name": escaped(folder.resolve().name, 200),
        "policy": _policy(script),
        "style": _part("page.css"),
        "script": script,
        "data": embedded_json(data),
        "progress": _progress(records),
        "cards": "\n".join(_card(card) for card in cards(records)),
        "decoder": escaped(decoder.source, 400),
        "plans_left_out": escaped(_plans_left_out(plans)),
        "rollouts_left_out": escaped(_rollouts_left_out(rollouts)),
        "replay_link": '<a href="#replay">Replay</a>' if replay else "",
        "replay": replay,
        "notes": _list(escaped(note, 600) for note in notes[:MAX_NOTES]),
        "config": escaped(records.config_text, MAX_CONFIG) or "config.toml is not there.",
        "version": escaped(__version__),
    }
    return Page(html=_filled(_part("page.html"), parts), notes=notes)


def _part(name: str) -> str:
    return (files("evenstep.report") / "page" / name).read_text(encoding="utf-8")


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Every ``{{name}}`` replaced, in one pass: what is filled in is never read as a template."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _policy(script: str) -> str:
    """A content security policy: nothing is fetched, and no script runs but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _progress(records: RunRecords) -> str:
    done, planned = len(records.windows), records.num_windows_planned
    if planned is None:
        text = f"{counted(done, 'window')} trained"
    elif done < planned:
        text = f"{done:,} of {planned:,} windows trained so far: the run goes on, or was stopped"
    else:
        text = f"finished, {counted(done, 'window')}"
    facts = [text]
    for section, key, label in (("model", "path", "model"), ("environment", "name", "environment"),
                                ("plan", "layout", "layout"), ("credit", "estimator", "estimator")):  # fmt: skip
        value = setting(records.config, section, key)
        if value is not None:
            facts.append(f"{label} {value}")
    return escaped(" · ".join(facts), 600)


def _card(card: Card) -> str:
    lines = "".join(f"<p>{line}</p>" for line in card.lines)
    return f'<article class="card"><h3>{card.question}</h3><p class="answer">{card.answer}</p>{lines}</article>'


def _list(items: Iterable[str]) -> str:
    shown = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{shown}</ul>" if shown else "<p>Nothing.</p>"


def _plans_left_out(plans: PlansShown) -> str:
    if not plans.num_stored:
        return "No plans are stored in this run folder."
    if len(plans.plans) == plans.num_stored:
        return f"All {counted(plans.num_stored, 'stored plan')} are here."
    return (
        f"{len(plans.plans):,} of {plans.num_stored:,} stored plans are here: the first and the last, those with the "
        f"most and fewest rows, most fillers and lowest efficiency, windows without a step, and others spread evenly."
    )


def _rollouts_left_out(rollouts: RolloutsShown) -> str:
    if not rollouts.num_stored:
        return "No rollouts are stored in this run folder."
    return (
        f"{counted(len(rollouts.rollouts), 'rollout')} of {rollouts.num_collections:,} of {rollouts.num_stored:,} "
        f"stored collections are here: of each the best, median and worst reward, the most segments, and one "
        f"that failed, was truncated or dropped. Long texts are cut in the middle."
    )


def _notes(records: RunRecords, plans: PlansShown, rollouts: RolloutsShown) -> list[str]:
    notes = [*records.problems]
    for name, problems in (("plans", plans.problems), ("rollout files", rollouts.problems)):
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            notes.append(f"{len(problems)} of the {name} could not be shown: {'; '.join(problems[:3])}{more}")
    return notes
