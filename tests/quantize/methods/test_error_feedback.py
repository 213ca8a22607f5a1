"""Error-compensated rounding of linears: better on texts it has not seen, never misled by few tokens."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.error_feedback import (
    DIRECTIONS,
    FEEDBACK_ROWS,
    Feedback,
    directions,
    leading,
    rows_kept,
    shrinkage,
)
from glm5_ascend.quantize.methods.rounding import quantize_linear
from glm5_ascend.quantize.run.expert import evenly


def draw(tokens: int, columns: int = 128, rank: int = 24, seed: int = 0) -> torch.Tensor:
    """Inputs whose directions are unequal, from the same source for every seed."""
    mixing = torch.randn(rank, columns, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    noise = 0.3 * torch.randn(tokens, columns, generator=generator)
    return torch.randn(tokens, rank, generator=generator) @ mixing / rank**0.5 + noise


def output_error(weight: torch.Tensor, scheme: str, feedback: Feedback | None, inputs: torch.Tensor) -> float:
    stored = quantize_linear("x.up_proj", weight, scheme, "gptq", feedback=feedback).stored
    integers = schemes.integer_weight(scheme, {"weight": stored["weight"]}).float()
    miss = inputs @ (integers * stored["weight_scale"] - weight).T
    return float(miss.square().sum() / (inputs @ weight.T).square().sum())


@pytest.mark.parametrize("scheme", [schemes.W4A8_DYNAMIC, schemes.W8A8_DYNAMIC])
@pytest.mark.parametrize(("tokens", "at_most"), [(8, 1.02), (64, 0.9), (600, 0.65)])
def test_other_texts_gain_the_more_tokens_were_seen(scheme: str, tokens: int, at_most: float) -> None:
    weight, unseen = torch.randn(64, 128), draw(2000, seed=99)
    plain = output_error(weight, scheme, None, unseen)
    assert output_error(weight, scheme, Feedback.on(draw(tokens)), unseen) < at_most * plain


def test_shrinkage_falls_with_the_tokens() -> None:
    found = [shrinkage(draw(tokens)) for tokens in (4, 32, 256, 2048)]
    assert found == sorted(found, reverse=True) and found[0] > 1 and found[-1] < 0.3
    assert shrinkage(torch.randn(64, 512)) > 1  # no structure: all directions alike


def test_a_wide_linear_keeps_its_strongest_directions() -> None:
    """Their second moments as they were, and all energy: what is left out is shared by all columns."""
    seen = draw(400, FEEDBACK_ROWS + 128, rank=200)
    feedback = Feedback.on(seen)
    assert feedback is not None and feedback.inputs.shape == (seen.shape[1], directions(seen.shape[1]))
    assert directions(FEEDBACK_ROWS) == FEEDBACK_ROWS and directions(FEEDBACK_ROWS + 1) == DIRECTIONS
    kept, rest = leading(seen, seen @ seen.T, DIRECTIONS)
    _, strengths, axes = torch.linalg.svd(seen.double(), full_matrices=False)
    wanted = axes[:DIRECTIONS].T * strengths[:DIRECTIONS].square() @ axes[:DIRECTIONS]
    assert torch.allclose(kept.double().T @ kept.double(), wanted, atol=1e-5 * float(strengths[0] ** 2))
    assert rest == pytest.approx(float(strengths[DIRECTIONS:].square().sum()), rel=1e-3)


@pytest.mark.parametrize("scheme", [schemes.W4A8_DYNAMIC, schemes.W8A8_DYNAMIC])
def test_a_wide_linear_loses_less_on_other_texts(scheme: str) -> None:
    columns = FEEDBACK_ROWS + 128
    weight, unseen = torch.randn(64, columns), draw(2000, columns, seed=99)
    plain = output_error(weight, scheme, None, unseen)
    assert output_error(weight, scheme, Feedback.on(draw(FEEDBACK_ROWS, columns)), unseen) < 0.8 * plain


def test_what_was_counted_as_error_is_of_the_weight() -> None:
    weight = torch.randn(32, 128)
    rounded = quantize_linear("x.up_proj", weight, schemes.W4A8_DYNAMIC, "gptq", feedback=Feedback.on(draw(300)))
    integers = schemes.integer_weight(schemes.W4A8_DYNAMIC, {"weight": rounded.stored["weight"]}).float()
    miss = integers * rounded.stored["weight_scale"] - weight
    assert rounded.squared_error == pytest.approx(float(miss.square().sum()), rel=1e-4)
    assert rounded.squared_weight == pytest.approx(float(weight.square().sum()), rel=1e-4)


def test_int8_scales_are_what_the_engine_holds() -> None:
    """bf16, and the integers belong to that scale: they are the same after a second rounding."""
    weight = torch.randn(32, 128)
    stored = quantize_linear("x.o_proj", weight, schemes.W8A8_DYNAMIC, "gptq", feedback=Feedback.on(draw(300))).stored
    scale = stored["weight_scale"]
    assert torch.equal(scale, scale.bfloat16().float())
    again = quantize_linear("x.o_proj", stored["weight"].float() * scale, schemes.W8A8_DYNAMIC, "minmax").stored
    assert stored["weight"].abs().max() >= 126 and again["weight"].shape == stored["weight"].shape


def test_descent_loses_less() -> None:
    weight, seen = torch.randn(64, 128), draw(600)
    errors = [output_error(weight, schemes.W4A8_DYNAMIC, Feedback.on(seen, steps), seen) for steps in (0, 1, 3)]
    assert errors == sorted(errors, reverse=True) and errors[2] < 0.95 * errors[0]


def test_inputs_that_say_nothing() -> None:
    assert Feedback.on(torch.zeros(5, 64)) is None
    weight = torch.randn(16, 64)
    plain = quantize_linear("x.up_proj", weight, schemes.W4A8_DYNAMIC, "ssz").stored
    without = quantize_linear("x.up_proj", weight, schemes.W4A8_DYNAMIC, "gptq").stored
    assert all(torch.equal(plain[name], without[name]) for name in plain)


def test_rows_that_are_kept() -> None:
    assert rows_kept(10_000, FEEDBACK_ROWS) == 10_000 and rows_kept(10_000, FEEDBACK_ROWS + 1) == FEEDBACK_ROWS
    mask = evenly(1000, 10)
    assert int(mask.sum()) == 10 and mask[0] and mask[-1] and int(evenly(3, 10).sum()) == 3
