"""Operands as the C++ ops take them: rows that are contiguous in their last dimension, tables of int32 and int64.

Other strides of rows are taken as they are; what does not fit is copied.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from glm5_kernels.paged_cache import MAX_POSITIONS
from glm5_kernels.w4a8_moe import ExpertWeights

#: The element types of rows, as glm5_kernels.h numbers them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
#: The rows that go into and come out of most ops.
FLOATS = torch.float32, torch.bfloat16
#: fp32 lanes of a vector: most ops take rows of whole vectors.
LANES = 16
#: The fields of a struct Rows of glm5_kernels.h, and of a struct Angles.
ROWS, ANGLES = "piii", "pipiii"
#: The fields of a struct ExpertBlocks, and of a struct RotateQueries.
BLOCKS, QUERIES = "piiiip", 2 * ROWS + ANGLES + "iiii"
#: The struct Rows of an operand that is not there.
NO_ROWS = 0, 0, 0, 0


def matrix(x: torch.Tensor) -> tuple[int, int, int, int]:
    """The struct Rows of x [T, D], or [D]."""
    return x.data_ptr(), 0, x.stride(0), DTYPES[x.dtype]


def rows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """The struct Rows of x [A, B, D]."""
    return x.data_ptr(), x.stride(0), x.stride(1), DTYPES[x.dtype]


def angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[int, ...]:
    """The struct Angles of what `as_angles` returns."""
    return cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), DTYPES[cos.dtype], cos.shape[1]


def blocks(weights: ExpertWeights, scales: torch.Tensor) -> tuple[int, ...]:
    """The struct ExpertBlocks of experts, whose scales are contiguous fp32."""
    bases: int = weights.addresses.ctypes.data
    return bases, weights.pitch, weights.rows, weights.columns, weights.packed, scales.data_ptr()


def as_rows(x: torch.Tensor, columns: int = LANES, dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """x with contiguous rows of one of `dtypes`, else of fp32, padded with zeros to a multiple of `columns`.

    It is x itself where that fits.
    """
    if x.dtype not in dtypes:
        x = x.float()
    if x.shape[-1] % columns:
        return pad(x, (0, -x.shape[-1] % columns)).contiguous()
    return x if x.stride(-1) == 1 else x.contiguous()


def as_int32(x: torch.Tensor) -> torch.Tensor:
    """x as contiguous int32; larger values become one beyond every cache, smaller ones -1."""
    return (x if x.dtype == torch.int32 else x.long().clamp(-1, MAX_POSITIONS).int()).contiguous()


def as_vector(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous, as fp32 or bf16."""
    return (x if x.dtype in FLOATS else x.float()).contiguous()


def as_angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, pairs] with contiguous rows, both fp32 or bf16."""
    if cos.dtype == sin.dtype and cos.dtype in FLOATS and cos.stride(1) == sin.stride(1) == 1:
        return cos, sin
    return cos.float().contiguous(), sin.float().contiguous()
