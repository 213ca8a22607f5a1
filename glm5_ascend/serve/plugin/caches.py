"""Rows of the two paged caches in int8, where vllm-ascend's keys in `--additional-config` switch them on.

    enable_sparse_li_c8   indexer keys: index_head_dim int8 + a 2-byte fp16 scale (GLM-5: 130 bytes per token and layer)
    enable_sparse_sfa_c8  latents: kv_lora_rank int8 + bf16 rope + fp32 scales, one per 128 (GLM-5: 656 bytes)

Without them rows are in the model's dtype. The layouts are those of `glm5_kernels.ops`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from glm5_ascend.serve.plugin.switches import TILE, switches
from glm5_kernels import ops

SCALE_BYTES = 2


class LatentAttention(MLAAttention):  # type: ignore[misc]
    """vLLM's owner of the latent cache and of kv_b_proj's halves, with W_UV [H, kv_lora_rank, v_head_dim] in order."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        self.W_UV.data = self.W_UV.data.contiguous()  # vLLM's is a transposed view, which is read element by element


class PackedMLAAttention(LatentAttention):
    """The same with rows of int8."""

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        size = packed_row_bytes(self.kv_lora_rank, self.qk_rope_head_dim)
        return dataclasses.replace(super().get_kv_cache_spec(vllm_config), head_size=size, dtype=torch.int8)


def packed_row_bytes(kv_lora_rank: int, rope: int) -> int:
    """int8 latents, bf16 rope, fp32 scales."""
    return kv_lora_rank + 2 * rope + 4 * kv_lora_rank // TILE


def adopt(attention: MLAAttention) -> bool:
    """Make `attention` ours, with an int8 cache if that is switched on; whether it is."""
    wanted = switches(get_current_vllm_config()).latents
    attention.__class__ = PackedMLAAttention if wanted else LatentAttention
    return wanted


def write_keys(cache: torch.Tensor, slot_mapping: torch.Tensor, keys: torch.Tensor) -> None:
    """Keys [T, D] into int8 rows [num_blocks, block_size, D + 2], quantized."""
    values, scales = ops.quantize_indexer(keys)
    integers, scale = split_keys(cache)
    ops.write_rows(integers, slot_mapping, values)
    ops.write_rows(scale[..., None], slot_mapping, scales[:, None])


def split_keys(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows [num_blocks, block_size, D + 2] as keys [.., D] and fp16 scales [num_blocks, block_size]."""
    dim = cache.shape[-1] - SCALE_BYTES
    return cache[..., :dim], cache[..., dim:].view(torch.float16)[..., 0]
