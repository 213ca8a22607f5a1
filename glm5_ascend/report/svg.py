"""Drawings as SVG: colours come from the page, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH = 420  # of a phone: text keeps its size there
SHADES = tuple(f"--{letter}" for letter in "abcdefghijkl")


def ticks(most: float) -> list[float]:
    """Four to eight round values above zero."""
    step = 10.0 ** math.floor(math.log10(most / 4))
    for factor in (1, 2, 5, 10):
        if most / (step * factor) <= 8:
            step *= factor
            break
    return [step * i for i in range(1, int(most / step) + 1)]


def svg(height: float, title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return head + f"<title>{escape(title)}</title>" + "".join(parts) + "</svg>"
