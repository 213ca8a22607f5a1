"""Comparison of results: the largest difference, its index, and whether the tolerance allows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """|got - want| <= absolute + relative * |want| for every element, and |got - want| <= norm * |want| for the norms
    over all elements; `reason` says why."""

    absolute: float
    relative: float
    reason: str
    norm: float = math.inf


@dataclass(frozen=True)
class Difference:
    """The result of a comparison.

    Attributes:
        ok: within the tolerance, with the NaN and infinities at the same indices.
        worst: index of the element that is furthest outside its tolerance, and both values, as text.
        largest: largest |got - want|.
        relative: norm of the difference over the norm of the reference, over all finite elements.
    """

    ok: bool
    worst: str
    largest: float
    relative: float


def compare_values(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> Difference:
    """Compare two tensors of one shape, on any device and of any dtype."""
    if got.shape != want.shape:
        return Difference(False, f"shape {list(got.shape)} instead of {list(want.shape)}", float("inf"), float("inf"))
    if got.numel() == 0:
        return Difference(True, "empty", 0.0, 0.0)
    a, b = got.detach().cpu().double(), want.detach().cpu().double()
    finite = a.isfinite() & b.isfinite()
    same_special = finite | (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(finite, (a - b).abs(), 0.0)
    excess = gap - (tolerance.absolute + tolerance.relative * torch.where(finite, b, 0.0).abs())
    excess = torch.where(same_special, excess, torch.inf)
    index = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    norm = float(torch.where(finite, b, 0.0).norm())
    relative = float(gap.norm()) / norm if norm else float(gap.norm())
    worst = f"[{', '.join(map(str, index))}] {float(a[index]):.6g} for {float(b[index]):.6g}"
    return Difference(bool((excess <= 0).all()) and relative <= tolerance.norm, worst, float(gap.max()), relative)


def compare_selection(got: torch.Tensor, want: torch.Tensor, scores: list[torch.Tensor], gap: float) -> Difference:
    """Compare two top-k results int [T, K] as sets.

    Only positions whose score is within `gap` of the last selected score may differ (none if it is 0). Both rows must
    list the same number of positions, valid ones first, none twice.

    Args:
        scores: fp32 or fp64 [positions] per row, from the reference.
    """
    worst, largest, missed, total, ok = "equal sets", 0.0, 0, 0, True
    for row, (a, b) in enumerate(zip(got.cpu().tolist(), want.cpu().tolist(), strict=True)):
        valid = [p for p in a if p >= 0]
        selected, expected = set(valid), {p for p in b if p >= 0}
        total += len(expected)
        if len(valid) != len(expected) or len(selected) != len(valid) or a[: len(valid)] != valid:
            return Difference(
                False, f"row {row}: {len(valid)} positions for {len(expected)}, or one twice", float("inf"), 1.0
            )
        if selected == expected:
            continue
        missed += len(expected - selected)
        last = min(float(scores[row][p]) for p in expected)
        for position in selected ^ expected:
            distance = abs(float(scores[row][position]) - last) if position < len(scores[row]) else float("inf")
            if distance > largest:
                largest, worst = distance, f"row {row} position {position}: {distance:.3g} from the last selected score"
            ok = ok and distance < gap
    return Difference(ok, worst, largest, missed / max(total, 1))
