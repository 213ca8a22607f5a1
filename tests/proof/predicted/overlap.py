"""Which work of a block lies beside other work of the same block."""

from __future__ import annotations

from collections.abc import Iterable

from tests.proof.executed.clocks import CORES
from tests.proof.predicted.timed import Record

Spans = list[tuple[float, float]]


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """The time that they cover."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def covered(record: Record, *lanes: str) -> Spans:
    """When at least one of the lanes works: "aic M", "aiv V" (either vector core)."""
    return merged(
        (start, end)
        for core, pipe, start, end, _ in record.spans
        if f"{CORES[core][:3]} {pipe}" in lanes and end > start
    )


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def hidden(inner: Spans, outer: Spans) -> float:
    """Share of `inner` during which `outer` works, too."""
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in inner for b in outer)
    return both / length(inner) if inner else 0.0
