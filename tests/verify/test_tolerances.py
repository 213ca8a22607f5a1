"""Which errors of a column a weight in INT4 may have: those of error feedback, and none of a wrong scale."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint.schemes import FLOAT, W4A8_DYNAMIC, W8A8_DYNAMIC
from glm5_ascend.verify.tolerances import Verdict, WeightComparison


def judged(scheme: str, factor: float = 1.0, noise: float = 0.0, rows: int = 256) -> Verdict:
    """Column 5 of a random weight times `factor`, with noise of that share of it; compared in two pieces."""
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(rows, 64, generator=generator)
    weight = reference.clone()
    weight[:, 5] = factor * reference[:, 5] + noise * torch.randn(rows, generator=generator)
    comparison = WeightComparison()
    for part in (slice(0, rows // 2), slice(rows // 2, rows)):
        comparison.add(weight[part], reference[part])
    return comparison.judge(scheme)


@pytest.mark.parametrize(("factor", "noise"), [(1.0, 0.0), (1.0, 0.8), (0.95, 0.7), (1.1, 0.3)])
def test_what_error_feedback_does_is_right(factor: float, noise: float) -> None:
    assert judged(W4A8_DYNAMIC, factor, noise).ok


@pytest.mark.parametrize(
    ("factor", "noise"), [(0.55, 0.0), (1.6, 0.0), (0.5, 0.3), (-1.0, 0.0), (0.0, 0.0), (1.0, 1.2)]
)
def test_a_wrong_column_is_not(factor: float, noise: float) -> None:
    verdict = judged(W4A8_DYNAMIC, factor, noise)
    assert not verdict.ok and verdict.column == 5 and verdict.column_error > verdict.column_limit


@pytest.mark.parametrize("scheme", [W8A8_DYNAMIC, FLOAT])
def test_more_bits_leave_less_room(scheme: str) -> None:
    assert judged(scheme, 1.02).ok
    assert not judged(scheme, 0.8).ok
    assert not judged(scheme, 1.0, 0.3).ok


@pytest.mark.parametrize(
    ("factor", "noise", "right"),
    [(1.0, 0.8, True), (0.9, 0.6, True), (1.3, 0.0, True), (0.6, 0.0, False), (-1.0, 0.0, False), (1.0, 1.2, False)],
)
def test_a_row_may_make_up_for_others(factor: float, noise: float, right: bool) -> None:
    """Row 5 of a random weight times `factor`, with noise."""
    reference = torch.randn(256, 64)
    weight = reference.clone()
    weight[5] = factor * reference[5] + noise * torch.randn(64)
    comparison = WeightComparison()
    comparison.add(weight, reference)
    verdict = comparison.judge(W4A8_DYNAMIC)
    assert verdict.ok is right and (right or verdict.row == 5)
    assert not comparison.judge(W8A8_DYNAMIC).ok and not comparison.judge(FLOAT).ok


@pytest.mark.parametrize(("factor", "noise", "right"), [(1.0, 1.3, True), (1.0, 3.0, False), (-1.0, 0.0, False)])
def test_a_huge_weight_makes_coarse_columns(factor: float, noise: float, right: bool) -> None:
    """One row's steps are large; `noise` is in halves of them. What has no direction may be more than a step's half."""
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(64, 64, generator=generator)
    reference[:, 5] *= 0.2
    reference[3, 7] = 300
    weight = reference.clone()
    weight[:, 5] *= factor
    weight[3, 5] += noise * 300 / 127 / 2
    comparison = WeightComparison()
    comparison.add(weight, reference)
    verdict = comparison.judge(W8A8_DYNAMIC)
    assert verdict.ok is right, verdict
