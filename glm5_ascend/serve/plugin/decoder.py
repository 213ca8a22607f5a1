"""GLM-5's decoder layer in vLLM: a step of few tokens is two calls of C++ for each layer, `ops.MlaSublayer` and
`ops.MlpSublayer`. Other steps, and layers that these do not take, run op by op (`mla.SparseMLA`, vLLM's MLP).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer, DeepseekV2MoE

from glm5_ascend.serve.plugin.backend import SparseMLAMetadata, current_metadata
from glm5_ascend.serve.plugin.compat import KEEP_WEIGHT, change_class
from glm5_ascend.serve.plugin.experts import FloatExperts, Int8Experts
from glm5_ascend.serve.plugin.linear import ByOurOp, linear_weights
from glm5_kernels import ops

Sublayer = TypeVar("Sublayer")


class DecoderLayer(DeepseekV2DecoderLayer):  # type: ignore[misc]
    """vLLM's layer, whose steps of few tokens are computed by its two sublayers."""

    @cached_property
    def attention(self) -> ops.MlaSublayer | None:
        return _prepared(lambda: ops.MlaSublayer(self._attention_weights()))

    @cached_property
    def feed_forward(self) -> ops.MlpSublayer | None:
        return _prepared(lambda: ops.MlpSublayer(self._mlp_weights()))

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and residual stream of the layer, both [T, hidden_size]; positions int64 [T]."""
        attended = None
        if self.attention is not None and 0 < len(hidden_states) <= ops.MOST_TOKENS:
            metadata: SparseMLAMetadata | None = current_metadata(self._modules_of_attention[1].layer_name)
            if metadata is not None and metadata.num_actual_tokens == len(hidden_states):
                attended = self._attend(self.attention, positions, hidden_states, residual, metadata)
        if attended is None:
            output: tuple[torch.Tensor, torch.Tensor]
            output = super().forward(positions, hidden_states, residual, llama_4_scaling)
            return output
        if self.feed_forward is not None:
            return self.feed_forward(*attended)
        hidden_states, residual = self.post_attention_layernorm(*attended)
        return self.mlp(hidden_states), residual

    @cached_property
    def _modules_of_attention(self) -> tuple[Any, Any, Any]:
        """Attention, the owner of its caches, and the indexer: torch looks a module up in three tables."""
        mla = self.self_attn.mla_attn
        return mla, mla.mla_attn, mla.indexer

    def _attend(
        self,
        sublayer: ops.MlaSublayer,
        positions: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        metadata: SparseMLAMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        mla, latents, indexer = self._modules_of_attention

        def prepare() -> tuple[ops.DecodeStep, torch.Tensor, bool]:
            """The step's tables, the positions that tokens attend to, and whether these are all."""
            attention, index = (
                metadata.angles(None if rope is None else rope.cos_sin_cache, positions)
                for rope in (mla.rotary_emb, mla.indexer_rope_emb)
            )
            topk_indices = latents.impl.topk_indices_buffer[: len(x)]
            takes_all = metadata.longest <= topk_indices.shape[1]
            if takes_all:
                topk_indices.copy_(metadata.all_positions(positions, topk_indices.shape[1]))
            step = ops.DecodeStep(metadata.paged, metadata.slot_mapping, attention, index)
            return step, topk_indices, takes_all

        key = "decode step", indexer is None, positions.numpy().tobytes()
        step, topk_indices, takes_all = metadata.once(key, prepare)
        ckv, kpe = latents.kv_cache.split([latents.kv_lora_rank, latents.qk_rope_head_dim], dim=-1)
        keys = None if indexer is None else indexer.k_cache.kv_cache
        selects = not (takes_all or indexer is None or mla.skip_topk)
        return sublayer(x, residual, step, ckv, kpe, keys, topk_indices, selects)

    def _attention_weights(self) -> ops.MlaWeights:
        mla = self.self_attn.mla_attn
        latents, indexer, rope = mla.mla_attn, mla.indexer, mla.indexer_rope_emb
        if latents.has_int8_cache or (indexer is not None and indexer.k_cache.dtype == torch.int8):
            raise ops.UnsupportedVariantError("int8 caches")
        of_indexer = None
        if indexer is not None:
            norm, interleaved = indexer.k_norm, not rope.is_neox_style
            wk_weights, wq_b = _parts(indexer.wk_weights_proj), _parts(indexer.wq_b)
            of_indexer = ops.IndexerWeights(wk_weights, wq_b, norm.weight.data, norm.bias.data, norm.eps, interleaved)
        qkv_a, q_b, o_proj = (_parts(layer) for layer in (mla.fused_qkv_a_proj, mla.q_b_proj, mla.o_proj))
        norm, q_norm, kv_norm = (
            layer.weight.data for layer in (self.input_layernorm, mla.q_a_layernorm, mla.kv_a_layernorm)
        )
        return ops.MlaWeights(
            norm, self.input_layernorm.variance_epsilon, qkv_a, q_b, o_proj, q_norm, kv_norm,
            mla.q_a_layernorm.variance_epsilon, latents.W_UK_T.data, latents.W_UV.data,
            0 if mla.rotary_emb is None else mla.qk_rope_head_dim, latents.scale, of_indexer,
        )  # fmt: skip

    def _mlp_weights(self) -> ops.MlpWeights:
        mlp, experts = self.mlp, None
        if isinstance(mlp, DeepseekV2MoE):
            experts, mlp = _routed_experts(mlp), mlp.shared_experts
        if mlp is None:
            raise ops.UnsupportedVariantError("no shared experts")
        norm, gate_up, down = self.post_attention_layernorm, _parts(mlp.gate_up_proj), _parts(mlp.down_proj)
        return ops.MlpWeights(norm.weight.data, norm.variance_epsilon, gate_up, down, experts)


def _routed_experts(moe: Any) -> ops.RoutedExperts:
    runner, router = moe.experts, moe.experts.router
    method = runner.routed_experts.quant_method
    is_ours = isinstance(method, Int8Experts) and not isinstance(method, FloatExperts)
    if not is_ours or runner.routed_experts.reader is not None or router.num_expert_group != 1:
        raise ops.UnsupportedVariantError("experts of floats, read ahead or in groups")
    if router.scoring_func != "sigmoid" or router.e_score_correction_bias is None or router.routed_scaling_factor != 1:
        raise ops.UnsupportedVariantError("another router")
    w13, w13_scale, w2, w2_scale = runner.routed_experts.operands
    return ops.RoutedExperts(
        _parts(moe.gate), router.e_score_correction_bias.data, router.top_k, router.renormalize,
        runner.routed_scaling_factor, w13, w13_scale, w2, w2_scale, method.swiglu_limit,
    )  # fmt: skip


def _prepared(make: Callable[[], Sublayer]) -> Sublayer | None:
    """The sublayer, or None if C++ does not take its weights."""
    try:
        return make()
    except ops.UnsupportedVariantError:
        return None


def _parts(layer: Any) -> list[ops.LinearWeights]:
    """The weights of a vLLM linear layer, unless vLLM has packed them again."""
    if isinstance(layer.quant_method, ByOurOp):
        parts: list[ops.LinearWeights] = layer.op_parts
        return parts
    if not getattr(layer, KEEP_WEIGHT, False):
        raise ops.UnsupportedVariantError(f"{layer.prefix} is packed by vLLM")
    return [linear_weights(layer)]


def install(model: torch.nn.Module) -> None:
    """Let the decoder layers of a model on one rank compute steps of few tokens by their sublayers."""
    if ops.choose("mla_preprocess").implementation != "cpu":
        return
    layer: Any
    for layer in model.modules():
        if type(layer) is DeepseekV2DecoderLayer and layer.self_attn.o_proj.tp_size == 1:
            change_class(layer, DecoderLayer)
