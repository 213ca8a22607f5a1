"""One attention layer of GLM-5 in vLLM: fused ops, then the value and output projections.

    hidden -> mla_preprocess -> (indexer_preprocess, lightning_indexer) -> sparse_flash_attention -> v_up_proj -> o_proj

Each op runs once per layer and step, whatever the layer's quantization. Layers without an indexer
(GLM-5.2) reuse the positions that the last layer with an indexer wrote to the shared buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.plugin.backend import SparseMLAMetadata, current_metadata
from glm5_ascend.serve.plugin.caches import LatentAttention
from glm5_ascend.serve.plugin.compat import KEEP_WEIGHT, change_class
from glm5_ascend.serve.plugin.indexer import indexer_columns, install_indexer
from glm5_ascend.serve.plugin.linear import linear_weights
from glm5_ascend.serve.plugin.loaders import mapped
from glm5_ascend.serve.plugin.platform import int8_caches
from glm5_kernels import ops

REPLACED = "MultiHeadLatentAttentionWrapper"


class SparseMLA(MultiHeadLatentAttentionWrapper):  # type: ignore[misc]
    """Replaces vLLM's MLA wrapper by name; for layers that are not sparse it is vLLM's wrapper unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uses_dsa = self.is_sparse and self.q_lora_rank is not None
        if not self.uses_dsa:
            return
        self.topk_columns = None if self.indexer is None else indexer_columns(self.indexer)
        if self.indexer is not None:
            self.choose_positions = install_indexer(self.indexer)
        change_class(self.mla_attn, LatentAttention)
        self.mla_attn.has_int8_cache = int8_caches(get_current_vllm_config()).latents
        for linear in (self.fused_qkv_a_proj, self.q_b_proj):
            setattr(linear, KEEP_WEIGHT, True)  # mla_preprocess multiplies with it
        for linear in (self.q_b_proj, self.kv_b_proj):
            linear.weight.weight_loader = mapped(linear.weight.weight_loader, linear)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention and output projection: positions [T], hidden_states [T, hidden_size] -> [T, hidden_size]."""
        if not self.uses_dsa:
            dense: torch.Tensor = super().forward(positions, hidden_states, llama_4_scaling)
            return dense
        metadata: SparseMLAMetadata | None = current_metadata(self.mla_attn.layer_name)
        tokens, n = len(hidden_states), 0 if metadata is None else metadata.num_actual_tokens
        if metadata is not None and n == tokens:
            attended = self.attend(positions, hidden_states, metadata)
        else:  # the profiling run has no metadata; rows beyond n are padding
            attended = hidden_states.new_zeros(tokens, self.num_heads * self.v_head_dim)
            if metadata is not None:
                attended[:n] = self.attend(positions[:n], hidden_states[:n], metadata)
        out: torch.Tensor = self.o_proj(attended)[0]
        return out

    def attend(self, positions: torch.Tensor, hidden_states: torch.Tensor, metadata: SparseMLAMetadata) -> torch.Tensor:
        """Attend and write this step's rows into the caches: [T, hidden_size] -> [T, H * v_head_dim]."""
        tokens = hidden_states.shape[0]
        cos, sin = metadata.angles(None if self.rotary_emb is None else self.rotary_emb.cos_sin_cache, positions)
        cache, slots = self.mla_attn.kv_cache, metadata.slot_mapping
        rows, is_int8 = cache, self.mla_attn.has_int8_cache
        if is_int8:  # this step's rows in the model's dtype, quantized below
            width = self.kv_lora_rank + self.qk_rope_head_dim
            rows, slots = hidden_states.new_empty(1, tokens, width), torch.arange(tokens)
        ckv, kpe = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        ql_nope, q_pe, q_c = ops.mla_preprocess(
            hidden_states,
            cos,
            sin,
            linear_weights(self.fused_qkv_a_proj),
            linear_weights(self.q_b_proj),
            self.mla_attn.W_UK_T.data,
            self.q_a_layernorm.weight.data,
            self.kv_a_layernorm.weight.data,
            slots,
            ckv,
            kpe,
            self.q_a_layernorm.variance_epsilon,
        )
        if is_int8:
            ops.write_rows(cache, metadata.slot_mapping, ops.pack_latents(ckv[0], kpe[0]))
        topk_indices = self.mla_attn.impl.topk_indices_buffer[:tokens, : self.topk_columns]
        if self.indexer is not None and not self.skip_topk:
            topk_indices.copy_(
                self.choose_positions(self.indexer, hidden_states, q_c, positions, self.indexer_rope_emb, metadata)
            )
        # Probabilities are rounded as an NPU rounds them: their products take half the time of fp32.
        selection = topk_indices, metadata.paged, self.mla_attn.scale, True
        if is_int8:
            latent, _ = ops.sparse_flash_attention_quant(ql_nope, q_pe, cache, *selection)  # [T, H, kv_lora_rank]
        else:
            latent, _ = ops.sparse_flash_attention(ql_nope, q_pe, ckv, kpe, *selection)
        return ops.v_up_proj(latent, self.mla_attn.W_UV.data)


def register() -> None:
    """Replace vLLM's MLA wrapper by `SparseMLA`, once per process."""
    registered = op_registry_oot.get(REPLACED)
    if registered is SparseMLA:
        return
    if registered is not None:
        raise MissingEnvironmentError(
            f"another vLLM plugin has already replaced {REPLACED} ({registered.__module__}.{registered.__qualname__})",
            "uninstall it, or name the plugins to load: VLLM_PLUGINS=glm5_cpu,glm5_ascend",
        )
    PluggableLayer.register_oot(name=REPLACED)(SparseMLA)
