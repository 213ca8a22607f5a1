"""The quantizer's ops in C++ (csrc/weights.cpp)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm5_kernels import hadamard as hadamard_reference
from glm5_kernels.gptq import GptqRound, gptq_inverse_factors
from glm5_kernels.hadamard import Hadamard, core_matrix, core_order
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import LANES
from glm5_kernels.weight_rounding import FakeRound, RoundRows, SszScale

__all__ = ["fake_round", "gptq_inverse_factors", "gptq_round", "hadamard", "round_rows", "ssz_scale"]

_GROUP = 8  # columns of GPTQ


def hadamard(operands: Hadamard) -> torch.Tensor:
    """Sizes too small for sixteen lanes are left to the reference."""
    x, weight, dim = operands
    n = len(weight)
    order = core_order(n)
    if (dim == 1 and n // order < LANES) or (dim == 0 and x.shape[1] % LANES) or x.stride(1) != 1:
        return hadamard_reference.hadamard(operands)
    core, scaled = core_matrix(order).T.contiguous(), (weight / n**0.5).contiguous()
    function("hadamard", "piii" + "pi" + "pii")(
        x.data_ptr(), x.stride(0), *x.shape, scaled.data_ptr(), n, core.data_ptr(), order, dim
    )
    return x


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


def gptq_round(operands: GptqRound) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scale, largest, perm, inputs, hinv_factors, damping, passes, refit = operands
    x, hinv = _grouped(inputs), _grouped(hinv_factors)
    coupling = (hinv.mT @ x).contiguous()
    gram = (x.mT @ x).contiguous() if passes else coupling  # only the descent reads it
    curvature = F.pad(inputs.float().square().sum(1), (0, -len(inputs) % _GROUP)) + damping
    rows = perm.contiguous(), x, hinv, coupling, gram, curvature
    weight, new_scale = weight.float().contiguous(), scale.float().contiguous().clone()
    q = torch.empty(weight.shape)
    function("gptq_round", "ppp" + "iiiiiii" + "pppppp" + "d")(
        weight.data_ptr(), new_scale.data_ptr(), q.data_ptr(), *weight.shape, largest, passes, refit,
        len(x), x.shape[1], *(tensor.data_ptr() for tensor in rows), damping,
    )  # fmt: skip
    return q, new_scale


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [K, n] -> [ceil(K / 8), n, 8]; the columns that fill up the last group are zero and change nothing."""
    filled = F.pad(rows.float(), (0, 0, 0, -len(rows) % _GROUP))
    return filled.view(-1, _GROUP, rows.shape[1]).mT.contiguous()
