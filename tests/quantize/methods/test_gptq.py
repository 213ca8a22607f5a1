"""GPTQ of linears: better on texts it has not seen, never misled by few tokens."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.gptq import FULL_COLUMNS, GPTQ, RANK, GPTQState, rank, shrinkage, truncated_svd
from glm5_ascend.quantize.methods.registry import METHODS
from glm5_ascend.quantize.methods.rounding import quantize_linear
from glm5_ascend.quantize.methods.ssz import SSZ

W4, W8 = schemes.W4A8_DYNAMIC, schemes.W8A8_DYNAMIC


def draw(tokens: int, columns: int = 128, rank: int = 24, seed: int = 0) -> torch.Tensor:
    """Inputs whose directions are unequal, from the same source for every seed."""
    mixing = torch.randn(rank, columns, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    noise = 0.3 * torch.randn(tokens, columns, generator=generator)
    return torch.randn(tokens, rank, generator=generator) @ mixing / rank**0.5 + noise


def output_error(weight: torch.Tensor, scheme: str, state: GPTQState | None, inputs: torch.Tensor) -> float:
    stored = quantize_linear("x.up_proj", weight, scheme, GPTQ, state=state).stored
    integers = schemes.integer_weight(scheme, {"weight": stored["weight"]}).float()
    error = inputs @ (integers * stored["weight_scale"] - weight).T
    return float(error.square().sum() / (inputs @ weight.T).square().sum())


@pytest.mark.parametrize("scheme", [W4, W8])
@pytest.mark.parametrize(
    ("tokens", "columns", "at_most"),
    [(8, 128, 1.02), (64, 128, 0.9), (600, 128, 0.65), (512, FULL_COLUMNS + 128, 0.8)],
)
def test_error_on_other_texts_falls_with_the_tokens(scheme: str, tokens: int, columns: int, at_most: float) -> None:
    weight, unseen = torch.randn(64, columns), draw(2000, columns, seed=99)
    plain = output_error(weight, scheme, None, unseen)
    assert output_error(weight, scheme, GPTQState.from_inputs(draw(tokens, columns)), unseen) < at_most * plain


def test_shrinkage_falls_with_the_tokens() -> None:
    ratios = [shrinkage(draw(tokens)) for tokens in (4, 32, 256, 2048)]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 1 and ratios[-1] < 0.3
    assert shrinkage(torch.randn(64, 512)) > 1  # no structure


def test_many_tokens_are_kept_as_so_many_rows_as_columns() -> None:
    """The Hessian is that of all tokens."""
    seen = draw(600)
    state = GPTQState.from_inputs(seen)
    assert state is not None and state.inputs.shape == (128, 128)
    damping = shrinkage(seen) * float(seen.square().sum()) / 128
    expected = seen.double().T @ seen.double() + damping * torch.eye(128)
    hessian = state.inputs.double() @ state.inputs.double().T + state.damping * torch.eye(128)
    assert torch.allclose(hessian, expected[state.perm][:, state.perm], rtol=1e-4, atol=1e-4 * damping)


def test_a_wide_linear_keeps_its_strongest_directions() -> None:
    """Their second moments stay, and the energy of the others is counted."""
    seen = draw(400, FULL_COLUMNS + 128, rank=200)
    state = GPTQState.from_inputs(seen)
    assert state is not None and state.inputs.shape == (seen.shape[1], rank(seen.shape[1]))
    assert rank(FULL_COLUMNS) == FULL_COLUMNS and rank(FULL_COLUMNS + 1) == RANK
    rows, residual = truncated_svd(seen, seen @ seen.T, RANK)
    _, strengths, axes = torch.linalg.svd(seen.double(), full_matrices=False)
    expected = axes[:RANK].T * strengths[:RANK].square() @ axes[:RANK]
    assert torch.allclose(rows.double().T @ rows.double(), expected, atol=1e-5 * float(strengths[0] ** 2))
    assert residual == pytest.approx(float(strengths[RANK:].square().sum()), rel=1e-3)


def test_reported_error_is_that_of_the_weight() -> None:
    weight = torch.randn(32, 128)
    rounded = quantize_linear("x.up_proj", weight, W4, GPTQ, state=GPTQState.from_inputs(draw(300)))
    error = schemes.dequantize(W4, rounded.stored) - weight
    assert rounded.squared_error == pytest.approx(float(error.square().sum()), rel=1e-4)
    assert rounded.squared_weight == pytest.approx(float(weight.square().sum()), rel=1e-4)


def test_int8_scales_are_what_the_engine_holds() -> None:
    """The engine rounds them to bf16, so the integers must belong to that scale."""
    weight = torch.randn(32, 128)
    stored = quantize_linear("x.o_proj", weight, W8, GPTQ, state=GPTQState.from_inputs(draw(300))).stored
    assert torch.equal(stored["weight_scale"], stored["weight_scale"].bfloat16().float())
    assert stored["weight"].abs().max() >= 126


def test_without_inputs_integers_are_the_nearest() -> None:
    assert GPTQState.from_inputs(torch.zeros(5, 64)) is None
    weight = torch.randn(16, 64)
    plain, gptq = (quantize_linear("x.up_proj", weight, W4, method).stored for method in (SSZ, GPTQ))
    assert all(torch.equal(plain[name], gptq[name]) for name in plain)


def test_verify_allows_every_method() -> None:
    assert max(method.tolerance for method in METHODS.values()) <= schemes.MAX_HALF_STEPS
