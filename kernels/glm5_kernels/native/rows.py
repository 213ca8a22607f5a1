"""Operands as the C++ ops take them: rows that are contiguous in their last dimension, tables of int32 and int64.

Other strides of rows are taken as they are; what does not fit is copied.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from glm5_kernels.native.library import FLOATS, LANES
from glm5_kernels.paged_cache import MAX_POSITIONS


def as_rows(x: torch.Tensor, columns: int = LANES, dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """x if its rows are contiguous, of one of `dtypes` and of a multiple of `columns`; else fp32, padded with zeros."""
    if x.dtype in dtypes and x.stride(-1) == 1 and not x.shape[-1] % columns:
        return x
    return pad(x.float(), (0, -x.shape[-1] % columns)).contiguous()


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
