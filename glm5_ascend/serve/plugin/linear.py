"""Linear layers: int8 for an `ascend` checkpoint; the head, and bf16 where our op is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from glm5_ascend.errors import CheckpointError
from glm5_kernels import ops

#: Extra bytes after a weight: the compiled product reads its last row in whole vectors.
PADDING = 64


class Int8Linear(LinearMethodBase):  # type: ignore[misc]
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

    def process_weights_after_loading(self, layer: Any) -> None:
        # Plain tensors: attribute access of a Parameter is slower.
        layer.op_weights = ops.LinearWeights(*(plain(field) for field in self.weights(layer)))
        layer.op_parts = in_parts(layer.op_weights, getattr(layer.weight, "parts", {}))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        results = [ops.int8_linear(x, part) for part in layer.op_parts]
        y = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        return y if bias is None else y + bias

    def weights(self, layer: Any) -> ops.LinearWeights:
        """Weights of the layer in the form that our ops take."""
        raise NotImplementedError


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


class _ByOurOp:
    """An unquantized layer by our op."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.op_weights = ops.LinearWeights(layer.weight.data)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = ops.int8_linear(x, layer.op_weights)
        return y if bias is None else y + bias


class Bf16Linear(_ByOurOp, UnquantizedLinearMethod):  # type: ignore[misc]
    """A bf16 linear layer by our op: a small one, or all where torch and vLLM have only a slow loop for bf16."""


class MappedTable(_ByOurOp, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """The embedding or the head as it lies in the file. vLLM packs both again, and never reads the embedding's copy."""


def use_our_products(model: torch.nn.Module) -> None:
    """Let the embedding and the head stay in the checkpoint's files; multiply bf16 by our op where it is faster.

    To be called before the weights are loaded.
    """
    layer: Any
    for layer in model.modules():
        method = type(getattr(layer, "quant_method", None))
        if method is UnquantizedEmbeddingMethod:
            layer.quant_method = MappedTable()
            layer.weight.weight_loader = mapped(layer.weight.weight_loader, layer)
            continue
        absorbed = getattr(layer, "_cpu_skip_gemm_dispatch", False)  # kv_b_proj, which vLLM splits
        is_bf16 = method is UnquantizedLinearMethod and layer.weight.dtype == torch.bfloat16
        if is_bf16 and not absorbed and layer.weight.numel() <= ops.fast_bf16_elements():
            layer.quant_method = Bf16Linear()


def use_our_norms(model: torch.nn.Module) -> None:
    """Let the model's RMS norms be one kernel each, where ops are compiled, instead of ten operators of torch."""
    for layer in model.modules():
        if type(layer) is RMSNorm and layer.has_weight and layer.variance_size_override is None:
            layer._forward_method = partial(_normed, layer)


def _normed(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    rows = x.reshape(-1, x.shape[-1]), None if residual is None else residual.reshape(-1, x.shape[-1])
    out, total = ops.rms_norm(*rows, layer.weight.data, layer.variance_epsilon)
    return out.view(x.shape) if residual is None else (out.view(x.shape), total.view(x.shape))


def linear_weights(layer: Any) -> ops.LinearWeights:
    """The weights of a vLLM linear layer, quantized or not, in the form that our ops take."""
    if isinstance(layer.quant_method, Int8Linear | _ByOurOp):
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


def mapped(loader: Callable[..., None], layer: Any) -> Callable[..., None]:
    """Loader that keeps a tensor of the parameter's layout where it is, a view of a mapped file, instead of copying it.

    Rows are whole vectors of the compiled product. Parts of a fused parameter are copied, unless it has `parts`, and so
    are the columns that a rank of tensor parallel has of o_proj and down_proj: its neighbours' lie in the same pages.

    Args:
        layer: the parameter's layer, which has vLLM's tp_rank and tp_size.
    """

    def load(param: Any, loaded: torch.Tensor, *shard: Any) -> None:
        rows = len(loaded) // layer.tp_size
        part = loaded[rows * layer.tp_rank : rows * (layer.tp_rank + 1)]
        fits = part.dtype == param.dtype and not part.shape[-1] % PADDING
        fits = fits and not part.data_ptr() % part.element_size()
        if fits and not shard and part.shape == param.shape:
            param.data = part
        elif fits and shard and hasattr(param, "parts"):
            param.parts[shard[0]] = part
        else:
            loader(param, loaded, *shard)

    return load


def as_fp32(loader: Callable[..., None]) -> Callable[..., None]:
    """Loader that reads int64 tensors as fp32 bits: fp16 checkpoints store deq_scale this way."""

    def load(param: torch.nn.Parameter, loaded: torch.Tensor, *args: Any) -> None:
        if loaded.dtype == torch.int64:
            loaded = loaded.to(torch.int32).view(torch.float32)
        loader(param, loaded, *args)

    return load


def one_value_loader(name: str) -> Callable[..., None]:
    """Loader of a scalar that the shards of a fused module share; raises `CheckpointError` if they differ."""

    def load(param: torch.nn.Parameter, loaded: torch.Tensor, *shard: Any) -> None:
        value = loaded.reshape(-1).float()
        if not bool(torch.isnan(param.data).any()) and not torch.equal(param.data, value):
            raise CheckpointError(
                f"{name}: the fused modules have different values ({float(param.data[0])} and {float(value[0])})",
                "the parts of a fused module share one input: quantize them with one input_scale and input_offset",
            )
        param.data.copy_(value)

    return load
