"""CPU kernels under the names vllm-ascend's attention calls, on the real schemas of torch_npu and vllm-ascend.

Ours are the two that matter, Lightning Indexer and Sparse Flash Attention: `glm5_kernels` behind the official
signatures. The others are what surrounds them on an NPU (norm, rope, quantized product, scatter), a few lines each,
from torch_npu's documents. Defaults are those of the schemas: torch leaves out what equals them. `CALLS` counts what
was called, `CHOSEN` keeps what the indexer answered.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from glm5_kernels import ops

CALLS: Counter[str] = Counter()
CHOSEN: list[torch.Tensor] = []
_NPU = torch.library.Library("npu", "IMPL")
_ASCEND = torch.library.Library("_C_ascend", "FRAGMENT")
_VLLM = torch.library.Library("vllm", "IMPL")
Tensor = torch.Tensor


def on_cpu(library: torch.library.Library, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under `name` for CPU tensors, counting its calls."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            CALLS[name] += 1
            return function(*arguments, **named)

        library.impl(name, counted, "CPU")
        return function

    return register


def define(schemas: list[str]) -> None:
    """vllm-ascend's own operators are compiled for an NPU: their schemas, as its sources give them, and our kernel."""
    for schema in schemas:
        if schema.startswith("npu_sparse_flash_attention("):
            _ASCEND.define(schema)
            on_cpu(_ASCEND, "npu_sparse_flash_attention")(sparse_flash_attention)


def starts(sums: Tensor) -> Tensor:
    return torch.cat([sums.new_zeros(1), sums])


@on_cpu(_NPU, "npu_lightning_indexer")
def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, actual_seq_lengths_query: Tensor, actual_seq_lengths_key: Tensor,
    block_table: Tensor, layout_query: str = "BSND", layout_key: str = "BSND", sparse_count: int = 2048,
    sparse_mode: int = 3, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert (layout_query, layout_key, sparse_mode) == ("TND", "PA_BSND", 3)
    topk = ops.lightning_indexer(
        query,
        key[:, :, 0],
        weights,
        ops.PagedBatch(starts(actual_seq_lengths_query), actual_seq_lengths_key, block_table),
        sparse_count,
    )
    CHOSEN.append(topk)
    return topk[:, None], query.new_empty(0)


def sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, *, block_table: Tensor,
    actual_seq_lengths_query: Tensor, actual_seq_lengths_kv: Tensor, query_rope: Tensor, key_rope: Tensor,
    layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = 3, attention_mode: int = 2, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert (layout_query, layout_kv, sparse_mode, attention_mode) == ("TND", "PA_BSND", 3, 2)
    assert value.data_ptr() == key.data_ptr()
    out, _lse = ops.sparse_flash_attention(
        query, query_rope, key[:, :, 0], key_rope[:, :, 0], sparse_indices[:, 0],
        ops.PagedBatch(starts(actual_seq_lengths_query), actual_seq_lengths_kv, block_table), scale_value, True,
    )  # fmt: skip
    return out, query.new_empty(0), query.new_empty(0)


def halves(x: Tensor) -> Tensor:
    """Neighbours as pairs -> all first ones, all second ones."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with the halves of each pair in its two halves, rotated."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos.float() + torch.cat([-second, first], dim=-1) * sin.float()).to(x.dtype)


@on_cpu(_NPU, "npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turn(halves(x), cos, sin)


@on_cpu(_NPU, "npu_rotary_mul")
def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    assert rotary_mode == "half"
    return turn(x, cos, sin)


@on_cpu(_NPU, "npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * factor * gamma.float()).to(x.dtype), factor


@on_cpu(_NPU, "npu_dynamic_quant")
def dynamic_quant(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1) / 127
    return torch.round(x.float() / scale.clamp_min(1e-20)[..., None]).clamp(-128, 127).to(torch.int8), scale


@on_cpu(_NPU, "npu_quant_matmul")
def quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, *, pertoken_scale: Tensor | None = None, bias: Tensor | None = None, **_: Any
) -> Tensor:
    y = x1.double() @ x2.double()
    y = (y if bias is None else y + bias) * scale.double()
    return (y if pertoken_scale is None else y * pertoken_scale.double()[..., None]).to(torch.bfloat16)


@on_cpu(_NPU, "npu_scatter_nd_update_")
def scatter_nd_update(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    x[indices.view(-1).long()] = updates
    return x


@on_cpu(_NPU, "npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, *,
    epsilon: float = 1e-5, cache_mode: str = "Norm", **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert cache_mode == "PA"
    rank = len(gamma)
    latent, _factor = rms_norm(kv[..., :rank], gamma, epsilon)
    rotated = interleave_rope(kv[..., rank:], cos, sin)
    ckv_cache.view(-1, rank)[index] = latent.reshape(-1, rank)
    k_cache.view(-1, rotated.shape[-1])[index] = rotated.reshape(-1, rotated.shape[-1])
    return tuple(kv.new_empty(0) for _ in range(4))


@on_cpu(_NPU, "npu_mla_prolog_v3")
def mla_prolog(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """The slow meaning that the tests of our forwarder have, by torch_npu's documents."""
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from tests.ops.support.npu_mla_prolog import npu_mla_prolog_v3

    schema = torch.ops.npu.npu_mla_prolog_v3.default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return npu_mla_prolog_v3(*arguments, **defaults | named)


@on_cpu(_NPU, "npu_transpose_batchmatmul")
def transpose_batchmatmul(
    x: Tensor, weight: Tensor, *, perm_x1: Sequence[int] = (0, 1, 2), perm_x2: Sequence[int] = (0, 1, 2),
    perm_y: Sequence[int] = (1, 0, 2), **_: Any,
) -> Tensor:  # fmt: skip
    y = torch.bmm(x.permute(*perm_x1).float(), weight.permute(*perm_x2).float())
    return y.permute(*perm_y).contiguous().to(x.dtype)


@on_cpu(_VLLM, "unquantized_gemm")
def unquantized_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@on_cpu(_VLLM, "quantize")
def quantize(x: Tensor, scale: Tensor, scale_reciprocal: Tensor, offset: Tensor) -> Tensor:
    y = x.float() * scale_reciprocal.float() + offset.float()
    return torch.round(y).clamp(-128, 127).to(torch.int8)
