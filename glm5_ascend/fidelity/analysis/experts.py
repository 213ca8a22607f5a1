"""One routed expert after the other: its tokens, its errors, and what its rounding adds to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from glm5_ascend.checkpoint import schemes
from glm5_ascend.fidelity.analysis.measure import (
    LinearErrors,
    Outliers,
    RoundedLinear,
    errors,
    rounded,
    scale_histogram,
)
from glm5_ascend.fidelity.analysis.outliers import states
from glm5_ascend.quantize.calibration.forward import Routed
from glm5_ascend.quantize.methods.input_statistics import InputStatistics, spread
from glm5_ascend.quantize.methods.transforms import Tensors
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.expert import smooth_expert
from glm5_ascend.quantize.run.source_weights import FloatWeights

#: Tokens of an expert its errors are measured on.
EXPERT_ROWS = 128
#: Experts of a layer whose weights' outliers are looked at, evenly spaced: the source is read once more for them.
OUTLIER_EXPERTS = 8


@dataclass
class ExpertReport:
    """One expert; errors are empty where it saw no token.

    Attributes:
        linears: by "gate_proj", "up_proj", "down_proj", as the recipe rounds them.
        output: relative error of the whole expert's output, by type.
        weights, activations: outliers by linear and state, for some of the experts.
    """

    expert: int
    tokens: int
    linears: dict[str, LinearErrors] = field(default_factory=dict)
    output: dict[str, float] = field(default_factory=dict)
    weights: dict[str, dict[str, Outliers]] = field(default_factory=dict)
    activations: dict[str, dict[str, Outliers]] = field(default_factory=dict)


@dataclass
class ExpertNoise:
    """What one expert's rounding changes: for the probe's `tokens`, by type, [tokens, hidden]."""

    report: ExpertReport
    tokens: torch.Tensor
    change: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]


def analyze_expert(
    plan: QuantizationPlan,
    source: FloatWeights,
    layer: int,
    expert: int,
    gains: Tensors,
    routed: Routed,
    kinds: tuple[str, ...],
    probed: int,
) -> ExpertNoise:
    """Run, smooth and round one expert.

    Args:
        kinds: types to try, the recipe's first. probed: the first so many tokens are the probe.
    """
    prefix, parts = plan.config.spec.layer_prefix(layer), plan.config.spec.expert_linears(expert)
    tensors = source.load_all(prefix, parts, gains)
    look = expert % max(1, plan.config.n_routed_experts // OUTLIER_EXPERTS) == 0
    before = {name: Outliers.of(tensor) for name, tensor in tensors.items()} if look else {}
    smoothed = smooth_expert(plan, tensors, layer, expert, routed)
    seen, states_of = smoothed.inputs.down, smoothed.states
    smooth = torch.ones(plan.config.moe_intermediate_size) if smoothed.scale is None else smoothed.scale
    report = ExpertReport(expert, seen.tokens)
    token, slot = torch.where(routed.ids == expert)
    sample = routed.inputs.gather(spread(token, EXPERT_ROWS))
    share = routed.weight[token, slot]
    token, share = token[token < probed], share[token < probed]
    probe = routed.inputs.gather(token)
    names = [part.tensor_name for part in parts]
    methods = [plan.linears[prefix + part.name].method for part in parts]
    gate, up, down = (tensors[name] for name in names)
    change: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    nobody = InputStatistics(1, 0)
    probe_output, sample_output = (_float(gate, up, down, rows) for rows in (probe, sample))
    for kind in kinds:
        made = [
            rounded(part.name, tensors[name], kind, method, nobody, None, states_of.get(part.name))
            for part, name, method in zip(parts, names, methods, strict=True)
        ]
        scales[kind] = torch.stack([scale_histogram(each.scales) for each in made]).sum(0)
        change[kind] = (_run(made, probe) - probe_output) * share[:, None]
        if len(sample):
            error = (_run(made, sample) - sample_output).norm()
            report.output[kind] = float(error / sample_output.norm().clamp_min(1e-30))
            if kind == kinds[0]:
                read = F.silu(sample @ gate.T) * (sample @ up.T)
                for part, linear, rows in zip(parts, made, (sample, sample, read), strict=True):
                    weight = tensors[part.tensor_name]
                    report.linears[part.name.rsplit(".", 1)[1]] = errors(linear, weight, rows)
    if look:
        for part in parts:
            name, raw = part.tensor_name, source.source.read(prefix + part.tensor_name)
            known = {"source": Outliers.of(raw), "rotated": before[name], "smoothed": Outliers.of(tensors[name])}
            report.weights[part.name.rsplit(".", 1)[1]] = known
        if seen.tokens:
            report.activations["down_proj"] = states(seen.rows, seen.rows, seen.rows / smooth)
    return ExpertNoise(report, token, change, scales)


def candidates(scheme: str) -> tuple[str, ...]:
    """Types to round experts to: the recipe's, and INT8 where that is not it already."""
    return (scheme, schemes.W8A8_DYNAMIC) if scheme == schemes.W4A8_DYNAMIC else (scheme,)


def _float(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _run(made: list[RoundedLinear], x: torch.Tensor) -> torch.Tensor:
    gate, up, down = made
    return down(F.silu(gate(x)) * up(x))
