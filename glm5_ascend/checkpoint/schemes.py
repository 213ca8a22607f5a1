"""The quantization types of the format: what weight their tensors mean; which tensors each stores: `types`.

Source: vllm-ascend 0.23.0 `quantization/methods/`, msModelSlim 26.1.0's saver and `w4a8_pack_int4` (facts, not code).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glm5_ascend.checkpoint.types import DESCRIPTION_META as DESCRIPTION_META
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME as DESCRIPTION_NAME
from glm5_ascend.checkpoint.types import FLOAT as FLOAT
from glm5_ascend.checkpoint.types import QUANTIZED as QUANTIZED
from glm5_ascend.checkpoint.types import W4A8_DYNAMIC as W4A8_DYNAMIC
from glm5_ascend.checkpoint.types import W8A8 as W8A8
from glm5_ascend.checkpoint.types import W8A8_DYNAMIC as W8A8_DYNAMIC
from glm5_ascend.checkpoint.types import Stored as Stored
from glm5_ascend.checkpoint.types import partial_sums as partial_sums
from glm5_ascend.checkpoint.types import stored_tensors as stored_tensors
from glm5_kernels.ops import unpack_int4 as unpack_int4

#: Half steps that a method of rounding may move an element of a column, in no direction. `verify` allows it, and no
#: method of `quantize/methods` has a larger `tolerance`.
MAX_HALF_STEPS = 2.0


def integer_weight(scheme: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The integers int8 [N, K] behind the stored tensors (keys are suffixes)."""
    return unpack_int4(tensors["weight"]) if scheme == W4A8_DYNAMIC else tensors["weight"]


def dequantize(scheme: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The fp32 weight [N, K] the engine computes with. Keys of `tensors` are suffixes ("weight", ...)."""
    if scheme == FLOAT:
        return tensors["weight"].float()
    q = integer_weight(scheme, tensors).float()
    if scheme == W8A8:
        # What the kernel multiplies with: deq_scale = input_scale * weight_scale.
        return q.mul_((tensors["deq_scale"] / tensors["input_scale"]).reshape(-1, 1))
    return q.mul_(tensors["weight_scale"])


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
