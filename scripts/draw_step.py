"""Draw docs/step.svg: three groups of rollouts become rows, rows become the cells of one step on four ranks.

    python scripts/draw_step.py

The cells are those of a real plan: 3 prompts × 2 rollouts with 1, 3 | 2, 5 | 1, 1 segments, layout ``fixed``, one row
a cell.
"""

from __future__ import annotations

from pathlib import Path

from evenstep.plan import plan_step

SEGMENTS = ((1, 3), (2, 5), (1, 1))  # of the two rollouts of each group
RANKS = 4
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # told apart by colour-blind readers
CELL_W, CELL_H, GAP = 92, 30, 6
LEFT, TOP, RIGHT = 300, 64, 24


def text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "start", fill: str = "#444") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{content}</text>'


def box(x: float, y: float, width: float, fill: str, label: str, *, dashed: bool = False) -> str:
    style = 'stroke="#888" stroke-dasharray="4 3" fill="#f4f4f4"' if dashed else f'fill="{fill}"'
    colour = "#666" if dashed else "#fff"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{CELL_H}" rx="4" {style}/>'
        f'<text x="{x + width / 2}" y="{y + 20}" font-size="12" text-anchor="middle" fill="{colour}">{label}</text>'
    )


def draw() -> str:
    rows = [
        (group, rollout, segment)
        for group, rollouts in enumerate(SEGMENTS)
        for rollout, count in enumerate(rollouts)
        for segment in range(count)
    ]
    plan = plan_step(
        [1] * len(rows), num_ranks=RANKS, layout="fixed", group_ids=[group for group, _, _ in rows], pad_scope="group"
    )
    shapes: list[str] = [
        text(24, 28, "6 rollouts, compacted into 13 rows", size=14, fill="#222"),
        text(LEFT, 28, "16 cells on 4 ranks, 3 of them inert fillers, 1 exact optimizer step", size=14, fill="#222"),
    ]
    y = TOP
    for group, rollouts in enumerate(SEGMENTS):
        for rollout, count in enumerate(rollouts):
            shapes.append(text(24, y + 14, f"g{group}·r{rollout}"))
            shapes += [
                f'<rect x="{74 + 34 * s}" y="{y}" width="30" height="20" rx="3" fill="{COLOURS[group]}"/>'
                for s in range(count)
            ]
            y += 27
    for rank, cells in enumerate(plan.cells):
        row_y = TOP + 16 + rank * (CELL_H + GAP)
        shapes.append(text(LEFT, row_y + 20, f"rank {rank}"))
        for k, cell in enumerate(cells):
            x = LEFT + 60 + k * (CELL_W + GAP)
            if rank == 0:
                shapes.append(text(x + CELL_W / 2, TOP + 8, f"micro-batch {k}", size=11, anchor="middle"))
            if cell:
                group, rollout, segment = rows[cell[0]]
                shapes.append(box(x, row_y, CELL_W, COLOURS[group], f"g{group}·r{rollout}·s{segment}"))
            else:
                shapes.append(box(x, row_y, CELL_W, "", "filler", dashed=True))
    width = LEFT + 60 + plan.num_microbatches * (CELL_W + GAP) + RIGHT
    height = max(y, TOP + 16 + RANKS * (CELL_H + GAP)) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif"><title>Rollouts, rows and cells of one step</title>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "step.svg"
    path.write_text(draw(), encoding="utf-8")
    print(path)
