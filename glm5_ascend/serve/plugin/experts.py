"""Routed experts of an `ascend` checkpoint: integers, int8 activations and integer sums, or floats (the MTP layer's).

The weights stay where the checkpoint's files are mapped (`loading.ExpertTensors`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC, W8A8_DYNAMIC
from glm5_ascend.serve.plugin.loading import ExpertTensors
from glm5_kernels import ops


class Int8Experts(FusedMoEMethodBase):  # type: ignore[misc]
    """Quantization method of W8A8_DYNAMIC experts."""

    scheme = W8A8_DYNAMIC

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        rank, ranks = self.moe.tp_rank, self.moe.tp_size
        layer.tensors = ExpertTensors(num_experts, self.scheme, rank, ranks)
        layer.reader = None  # `mapped_files.Reader`, if the files do not fit into the memory

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.operands = layer.tensors.operands()
        del layer.tensors

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kw: Any
    ) -> torch.Tensor:
        if layer.reader is not None:
            layer.reader.read(self.weights(layer, chosen_experts(topk_ids)))
        w13, w13_scale, w2, w2_scale = layer.operands
        return ops.w4a8_moe(x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, self.swiglu_limit)

    @property
    def swiglu_limit(self) -> float:
        """Largest gate, and largest size of up, before their product."""
        limit: float | None = self.moe.swiglu_limit
        return math.inf if limit is None else limit

    @staticmethod
    def weights(layer: Any, experts: Iterable[int]) -> Iterator[torch.Tensor]:
        """The weights of some experts, in the order of their products."""
        w13, _, w2, _ = layer.operands
        for expert in experts:
            yield from (*w13.blocks[2 * expert : 2 * expert + 2], w2.blocks[expert])


class Int4Experts(Int8Experts):
    """W4A8_DYNAMIC experts: two output rows per byte."""

    scheme = W4A8_DYNAMIC


class FloatExperts(Int8Experts):
    """FLOAT experts, one after the other. vLLM's own method holds a second copy of all of them, 19 GB in GLM-5."""

    scheme = FLOAT

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.operands = layer.tensors.floats(layer.params_dtype)
        del layer.tensors

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kw: Any
    ) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        if layer.reader is not None:
            layer.reader.read(self.weights(layer, chosen_experts(topk_ids)))
        for expert in chosen_experts(topk_ids):
            gate, up, down = layer.operands[expert]
            token, choice = torch.where(topk_ids == expert)
            rows = x[token]
            limit = self.swiglu_limit
            gated = silu(ops.int8_linear(rows, gate).clamp_(max=limit))
            hidden = gated.mul_(ops.int8_linear(rows, up).clamp_(-limit, limit))
            out.index_add_(0, token, ops.int8_linear(hidden, down).float() * topk_weights[token, choice, None])
        return out.to(x.dtype)

    @staticmethod
    def weights(layer: Any, experts: Iterable[int]) -> Iterator[torch.Tensor]:
        yield from (linear.weight for expert in experts for linear in layer.operands[expert])


def chosen_experts(topk_ids: torch.Tensor) -> list[int]:
    """The experts of all tokens, in order; a negative id is one of another rank."""
    experts: list[int] = topk_ids[topk_ids >= 0].unique().tolist()
    return experts
