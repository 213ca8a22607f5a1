"""Quantization-aware training: what `rounding` stores and the server computes, with gradients.

The numbers are those of the one quantizer and of the one int8 matmul, called here; only the gradients are this file's:

    weight      straight through where rounding did not clip, 0 where it did
    activation  straight through: a per-token scale clips nothing

Weights are [N, K], one row per output channel, in fp32 or bf16; schemes are W8A8_DYNAMIC and W4A8_DYNAMIC (N even).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.method import LARGEST, Method
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.rounding import quantize_linear, weight_bits
from glm5_kernels import ops

#: The rounding does not depend on the module's name, only the columns of scale_bias do.
_MODULE = "fake_quant"


class FakeWeight(NamedTuple):
    """A weight as the server holds it.

    dequantized: fp32 [N, K], integers times scale, with a gradient.
    integers: int8 [N, K].
    scale: fp32 [N, 1], as the engine holds it.
    """

    dequantized: torch.Tensor
    integers: torch.Tensor
    scale: torch.Tensor


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, scheme: str, method: Method
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stored = quantize_linear(_MODULE, weight.float(), scheme, method).stored
        integers, scale = schemes.integer_weight(scheme, stored), stored["weight_scale"]
        whole, largest = (weight.float() / scale).round(), LARGEST[weight_bits(scheme)]
        ctx.save_for_backward((whole >= -largest - 1) & (whole <= largest))
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(integers, scale)
        return schemes.dequantize(scheme, stored), integers, scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0.0).to(ctx.dtype), None, None


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        integers, scale = ops.quantize_per_token(x.reshape(-1, x.shape[-1]))
        return (integers.float() * scale).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].to(ctx.dtype)


class _Product(torch.autograd.Function):
    """The server's output, with the gradient of the float product of what both sides stand for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dequantized: torch.Tensor, served: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, dequantized)
        return served.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x, dequantized), grad = ctx.saved_tensors, grads[0].float()
        of_weight = grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        return grad @ dequantized, of_weight, None


def fake_quant_weight(weight: torch.Tensor, scheme: str, method: Method = MINMAX) -> FakeWeight:
    """Round a weight [N, K], fp32 or bf16, in training.

    Args:
        scheme: W8A8_DYNAMIC or W4A8_DYNAMIC.
        method: finds the scale: `MINMAX` or `SSZ`.

    Raises:
        ValueError: another scheme.
    """
    if scheme not in (schemes.W8A8_DYNAMIC, schemes.W4A8_DYNAMIC):
        raise ValueError(f"fake quantization knows W8A8_DYNAMIC and W4A8_DYNAMIC, not {scheme}")
    return FakeWeight(*_Weight.apply(weight, scheme, method))  # type: ignore[no-untyped-call]


def fake_quant_activation(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] -> fp32 [..., K]: int8 with one scale per token, as `ops.int8_linear` rounds its input."""
    rounded: torch.Tensor = _Activation.apply(x)  # type: ignore[no-untyped-call]
    return rounded


def fake_quant_linear(x: torch.Tensor, weight: FakeWeight) -> torch.Tensor:
    """x [..., K] -> [..., N] in x's dtype: the server's integer product, bit for bit, with a gradient."""
    integer_weight = ops.LinearWeights(weight.integers, ops.PER_TOKEN, weight.scale.flatten())
    served = ops.int8_linear(x.detach(), integer_weight)
    product: torch.Tensor = _Product.apply(fake_quant_activation(x), weight.dequantized, served)  # type: ignore[no-untyped-call]
    return product
