"""Routed experts of an `ascend` checkpoint: int4 or int8 weights, int8 activations, integer sums.

The weights stay where the checkpoint's files are mapped (`loading.ExpertTensors`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from glm5_ascend.serve.plugin.loading import ExpertTensors
from glm5_kernels import ops


class Int8Experts(FusedMoEMethodBase):  # type: ignore[misc]
    """Quantization method of W8A8_DYNAMIC experts."""

    rows_per_byte = 1

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        layer.tensors = ExpertTensors(num_experts, hidden_size, intermediate_size_per_partition, self.rows_per_byte)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.operands = layer.tensors.operands()
        del layer.tensors

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kw: Any
    ) -> torch.Tensor:
        return ops.w4a8_moe(x, topk_weights, topk_ids, *layer.operands)


class Int4Experts(Int8Experts):
    """W4A8_DYNAMIC experts: two output rows per byte."""

    rows_per_byte = 2
