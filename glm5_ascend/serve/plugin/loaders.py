"""Loaders of vLLM's parameters: a weight stays in the mapped file, scales become fp32, shared values must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from glm5_ascend.errors import CheckpointError

#: Extra bytes after a weight: the compiled product reads its last row in whole vectors.
PADDING = 64


def mapped(loader: Callable[..., None], layer: Any) -> Callable[..., None]:
    """Loader that keeps a tensor of the parameter's layout where it is, a view of a mapped file, instead of copying it.

    Rows are whole vectors of the compiled product. Parts of a fused parameter are copied, unless it has `parts`, and so
    are the columns that a rank of tensor parallel has of o_proj and down_proj: its neighbours' lie in the same pages.

    Args:
        layer: the parameter's layer, which has vLLM's tp_rank and tp_size.
    """

    def load(param: Any, loaded: torch.Tensor, *shard: Any) -> None:
        rows = len(loaded) // layer.tp_size
        local = loaded[rows * layer.tp_rank : rows * (layer.tp_rank + 1)]
        fits = (
            local.dtype == param.dtype and not local.shape[-1] % PADDING and not local.data_ptr() % local.element_size()
        )
        if fits and not shard and local.shape == param.shape:
            param.data = local
        elif shard and hasattr(param, "parts"):
            param.parts[shard[0]] = local if fits else local.to(param.dtype, copy=True)
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
