"""SSZ and rounding: compiled and plain versions agree, and both do what their contracts say."""

from __future__ import annotations

import pytest
import torch

from tests.ops.support.implementations import cpu, reference

GRID = torch.linspace(0.2, 1.0, 24)


def squared_error(weight: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    return ((torch.round(weight / scale).clamp(-largest - 1, largest) * scale - weight).double() ** 2).sum(1)


@pytest.mark.parametrize("columns", [1, 15, 16, 63, 64, 100, 640])
@pytest.mark.parametrize("largest", [7, 127])
def test_ssz_finds_equally_good_scales(columns: int, largest: int) -> None:
    """Rounding differences may lead to another local minimum, an equally good one over many rows."""
    weight = torch.distributions.StudentT(4.0).sample((400, columns))
    weight[7] = 0
    got, want = cpu.ssz_scale(weight, largest, 8, GRID), reference.ssz_scale(weight, largest, 8, GRID)
    assert got.shape == want.shape == (400, 1) and got[7] == want[7] == 1
    errors = [float(squared_error(weight, scale, largest).sum()) for scale in (got, want)]
    noise = 1e-9 * float(weight.square().sum())  # where integers are exact there is no error to compare
    assert errors[0] == pytest.approx(errors[1], rel=2e-3, abs=noise)
    same = ((got - want).abs() < 1e-5 * want).float().mean()
    assert same > (0.9 if columns > 16 else 0.5)  # short rows have many equally good scales


def test_ssz_against_an_exhaustive_search() -> None:
    weight = torch.randn(16, 128)
    got = squared_error(weight, cpu.ssz_scale(weight, 7, 8, GRID), 7)
    start = weight.abs().amax(1, keepdim=True) / 7
    best = torch.stack([squared_error(weight, start * ratio, 7) for ratio in torch.linspace(0.2, 1.1, 4000)]).amin(0)
    assert bool((got <= best * 1.03).all()) and float(got.sum() / best.sum()) < 1.01


def test_ssz_of_a_row_does_not_depend_on_the_others() -> None:
    weight = torch.randn(33, 200)
    whole = cpu.ssz_scale(weight, 7, 8, GRID)
    assert torch.equal(whole, torch.cat([cpu.ssz_scale(row[None], 7, 8, GRID) for row in weight]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("shape", "parts"), [((32, 64), 1), ((6, 48), 16), ((2, 16), 1), ((4, 100), 4), ((8, 7), 1)])
def test_rounding_agrees_to_the_byte(bits: int, shape: tuple[int, int], parts: int) -> None:
    """Weights at exact halves and beyond the range included."""
    scale = torch.rand(shape[0], 1).bfloat16().float() + 0.01
    weight = (torch.randint(-40 * bits, 40 * bits, shape) / 2 * scale).float()
    got, want = (m.round_rows(weight, scale, bits, parts) for m in (cpu, reference))
    assert got[0].dtype is torch.int8 and torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert got[2] == pytest.approx(want[2], rel=1e-5) and got[3] == pytest.approx(want[3], rel=1e-5)


def test_rounding_by_hand() -> None:
    weight = torch.tensor([[0.5, 1.5, -2.5, 9.0], [-0.5, -1.5, 2.6, -9.0]])
    for module in (cpu, reference):
        stored, sums, error, square = module.round_rows(weight, torch.ones(2, 1), 4, 2)
        assert stored.tolist() == [[0, (-2 << 4 | 2) + 256 - 256, 0x3E, -128 + 7]]
        assert sums.tolist() == [[2.0, 5.0], [-2.0, -5.0]]
        assert error == pytest.approx(0.25 * 5 + 4 + 0.16 + 1) and square == pytest.approx(float((weight**2).sum()))


@pytest.mark.parametrize("columns", [3, 16, 70, 256])
@pytest.mark.parametrize(("largest", "steps"), [(7, 0), (7, 8), (127, 0)])
def test_fake_round_is_what_storing_and_reading_back_gives(columns: int, largest: int, steps: int) -> None:
    weight, factor = torch.randn(20, columns), torch.rand(columns) + 0.1
    weight[3] = 0
    for module in (cpu, reference):
        got = module.fake_round(weight, factor, largest, steps)
        scaled = weight * factor
        if steps:
            scale = module.ssz_scale(scaled, largest, steps, torch.ones(1))
        else:
            scale = (scaled.abs().amax(1, keepdim=True) / largest).masked_fill(
                scaled.abs().amax(1, keepdim=True) == 0, 1
            )
        expected = torch.round(scaled / scale).clamp(-largest - 1, largest) * scale
        assert torch.equal(got, expected)
