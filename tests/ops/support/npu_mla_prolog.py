"""torch_npu's `npu_mla_prolog_v3`, stood in for: its schema word for word, and a slow meaning of what GLM-5 asks of it.

The meaning is written from torch_npu 2.13's `_op_plugin_docs.py` and shares no code with ours.
"""

from __future__ import annotations

from typing import Any

import torch

SCHEMA = (
    "npu_mla_prolog_v3(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, Tensor "
    "weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, "
    "Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, Tensor? cache_index=None, Tensor? dequant_scale_x=None, "
    "Tensor? dequant_scale_w_dq=None, Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None, "
    "Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, Tensor? smooth_scales_cq=None, Tensor? "
    "actual_seq_len=None, Tensor? k_nope_clip_alpha=None, float rmsnorm_epsilon_cq=1e-05, float "
    "rmsnorm_epsilon_ckv=1e-05, str cache_mode='PA_BSND', bool query_norm_flag=False, int weight_quant_mode=0, "
    "int kv_cache_quant_mode=0, int query_quant_mode=0, int ckvkr_repo_mode=0, int quant_scale_repo_mode=0, "
    "int tile_size=128, float qc_qr_scale=1.0, float kc_scale=1.0, int? token_x_dtype=None, int? "
    "weight_dq_dtype=None, int? weight_uq_qr_dtype=None, int? weight_dkv_kr_dtype=None, int? "
    "kv_cache_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() / torch.sqrt((x.float() ** 2).mean(-1, keepdim=True) + eps) * gamma.float()


def npu_mla_prolog_v3(
    token_x: torch.Tensor, weight_dq: torch.Tensor, weight_uq_qr: torch.Tensor, weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor, rmsnorm_gamma_cq: torch.Tensor, rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor, rope_cos: torch.Tensor, kv_cache: torch.Tensor, kr_cache: torch.Tensor, *,
    cache_index: torch.Tensor, dequant_scale_x: torch.Tensor | None, dequant_scale_w_dq: torch.Tensor | None,
    dequant_scale_w_uq_qr: torch.Tensor | None, dequant_scale_w_dkv_kr: torch.Tensor | None,
    rmsnorm_epsilon_cq: float, rmsnorm_epsilon_ckv: float, cache_mode: str, query_norm_flag: bool,
    weight_quant_mode: int, **others: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Weights [K, N]; rotated rows come out with the first of each pair in front."""
    assert cache_mode == "PA_BSND" and query_norm_flag and weight_quant_mode in (0, 2)
    assert not any(others[f"{name}_quant_mode"] for name in ("kv_cache", "query")) and not others["ckvkr_repo_mode"]
    assert (others["qc_qr_scale"], others["kc_scale"]) == (1.0, 1.0) and others["smooth_scales_cq"] is None
    bf16, (heads, nope, rank), rope = torch.bfloat16, weight_uk.shape, rope_cos.shape[1]
    expected = torch.int8 if weight_quant_mode else bf16
    assert {token_x.dtype, weight_dq.dtype, weight_uq_qr.dtype, weight_dkv_kr.dtype} == {expected}
    assert {x.dtype for x in (rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin, rope_cos, weight_uk, kv_cache)} == {bf16}
    assert cache_index.dtype == torch.int64 and kv_cache.shape[1] in (16, 128) and bool((cache_index >= 0).all())

    def product(x: torch.Tensor, weight: torch.Tensor, of_x: Any, of_weight: Any) -> torch.Tensor:
        whole = (x.double() @ weight.double()).float()
        if of_weight is None:
            return whole.bfloat16()
        assert of_x.shape == (len(x), 1) and of_weight.shape == (1, weight.shape[1])
        return (whole * of_x * of_weight).bfloat16()

    def turned(x: torch.Tensor) -> torch.Tensor:
        """Pairs are neighbours."""
        c, s = (angles.float().view(len(x), *[1] * (x.dim() - 2), rope) for angles in (rope_cos, rope_sin))
        first, second = x.float()[..., 0::2], x.float()[..., 1::2]
        return (torch.cat([first, second], -1) * c + torch.cat([-second, first], -1) * s).bfloat16()

    q_norm = norm(
        product(token_x, weight_dq, dequant_scale_x, dequant_scale_w_dq), rmsnorm_gamma_cq, rmsnorm_epsilon_cq
    )
    q_scale = torch.zeros(1)
    codes = q_norm.bfloat16()
    if weight_quant_mode:
        q_scale = q_norm.abs().amax(-1, keepdim=True) / 127
        codes = (q_norm / q_scale).round().to(torch.int8)
    z = product(codes, weight_uq_qr, q_scale, dequant_scale_w_uq_qr).view(len(token_x), heads, nope + rope)
    query = torch.einsum("thn,hnr->thr", z[..., :nope].float(), weight_uk.float()).bfloat16()
    latents = product(token_x, weight_dkv_kr, dequant_scale_x, dequant_scale_w_dkv_kr)
    rows = norm(latents[:, :rank], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv).bfloat16(), turned(latents[:, rank:])
    for cache, values in zip((kv_cache, kr_cache), rows, strict=True):
        for token, slot in enumerate(cache_index.tolist()):
            cache[slot // cache.shape[1], slot % cache.shape[1], 0] = values[token]
    return query, turned(z[..., nope:]), torch.zeros(1), codes, q_scale
