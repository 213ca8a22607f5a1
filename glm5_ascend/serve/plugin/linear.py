"""Linear layers: int8 for an `ascend` checkpoint; the head, and bf16 where our op is faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from glm5_ascend.serve.plugin.compat import KEEP_WEIGHT
from glm5_ascend.serve.plugin.loaders import PADDING, as_fp32, mapped, one_value_loader
from glm5_kernels import ops


class ByOurOp:
    """A layer by our op, in the parts that stay in the file."""

    def weights(self, layer: Any) -> ops.LinearWeights:
        """Weights of the layer in the form that our ops take."""
        return ops.LinearWeights(layer.weight)

    def process_weights_after_loading(self, layer: Any) -> None:
        # Plain tensors: attribute access of a Parameter is slower.
        layer.op_weights = ops.LinearWeights(*(plain(field) for field in self.weights(layer)))
        layer.op_parts = in_parts(layer.op_weights, getattr(layer.weight, "parts", {}))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        results = [ops.int8_linear(x, weights) for weights in layer.op_parts]
        y = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        return y if bias is None else y + bias


class Int8Linear(ByOurOp, LinearMethodBase):  # type: ignore[misc]
    """Base of W8A8_DYNAMIC and W8A8: int8 weight, one fp32 scale per output row.

    Scales are used as stored. vllm-ascend rounds weight_scale and input_scale to bf16; our writer stores bf16 values.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        loader, rows = mapped(extra["weight_loader"], layer), sum(output_partition_sizes)
        size = rows * input_size_per_partition
        weight = torch.empty(size + PADDING, dtype=torch.int8)[:size].view(rows, input_size_per_partition)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        if self.prefix.endswith(".gate_up_proj"):
            layer.weight.parts = {}  # stay in the file, and are multiplied one after the other
        for name, shape, dtype in self.channel_parameters(rows):
            data = torch.zeros(shape, dtype=dtype)
            layer.register_parameter(
                name, ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=as_fp32(loader))
            )

    def channel_parameters(self, rows: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of the parameters that have one entry per output row."""
        return [("weight_scale", (rows, 1), torch.float32), ("weight_offset", (rows, 1), torch.float32)]


class W8A8DynamicLinear(Int8Linear):
    """W8A8_DYNAMIC: activations quantized per token at run time."""

    def weights(self, layer: Any) -> ops.LinearWeights:
        return ops.LinearWeights(layer.weight, ops.PER_TOKEN, layer.weight_scale.flatten())


class W8A8StaticLinear(Int8Linear):
    """W8A8: activations quantized with one calibrated scale and offset."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **extra: Any) -> None:
        super().create_weights(layer, *args, **extra)
        for name in ("input_scale", "input_offset"):
            parameter = torch.nn.Parameter(torch.full((1,), float("nan")), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, {"weight_loader": one_value_loader(f"{self.prefix}.{name}")})

    def channel_parameters(self, rows: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        parameters = [("deq_scale", (rows,), torch.float32), ("quant_bias", (rows,), torch.int32)]
        return [*parameters, *super().channel_parameters(rows)]

    def weights(self, layer: Any) -> ops.LinearWeights:
        bias = layer.quant_bias
        if isinstance(layer, RowParallelLinear) and layer.tp_rank:  # the ranks' results are added
            bias = torch.zeros_like(bias)
        return ops.LinearWeights(
            layer.weight, ops.PER_TENSOR, layer.deq_scale, layer.input_scale, layer.input_offset, bias
        )


class Bf16Linear(ByOurOp, UnquantizedLinearMethod):  # type: ignore[misc]
    """A bf16 linear layer by our op: a small one, or all where torch and vLLM have only a slow loop for bf16."""


class MappedTable(ByOurOp, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """The embedding or the head as it lies in the file. vLLM packs both again, and never reads the embedding's copy."""


def use_our_products(model: torch.nn.Module) -> None:
    """Let the embedding and the head stay in the checkpoint's files, and bf16 layers where our op is faster.

    To be called before the weights are loaded.
    """
    layer: Any
    for layer in model.modules():
        method = type(getattr(layer, "quant_method", None))
        if method is UnquantizedEmbeddingMethod:
            layer.quant_method = MappedTable()
            layer.weight.weight_loader = mapped(layer.weight.weight_loader, layer)
            continue
        absorbed = getattr(layer, KEEP_WEIGHT, False)  # kv_b_proj, which vLLM splits
        is_bf16 = method is UnquantizedLinearMethod and layer.weight.dtype == torch.bfloat16
        if is_bf16 and not absorbed and layer.weight.numel() <= ops.fast_bf16_elements():
            layer.quant_method = Bf16Linear()
            layer.weight.weight_loader = mapped(layer.weight.weight_loader, layer)
            if isinstance(layer, MergedColumnParallelLinear) and layer.tp_size == 1:  # each rank has all of some parts
                layer.weight.parts = {}


def linear_weights(layer: Any) -> ops.LinearWeights:
    """The weights of a vLLM linear layer, quantized or not, in the form that our ops take."""
    if isinstance(layer.quant_method, ByOurOp):
        weights: ops.LinearWeights = layer.op_weights
        return weights
    return ops.LinearWeights(layer.weight.data)


def in_parts(fused: ops.LinearWeights, parts: Mapping[int, torch.Tensor]) -> list[ops.LinearWeights]:
    """The weights of a fused layer one after the other, if its parts stay in the file, else the weights together."""
    if not parts:
        return [fused]
    weights, rows = [parts[i] for i in sorted(parts)], [len(parts[i]) for i in sorted(parts)]
    scales, biases = (
        [None] * len(rows) if field is None else field.split(rows) for field in (fused.scale, fused.quant_bias)
    )
    return [
        fused._replace(weight=weight, scale=scale, quant_bias=bias)
        for weight, scale, bias in zip(weights, scales, biases, strict=True)
    ]


def plain(field: Any) -> Any:
    return field.data if isinstance(field, torch.nn.Parameter) else field
