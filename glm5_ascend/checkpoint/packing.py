"""INT4 packing of W4A8_DYNAMIC weights and the `scale_bias` that travels with them.

Source of the layout: msModelSlim 26.1.0 (`w4a8_pack_int4`) and vllm-ascend 0.23.0 (`quantization/methods/w4a8.py`).
"""

from __future__ import annotations

import torch

from glm5_ascend.checkpoint.types import DOWN_PROJ_PARTIAL_SUMS as DOWN_PROJ_PARTIAL_SUMS
from glm5_kernels.ops import unpack_int4 as unpack_int4


def scale_bias(q: torch.Tensor, weight_scale: torch.Tensor, partial_sums: int = 1) -> torch.Tensor:
    """`8 * sum_k(q * weight_scale)`: what undoes the +8 shift of the NPU's unsigned-nibble matmul.

    Args:
        q: int8 [N, K]. weight_scale: fp32 [N, 1].
        partial_sums: 1 for gate/up_proj, `DOWN_PROJ_PARTIAL_SUMS` for down_proj, whose K columns are cut into that
            many chunks so that each tensor-parallel rank can add up its own.
    Returns:
        fp32 [N, partial_sums].
    """
    n, k = q.shape
    return scale_bias_of(q.reshape(n, partial_sums, k // partial_sums).sum(dim=-1, dtype=torch.int64), weight_scale)


def scale_bias_of(sums: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """`scale_bias` from the sums of the integers, int64 [N, partial_sums]."""
    # Integer sums are exact; one multiplication at the end rounds once.
    return 8.0 * sums.to(torch.float32) * weight_scale
