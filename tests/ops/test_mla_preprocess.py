"""MLA preprocess, step by step, against formulas written out naively, in every combination of quant modes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from glm5_kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")

TOKENS, HIDDEN, Q_LORA, KV_LORA, ROPE, HEADS, NOPE = 5, 24, 20, 16, 8, 3, 6
MODES = [ops.NO_QUANT, ops.PER_TOKEN, ops.PER_TENSOR]


def linear(n: int, k: int, mode: str, dtype: torch.dtype = torch.float32) -> ops.LinearWeights:
    if mode == ops.NO_QUANT:
        return ops.LinearWeights((torch.randn(n, k) / math.sqrt(k)).to(dtype))
    weight, scale = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n) * 0.002 + 0.001
    if mode == ops.PER_TOKEN:
        return ops.LinearWeights(weight, mode, scale)
    input_scale, input_offset = torch.tensor([0.03]), torch.tensor([5.0])
    bias = (-5 * weight.long().sum(1)).to(torch.int32)
    return ops.LinearWeights(weight, mode, input_scale * scale, input_scale, input_offset, bias)


def naive_linear(x: torch.Tensor, w: ops.LinearWeights) -> torch.Tensor:
    """Steps 1-3 and 6-8 in fp64 and int64."""
    if w.quant_mode == ops.NO_QUANT:
        return (x.double() @ w.weight.double().T).float()
    assert w.scale is not None
    if w.quant_mode == ops.PER_TOKEN:
        s = x.float().abs().amax(-1, keepdim=True) / 127
        return ((x.float() / s).round().long() @ w.weight.long().T).float() * s * w.scale
    assert w.input_scale is not None and w.input_offset is not None and w.quant_bias is not None
    x_q = (x.float() / w.input_scale + w.input_offset).round().clamp(-128, 127).long()
    return (x_q @ w.weight.long().T + w.quant_bias).float() * w.scale


def naive_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.stack([row / torch.sqrt((row * row).mean() + eps) * gamma for row in x.float()])


def naive_rope(x: torch.Tensor, position: int) -> torch.Tensor:
    """Complex multiplication of the pairs (0,1), (2,3), ..."""
    angle = torch.tensor([position * 1e4 ** (-2 * i / ROPE) for i in range(ROPE // 2)], dtype=torch.float64)
    rotated = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.view_as_real(rotated).flatten(-2).float()


class Case:
    def __init__(self, qkv_a_mode: str, q_b_mode: str, dtype: torch.dtype = torch.float32) -> None:
        self.x = torch.randn(TOKENS, HIDDEN).to(dtype)
        self.positions = [0, 1, 7, 100, 3000]
        angle = torch.tensor([[p * 1e4 ** (-2 * i / ROPE) for i in range(ROPE // 2)] for p in self.positions])
        self.cos, self.sin = angle.cos(), angle.sin()
        self.qkv_a = linear(Q_LORA + KV_LORA + ROPE, HIDDEN, qkv_a_mode, dtype)
        self.q_b = linear(HEADS * (NOPE + ROPE), Q_LORA, q_b_mode, dtype)
        self.w_uk_t = (torch.randn(HEADS, NOPE, KV_LORA) / math.sqrt(NOPE)).to(dtype)
        self.q_gamma, self.kv_gamma = 1 + 0.1 * torch.randn(Q_LORA), 1 + 0.1 * torch.randn(KV_LORA)
        self.slots, self.eps, self.dtype = torch.tensor([6, 0, 11, 3, 5]), 0.5, dtype  # an eps that nobody can miss
        self.ckv = torch.full((3, 4, KV_LORA), 7.0, dtype=dtype)
        self.kpe = torch.full((3, 4, ROPE), 7.0, dtype=dtype)

    def run(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        names = ["x", "cos", "sin", "qkv_a", "q_b", "w_uk_t", "q_gamma", "kv_gamma", "slots", "ckv", "kpe", "eps"]
        return ops.mla_preprocess(*(changes.get(name, getattr(self, name)) for name in names))

    def expected(self) -> dict[str, torch.Tensor]:
        y = naive_linear(self.x, self.qkv_a).to(self.dtype)  # steps 1-3
        q, kv, k_pe = y[:, :Q_LORA], y[:, Q_LORA : Q_LORA + KV_LORA], y[:, Q_LORA + KV_LORA :]  # 4
        q_c = naive_norm(q, self.q_gamma, self.eps)  # 5
        q_in = q_c.to(self.dtype) if self.q_b.quant_mode == ops.NO_QUANT else q_c
        z = naive_linear(q_in, self.q_b).to(self.dtype).view(TOKENS, HEADS, NOPE + ROPE)  # 6-8
        ql = torch.stack(
            [(z[:, h, :NOPE].double() @ self.w_uk_t[h].double()).float() for h in range(HEADS)], dim=1
        )  # 9
        rotate = lambda v: torch.stack([naive_rope(row, p) for row, p in zip(v, self.positions, strict=True)])  # noqa: E731
        return {
            "ql_nope": ql,
            "q_pe": rotate(z[..., NOPE:]),  # 10
            "q_c": q_c,
            "ckv": naive_norm(kv, self.kv_gamma, self.eps),  # 11
            "kpe": rotate(k_pe),  # 12
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qkv_a_mode", MODES)
@pytest.mark.parametrize("q_b_mode", MODES)
def test_every_output_in_every_quant_mode(qkv_a_mode: str, q_b_mode: str, dtype: torch.dtype) -> None:
    """fp32: rounding only, 1e-5. Both modes are free of each other (FLOAT q_b after quantized qkv_a and so on).

    bf16 rounds each of the four stages once: 4 * 2^-8 relative, and absolute at magnitude 4.
    """
    case = Case(qkv_a_mode, q_b_mode, dtype)
    got = dict(zip(("ql_nope", "q_pe", "q_c"), case.run(), strict=True))
    got |= {"ckv": case.ckv.view(12, -1)[case.slots], "kpe": case.kpe.view(12, -1)[case.slots]}
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (4 * 2**-8 * 4, 4 * 2**-8)
    for name, want in case.expected().items():
        assert got[name].dtype == dtype
        torch.testing.assert_close(
            got[name].float(), want, atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_no_tokens() -> None:
    case = Case(ops.PER_TENSOR, ops.PER_TOKEN)
    ql, q_pe, q_c = case.run(x=case.x[:0], cos=case.cos[:0], sin=case.sin[:0], slots=case.slots[:0])
    assert (ql.shape, q_pe.shape, q_c.shape) == ((0, HEADS, KV_LORA), (0, HEADS, ROPE), (0, Q_LORA))


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_without_rotation(mode: str) -> None:
    """GLM-5.3-Flash: what a layer with rotated dims gives, but for them."""
    case = Case(mode, ops.NO_QUANT)
    ql, _, q_c = case.run()
    ckv, none = torch.zeros_like(case.ckv), torch.zeros(TOKENS, 0)
    rows = case.qkv_a._replace(
        weight=case.qkv_a.weight[:-ROPE],
        scale=None if case.qkv_a.scale is None else case.qkv_a.scale[:-ROPE],
        quant_bias=None if case.qkv_a.quant_bias is None else case.qkv_a.quant_bias[:-ROPE],
    )
    q_b = ops.LinearWeights(case.q_b.weight.view(HEADS, NOPE + ROPE, -1)[:, :NOPE].flatten(0, 1))
    got = case.run(cos=none, sin=none, qkv_a=rows, q_b=q_b, ckv=ckv, kpe=torch.zeros(3, 4, 0))
    assert got[1].shape == (TOKENS, HEADS, 0)
    torch.testing.assert_close((got[0], got[2]), (ql, q_c), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ckv.view(12, -1)[case.slots], case.ckv.view(12, -1)[case.slots], atol=1e-6, rtol=1e-6)
