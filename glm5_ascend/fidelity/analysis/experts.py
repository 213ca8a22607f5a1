"""One routed expert: the noise that its rounding adds to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from glm5_ascend.fidelity.analysis.measure import round_linear
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.layers import swiglu
from glm5_ascend.quantize.calibration.forward import Routed
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.transforms import Tensors
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.expert import smooth_expert
from glm5_ascend.quantize.run.source_weights import FloatWeights


@dataclass
class ExpertNoise:
    """What rounding one expert changes.

    Attributes:
        seen: number of tokens that the router sent to it.
        tokens: int64, those of the probe. change: of the layer's output for them, by type, [tokens, hidden].
    """

    expert: int
    seen: int
    tokens: torch.Tensor
    change: dict[str, torch.Tensor]


def analyze_expert(
    plan: QuantizationPlan,
    source: FloatWeights,
    layer: int,
    expert: int,
    gains: Tensors,
    routed: Routed,
    types: tuple[str, ...],
    probed: int,
) -> ExpertNoise:
    """Run, smooth and round one expert.

    Args:
        types: types to try, the recipe's first. probed: number of tokens of the probe, which are the first.
    """
    prefix, linears = plan.config.spec.layer_prefix(layer), plan.config.spec.expert_linears(expert)
    tensors = source.load_all(prefix, linears, gains)
    smoothed = smooth_expert(plan, tensors, layer, expert, routed)
    token, slot = torch.where(routed.ids == expert)
    share = routed.weight[token, slot]
    token, share = token[token < probed], share[token < probed]
    probe = routed.inputs.rows(token)
    weights = [tensors[linear.tensor_name] for linear in linears]
    exact = _output(plan.config, [partial(torch.nn.functional.linear, weight=weight) for weight in weights], probe)
    change: dict[str, torch.Tensor] = {}
    for scheme in types:
        rounded = [
            round_linear(
                linear.name, weight, scheme, plan.linears[prefix + linear.name].method,
                InputStatistics(1, 0), None, smoothed.states.get(linear.name),
            )
            for linear, weight in zip(linears, weights, strict=True)
        ]  # fmt: skip
        change[scheme] = (_output(plan.config, rounded, probe) - exact) * share[:, None]
    return ExpertNoise(expert, smoothed.inputs.down.tokens, token, change)


def _output(
    config: ModelConfig, linears: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> torch.Tensor:
    gate, up, down = linears
    return down(swiglu(config, gate(x), up(x)))
