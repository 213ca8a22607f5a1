"""Rows of the two paged caches: in the model's dtype, or int8 where vllm-ascend's keys in --additional-config say so.

    enable_sparse_li_c8   indexer keys: index_head_dim int8 + a 2-byte fp16 scale (GLM-5: 130 bytes per token and layer)
    enable_sparse_sfa_c8  latents: kv_lora_rank int8 + bf16 rope + fp32 scales, one per 128 (GLM-5: 656 bytes)

The layouts are those of `glm5_kernels.ops`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

from glm5_ascend.serve.plugin.backend import IndexerBackend
from glm5_ascend.serve.plugin.platform import TILE
from glm5_kernels import ops

SCALE_BYTES = 2


class LatentAttention(MLAAttention):  # type: ignore[misc]
    """vLLM's owner of the latent cache, with the cache's dtype of choice, and W_UK and W_UV as our ops read them.

    Attributes:
        has_int8_cache: rows are int8 latents, bf16 rope and fp32 scales.
    """

    has_int8_cache = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        # Both are views of kv_b_proj, in whose rows W_UV's columns and W_UK_T's rows are contiguous.
        if ops.reads_columns(act_dtype):
            self.W_UK_T.data = self.W_UK_T.data.mT.contiguous().mT
        else:
            self.W_UV.data = self.W_UV.data.contiguous()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        if not self.has_int8_cache:
            return spec
        row_bytes = self.kv_lora_rank + 2 * self.qk_rope_head_dim + 4 * self.kv_lora_rank // TILE
        return dataclasses.replace(spec, head_size=row_bytes, dtype=torch.int8)


class IndexerCache(DeepseekV32IndexerCache):  # type: ignore[misc]
    """Key cache [num_blocks, block_size, index_head_dim] in the model's dtype, or int8 with a scale of two bytes."""

    def get_attn_backend(self) -> type[IndexerBackend]:
        return IndexerBackend


def write_keys(cache: torch.Tensor, slot_mapping: torch.Tensor, keys: torch.Tensor) -> None:
    """Quantize keys [T, D] and write them into int8 rows [num_blocks, block_size, D + 2]."""
    values, scales = ops.quantize_indexer(keys)
    integers, scale = split_keys(cache)
    ops.write_rows(integers, slot_mapping, values)
    ops.write_rows(scale[..., None], slot_mapping, scales[:, None])


def split_keys(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split int8 rows [num_blocks, block_size, D + 2] into keys [.., D] and fp16 scales [num_blocks, block_size]."""
    dim = cache.shape[-1] - SCALE_BYTES
    return cache[..., :dim], cache[..., dim:].view(torch.float16)[..., 0]
