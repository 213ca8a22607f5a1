"""The calibration backward of one layer on float weights: gradients at its inputs from those at its outputs.

Weights get no gradient. What a routed expert hands back is worked out by hand, because all draws share its forward; the
rest of a layer goes through autograd, one sequence at a time. Choices (experts, keys) are constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from glm5_ascend.model import layers
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.calibration.forward import ROUTER
from glm5_ascend.quantize.calibration.product import product
from glm5_ascend.quantize.methods.transforms import Tensors


class _ProductWithGradient(torch.autograd.Function):
    """`product` with the gradient of x, by the same product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return product(grads[0], weight.T), None


class GradientLayer:
    """`LayerWeights` over a dict of fp32 tensors, with gradients of what passes through."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        if name == ROUTER:  # as in the forward
            return x @ weight.T
        made: torch.Tensor = _ProductWithGradient.apply(x, weight)  # type: ignore[no-untyped-call]
        return made

    def vector(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class Handed(NamedTuple):
    """What reaches one sequence from behind, for D draws.

    Attributes:
        stream: fp32 [D, S, hidden], at the stream behind the layer.
        inputs: fp32 [D, S, hidden], at the routed experts' inputs.
        weight: fp32 [D, S, top_k], at the weights of the chosen experts.
        ids: int64 [S, top_k], these.
    """

    stream: torch.Tensor
    inputs: torch.Tensor
    weight: torch.Tensor
    ids: torch.Tensor


def layer_gradient(
    config: ModelConfig, layer: int, tensors: Tensors, hidden: torch.Tensor, shared: torch.Tensor | None, handed: Handed
) -> torch.Tensor:
    """fp32 [D, S, hidden], the gradient at the stream `hidden` [S, hidden] in front of a MoE layer.

    Args:
        tensors: all of the layer but its routed experts.
        shared: selection bool [S, S] of the layer whose indexer this one shares.
    """
    weights = GradientLayer(tensors)
    with torch.enable_grad():
        leaf = hidden.clone().requires_grad_()
        mixed, _ = layers.attention_block(config, layer, weights, leaf, shared)
        x = layers.mlp_input(config, weights, mixed)
        score = torch.sigmoid(weights.linear(ROUTER, x))
        stream = mixed + layers.unrouted_mlp(config, layer, weights, x)
        made = [stream, x, layers.expert_weights(config, score, handed.ids)]
    found, draws = torch.empty_like(handed.stream), len(handed.stream)
    for draw in range(draws):
        given = [handed.stream[draw], handed.inputs[draw], handed.weight[draw]]
        (found[draw],) = torch.autograd.grad(made, leaf, given, retain_graph=draw + 1 < draws)
    return found


def expert_gradient(
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    behind: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a routed expert hands back on n of its tokens.

    Args:
        gate, up, down: fp32, its linears.
        x: fp32 [n, hidden], its inputs. weight: fp32 [n, 1], how the router weighs it.
        behind: fp32 [D, n, hidden], gradients at the stream it adds to.
    Returns:
        gradients at x, fp32 [D, n, hidden], and at its weight, fp32 [D, n].
    """
    gated, upper = product(x, gate), product(x, up)
    sigmoid = torch.sigmoid(gated)
    silu = gated * sigmoid
    back = product(behind, down.T)
    of_weight = (back * (silu * upper)).sum(-1)
    back *= weight
    of_gate = back * (upper * (sigmoid + silu * (1 - sigmoid)))
    return product(of_gate, gate.T) + product(back * silu, up.T), of_weight
