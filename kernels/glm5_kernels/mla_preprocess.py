"""MLA preprocess: everything between a layer's input and the operands of sparse attention, in one op.

T tokens, D hidden size, H heads, Q = q_lora_rank, R = kv_lora_rank, N/P = qk nope/rope head dim.

The 13 steps:

    1-3   y = qkv_a(hidden_states)            quantize, multiply, scale back
    4     y -> q | kv | k_pe
    5     q_c = RMSNorm(q) * q_a_gamma        fp32; a copy in the activation dtype is returned
    6-8   z = q_b(q_c) as [T, H, N + P]       quantize the fp32 q_c, multiply, scale back
    9     ql_nope = z[..., :N] @ w_uk_t       per head
    10    q_pe = rope(z[..., N:])
    11    ckv = RMSNorm(kv) * kv_a_gamma
    12    kpe = rope(k_pe)
    13    ckv_cache[slot], kpe_cache[slot] = ckv, kpe

qkv_a has the rows q | kv latent | k_pe (vLLM's fused_qkv_a_proj), q_b for each head nope | rope. Each has its own quant
mode: "no_quant", "per_token_quant_symm" (W8A8_DYNAMIC) or
"per_tensor_quant_asymm" (W8A8 static). no_quant multiplies in the activation dtype.

On purpose unlike the NPU kernel `_C_ascend.mla_preprocess`: rows are q | kv | k_pe, not kv | k_pe | q; rope is
interleaved in and out, not half-split on permuted weights; quantization divides in fp32, not fp16; no q_a beta.

Source: vllm-ascend `csrc/mla_preprocess` (semantics), vLLM `model_executor/layers/mla.py`."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.contract import WRITTEN, require_same_dtype, require_shape
from glm5_kernels.indexer_preprocess import rotate
from glm5_kernels.int8 import LinearWeights, apply_linear
from glm5_kernels.paged_cache import check_slots, write_rows


class MlaPreprocess(NamedTuple):
    """ql_nope [T, H, R], q_pe [T, H, P] and q_c [T, Q] in hidden_states' dtype; writes rows of both caches."""

    hidden_states: Annotated[Tensor, "float [T, D]"]  # after input_layernorm
    cos: Annotated[Tensor, "float [T, pairs]"]  # of each token's position; pairs are interleaved: (0, 1), (2, 3), ...
    sin: Annotated[Tensor, "float [T, pairs]"]
    qkv_a: LinearWeights  # [Q + R + P, D]
    q_b: LinearWeights  # [H * (N + P), Q]
    w_uk_t: Annotated[Tensor, "hidden_states [H, N, R]"]  # kv_b_proj's key half: absorbs q_nope into the latent space
    q_a_gamma: Annotated[Tensor, "float [Q]"]  # RMSNorm weights
    kv_a_gamma: Annotated[Tensor, "float [R]"]
    slot_mapping: Annotated[Tensor, "int [T]"]  # cache row of each token, block * block_size + offset; negative = skip
    ckv_cache: Annotated[Tensor, "float [num_blocks, block_size, R]", WRITTEN]  # both may be views of one fused cache
    kpe_cache: Annotated[Tensor, "float [num_blocks, block_size, P]", WRITTEN]
    eps: float  # of both norms (HF 5.19: 1e-6, vLLM: rms_norm_eps, the NPU kernel: 1e-6)

    def rules(self) -> None:
        (heads, nope, rank), rope, q_lora = self.w_uk_t.shape, self.kpe_cache.shape[2], len(self.q_a_gamma)
        tokens, hidden = self.hidden_states.shape
        require_shape("cos", self.cos, (tokens, rope // 2))
        require_shape("qkv_a.weight", self.qkv_a.weight, (q_lora + rank + rope, hidden))
        require_shape("q_b.weight", self.q_b.weight, (heads * (nope + rope), q_lora))
        for name, weight in (("qkv_a.weight", self.qkv_a.weight), ("q_b.weight", self.q_b.weight)):
            if weight.dtype != torch.int8:
                require_same_dtype(name, weight, "hidden_states", self.hidden_states)

    def check_values(self) -> None:
        check_slots(self.slot_mapping, self.kpe_cache)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] -> fp32 [..., n]: x / sqrt(mean(x^2) + eps) * gamma."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * gamma.float()


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, *caches, eps = operands
    tokens, dtype = hidden_states.shape[0], hidden_states.dtype
    heads, nope, kv_lora = w_uk_t.shape
    rope = 2 * cos.shape[1]
    y = apply_linear(hidden_states, qkv_a, dtype)  # 1-3
    q, kv, k_pe = torch.split(y, [q_a_gamma.numel(), kv_lora, rope], dim=-1)  # 4
    q_c = rms_norm(q, q_a_gamma, eps)  # 5
    z = apply_linear(q_c, q_b, dtype).view(tokens, heads, nope + rope)  # 6-8
    ql_nope = z.new_empty(tokens, heads, kv_lora)
    torch.bmm(z[..., :nope].transpose(0, 1), w_uk_t, out=ql_nope.transpose(0, 1))  # 9
    q_pe = rotate(z[..., nope:].float(), cos, sin).to(dtype)  # 10
    ckv = rms_norm(kv, kv_a_gamma, eps).to(dtype)  # 11
    kpe = rotate(k_pe[:, None].float(), cos, sin)[:, 0]  # 12
    for cache, rows in zip(caches, (ckv, kpe), strict=True):  # 13
        write_rows(cache, slot_mapping, rows)
    return ql_nope, q_pe, q_c.to(dtype)
