"""The quantization types of the format: what weight their tensors mean; which tensors each stores: `types`.

Source: vllm-ascend 0.23.0 `quantization/methods/`, msModelSlim 26.1.0's saver (facts, not code).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glm5_ascend.checkpoint.packing import unpack_int4
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
