"""The quantization types of the format: which tensors each stores, and what weight those tensors mean.

Source: vllm-ascend 0.23.0 `quantization/methods/`, msModelSlim 26.1.0's saver (facts, not code).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from glm5_ascend.checkpoint.packing import DOWN_PROJ_PARTIAL_SUMS, unpack_int4
from glm5_ascend.checkpoint.types import DESCRIPTION_META as DESCRIPTION_META
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME as DESCRIPTION_NAME
from glm5_ascend.checkpoint.types import FLOAT as FLOAT
from glm5_ascend.checkpoint.types import QUANTIZED as QUANTIZED
from glm5_ascend.checkpoint.types import W4A8_DYNAMIC as W4A8_DYNAMIC
from glm5_ascend.checkpoint.types import W8A8 as W8A8
from glm5_ascend.checkpoint.types import W8A8_DYNAMIC as W8A8_DYNAMIC

#: Half steps that a method of rounding may move an element of a column, in no direction. `verify` allows it, and no
#: method of `quantize/methods` has a larger `tolerance`.
MAX_HALF_STEPS = 2.0


@dataclass(frozen=True)
class Stored:
    """One stored tensor of a linear: suffix behind the module name, dtype, shape."""

    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(scheme: str, shape: tuple[int, int], module: str) -> tuple[Stored, ...]:
    """Tensors that a linear `module` of `shape` [N, K] stores under `scheme` (not FLOAT)."""
    n, k = shape
    f32, i8, i32 = torch.float32, torch.int8, torch.int32
    per_row = (Stored("weight_scale", f32, (n, 1)), Stored("weight_offset", f32, (n, 1)))
    if scheme == W8A8_DYNAMIC:
        return (Stored("weight", i8, (n, k)), *per_row)
    if scheme == W8A8:
        # weight_scale/offset are not written by msModelSlim; an NPU kernel once read them uninitialised
        # (vllm-ascend PR 16728), so we store them.
        return (
            Stored("weight", i8, (n, k)), *per_row, Stored("input_scale", f32, (1,)), Stored("input_offset", f32, (1,)),
            Stored("deq_scale", f32, (n,)), Stored("quant_bias", i32, (n,)),
        )  # fmt: skip
    if scheme == W4A8_DYNAMIC:
        return (Stored("weight", i8, (n // 2, k)), *per_row, Stored("scale_bias", f32, (n, partial_sums(module))))
    raise ValueError(f"unknown scheme {scheme!r}")


def partial_sums(module: str) -> int:
    """Columns of scale_bias: down_proj is split along K under tensor parallelism, gate/up_proj are not."""
    return DOWN_PROJ_PARTIAL_SUMS if module.endswith("down_proj") else 1


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
