"""The routed experts in C++ (csrc/experts.h)."""

from __future__ import annotations

import torch

from glm5_kernels.native.library import function
from glm5_kernels.native.rows import ROWS, as_rows, matrix
from glm5_kernels.w4a8_moe import ExpertWeights, W4a8Moe

#: The fields of a struct ExpertBlocks of glm5_kernels.h.
BLOCKS = "piiiip"


def _blocks(weights: ExpertWeights, scales: torch.Tensor) -> tuple[int, ...]:
    bases: int = weights.addresses.ctypes.data
    return bases, weights.pitch, weights.rows, weights.columns, weights.packed, scales.data_ptr()


def w4a8_moe(operands: W4a8Moe) -> torch.Tensor:
    x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, limit = operands
    rows, out = as_rows(x, 1), torch.empty(x.shape, dtype=torch.float32)
    ids, weights = topk_ids.long().contiguous(), topk_weights.float().contiguous()
    scales = w13_scale.float().contiguous(), w2_scale.float().contiguous()
    function("w4a8_moe", ROWS + "pp" + 2 * BLOCKS + "diiip")(
        *matrix(rows), ids.data_ptr(), weights.data_ptr(), *_blocks(w13, scales[0]), *_blocks(w2, scales[1]),
        limit, *ids.shape, len(w2.blocks), out.data_ptr(),
    )  # fmt: skip
    return out.to(x.dtype)
