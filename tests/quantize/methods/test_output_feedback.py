"""Two-sided rounding: the formula written out, blocks of rows, and what it saves of the error that it weighs."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods import output_feedback
from glm5_ascend.quantize.methods.error_feedback import Feedback, shrinkage
from glm5_ascend.quantize.methods.output_feedback import (
    OUTPUT_DIRECTIONS,
    GradientMoments,
    OutputFeedback,
    strongest,
)
from glm5_ascend.quantize.methods.rounding import quantize_linear, ssz_scale
from tests.quantize.methods.test_error_feedback import draw

ROWS, COLUMNS = 96, 64


def moments_of(gradients: torch.Tensor) -> GradientMoments:
    energy = gradients.double().square().sum(1)
    total = gradients.T @ gradients
    return GradientMoments(total, len(gradients), float(energy.sum()), float(energy.square().sum()))


def problem() -> tuple[torch.Tensor, Feedback, torch.Tensor, OutputFeedback, torch.Tensor]:
    """A weight, both its feedbacks, and both second moments, fp64, as they weigh errors."""
    inputs = Feedback.on(draw(300, COLUMNS))
    assert inputs is not None
    outputs, damping = strongest(moments_of(draw(500, ROWS, seed=1)))
    place = inputs.order.argsort()
    x, y = inputs.inputs[place].double(), outputs.double()
    of_inputs = x @ x.T + inputs.damping * torch.eye(COLUMNS, dtype=torch.float64)
    of_outputs = y @ y.T + damping * torch.eye(ROWS, dtype=torch.float64)
    return torch.randn(ROWS, COLUMNS), inputs, of_inputs, OutputFeedback.of(outputs, damping), of_outputs


def weighed(error: torch.Tensor, of_outputs: torch.Tensor, of_inputs: torch.Tensor) -> float:
    error = error.double()
    return float(torch.trace(of_outputs @ error @ of_inputs @ error.T))


def naive(weight: torch.Tensor, inputs: Feedback, of_outputs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sixteen rows at a time; those behind move to where they make up best for what these miss."""
    left, rounded = weight.double().clone(), torch.empty_like(weight)
    for start in range(0, len(weight), 16):
        here, behind = slice(start, start + 16), slice(start + 16, None)
        rounded[here] = inputs.round(left[here].float(), scale[here], 7, refit=True)[0]
        missed = left[here] - rounded[here]
        left[behind] += torch.linalg.solve(of_outputs[behind, behind], of_outputs[behind, here] @ missed)
    return rounded


def test_rounding_is_the_formula_written_out() -> None:
    weight, inputs, of_inputs, outputs, of_outputs = problem()
    scale = ssz_scale(weight, 7)
    got, _ = outputs.beside(inputs).round(weight, scale, 7, refit=True)
    want = naive(weight, inputs, of_outputs, scale)
    assert (got == want).float().mean() > 0.98  # a tie of rounding decides what comes behind it
    ours, written = (weighed(rounded - weight, of_outputs, of_inputs) for rounded in (got, want))
    assert ours == pytest.approx(written, rel=0.02)


def test_the_weighed_error_falls() -> None:
    weight, inputs, of_inputs, outputs, of_outputs = problem()

    def error_with(feedback: Feedback | output_feedback.TwoSidedFeedback | None) -> float:
        stored = quantize_linear("x.down_proj", weight, schemes.W4A8_DYNAMIC, "yaqa", feedback=feedback).stored
        made = schemes.integer_weight(schemes.W4A8_DYNAMIC, stored).float() * stored["weight_scale"]
        return weighed(made - weight, of_outputs, of_inputs)

    nearest, one_sided, two_sided = (error_with(each) for each in (None, inputs, outputs.beside(inputs)))
    assert two_sided < 0.85 * one_sided < 0.85 * nearest


@pytest.mark.parametrize("group", [16, 48])
def test_any_split_of_the_rows_gives_the_same_bits(group: int) -> None:
    """Blocks that are written end at multiples of 16, which may lie within a group."""
    weight, inputs, _, found, _ = problem()
    outputs = OutputFeedback(found.outputs, output_feedback.group_gains(found.outputs, 1.0, group), group)
    scale = ssz_scale(weight, 7)
    whole = outputs.beside(inputs).round(weight, scale, 7, refit=True)
    pieces = outputs.beside(inputs)
    made = [pieces.round(weight[rows], scale[rows], 7, refit=True) for rows in (slice(0, 32), slice(32, ROWS))]
    for one, several in zip(whole, zip(*made, strict=True), strict=True):
        assert torch.equal(one, torch.cat(several))


def test_damping_is_that_of_the_rows() -> None:
    gradients = draw(200, ROWS)
    energy = float(gradients.square().sum()) / ROWS
    assert moments_of(gradients).damping() == pytest.approx(shrinkage(gradients) * energy, rel=1e-4)


def test_a_wide_stream_keeps_its_strongest_directions() -> None:
    """Their second moments as they were, and all energy."""
    hidden = 2 * OUTPUT_DIRECTIONS + 64
    moments = moments_of(draw(2000, hidden, rank=100))
    outputs, damping = strongest(moments)
    assert outputs.shape == (hidden, OUTPUT_DIRECTIONS)
    energies, axes = torch.linalg.eigh(moments.total.double())
    strong, axes = energies[-100:], axes[:, -100:]
    along = axes.T @ (outputs @ outputs.T).double() @ axes
    assert torch.allclose(along, strong.diag(), atol=1e-3 * float(strong[-1]))
    kept = float(outputs.double().square().sum()) + hidden * (damping - moments.damping())
    assert kept == pytest.approx(float(energies.sum()), rel=1e-3)
