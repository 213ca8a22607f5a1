"""A whole attention layer of transformers' GLM-5 against ours: preprocess, indexer, sparse attention, up-projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5_kernels import ops
from tests.ops.support.paged_batch import paged_batch

modeling = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
EPS = 1e-5


def build(topk: int) -> Any:
    from transformers import GlmMoeDsaConfig

    config = GlmMoeDsaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=48,
        qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20, index_n_heads=16, index_head_dim=32,
        index_topk=topk, num_hidden_layers=1, mlp_layer_types=["dense"], vocab_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, attn_implementation="eager",
    )  # fmt: skip
    layer = modeling.GlmMoeDsaAttention(config, 0).eval()
    for norm in (layer.q_a_layernorm, layer.kv_a_layernorm):
        norm.variance_epsilon = EPS  # transformers uses its class default 1e-6, vLLM the config's
        torch.nn.init.normal_(norm.weight, 1.0, 0.1)
    rope = modeling.GlmMoeDsaRotaryEmbedding(config)
    return layer, rope, config


def run_hf(layer: Any, rope: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    length = x.shape[0]
    cos_sin = rope(x[None], torch.arange(length)[None])
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        out, _, topk = layer(x[None], cos_sin, mask)
    return out[0], topk[0], cos_sin


def run_ours(layer: Any, config: Any, cos_sin: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    length, heads = x.shape[0], config.num_attention_heads
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    batch, positions = paged_batch([length], [length], block_size=8), torch.arange(length)
    slots = batch.block_table[0, positions // 8].long() * 8 + positions % 8
    cos, sin = (t[0, :, : rope // 2] for t in cos_sin)
    w_kv = layer.kv_b_proj.weight.detach().view(heads, nope + config.v_head_dim, rank)
    fused = torch.zeros(batch.num_blocks, 8, rank + rope)
    ql, q_pe, q_c = ops.mla_preprocess(
        x, cos, sin, ops.LinearWeights(torch.cat([layer.q_a_proj.weight, layer.kv_a_proj_with_mqa.weight]).detach()),
        ops.LinearWeights(layer.q_b_proj.weight.detach()), w_kv[:, :nope].contiguous(), layer.q_a_layernorm.weight,
        layer.kv_a_layernorm.weight, slots, fused[..., :rank], fused[..., rank:], EPS,
    )  # fmt: skip
    q, k, w = indexer_operands(layer.indexer, x, q_c, cos_sin)
    keys = torch.zeros(batch.num_blocks, 8, config.index_head_dim)
    ops.write_rows(keys, slots, k)
    selected = ops.lightning_indexer(q, keys, w, batch.paged, config.index_topk)
    latent, _ = ops.sparse_flash_attention(
        ql, q_pe, fused[..., :rank], fused[..., rank:], selected, batch.paged, (nope + rope) ** -0.5
    )
    values = torch.einsum("thr,hvr->thv", latent, w_kv[:, nope:])
    return torch.nn.functional.linear(values.reshape(length, -1), layer.o_proj.weight), selected


def indexer_operands(indexer: Any, x: torch.Tensor, q_c: torch.Tensor, cos_sin: Any) -> tuple[torch.Tensor, ...]:
    """q [T, H, D], k [T, D], weights [T, H] with transformers' own projections and rope."""
    rope, dim, heads = indexer.qk_rope_head_dim, indexer.head_dim, indexer.n_heads
    q = indexer.wq_b(q_c).view(1, -1, heads, dim)
    k = indexer.k_norm(indexer.wk(x)).view(1, -1, 1, dim)
    q_rot, k_rot = modeling.apply_rotary_pos_emb_interleave(q[..., :rope], k[..., :rope], *cos_sin, unsqueeze_dim=2)
    q, k = torch.cat([q_rot, q[..., rope:]], -1)[0], torch.cat([k_rot, k[..., rope:]], -1)[0, :, 0]
    return q, k, indexer.weights_proj(x) * (heads**-0.5 * dim**-0.5)


@pytest.mark.parametrize(("length", "topk"), [(20, 64), (40, 8), (1, 8), (33, 32)])
@torch.no_grad()
def test_layer_equals_transformers(length: int, topk: int) -> None:
    """fp32, 1e-5: a prefix shorter than topk (dense) and longer ones (sparse)."""
    layer, rope, config = build(topk)
    x = torch.randn(length, config.hidden_size)
    want, want_topk, cos_sin = run_hf(layer, rope, x)
    got, selected = run_ours(layer, config, cos_sin, x)
    for t in range(length):
        valid = min(topk, t + 1)
        assert set(selected[t, :valid].tolist()) == set(want_topk[t, :valid].tolist())
        assert selected[t, valid:].tolist() == [-1] * (topk - valid)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
