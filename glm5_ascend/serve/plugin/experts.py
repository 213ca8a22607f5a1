"""Routed experts of an `ascend` checkpoint: int4 or int8 weights, int8 activations, integer sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from glm5_ascend.checkpoint.packing import DOWN_PROJ_PARTIAL_SUMS, unpack_int4
from glm5_ascend.errors import CheckpointError
from glm5_kernels import ops

#: vLLM's names of an expert's three projections.
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Int8Experts(FusedMoEMethodBase):  # type: ignore[misc]
    """Quantization method of W8A8_DYNAMIC experts."""

    rows_per_byte = 1

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        e, d, i, n = num_experts, hidden_size, intermediate_size_per_partition, self.rows_per_byte
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "w13_weight": ((e, 2 * i // n, d), torch.int8),
            "w13_weight_scale": ((e, 2 * i, 1), torch.float32),
            "w13_weight_offset": ((e, 2 * i, 1), torch.float32),
            "w2_weight": ((e, d // n, i), torch.int8),
            "w2_weight_scale": ((e, d, 1), torch.float32),
            "w2_weight_offset": ((e, d, 1), torch.float32),
        }
        if n == 2:
            # Every checkpoint has them, so they are loaded; only the NPU applies the shift that they undo.
            shapes["w13_scale_bias"] = (e, 2 * i, 1), torch.float32
            shapes["w2_scale_bias"] = (e, d, DOWN_PROJ_PARTIAL_SUMS), torch.float32
        for name, (shape, dtype) in shapes.items():
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, {"weight_loader": expert_loader(name)})

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kw: Any
    ) -> torch.Tensor:
        return ops.w4a8_moe(
            x,
            topk_weights,
            topk_ids,
            layer.w13_weight.data,
            layer.w13_weight_scale.data.squeeze(-1),
            layer.w2_weight.data,
            layer.w2_weight_scale.data.squeeze(-1),
        )


class Int4Experts(Int8Experts):
    """W4A8_DYNAMIC experts: two output rows per byte in the file, one code per byte in memory."""

    rows_per_byte = 2

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13_weight", "w2_weight"):
            codes = torch.stack([unpack_int4(expert) for expert in getattr(layer, name).data])
            setattr(layer, name, torch.nn.Parameter(codes, requires_grad=False))


def expert_loader(name: str) -> Callable[..., bool | None]:
    """Loader that copies a tensor to its expert and checks its shape. vLLM's own takes "scale_bias" for a bias."""

    def load(
        param: torch.nn.Parameter,
        loaded: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        target = param.data[expert_id]
        if name.startswith("w13"):
            gate, up = target.chunk(2, dim=0)
            target = gate if shard_id == "w1" else up
        if target.shape != loaded.shape:
            raise CheckpointError(
                f"{weight_name}: {PROJECTIONS[shard_id]} of expert {expert_id} has shape {list(loaded.shape)}, "
                f"expected {list(target.shape)}",
                "W4A8_DYNAMIC weights are packed int8 [N/2, K]; down_proj's scale_bias is [N, 16]",
            )
        target.copy_(loaded)
        return True if return_success else None

    return load
