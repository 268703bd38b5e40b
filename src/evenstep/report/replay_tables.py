"""Tables of frozen replays: what ``evenstep replay --json`` wrote into a run folder's ``replay/``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from evenstep.report.text import escaped

__all__ = ["replay_section"]

MAX_FILES = 8
MAX_ARMS = 40
MAX_COLUMNS = 40
# metric -> how it is headed in the table that one sees first
HEADINGS = {
    "result": "result",
    "steps_completed": "steps",
    "rows_consumed": "rows",
    "step_seconds_median": "s/step",
    "speedup_paired_median": "speed",
    "peak_memory_bytes": "peak MiB",
    "padding_efficiency": "padding",
    "num_microbatches_median": "K",
    "gradient_cosine_min": "cosine",
    "gradient_relative_difference_max": "gradient",
    "loss_max_abs_difference": "loss",
}
FORMS = {"step_seconds_median": ".3g", "speedup_paired_median": ".2f", "padding_efficiency": ".3f"}
LEGEND = (
    "<p>s/step: median seconds of a step; speed: how often that fits into the first arm's, median over pairs of the "
    "same step; padding: real tokens / tokens computed, above 1 where beginnings that rows share are computed once; K: "
    "micro-batches per rank, median. Against the first arm, the worst step of each: cosine and relative difference of "
    "the whole gradient before clipping, |difference| of the loss.</p>"
)

Json = Mapping[str, Any]


def replay_section(folder: Path) -> tuple[str, list[str]]:
    """The page's section as HTML, empty without a replay; and what could not be read."""
    problems: list[str] = []
    tables: list[str] = []
    paths = sorted(folder.glob("*.json"))
    for path in paths[:MAX_FILES]:
        try:
            tables.append(_table(_title(path.stem), json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"replay/{path.name}: {error}")
    if len(paths) > MAX_FILES:
        problems.append(f"replay: {len(paths) - MAX_FILES} more files are not shown")
    if not tables:
        return "", problems
    intro = (
        "<p>Recorded rollouts were replayed from the same weights under several arms; differences are against the "
        "first arm. A difference says something only beside the noise floor: the first arm against itself with rows "
        "permuted.</p>"
    )
    return f'<section id="replay"><h2>Replay</h2>{intro}{"".join(tables)}</section>', problems


def _title(stem: str) -> str:
    """When the replay ended, where the file's name says so, else that name.

    >>> _title("20261130T170931Z"), _title("first")
    ('2026-11-30 17:09:31 UTC', 'first')
    """
    with suppress(ValueError):
        return f"{datetime.strptime(stem, '%Y%m%dT%H%M%SZ'):%Y-%m-%d %H:%M:%S} UTC"
    return stem


def _table(name: str, data: Any) -> str:
    """Arms as rows, their figures as columns, the noise floor last.

    Raises:
        ValueError: the file is not one of a replay.
    """
    arms = data.get("arms") if isinstance(data, dict) else None
    if not isinstance(arms, dict) or not arms or not all(isinstance(arm, dict) for arm in arms.values()):
        raise ValueError("`arms` must be an object of objects, as `evenstep replay --json` writes it")
    lines: list[tuple[str, Json]] = list(arms.items())[:MAX_ARMS]
    floor = data.get("noise_floor")
    if isinstance(floor, dict):
        lines.append(("noise floor", floor))
    facts = [
        f"{escaped(key.replace('_', ' '), 80)} {_figure(key, value)}"
        for key, value in list(data.items())[:MAX_COLUMNS]
        if key not in ("arms", "noise_floor", "format_version", "kind", "passed") and _is_plain(value)
    ]
    title, said = (
        escaped(name, 120),
        [f"<li>{text}</li>" for arm, figures in lines for text in _sentences(arm, figures)],
    )
    shown: list[tuple[str, Json]] = []
    for arm, figures in lines:
        counts = {
            "steps_completed": _of(figures.get("steps_completed"), data.get("num_steps")),
            "rows_consumed": _of(figures.get("rows_consumed"), figures.get("rows_expected")),
        }
        shown.append((arm, {"result": _result(figures), **figures, **counts}))
    there = {key for _, figures in shown for key, value in figures.items() if _is_plain(value)}
    all_keys = dict.fromkeys(key for _, figures in lines for key in figures if key in there)
    return (
        f"<h3>{title}</h3>"
        + _grid(f"Replay {title}", shown, {key: text for key, text in HEADINGS.items() if key in there})
        + LEGEND
        + (f"<ul>{''.join(said)}</ul>" if said else "")
        + f"<details><summary>All figures of {title}</summary><p>{'; '.join(facts)}</p>"
        + _grid(f"All figures of {title}", lines, {key: key.replace("_", " ") for key in list(all_keys)[:MAX_COLUMNS]})
        + "</details>"
    )


def _grid(label: str, lines: Sequence[tuple[str, Json]], headings: Mapping[str, str]) -> str:
    head = "".join(f'<th scope="col">{escaped(text, 80)}</th>' for text in headings.values())
    body = "".join(
        f'<tr><th scope="row">{escaped(arm, 200)}</th>'
        + "".join(f"<td>{_figure(key, figures.get(key))}</td>" for key in headings)
        + "</tr>"
        for arm, figures in lines
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table><thead><tr>'
        f'<th scope="col" class="corner">arm</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _of(count: Any, total: Any) -> Any:
    """A count with what it should be, where that is known."""
    return f"{count:,}/{total:,}" if type(count) is int and type(total) is int else count


def _result(figures: Json) -> str | None:
    """passed or failed where that was judged, else how the arm ended."""
    status, passed = figures.get("status"), figures.get("passed")
    if status not in (None, "ok") or not isinstance(passed, bool):
        return None if status is None else str(status)
    return "passed" if passed else "failed"


def _sentences(arm: str, figures: Json) -> Iterator[str]:
    """Why an arm failed, and where it began."""
    name, problem, first = escaped(arm, 200), figures.get("problem"), figures.get("first_deviation")
    if isinstance(problem, str):
        yield f"<b>{name}</b> failed: {escaped(problem, 600)}"
    if isinstance(first, dict):
        places = {"worst_parameter": "most in", "worst_row": "log-probs differ most in row",
                  "worst_row_microbatch": "micro-batch", "worst_row_rank": "of rank"}  # fmt: skip
        where = [f"{said} {escaped(first[key], 200)}" for key, said in places.items() if _is_plain(first.get(key))]
        yield f"<b>{name}</b> first left the limit in step {escaped(first.get('step'), 40)}: {', '.join(where)}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _figure(key: str, value: Any) -> str:
    """A figure as people read it.

    >>> _figure("gradient_cosine_min", 0.9999999991), _figure("peak_memory_bytes", 3 << 20), _figure("x", None)
    ('1 − 9e-10', '3', '–')
    >>> _figure("step_seconds_median", 0.26788), _figure("padding_efficiency", 1.0)
    ('0.268', '1.000')
    """
    if value is None or isinstance(value, (dict, list)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return escaped(value, 300)
    if not math.isfinite(value):
        return escaped(value)
    if key in FORMS:
        return format(value, FORMS[key])
    if key.endswith("_bytes"):
        return f"{value / 2**20:,.0f}"
    if "cosine" in key and 0 <= 1 - value < 1e-3:
        return "1" if value == 1 else f"1 − {1 - value:.1g}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2g}" if "difference" in key else f"{value:.4g}"
