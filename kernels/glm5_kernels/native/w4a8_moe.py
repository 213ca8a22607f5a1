"""The routed experts in C++ (csrc/experts.h)."""

from __future__ import annotations

import ctypes
import math

import torch

from glm5_kernels.native.library import function
from glm5_kernels.native.rows import DTYPES, FLOATS
from glm5_kernels.w4a8_moe import ExpertWeights, W4a8Moe


class ExpertBlocks(ctypes.Structure):
    """The struct of glm5_kernels.h."""

    _fields_ = (
        ("bases", ctypes.c_void_p), ("pitch", ctypes.c_int64), ("rows", ctypes.c_int64), ("k", ctypes.c_int64),
        ("packed", ctypes.c_int64), ("scales", ctypes.c_void_p), ("limit", ctypes.c_double),
    )  # fmt: skip


def _blocks(weights: ExpertWeights, scales: torch.Tensor, limit: float) -> ExpertBlocks:
    bases = weights.addresses.ctypes.data
    return ExpertBlocks(bases, weights.pitch, weights.rows, weights.columns, weights.packed, scales.data_ptr(), limit)


def w4a8_moe(operands: W4a8Moe) -> torch.Tensor:
    x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, limit = operands
    rows = x if x.dtype in FLOATS else x.float()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    ids, weights = topk_ids.long().contiguous(), topk_weights.float().contiguous()
    scales = w13_scale.float().contiguous(), w2_scale.float().contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    gate_up, down = _blocks(w13, scales[0], limit), _blocks(w2, scales[1], math.inf)
    function("w4a8_moe", "piiippiippp")(
        rows.data_ptr(), rows.stride(0), DTYPES[rows.dtype], len(rows), ids.data_ptr(), weights.data_ptr(),
        ids.shape[1], len(w2.blocks), ctypes.byref(gate_up), ctypes.byref(down), out.data_ptr(),
    )  # fmt: skip
    return out.to(x.dtype)
