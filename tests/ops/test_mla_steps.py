"""Each of MLA preprocess's 13 steps on its own: from what the step before it gave, by a formula written out here."""

from __future__ import annotations

import math

import pytest
import torch

from glm5_kernels import ops
from glm5_kernels.mla_preprocess.reference import Steps, mla_preprocess, steps

T, D, RQ, R, P, H, N = 4, 16, 12, 8, 6, 2, 5
EPS = 1e-5
MODES = [ops.NO_QUANT, ops.PER_TOKEN, ops.PER_TENSOR]


def linear(n: int, k: int, mode: str) -> ops.LinearWeights:
    if mode == ops.NO_QUANT:
        return ops.LinearWeights(torch.randn(n, k))
    weight, scale = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n) * 0.01
    if mode == ops.PER_TOKEN:
        return ops.LinearWeights(weight, mode, scale)
    bias = torch.randint(-500, 500, (n,), dtype=torch.int32)
    return ops.LinearWeights(weight, mode, scale, torch.tensor([0.05]), torch.tensor([-7.0]), bias)


class Layer:
    def __init__(self, first: str, second: str) -> None:
        self.x, angle = torch.randn(T, D), torch.rand(T, P // 2) * 6
        self.cos, self.sin = angle.cos(), angle.sin()
        self.qkv_a, self.q_b = linear(RQ + R + P, D, first), linear(H * (N + P), RQ, second)
        self.w_uk_t, self.q_gamma, self.kv_gamma = torch.randn(H, N, R), torch.rand(RQ) + 0.5, torch.rand(R) + 0.5

    @property
    def operands(self) -> tuple[object, ...]:
        return self.x, self.cos, self.sin, self.qkv_a, self.q_b, self.w_uk_t, self.q_gamma, self.kv_gamma


@pytest.fixture(params=[(a, b) for a in MODES for b in MODES], ids=lambda modes: "-".join(mode[:9] for mode in modes))
def made(request: pytest.FixtureRequest) -> tuple[Layer, Steps]:
    layer = Layer(*request.param)
    return layer, steps(*layer.operands, EPS)  # type: ignore[arg-type]


def quantized(x: torch.Tensor, w: ops.LinearWeights) -> list[list[float]]:
    """Step 1 and 6, a number at a time; python rounds half to even."""
    if w.quant_mode == ops.NO_QUANT:
        return x.tolist()  # type: ignore[no-any-return]
    out = []
    for row in x:
        if w.quant_mode == ops.PER_TOKEN:
            codes = [round(float(value / (row.abs().max() / 127))) for value in row]
        else:
            assert w.input_scale is not None and w.input_offset is not None
            codes = [round(float(value / w.input_scale + w.input_offset)) for value in row]
        out.append([min(max(code, -128), 127) for code in codes])
    return out


def multiplied(codes: torch.Tensor, w: ops.LinearWeights) -> torch.Tensor:
    """Step 2 and 7."""
    if w.quant_mode == ops.NO_QUANT:
        return (codes.double() @ w.weight.double().T).float()
    y = torch.einsum("tk,nk->tn", codes.long(), w.weight.long())
    return (y if w.quant_bias is None else y + w.quant_bias).int()


def scaled(y: torch.Tensor, source: torch.Tensor, w: ops.LinearWeights) -> torch.Tensor:
    """Step 3 and 8."""
    if w.scale is None:
        return y
    token = source.abs().amax(1, keepdim=True) / 127 if w.quant_mode == ops.PER_TOKEN else torch.ones(1)
    return y.float() * token * w.scale


def normed(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * gamma / math.sqrt(float((row * row).mean()) + EPS) for row in x])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for i in range(P // 2):
        a, b, c, s = x[..., 2 * i], x[..., 2 * i + 1], cos[:, i], sin[:, i]
        c, s = c.view(T, *[1] * (a.dim() - 1)), s.view(T, *[1] * (a.dim() - 1))
        out[..., 2 * i], out[..., 2 * i + 1] = a * c - b * s, b * c + a * s
    return out


def test_steps_1_and_6_quantize(made: tuple[Layer, Steps]) -> None:
    layer, got = made
    assert got.x_q.tolist() == quantized(layer.x, layer.qkv_a)
    assert got.q_c_q.tolist() == quantized(got.q_c, layer.q_b)


def test_steps_2_and_7_multiply(made: tuple[Layer, Steps]) -> None:
    """Integers exactly."""
    layer, got = made
    for result, codes, w in ((got.y_q, got.x_q, layer.qkv_a), (got.z_q, got.q_c_q, layer.q_b)):
        torch.testing.assert_close(result, multiplied(codes, w), rtol=1e-6, atol=1e-6 if w.scale is None else 0)


def test_steps_3_and_8_scale_back(made: tuple[Layer, Steps]) -> None:
    layer, got = made
    torch.testing.assert_close(got.y, scaled(got.y_q, layer.x, layer.qkv_a))
    torch.testing.assert_close(got.z.flatten(1), scaled(got.z_q, got.q_c, layer.q_b))


def test_step_4_splits(made: tuple[Layer, Steps]) -> None:
    _, got = made
    assert torch.equal(torch.cat([got.q, got.kv, got.k_pe], 1), got.y)
    assert (got.q.shape[1], got.kv.shape[1], got.k_pe.shape[1]) == (RQ, R, P)


def test_steps_5_and_11_normalise(made: tuple[Layer, Steps]) -> None:
    layer, got = made
    torch.testing.assert_close(got.q_c, normed(got.q, layer.q_gamma))
    torch.testing.assert_close(got.ckv, normed(got.kv, layer.kv_gamma))


def test_step_9_absorbs(made: tuple[Layer, Steps]) -> None:
    layer, got = made
    torch.testing.assert_close(got.ql_nope, torch.einsum("thn,hnr->thr", got.z[..., :N], layer.w_uk_t))


def test_steps_10_and_12_rotate(made: tuple[Layer, Steps]) -> None:
    layer, got = made
    torch.testing.assert_close(got.q_pe, rotated(got.z[..., N:], layer.cos, layer.sin))
    torch.testing.assert_close(got.kpe, rotated(got.k_pe, layer.cos, layer.sin))


def test_step_13_writes_the_caches(made: tuple[Layer, Steps]) -> None:
    layer, got = made
    slots, ckv, kpe = torch.tensor([5, -1, 0, 2]), torch.full((2, 3, R), 7.0), torch.full((2, 3, P), 7.0)
    mla_preprocess(*layer.operands, slots, ckv, kpe, EPS)  # type: ignore[arg-type]
    for cache, rows in ((ckv.view(6, R), got.ckv), (kpe.view(6, P), got.kpe)):
        assert torch.equal(cache[[5, 0, 2]], rows[[0, 2, 3]])
        assert bool((cache[[1, 3, 4]] == 7).all())
