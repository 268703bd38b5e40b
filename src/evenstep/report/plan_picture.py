"""A step plan drawn as a grid, ranks below each other and micro-batches side by side, as one SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np

from evenstep.plan import StepPlan
from evenstep.plan.prefixes import SharedPrefixes
from evenstep.types import Int64Array

__all__ = ["plan_svg"]

# told apart by colour-blind readers, in light and in dark
COLOURS = ("#0072b2", "#c44f00", "#00805d", "#cc79a7", "#e69f00", "#56b4e9", "#a3a500", "#7a5fc4")
LIGHT_COLOURS = {"#cc79a7", "#e69f00", "#56b4e9", "#a3a500"}  # dark text on them
MAX_RANKS, MAX_COLUMNS, MAX_BARS = 16, 32, 6000  # what still can be seen, and a file that still opens at once
LEFT, TOP, WIDTH, GAP = 74, 104, 1100, 6
LANE, MIN_COLUMN, TEXT_WIDTH = 58, 16, 46
CSS = (
    "svg{background:#fff;color:#222;font-family:Helvetica,Arial,sans-serif}"
    "text{fill:currentColor}.soft{opacity:.65}.lane{fill:#8884}.pad{opacity:.28}"
    ".label{fill:#fff;font-size:10px;pointer-events:none}.dark{fill:#111}"
    "@media(prefers-color-scheme:dark){svg{background:#15181c;color:#e6e6e6}}"
)


def plan_svg(
    plan: StepPlan,
    lengths: Sequence[int] | Int64Array,
    labels: Sequence[tuple[int, int, int]],
    *,
    title: str,
    prefixes: SharedPrefixes | None = None,
) -> str:
    """Draw a plan: each row a bar as long as its width, darker where it has tokens, coloured by its group.

    Args:
        plan: of rows 0 to R - 1.
        lengths: [R] tokens.
        labels: [R] (group, rollout in the group, segment in the rollout), written as ``g0·r1·s2`` where there is room.
        title: what the picture is called.
        prefixes: what the rows share, for layout ``tree``: a bar is then what a row adds to those before it.

    Padded rows of a cell lie below each other, packed ones end to end. Plans of many ranks or micro-batches are cut,
    and the picture says so.
    """
    lengths_R = np.asarray(lengths)
    num_ranks, num_columns = min(plan.num_ranks, MAX_RANKS), min(plan.num_microbatches, MAX_COLUMNS)
    footprints = np.array(
        [
            [_cell_width(plan, lengths_R, plan.cells[rank][k], prefixes) for k in range(num_columns)]
            for rank in range(num_ranks)
        ]
    )
    tokens_K = footprints.max(axis=0)
    scale = max(WIDTH - num_columns * GAP, 200) / max(int(tokens_K.sum()), 1)
    widths_K = np.maximum(tokens_K * scale, MIN_COLUMN)
    lefts_K = LEFT + np.concatenate([[0], np.cumsum(widths_K + GAP)[:-1]])
    parts: list[str] = []
    bars_left = MAX_BARS
    for k in range(num_columns):
        middle = lefts_K[k] + widths_K[k] / 2
        if widths_K[k] >= 22 or k % 4 == 0:
            parts.append(_text(middle, TOP - 10, str(k), size=11, anchor="middle", soft=True))
    for rank in range(num_ranks):
        y = TOP + rank * (LANE + GAP)
        parts.append(_text(LEFT - 10, y + LANE / 2 + 4, f"rank {rank}", size=12, anchor="end"))
        for k in range(num_columns):
            cell = plan.cells[rank][k]
            place = f"rank {rank}, micro-batch {k}"
            box = (float(lefts_K[k]), float(y), float(widths_K[k]))
            if len(cell) > bars_left:
                parts.append(_many(box, place, len(cell), int(footprints[rank, k]), scale))
            else:
                bars_left -= max(len(cell), 1)
                parts.append(_cell(plan, lengths_R, labels, cell, box, scale, place, prefixes))
    height = TOP + num_ranks * (LANE + GAP) + 44
    right = float(lefts_K[-1] + widths_K[-1] + 24)
    stats = plan.stats
    budget = "no budget" if plan.budget is None else f"budget {plan.budget:,} tokens"
    subtitle = (
        f"layout {plan.layout}, {budget}, {plan.num_ranks} ranks × {plan.num_microbatches} micro-batches; "
        f"{stats.num_rows:,} rows, {stats.num_fillers:,} fillers, padding efficiency {stats.padding_efficiency:.1%}, "
        f"lockstep efficiency {stats.lockstep_efficiency:.1%}"
    )
    note = "width of a bar: tokens the row takes, paler where padded; colour: group; hatched: filler"
    if plan.num_ranks > num_ranks or plan.num_microbatches > num_columns:
        note += (
            f"; shown: {num_ranks} of {plan.num_ranks} ranks, {num_columns} of {plan.num_microbatches} micro-batches"
        )
    right = max(right, 760.0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {height}" width="{right:.0f}" '
        f'height="{height}" role="img" aria-labelledby="title"><title id="title">{escape(title)}</title>'
        f"<style>{CSS}</style>"
        '<defs><pattern id="filler" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="7" height="7" fill="#8882"/><rect width="2" height="7" fill="#888a"/></pattern></defs>'
        f"{_text(24, 28, title, size=16)}{_text(24, 50, subtitle, size=12, soft=True)}"
        f"{_text(LEFT, TOP - 28, 'micro-batch, in the order they run', size=11, soft=True)}"
        f"{''.join(parts)}{_text(24, height - 14, note, size=11, soft=True)}</svg>\n"
    )


def _cell_width(plan: StepPlan, lengths_R: Int64Array, cell: Sequence[int], prefixes: SharedPrefixes | None) -> int:
    """Tokens from left to right of a cell: its widest row, or all its rows where they lie end to end."""
    if not cell:
        return plan.room.filler_footprint // max(plan.micro_batch_rows, 1)
    if plan.layout in ("fixed", "padded"):
        return plan.padded_width(int(lengths_R[list(cell)].max()))
    if prefixes is not None:
        return int(sum(length for _, length in _added(lengths_R, cell, prefixes)))
    return int(plan.room.widths(lengths_R[list(cell)]).sum())


def _added(lengths_R: Int64Array, cell: Sequence[int], prefixes: SharedPrefixes) -> list[tuple[int, int]]:
    """The rows of a tree cell in the order of their tokens, each with the tokens that it adds to those before it."""
    among = prefixes.among(np.array(cell, dtype=np.int64))
    return list(zip(among.order_R.tolist(), (lengths_R[among.order_R] - among.shared_R).tolist(), strict=True))


def _cell(
    plan: StepPlan,
    lengths_R: Int64Array,
    labels: Sequence[tuple[int, int, int]],
    cell: Sequence[int],
    box: tuple[float, float, float],
    scale: float,
    place: str,
    prefixes: SharedPrefixes | None,
) -> str:
    left, top, width = box
    if not cell:
        return _filler(left, top, width, LANE, f"{place}: inert filler")
    is_stacked = plan.layout in ("fixed", "padded")
    parts: list[str] = []
    widest = plan.padded_width(int(lengths_R[list(cell)].max())) if is_stacked else 0
    num_bars = max(len(cell), plan.micro_batch_rows) if plan.layout == "fixed" else len(cell)
    tall = LANE / num_bars if is_stacked else LANE
    x = left
    bars = [(row, int(lengths_R[row])) for row in cell] if prefixes is None else _added(lengths_R, cell, prefixes)
    for i, (row, length) in enumerate(bars):
        takes = widest if is_stacked else length if prefixes is not None else int(plan.room.widths(lengths_R[[row]])[0])
        y = top + i * tall if is_stacked else top
        parts.append(_bar(x, y, length * scale, takes * scale, tall, labels[row], row, length, takes, place))
        if not is_stacked:
            x += takes * scale
    parts += [
        _filler(left, top + i * tall, widest * scale, tall, f"{place}: inert filler")
        for i in range(len(cell), num_bars)
    ]
    return "".join(parts)


def _bar(
    x: float,
    y: float,
    real: float,
    taken: float,
    tall: float,
    label: tuple[int, int, int],
    row: int,
    length: int,
    takes: int,
    place: str,
) -> str:
    colour = COLOURS[label[0] % len(COLOURS)]
    name = "g{}·r{}·s{}".format(*label)
    gap = 1.0 if tall > 6 else 0.3
    high = max(tall - gap, 0.4)
    tip = f"{place}: row {row} ({name}), {length:,} tokens" + (f", padded to {takes:,}" if takes > length else "")
    shapes = f"<title>{escape(tip)}</title>"
    if taken > real:
        shapes += _rect(x, y, max(taken - 0.5, 0.5), high, f'fill="{colour}" class="pad"')
    shapes += _rect(x, y, max(real - 0.5, 0.5), high, f'fill="{colour}"')
    if real >= TEXT_WIDTH and high >= 12:
        kind = "label dark" if colour in LIGHT_COLOURS else "label"
        at = f'x="{x + real / 2:.1f}" y="{y + high / 2 + 3.5:.1f}"'
        shapes += f'<text {at} text-anchor="middle" class="{kind}">{name}</text>'
    return f"<g>{shapes}</g>"


def _filler(x: float, y: float, wide: float, tall: float, tip: str) -> str:
    rect = _rect(x, y, max(wide, 1.0), max(tall - 1, 1.0), 'fill="url(#filler)" stroke="#888"')
    return f"<g><title>{escape(tip)}</title>{rect}</g>"


def _many(box: tuple[float, float, float], place: str, count: int, tokens: int, scale: float) -> str:
    """A cell of more rows than are drawn one by one."""
    left, top, _ = box
    rect = _rect(left, top, max(tokens * scale, 1.0), LANE - 1, 'class="lane"')
    return f"<g><title>{escape(f'{place}: {count:,} rows')}</title>{rect}</g>"


def _rect(x: float, y: float, wide: float, tall: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" {style}/>'


def _text(x: float, y: float, content: str, *, size: int, anchor: str = "start", soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{kind}>{escape(content)}</text>'
