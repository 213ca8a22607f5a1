"""Weight rounding in C++ (csrc/weight_rounding.h)."""

from __future__ import annotations

import torch

from glm5_kernels.native.library import function
from glm5_kernels.weight_rounding import FakeRound, RoundRows, SszScale


def ssz_scale(operands: SszScale) -> torch.Tensor:
    weight, largest, steps, grid = operands
    weight, grid, out = weight.contiguous(), grid.contiguous(), torch.empty(len(weight), 1)
    function("ssz_scale", "ppiiiiip")(
        weight.data_ptr(), grid.data_ptr(), *weight.shape, largest, steps, len(grid), out.data_ptr()
    )
    return out


def fake_round(operands: FakeRound) -> torch.Tensor:
    weight, factor, largest, steps = operands
    weight, factor, out = weight.contiguous(), factor.float().contiguous(), torch.empty(weight.shape)
    function("fake_round", "ppiiiip")(
        weight.data_ptr(), factor.data_ptr(), *weight.shape, largest, steps, out.data_ptr()
    )
    return out


def round_rows(operands: RoundRows) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    weight, scale, bits, parts = operands
    rows, columns = weight.shape
    weight, scale = weight.contiguous(), scale.contiguous()
    stored, sums = torch.empty(rows * bits // 8, columns, dtype=torch.int8), torch.empty(rows, parts)
    squares = torch.empty(2, dtype=torch.float64)
    function("round_rows", "ppiiiippp")(
        weight.data_ptr(), scale.data_ptr(), rows, columns, bits, parts, stored.data_ptr(), sums.data_ptr(),
        squares.data_ptr(),
    )  # fmt: skip
    return stored, sums, float(squares[0]), float(squares[1])
