"""One routed expert: its tokens, its errors, and the noise that its rounding adds to the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.fidelity.analysis.measure import RoundedLinear, relative_error, round_linear
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.layers import swiglu
from glm5_ascend.quantize.calibration.forward import Routed
from glm5_ascend.quantize.methods.input_statistics import InputStatistics, spread
from glm5_ascend.quantize.methods.transforms import Tensors
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.expert import smooth_expert
from glm5_ascend.quantize.run.source_weights import FloatWeights

#: Tokens of an expert on which its errors are measured.
EXPERT_ROWS = 128


@dataclass
class ExpertReport:
    """One expert. output_error: of the whole expert, relative, by type; empty where it saw no token."""

    expert: int
    tokens: int
    output_error: dict[str, float] = field(default_factory=dict)


@dataclass
class ExpertNoise:
    """Change of the layer's output by one expert's rounding: for the probe's `tokens`, by type, [tokens, hidden]."""

    report: ExpertReport
    tokens: torch.Tensor
    change: dict[str, torch.Tensor]


def expert_schemes(scheme: str) -> tuple[str, ...]:
    """Types to try for experts: the recipe's, and INT8 where the recipe's is INT4."""
    return (scheme, schemes.W8A8_DYNAMIC) if scheme == schemes.W4A8_DYNAMIC else (scheme,)


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
    report = ExpertReport(expert, smoothed.inputs.down.tokens)
    token, slot = torch.where(routed.ids == expert)
    sample = routed.inputs.rows(spread(token, EXPERT_ROWS))
    share = routed.weight[token, slot]
    token, share = token[token < probed], share[token < probed]
    probe = routed.inputs.rows(token)
    weights = [tensors[linear.tensor_name] for linear in linears]
    probe_output, sample_output = (_float_output(plan.config, weights, x) for x in (probe, sample))
    change: dict[str, torch.Tensor] = {}
    for scheme in types:
        rounded = [
            round_linear(
                linear.name, weight, scheme, plan.linears[prefix + linear.name].method,
                InputStatistics(1, 0), None, smoothed.states.get(linear.name),
            )
            for linear, weight in zip(linears, weights, strict=True)
        ]  # fmt: skip
        change[scheme] = (_rounded_output(plan.config, rounded, probe) - probe_output) * share[:, None]
        if len(sample):
            sampled = _rounded_output(plan.config, rounded, sample)
            report.output_error[scheme] = relative_error(sampled, sample_output)
    return ExpertNoise(report, token, change)


def _float_output(config: ModelConfig, weights: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up, down = weights
    return swiglu(config, x @ gate.T, x @ up.T) @ down.T


def _rounded_output(config: ModelConfig, linears: Sequence[RoundedLinear], x: torch.Tensor) -> torch.Tensor:
    gate, up, down = linears
    return down(swiglu(config, gate(x), up(x)))
