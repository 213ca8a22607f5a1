"""The NPU operators that a GLM-5 layer of SGLang calls, in plain torch, from their public descriptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

OPERATORS: dict[str, Callable[..., Any]] = {}


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    OPERATORS[function.__name__] = function
    return function


@operator
def npu_format_cast(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


@operator
def npu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * factor * weight.float()).to(x.dtype), factor


@operator
def npu_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    return *npu_rms_norm(total, weight, eps), total


@operator
def npu_dynamic_quant(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1) / 127
    return torch.round(x.float() / scale.clamp_min(1e-30)[..., None]).clamp(-128, 127).to(torch.int8), scale


@operator
def npu_quantize(x: Tensor, reciprocal: Tensor, offset: Tensor, *_: Any) -> Tensor:
    return torch.round(x.float() * reciprocal.float() + offset.float()).clamp(-128, 127).to(torch.int8)


@operator
def npu_quant_matmul(
    x: Tensor, weight: Tensor, scale: Tensor, *, pertoken_scale: Tensor | None = None, bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float16, **_: Any,
) -> Tensor:  # fmt: skip
    y = x.double() @ weight.double()
    y = (y if bias is None else y + bias.double()) * scale.double()
    return (y if pertoken_scale is None else y * pertoken_scale.double().reshape(-1, 1)).to(output_dtype)


@operator
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    return (silu(gate) * up).to(x.dtype)


@operator
def npu_dequant_swiglu_quant(x: Tensor, *, activate_left: bool = False, **_: Any) -> tuple[Tensor, Tensor]:
    assert activate_left
    return npu_dynamic_quant(npu_swiglu(x.float()))


@operator
def npu_transpose_batchmatmul(
    x: Tensor, weight: Tensor, *, perm_x1: Sequence[int], perm_x2: Sequence[int], perm_y: Sequence[int], **_: Any
) -> Tensor:
    return torch.bmm(x.permute(*perm_x1).float(), weight.permute(*perm_x2).float()).permute(*perm_y).to(x.dtype)


@operator
def batch_matmul_transpose(x: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(torch.bmm(x.transpose(0, 1).float(), weight.float()).transpose(0, 1))


@operator
def npu_moe_gating_top_k(
    logits: Tensor, k: int, *, bias: Tensor | None = None, k_group: int = 1, group_count: int = 1, norm_type: int = 0,
    routed_scaling_factor: float = 1.0, eps: float = 1e-20, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert (k_group, group_count, norm_type) == (1, 1, 1)
    score = torch.sigmoid(logits.float())
    topk = (score if bias is None else score + bias.float()).topk(k, -1).indices
    weight = score.gather(-1, topk)
    weight = weight / (weight.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weight.to(logits.dtype), topk.int(), score


@operator
def npu_moe_init_routing_v2(
    x: Tensor, experts: Tensor, *, expert_num: int, expert_tokens_num_type: int = 0, quant_mode: int = -1,
    row_idx_type: int = 0, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    flat = experts.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    count = torch.bincount(flat, minlength=expert_num)
    rows, scale = x[order // experts.shape[1]], None
    if quant_mode == 1:
        rows, scale = npu_dynamic_quant(rows)
    slot = order.argsort() if row_idx_type == 0 else order
    return rows, slot.int(), count if expert_tokens_num_type == 1 else count.cumsum(0), scale


@operator
def npu_moe_compute_expert_tokens(experts: Tensor, count: int) -> Tensor:
    return torch.bincount(experts.long(), minlength=count).cumsum(0)


@operator
def npu_grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None, bias: Sequence[Tensor] | None = None, group_list: Tensor,
    group_list_type: int = 0, output_dtype: torch.dtype = torch.bfloat16, **_: Any,
) -> list[Tensor]:  # fmt: skip
    rows, count, out = x[0].double(), group_list, []
    if group_list_type == 0:
        count = torch.diff(group_list, prepend=group_list.new_zeros(1))
    for expert, part in enumerate(rows.split(count.tolist())):
        matrix = weight[0][expert]
        if matrix.dtype is torch.int32:
            assert scale is not None and bias is not None
            y = int4_product(part, matrix, scale[0][expert]) + bias[0][expert].double().reshape(1, -1)
        else:
            y = part @ matrix.double()
            y = y if scale is None else y * scale[0][expert].double().reshape(1, -1)
        out.append(y)
    y = torch.cat(out)
    return [(y if per_token_scale is None else y * per_token_scale[0].double().reshape(-1, 1)).to(output_dtype)]


def int4_product(x: Tensor, packed: Tensor, scale_bits: Tensor) -> Tensor:
    """int8 x times INT4 [K, N/8], as the NPU computes it: x = 16 high + low, the low half read as low - 8.

    So the product is that of x - 8, and `scale_bias`, 8 times the sum of a row of weights, makes up for it.
    """
    nibbles = packed.contiguous().view(torch.uint8)
    q = torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(-2).to(torch.int32)
    words = scale_bits.reshape(-1).view(torch.int32).unflatten(-1, (-1, 2))
    assert not words[:, 1].any()
    return (x - 8) @ (torch.where(q > 7, q - 16, q) * words[:, 0].contiguous().view(torch.float32).double())


@operator
def npu_moe_finalize_routing(
    y: Tensor, *, scales: Tensor, expanded_src_to_dst_row: Tensor, drop_pad_mode: int = 0, **_: Any
) -> Tensor:
    tokens, k = scales.shape
    slot = expanded_src_to_dst_row.long()
    slot = slot.view(tokens, k) if drop_pad_mode == 2 else slot.view(k, tokens).t()
    return (y[slot.reshape(-1)].float().view(tokens, k, -1) * scales.float()[..., None]).sum(1).to(y.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos.float() + torch.cat([-second, first], -1) * sin.float()).to(x.dtype)


@operator
def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turn(x, cos, sin)


@operator
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turn(torch.cat([x[..., ::2], x[..., 1::2]], -1), cos, sin)


@operator
def npu_mrope(
    positions: Tensor, q: Tensor, k: Tensor, cache: Tensor, head: int, *, rotary_mode: str = "half", **_: Any
) -> tuple[Tensor, Tensor]:
    cos, sin = (part[:, None] for part in cache[positions].float().chunk(2, -1))

    def rotated(x: Tensor) -> Tensor:
        heads = x.reshape(len(x), -1, head).float()
        turning, rest = heads.split([2 * cos.shape[-1], head - 2 * cos.shape[-1]], -1)
        half = rotary_mode == "half"
        a, b = turning.chunk(2, -1) if half else (turning[..., ::2], turning[..., 1::2])
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned_heads = torch.cat(pair, -1) if half else torch.stack(pair, -1).flatten(-2)
        return torch.cat([turned_heads, rest], -1).reshape(x.shape).to(x.dtype)

    return rotated(q), rotated(k)


def normed(x: Tensor, norm: Any, eps: float) -> Tensor:
    bias = getattr(norm, "bias", None)
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * norm.weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def fused_split_qk_norm(
    x: Tensor, q_norm: Any, kv_norm: Any, q: int, kv: int, rope: int, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = x.split([q, kv, rope], -1)
    return normed(a, q_norm, eps), normed(b, kv_norm, eps)[:, None], c[:, None].contiguous()


def l1_norm(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def add_rmsnorm_bias(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: Any
) -> tuple[Tensor, Tensor]:
    total = x + residual
    factor = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + eps)
    return (total.float() * factor * weight.float() + bias.float()).to(x.dtype), total
