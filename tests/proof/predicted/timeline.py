"""A block as a picture: one lane per pipe of each core, a bar where it works."""

from __future__ import annotations

from html import escape
from pathlib import Path

from tests.proof.executed.clocks import CORES, PIPES
from tests.proof.predicted.overlap import merged
from tests.proof.predicted.rates import rate
from tests.proof.predicted.timed import Record

COLOURS = {"V": "#d95f02", "M": "#1b9e77", "MTE1": "#66a61e", "MTE2": "#7570b3", "MTE3": "#e7298a", "FIX": "#a6761d"}
#: Microseconds shown (of longer blocks the middle), and pixels.
WINDOW, WIDTH, LEFT, LANE = 20.0, 900, 90, 22
#: Bars closer than this many microseconds are drawn as one.
GAP = WINDOW / 1000


def draw(record: Record, title: str, path: Path) -> None:
    """SVG of the cube core and of one of two vector cores, which do the same."""
    scale = 1e6 / rate("clock")
    end = record.end * scale
    first, shown = max(0.0, (end - WINDOW) / 2), min(end, WINDOW)
    lanes = [(core, pipe) for core in (0, 1) for pipe in PIPES if any(s[:2] == (core, pipe) for s in record.spans)]
    lanes = [lane for lane in lanes if lane[1] in COLOURS]
    bottom = 40 + LANE * len(lanes)
    parts = [text(8, 18, f"{title}: {shown:.1f} of {end:.1f} us")]
    for row, (core, pipe) in enumerate(lanes):
        top = 30 + LANE * row
        parts.append(text(8, top + 14, f"{CORES[core]} {pipe}"))
        spans = ((a * scale, b * scale + GAP) for c, p, a, b, _ in record.spans if (c, p) == (core, pipe))
        for start, stop in merged(spans):
            left, right = max(start - first, 0.0), min(stop - GAP - first, shown)
            if right > left:
                x, wide = LEFT + left / shown * WIDTH, (right - left) / shown * WIDTH
                box = f'x="{x:.1f}" y="{top}" width="{max(wide, 0.2):.1f}" height="18"'
                parts.append(f'<rect {box} fill="{COLOURS[pipe]}"/>')
    for step in range(5):
        parts.append(text(LEFT + step / 4 * WIDTH - 10, bottom + 12, f"{first + step / 4 * shown:.1f} us"))
    size = f'width="{LEFT + WIDTH + 30}" height="{bottom + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    path.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n")


def text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'
