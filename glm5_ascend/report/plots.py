"""The plots of the reports: intervals, bars, columns, histograms, heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from glm5_ascend.report.svg import WIDTH, svg


@dataclass(frozen=True)
class Row:
    """One line of an interval plot; `ends` are those of its axis, `end_labels` how they read."""

    label: str
    value: float
    interval: tuple[float, float] | None
    text: str
    ends: tuple[float, float]
    end_labels: tuple[str, str]


def intervals(title: str, rows: Sequence[Row]) -> str:
    """A dot for the value and a band for the interval, on the row's axis."""
    parts = []
    left, right = 190.0, WIDTH - 80.0
    for index, row in enumerate(rows):
        y, (least, most) = 36 * index + 12, row.ends

        def at(number: float, least: float = least, most: float = most) -> float:
            return left + (right - left) * (number - least) / ((most - least) or 1.0)

        parts.append(f'<text x="0" y="{y + 4}">{escape(_short(row.label, 34))}</text>')
        parts.append(f'<path d="M{left} {y}H{right}" stroke="var(--line)"/>')
        if least < 0 < most:
            parts.append(f'<path d="M{at(0):.1f} {y - 8}V{y + 8}" stroke="var(--soft)"/>')
        if row.interval is not None:
            low, high = row.interval
            parts.append(
                f'<path class="interval" d="M{at(low):.1f} {y}H{at(high):.1f}" stroke="var(--one)" stroke-width="7" '
                'stroke-opacity="0.45"/>'
            )
        parts.append(f'<circle cx="{at(row.value):.1f}" cy="{y}" r="4" fill="var(--one)"/>')
        parts.append(f'<text x="{right + 10}" y="{y + 4}">{escape(row.text)}</text>')
        for x, label, anchor in zip((left, right), row.end_labels, ("start", "end"), strict=True):
            parts.append(f'<text class="soft" x="{x}" y="{y + 17}" text-anchor="{anchor}">{escape(label)}</text>')
    return svg(36 * len(rows) + 4, title, parts)


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """One horizontal bar per (label, value >= 0, text)."""
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    parts = []
    for index, (label, value, text) in enumerate(rows):
        y, width = 22 * index, 150 * value / longest
        parts.append(f'<text x="0" y="{y + 14}">{escape(_short(label, 34))}</text>')
        parts.append(f'<rect x="190" y="{y + 3}" width="{width:.1f}" height="13" fill="var(--one)"/>')
        parts.append(f'<text class="soft" x="{195 + width:.1f}" y="{y + 14}">{escape(text)}</text>')
    return svg(22 * len(rows) + 4, title, parts)


def columns(title: str, values: Sequence[float], unit: str, labels: tuple[str, str] | None = None) -> str:
    """One column per value; `labels` name the first and the last one."""
    most, height = max(values, default=0.0) or 1.0, 110.0
    step = WIDTH / max(1, len(values))
    parts = [f'<text class="soft" x="0" y="11">{most:.4g}</text>']
    for index, value in enumerate(values):
        tall = height * value / most
        parts.append(
            f'<rect x="{index * step:.1f}" y="{16 + height - tall:.1f}" width="{max(0.6, 0.85 * step):.1f}" '
            f'height="{tall:.1f}" fill="var(--one)"/>'
        )
    first, last = labels or ("0", str(len(values) - 1))
    parts.append(f'<path d="M0 {16 + height}H{WIDTH}" stroke="var(--soft)"/>')
    parts.append(f'<text class="soft" x="0" y="{height + 31}">{escape(first)}</text>')
    parts.append(f'<text class="soft" x="{WIDTH / 2}" y="{height + 31}" text-anchor="middle">{escape(unit)}</text>')
    parts.append(f'<text class="soft" x="{WIDTH}" y="{height + 31}" text-anchor="end">{escape(last)}</text>')
    return svg(height + 36, title, parts)


def heat_map(title: str, rows: Sequence[str], cells: Sequence[Sequence[float | None]], most: float, unit: str) -> str:
    """Cells [rows, columns] between 0 and `most`; None is left empty. Every cell says its value when pointed at."""
    left, high = 150.0, 18.0
    count = max((len(row) for row in cells), default=1) or 1
    step = (WIDTH - left) / count
    parts = []
    for index, (label, row) in enumerate(zip(rows, cells, strict=True)):
        y = index * high
        parts.append(f'<text x="0" y="{y + 13}">{escape(_short(label, 26))}</text>')
        for column, value in enumerate(row):
            if value is None:
                continue
            shade = min(1.0, max(0.0, value / most)) if most > 0 and math.isfinite(value) else 0.0
            parts.append(
                f'<rect x="{left + column * step:.1f}" y="{y:.1f}" width="{max(0.5, step - 0.5):.1f}" '
                f'height="{high - 2}" fill="var(--two)" fill-opacity="{0.06 + 0.94 * shade:.2f}">'
                f"<title>{escape(label)}, {column}: {value:.4g}</title></rect>"
            )
    foot = len(rows) * high + 13
    parts.append(f'<text class="soft" x="{left}" y="{foot}">0</text>')
    parts.append(f'<text class="soft" x="{WIDTH}" y="{foot}" text-anchor="end">{count - 1}</text>')
    parts.append(
        f'<text class="soft" x="{(left + WIDTH) / 2}" y="{foot}" text-anchor="middle">{escape(unit)}, '
        f"full colour at {most:.4g}</text>"
    )
    return svg(foot + 6, title, parts)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
