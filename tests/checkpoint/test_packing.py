"""INT4 packing and scale_bias, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.schemes import scale_bias, unpack_int4
from tests.verify.support.integers import pack


def test_bytes_by_hand() -> None:
    """0xDC -> -4, -3; 0x20 -> 0, 2; 0x3B -> -5, 3: even row in the low nibble, odd row in the high one."""
    packed = torch.tensor([[-36, 32, 59]], dtype=torch.int8)
    assert torch.equal(unpack_int4(packed), torch.tensor([[-4, 0, -5], [-3, 2, 3]], dtype=torch.int8))
    every = unpack_int4(torch.arange(-128, 128).to(torch.int8)[None])
    assert len({*zip(*every.tolist(), strict=True)}) == 256 and every.unique().tolist() == list(range(-8, 8))


def test_scale_bias_by_hand() -> None:
    """Row of 128 columns, 16 chunks of 8; the first chunk sums to -1: 8 * 0.0279541015625 * -1."""
    q = torch.zeros(8, 128, dtype=torch.int8)
    q[0, :8] = torch.tensor([-4, 0, -5, 1, 2, 3, 1, 1])
    scale = torch.full((8, 1), 0.0279541015625)
    bias = scale_bias(q, scale, 16)
    assert bias.shape == (8, 16)
    assert float(bias[0, 0]) == -0.2236328125
    assert not bias[1:].any() and not bias[0, 1:].any()


def test_only_down_proj_has_partial_sums() -> None:
    shapes = {
        name: {s.suffix: s.shape for s in schemes.stored_tensors(schemes.W4A8_DYNAMIC, (32, 64), name)}
        for name in ("x.gate_proj", "x.up_proj", "x.down_proj")
    }
    assert [shapes[name]["scale_bias"] for name in shapes] == [(32, 1), (32, 1), (32, 16)]
    assert all(shape["weight"] == (16, 64) for shape in shapes.values())


def test_dequantize_means_the_same_for_every_scheme() -> None:
    q = torch.randint(-8, 8, (8, 16)).to(torch.int8)
    scale = torch.rand(8, 1) + 0.1
    expected = q.float() * scale
    stored = {"weight": q, "weight_scale": scale}
    assert torch.equal(schemes.dequantize(schemes.W8A8_DYNAMIC, stored), expected)
    packed = {"weight": pack(q[0::2], q[1::2])}
    assert torch.equal(schemes.dequantize(schemes.W4A8_DYNAMIC, stored | packed), expected)
    static = {"weight": q, "input_scale": torch.tensor([0.5]), "deq_scale": 0.5 * scale.flatten()}
    torch.testing.assert_close(schemes.dequantize(schemes.W8A8, static), expected)
    assert torch.equal(schemes.dequantize(schemes.FLOAT, {"weight": expected.bfloat16()}), expected.bfloat16().float())
    with pytest.raises(ValueError, match="unknown scheme"):
        schemes.stored_tensors("W2A8", (8, 16), "x")
