"""Tables of frozen replays: what ``evenstep replay --json`` wrote into a run folder's ``replay/``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.report.text import escaped

__all__ = ["replay_section"]

MAX_FILES = 8
MAX_ARMS = 40
MAX_COLUMNS = 40
# metric -> how it is headed; others follow under their own names
HEADINGS = {
    "status": "status",
    "steps_completed": "steps",
    "rows_consumed": "rows",
    "step_seconds_median": "seconds per step, median",
    "speedup_paired_median": "times as fast as the first arm, median of pairs",
    "peak_memory_bytes": "peak memory, MiB",
    "padding_efficiency": "padding efficiency",
    "tokens_per_second": "tokens per second",
    "loss_max_abs_difference": "loss, most |difference|",
    "gradient_cosine_min": "gradient cosine, least",
    "gradient_relative_difference_max": "gradient, largest relative difference",
    "update_cosine_min": "update cosine, least",
    "weight_max_abs_difference": "weights, most |difference|",
}

Json = Mapping[str, Any]


def replay_section(folder: Path) -> tuple[str, list[str]]:
    """The page's section as HTML, empty without a replay; and what could not be read."""
    problems: list[str] = []
    tables: list[str] = []
    paths = sorted(folder.glob("*.json"))
    for path in paths[:MAX_FILES]:
        try:
            tables.append(_table(path.stem, json.loads(path.read_text(encoding="utf-8"))))
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
    columns = _columns([figures for _, figures in lines])
    head = "".join(f'<th scope="col">{escaped(HEADINGS.get(key, key.replace("_", " ")), 80)}</th>' for key in columns)
    body = "".join(
        f'<tr><th scope="row">{escaped(arm, 200)}</th>'
        + "".join(f"<td>{_figure(key, figures.get(key))}</td>" for key in columns)
        + "</tr>"
        for arm, figures in lines
    )
    facts = [
        f"{escaped(key.replace('_', ' '), 80)} {_figure(key, value)}"
        for key, value in list(data.items())[:MAX_COLUMNS]
        if key not in ("arms", "noise_floor", "format_version") and _is_plain(value)
    ]
    title = escaped(name, 120)
    said = f"<p>{'; '.join(facts)}</p>" if facts else ""
    return (
        f"<h3>{title}</h3>{said}"
        f'<div class="wide" tabindex="0" role="region" aria-label="Replay {title}"><table><thead><tr>'
        f'<th scope="col">arm</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _columns(lines: Sequence[Json]) -> list[str]:
    there = {key for figures in lines for key, value in figures.items() if _is_plain(value)}
    known = [key for key in HEADINGS if key in there]
    others = [key for figures in lines for key in figures if key in there and key not in HEADINGS]
    return [*known, *dict.fromkeys(others)][:MAX_COLUMNS]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _figure(key: str, value: Any) -> str:
    """A figure as people read it.

    >>> _figure("gradient_cosine_min", 0.9999999991), _figure("peak_memory_bytes", 3 << 20), _figure("x", None)
    ('1 − 9e-10', '3', '–')
    """
    if value is None or isinstance(value, (dict, list)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return escaped(value, 300)
    if not math.isfinite(value):
        return escaped(value)
    if key.endswith("_bytes"):
        return f"{value / 2**20:,.0f}"
    if "cosine" in key and 0 <= 1 - value < 1e-3:
        return "1" if value == 1 else f"1 − {1 - value:.1g}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"
