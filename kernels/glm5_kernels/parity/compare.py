"""One judge for all ops: where two results differ most, by how much, and whether that is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """|got - want| <= absolute + relative * |want| for every element, and |got - want| <= norm * |want| as norms over
    all of them; and why that much is allowed."""

    absolute: float
    relative: float
    reason: str
    norm: float = math.inf


@dataclass(frozen=True)
class Difference:
    """What the judge saw.

    Attributes:
        ok: within the tolerance, with the same NaN and infinite places.
        worst: index of the element that is furthest out of its tolerance, and both values, as text.
        largest: largest |got - want|.
        relative: norm of the difference over the norm of the reference, over all finite elements.
    """

    ok: bool
    worst: str
    largest: float
    relative: float


def compare_values(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> Difference:
    """Two tensors of one shape, on any device and of any dtype."""
    if got.shape != want.shape:
        return Difference(False, f"shape {list(got.shape)} instead of {list(want.shape)}", float("inf"), float("inf"))
    if got.numel() == 0:
        return Difference(True, "empty", 0.0, 0.0)
    a, b = got.detach().cpu().double(), want.detach().cpu().double()
    finite = a.isfinite() & b.isfinite()
    same_place = finite | (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(finite, (a - b).abs(), 0.0)
    excess = gap - (tolerance.absolute + tolerance.relative * torch.where(finite, b, 0.0).abs())
    excess = torch.where(same_place, excess, torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    norm = float(torch.where(finite, b, 0.0).norm())
    relative = float(gap.norm()) / norm if norm else float(gap.norm())
    worst = f"[{', '.join(map(str, at))}] {float(a[at]):.6g} for {float(b[at]):.6g}"
    return Difference(bool((excess <= 0).all()) and relative <= tolerance.norm, worst, float(gap.max()), relative)


def compare_choice(got: torch.Tensor, want: torch.Tensor, scores: list[torch.Tensor], gap: float) -> Difference:
    """Two top-k results int [T, K] as sets; only positions whose score is nearer than `gap` to the last chosen one's
    may differ (none if it is 0), and both must list as many positions, valid ones first, none twice.

    Args:
        scores: fp32 or fp64 [positions] per row, from the reference.
    """
    worst, largest, missed, total, ok = "equal sets", 0.0, 0, 0, True
    for row, (a, b) in enumerate(zip(got.cpu().tolist(), want.cpu().tolist(), strict=True)):
        valid = [p for p in a if p >= 0]
        chosen, wanted = set(valid), {p for p in b if p >= 0}
        total += len(wanted)
        if len(valid) != len(wanted) or len(chosen) != len(valid) or a[: len(valid)] != valid:
            return Difference(
                False, f"row {row}: {len(valid)} positions for {len(wanted)}, or one twice", float("inf"), 1.0
            )
        if chosen == wanted:
            continue
        missed += len(wanted - chosen)
        last = min(float(scores[row][p]) for p in wanted)
        for position in chosen ^ wanted:
            distance = abs(float(scores[row][position]) - last) if position < len(scores[row]) else float("inf")
            if distance > largest:
                largest, worst = distance, f"row {row} position {position}: {distance:.3g} from the last chosen score"
            ok = ok and distance < gap
    return Difference(ok, worst, largest, missed / max(total, 1))
