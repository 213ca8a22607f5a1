"""Stand-ins with documented output shapes for vllm-ascend's compiled operators, which are not on PyPI.

Schemas are those of vllm-ascend's `csrc/torch_binding.cpp`: an unknown argument is an error. Only the schemas of
`batch_matmul_transpose` and `npu_hc_*` are from their calls. An operator that a newer vllm-ascend adds is reported as
missing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

Tensor = torch.Tensor
FAR = 9223372036854775807
#: Schemas of the operators that GLM-5 calls, without namespace.
SCHEMAS = (
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6) "
    "-> (Tensor y, Tensor rstd, Tensor x)",
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type, "
    "bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None) "
    "-> (Tensor y, Tensor expert_idx, Tensor out)",
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, "
    "Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, "
    "bool activate_left=True, int quant_mode=0, int swiglu_mode=0, float clamp_limit=0.0, float glu_alpha=1.0, "
    "float glu_bias=0.0) -> (Tensor y, Tensor scale)",
    "grouped_matmul_swiglu_quant_weight_nz(Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, "
    "Tensor group_list, *, Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0) "
    "-> (Tensor output, Tensor output_scale, Tensor output_offset)",
    "grouped_matmul_swiglu_quant_weight_nz_tensor_list(Tensor x, Tensor[] weight, Tensor[] weight_scale, "
    "Tensor x_scale, Tensor group_list, *, Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0) "
    "-> (Tensor output, Tensor output_scale, Tensor output_offset)",
    "grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, "
    "Tensor group_list, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, "
    "int? dequant_mode=0, int? dequant_dtype=0, int? quant_mode=0, int? quant_dtype=0, bool transpose_weight=False, "
    "int group_list_type=0, int[2] tuning_config=[], float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale)",
    "npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    "Tensor key_dequant_scale, *, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
    "Tensor? block_table=None, int query_quant_mode=0, int key_quant_mode=0, str layout_query='BSND', "
    "str layout_key='BSND', int sparse_count=2048, int sparse_mode=3) -> Tensor",
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
    "str layout_key='BSND', int sparse_count=2048, int sparse_mode=3) -> (Tensor, Tensor)",
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, "
    "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', "
    f"str layout_kv='BSND', int sparse_mode=3, int pre_tokens={FAR}, int next_tokens={FAR}, int attention_mode=2, "
    "bool return_softmax_lse=False) -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)",
    "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
    "float scale_value, *, int key_quant_mode=1, int value_quant_mode=1, Tensor? key_dequant_scale=None, "
    "Tensor? value_dequant_scale=None, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', "
    f"int sparse_mode=3, int pre_tokens={FAR}, int next_tokens={FAR}, int attention_mode=2, "
    "int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64, bool return_softmax_lse=False) "
    "-> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)",
    "mla_preprocess(Tensor hiddenState, Tensor wdqkv, Tensor? descale0, Tensor gamma1, Tensor? beta1, Tensor wuq, "
    "Tensor? descale1, Tensor gamma2, Tensor cos, Tensor sin, Tensor wuk, Tensor kv_cache, Tensor kv_cache_rope, "
    "Tensor slotmapping, Tensor? quant_scale0, Tensor? quant_offset0, Tensor? bias0, Tensor? quant_scale1, "
    "Tensor? quant_offset1, Tensor? bias1, Tensor? ctkv_scale, Tensor? q_nope_scale, str? cache_mode, "
    "str? quant_mode, bool? enable_inner_out, Tensor(a!) q_out0, Tensor(b!) kv_cache_out0, Tensor(c!) q_out1, "
    "Tensor(d!) kv_cache_out1, Tensor(e!) inner_out) "
    "-> (Tensor(a!) q_out0, Tensor(b!) kv_cache_out0, Tensor(c!) q_out1, Tensor(d!) kv_cache_out1, "
    "Tensor(e!) inner_out)",
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor(a!) tensor_c, str? format_mode=None, "
    "str? quant_mode=None) -> ()",
    "npu_hc_pre_v2(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int hc_sinkhorn_iters, "
    "float norm_eps, float hc_eps) -> (Tensor, Tensor, Tensor)",
    "npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
)
_LIBRARY: list[torch.library.Library] = []


def define() -> None:
    """Register the operators on Meta, as the library of a compiled vllm-ascend does for an NPU."""
    from vllm_ascend import utils

    sys.modules["vllm_ascend.vllm_ascend_C"] = types.ModuleType("vllm_ascend.vllm_ascend_C")
    utils._CUSTOM_OP_ENABLED = True
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    _LIBRARY.append(library)
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, OURS[f"_C_ascend::{name}"], "Meta")
    old, new = "npu_kv_quant_sparse_flash_attention", "npu_kv_quant_sparse_flash_attention_vllm"  # name since 0.30
    library.define(next(schema for schema in SCHEMAS if schema.startswith(f"{old}(")).replace(old, new, 1))
    library.impl(new, quantized_attention, "Meta")
    with suppress(ImportError):  # Triton kernels of GLM-5.3-Flash, which need a device
        import_module("vllm_ascend.models.glm5next.mtp").__dict__["fused_eh_norm"] = paired_norms
        pools = import_module("vllm_ascend.models.glm5next.sparse_attn_indexer_kpool").__dict__
        pools["glm5_next_kpool_tail_compress_and_write_cache_triton"] = nothing
        pools["glm5_next_lightning_indexer_triton"] = pooled_indexer
        import_module("vllm_ascend.ops.layernorm").__dict__["rms_norm_gated"] = gated_norm
        kda = import_module("vllm_ascend.models.glm5next.kda").__dict__
        kda |= {"causal_conv1d": short_convolution, "recurrent_kda": delta_rule, "chunk_kda": delta_rule}


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    _same(x1.shape == x2.shape and x1.shape[-1:] == gamma.shape, x1, x2, gamma)
    return torch.empty_like(x1), x1.new_empty(*x1.shape[:-1], 1, dtype=torch.float32), torch.empty_like(x1)


def gating_top_k(x: Tensor, k: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    return x.new_empty(rows, k), x.new_empty(rows, k, dtype=torch.int32), torch.empty_like(x, dtype=torch.float32)


def dequant_swiglu_quant(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    half = x.new_empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.int8)
    return half, x.new_empty(x.shape[:-1], dtype=torch.float32)


def grouped_swiglu_quant(x: Tensor, weight: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [E, K, N], or eight INT4 in an int32 of them."""
    first = weight[0] if isinstance(weight, list | tuple) else weight
    _same(first.shape[-2] == x.shape[-1], x, first)
    columns = first.shape[-1] * (8 if first.dtype == torch.int32 else 1)
    one = x.new_empty(x.shape[0], columns // 2, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)
    return *one, x.new_empty(0)


def grouped_swiglu_quant_v2(x: Tensor, weight: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return grouped_swiglu_quant(x, weight)[:2]


def indexer_quant(query: Tensor, key: Tensor, *_: Any, sparse_count: int = 2048, **__: Any) -> Tensor:
    _same(query.shape[-1] == key.shape[-1] and query.dtype == key.dtype, query, key)
    return query.new_empty(query.shape[0], key.shape[2], sparse_count, dtype=torch.int32)


def indexer(query: Tensor, key: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return indexer_quant(query, key, *rest, **named), query.new_empty(0)


def attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, *_: Any, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _same(query.shape[-1] == key.shape[-1] and query.shape[0] == sparse_indices.shape[0], query, key, sparse_indices)
    if query_rope is not None and key_rope is not None:
        _same(query_rope.shape[-1] == key_rope.shape[-1], query_rope, key_rope)
    return torch.empty_like(query), *_sums(query, key)


def quantized_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, *_: Any, rope_head_dim: int = 64, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _same(query.shape[0] == sparse_indices.shape[0], query, sparse_indices)
    return query.new_empty(*query.shape[:-1], query.shape[-1] - rope_head_dim), *_sums(query, key)


def combine_over_context(
    partial_output: Tensor, softmax_lse: Tensor, dcp_size: int, scatter_dim: int, *_: Any, return_lse: bool = False,
    **__: Any,
) -> Tensor:  # fmt: skip
    """Merge partial outputs [tokens, heads, D] by their LSE [tokens, heads, 1]; a Triton kernel since 0.30."""
    shape = list(partial_output.shape)
    _same(softmax_lse.shape == (*shape[:2], 1) and shape[scatter_dim] % dcp_size == 0, partial_output, softmax_lse)
    shape[scatter_dim] //= dcp_size
    return partial_output.new_empty(*shape[:2], shape[2] + return_lse)


def preprocess(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    names = ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1", "inner_out")
    return tuple(named[name] if name in named else arguments[i - 5] for i, name in enumerate(names))


def mix_streams(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, streams: int, *_: Any) -> tuple[Tensor, ...]:
    """(input of a layer [T, hidden], post [T, streams], comb [T, streams, streams]) of streams [T, streams, hidden]."""
    rows, hidden = x.shape[0], x.shape[-1]
    _same(x.shape[1:] == (streams, hidden) and fn.shape == (streams * (streams + 2), streams * hidden), x, fn)
    floats = [x.new_empty(rows, streams, *more, dtype=torch.float32) for more in ((), (streams,))]
    return x.new_empty(rows, hidden), *floats


def spread_streams(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams [1, T, streams, hidden] after a layer's output [1, T, hidden]."""
    _same(residual.shape[:2] == x.shape[:2] == post.shape[:2] == comb.shape[:2], x, residual, post, comb)
    return torch.empty_like(residual)


def paired_norms(positions: Tensor, embeds: Tensor, previous: Tensor, *_: Any) -> Tensor:
    _same(embeds.shape == previous.shape, embeds, previous)
    return embeds.new_empty(embeds.shape[0], 2 * embeds.shape[1])


def pooled_indexer(query: Tensor, *_: Any, index_topk: int, index_kpool: int, **__: Any) -> Tensor:
    return query.new_empty(query.shape[0], 1, index_topk + index_kpool - 1, dtype=torch.int32)


def short_convolution(x: Tensor, weight: Tensor, state: Tensor, *_: Any, **__: Any) -> Tensor:
    """Output like x [T, channels] of a convolution [taps, channels] whose state is [pages, tokens, channels]."""
    _same(x.shape[1] == weight.shape[1] == state.shape[2], x, weight, state)
    return torch.empty_like(x)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor, *_: Any,
    output_buffer: Tensor | None = None, **__: Any,
) -> Tensor:  # fmt: skip
    """Output like v [1, T, heads, dim] of linear attention whose states are [pages, heads, dim, dim]."""
    _same(q.shape == k.shape == v.shape == gate.shape and beta.shape == v.shape[:3], q, k, v, gate, beta)
    _same(state.shape[1:] == (*v.shape[2:], v.shape[3]), v, state)
    return torch.empty_like(v) if output_buffer is None else output_buffer


def gated_norm(x: Tensor, gate: Tensor, *_: Any, **__: Any) -> Tensor:
    _same(x.shape[-2:] == gate.shape[-2:], x, gate)
    return torch.empty_like(x)


def nothing(*_: Any, **__: Any) -> None:
    pass


def _sums(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    groups = key.shape[2]
    shape = groups, query.shape[0], query.shape[1] // groups
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def _same(holds: bool, *tensors: Tensor) -> None:
    if not holds:
        raise ValueError(f"shapes or types do not agree: {[(list(t.shape), str(t.dtype)) for t in tensors]}")


OURS: dict[str, Callable[..., Any]] = {
    "_C_ascend::npu_add_rms_norm_bias": add_rms_norm,
    "_C_ascend::moe_gating_top_k": gating_top_k,
    "_C_ascend::npu_dequant_swiglu_quant": dequant_swiglu_quant,
    "_C_ascend::grouped_matmul_swiglu_quant_weight_nz": grouped_swiglu_quant,
    "_C_ascend::grouped_matmul_swiglu_quant_weight_nz_tensor_list": grouped_swiglu_quant,
    "_C_ascend::grouped_matmul_swiglu_quant_v2": grouped_swiglu_quant_v2,
    "_C_ascend::npu_lightning_indexer_quant": indexer_quant,
    "_C_ascend::npu_lightning_indexer": indexer,
    "_C_ascend::npu_sparse_flash_attention": attention,
    "_C_ascend::npu_kv_quant_sparse_flash_attention": quantized_attention,
    "_C_ascend::npu_kv_quant_sparse_flash_attention_vllm": quantized_attention,
    "_C_ascend::mla_preprocess": preprocess,
    "_C_ascend::batch_matmul_transpose": nothing,
    "_C_ascend::npu_hc_pre_v2": mix_streams,
    "_C_ascend::npu_hc_post": spread_streams,
    "atb::_npu_reshape_and_cache": nothing,
    "vllm::dcp_a2a_fused": combine_over_context,
}
