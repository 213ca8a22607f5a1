"""Rounding weights to integers: the best scale, the integers, and what a search wants to see of them.

Every op takes W fp32 [N, K], a row per output channel, and treats each row by itself: the same bits for any
number of threads. `largest` is 7 for INT4, 127 for INT8; integers lie in -largest - 1 .. largest, ties go to even.
Weights are finite: the quantizer refuses others where it reads them.

Source: msModelSlim 26.1.0 (`ssz`, the alternation; `w4a8_pack_int4`, the packing); the closed form of the gain is ours.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.errors import KernelInputError


class SszScale(NamedTuple):
    """The scale fp32 [N, 1] of each row at which rounding loses least; 1 for a row of zeros.

    For fixed integers q the best scale is s = sum(w q) / sum(q^2), and the squared error is then less than sum(w^2) by
    sum(w q)^2 / sum(q^2). Starts from the best of the refitted scales `grid * max|w| / largest`, then alternates
    integers and scale while that gain grows, at most `steps` times.
    """

    weight: Annotated[Tensor, "fp32 [N, K]"]
    largest: int
    steps: int
    grid: Annotated[Tensor, "fp32 [ratios]"]

    def rules(self) -> None:
        _check_columns(self.weight)


class RoundRows(NamedTuple):
    """Integers as stored, their sums, and the float sums of (integer * scale - w)^2 and w^2.

    stored: int8 [N, K]; for 4 bits [N / 2, K], row 2i in the low nibble, row 2i + 1 in the high one.
    sums: fp32 [N, parts], of the integers in each of `parts` equal runs of columns; exact.
    """

    weight: Annotated[Tensor, "fp32 [N, K]"]
    scale: Annotated[Tensor, "fp32 [N, 1]"]
    bits: int
    parts: int = 1

    def rules(self) -> None:
        _check_columns(self.weight)
        rows, columns = self.weight.shape
        if self.bits not in (4, 8) or (self.bits == 4 and rows % 2) or self.parts < 1 or columns % self.parts:
            what = f"{[rows, columns]} to {self.bits} bits with {self.parts} partial sums"
            raise KernelInputError(f"cannot round {what}")


class FakeRound(NamedTuple):
    """weight times diag(factor) after rounding, as integers times scales: fp32 [N, K].

    The scale is the min-max one; with `steps` > 0 refitted as in `SszScale`.
    """

    weight: Annotated[Tensor, "fp32 [N, K]"]
    factor: Annotated[Tensor, "float [K]"]
    largest: int
    steps: int = 0

    def rules(self) -> None:
        _check_columns(self.weight)


def _check_columns(weight: Tensor) -> None:
    if not weight.shape[1]:
        raise KernelInputError(f"weight has shape {list(weight.shape)}, expected at least one column")


_BLOCK = 2**19  # weights worked on at a time
NOISE = 1e-6  # relative gain below which a refit counts as converged


def ssz_scale(operands: SszScale) -> torch.Tensor:
    weight, largest, steps, grid = operands
    rows = max(1, _BLOCK // weight.shape[1])
    return torch.cat([_ssz(some, largest, steps, grid.cpu().tolist()) for some in weight.split(rows)])


def fake_round(operands: FakeRound) -> torch.Tensor:
    weight, factor, largest, steps = operands
    scaled = weight * factor
    scale = _ssz(scaled, largest, steps, [1.0]) if steps else _minmax(scaled, largest)
    return _integers(scaled, scale, largest) * scale


def round_rows(operands: RoundRows) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    weight, scale, bits, parts = operands
    q = _integers(weight, scale, 2 ** (bits - 1) - 1)
    sums = q.view(len(q), parts, -1).sum(-1)
    stored = q.to(torch.int8)
    if bits == 4:
        stored = (stored[1::2] << 4) | (stored[0::2] & 0x0F)
    return stored, sums, _total(q * scale - weight), _total(weight)


def _minmax(weight: torch.Tensor, largest: int) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / largest
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _integers(weight: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    return torch.round(weight / scale).clamp_(-largest - 1, largest)


def _ssz(weight: torch.Tensor, largest: int, steps: int, grid: list[float]) -> torch.Tensor:
    # By a power of two, which changes no bit: sums over weights above 1e36 would overflow fp32.
    exponent = torch.frexp(weight.abs().amax(1, keepdim=True)).exponent.clamp(-100, 100)
    weight = torch.ldexp(weight, -exponent)
    start = _minmax(weight, largest)
    best, gain = start, torch.full_like(start, -1.0)
    for ratio in grid:
        best, gain, _ = _refit(weight, start * ratio, largest, best, gain, 0.0)
    for _ in range(steps):
        best, gain, improved = _refit(weight, best, largest, best, gain, NOISE)
        if not improved:
            break
    return torch.ldexp(best, exponent)


def _refit(
    weight: torch.Tensor, scale: torch.Tensor, largest: int, best: torch.Tensor, gain: torch.Tensor, noise: float
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Rows whose refit at `scale` gains more than before by `noise` take the refitted scale."""
    q = _integers(weight, scale, largest)
    along, energy = (weight * q).sum(1, keepdim=True), q.square().sum(1, keepdim=True)
    new = along.square() / energy.clamp_min(1.0)
    better = (new > gain * (1 + noise)) & (energy > 0)
    return torch.where(better, along / energy, best), torch.where(better, new, gain), bool(better.any())


def _total(x: torch.Tensor) -> float:
    """Sum of squares, in float64 from row to row; an NPU has none."""
    return float(x.square().sum(1).cpu().double().sum())
