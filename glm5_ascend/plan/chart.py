"""Drawings of the report as SVG: colours come from the page, so they follow light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from glm5_ascend.plan.frontier import Point
from glm5_ascend.plan.memory import Memory
from glm5_ascend.plan.predict import Prediction
from glm5_ascend.plan.result import Range
from glm5_ascend.report.svg import SHADES, WIDTH, svg, ticks


def memory_bar(held: Memory) -> str:
    """One bar for the die, and a legend with every part."""
    parts = [(name, float(nbytes)) for name, nbytes in held.weights.items()]
    other = [(name, nbytes) for name, nbytes in held.parts.items() if name != "weights"]
    large = [part for part in parts if part[1] > 0.005 * held.total]
    rest = sum(nbytes for _, nbytes in parts) - sum(nbytes for _, nbytes in large)
    shown = [*large, ("small weights", rest), *((n, b) for n, b in other if b > 0), ("cache", max(0.0, held.budget)),
             ("not used by the engine", held.total - held.usable)]  # fmt: skip
    x, bar, legend = 0.0, [], []
    for index, (name, nbytes) in enumerate(item for item in shown if item[1] > 0):
        fill = {"cache": "--free", "not used by the engine": "--line"}.get(name, SHADES[index % len(SHADES)])
        width = WIDTH * nbytes / held.total
        bar.append(f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="34" fill="var({fill})"/>')
        column, row = index % 2, index // 2
        lx, ly = column * WIDTH / 2, 52 + 20 * row
        legend.append(
            f'<rect x="{lx}" y="{ly}" width="12" height="12" fill="var({fill})"/>'
            f'<text x="{lx + 18}" y="{ly + 10}">{escape(name)} {nbytes / 1e9:.2f} GB</text>'
        )
        x += width
    height = 58 + 20 * -(-len(legend) // 2)
    title = f"memory of one die, {held.total / 1e9:.1f} GB"
    return svg(height, title, [*bar, *legend])


def share_bars(prediction: Prediction) -> str:
    """Operators of a decode step, longest first."""
    rows = sorted(prediction.by_op.items(), key=lambda item: -item[1])
    rows = [row for row in rows if row[1] > 0.01 * prediction.step_seconds]
    longest, parts = rows[0][1], []
    for index, (name, seconds) in enumerate(rows):
        y, width = 24 * index, 140 * seconds / longest
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<rect x="158" y="{y + 3}" width="{width:.1f}" height="14" fill="var(--one)"/>')
        share = f"{1e3 * seconds:.1f} ms, {100 * seconds / prediction.step_seconds:.0f} %"
        parts.append(f'<text class="soft" x="{163 + width:.1f}" y="{y + 14}">{share}</text>')
    title = f"decode step of {1e3 * prediction.step_seconds:.0f} ms by operator"
    return svg(24 * len(rows) + 4, title, parts)


def frontier_chart(points: Sequence[Point], band: Range, limit: float | None) -> str:
    """Tokens per second over milliseconds per token; the chosen point is marked, the SLO is a line."""
    left, right, top, bottom = 48.0, WIDTH - 12.0, 12.0, 230.0
    most_x = 1.1 * max([p.tpot_ms for p in points] + ([1e3 * limit] if limit else []))
    low, high = band.low / band.value, band.high / band.value
    most_y = 1.05 * high * max(p.output_per_second for p in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / most_x, bottom - (bottom - top) * y / most_y

    parts = [f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="var(--soft)"/>']
    for value in ticks(most_x):
        x, _ = at(value, 0)
        parts.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    for value in ticks(most_y):
        _, y = at(0, value)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="var(--line)"/>')
        parts.append(f'<text class="soft" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
    upper = [at(p.tpot_ms, p.output_per_second * high) for p in points]
    lower = [at(p.tpot_ms, p.output_per_second * low) for p in reversed(points)]
    outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *lower])
    parts.append(f'<polygon points="{outline}" fill="var(--one)" opacity="0.18"/>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(p.tpot_ms, p.output_per_second) for p in points))
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--one)" stroke-width="2"/>')
    if limit:
        x, _ = at(1e3 * limit, 0)
        parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="var(--two)" stroke-dasharray="5 4"/>')
    for p in points:
        x, y = at(p.tpot_ms, p.output_per_second)
        fill, radius = ("--two", 6) if p.chosen else ("--one", 3)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="var({fill})"/>')
        if p.chosen:
            side, anchor = (10, "start") if x < (left + right) / 2 else (-10, "end")
            parts.append(
                f'<text x="{x + side:.1f}" y="{y - 10:.1f}" text-anchor="{anchor}">'
                f"{p.concurrency:g} requests: {p.output_per_second:,.0f} tokens/s</text>"
            )
    parts.append(f'<text class="soft" x="{right}" y="{bottom + 34}" text-anchor="end">ms per output token</text>')
    parts.append(f'<text class="soft" x="{left + 6}" y="{top + 10}">output tokens per second</text>')
    return svg(270, "throughput over latency", parts)
