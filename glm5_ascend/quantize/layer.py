"""One layer through the whole chain: read, fuse, rotate, calibrate, smooth, round, write, free.

The forward pass uses the *float* (rotated, not yet rounded) weights. Every layer then sees the inputs the original
model would produce, so a layer's result does not depend on how the layers before it were rounded: the order of
experts, a restart, or another recipe for one layer change nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint import structure as S
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.checkpoint.structure import Linear, Vector
from glm5_ascend.model import layers as M
from glm5_ascend.quantize.plan import Plan, SmoothPlan
from glm5_ascend.quantize.rotation import Rotations
from glm5_ascend.quantize.rounding import quantize_linear
from glm5_ascend.quantize.smoothing import flex_awq_ssz, flex_smooth_quant
from glm5_ascend.quantize.statistics import InputStatistics
from glm5_ascend.quantize.transforms import Tensors, fuse_norms, gains_of, move_scale, rotate

#: Rows of an input kept for the smoothing searches.
SEARCH_ROWS = 512
#: An expert that saw fewer tokens keeps its scales: a search on them would fit noise. It is reported.
COLD_EXPERT_TOKENS = 8

Write = Callable[[str, torch.Tensor], None]


@dataclass
class LayerReport:
    """What is worth knowing about one finished layer."""

    layer: int
    cold_experts: list[int] = field(default_factory=list)
    squared_error: dict[str, float] = field(default_factory=dict)  # by scheme: sum of squares of W_deq - W
    squared_weight: dict[str, float] = field(default_factory=dict)

    def add(self, scheme: str, error: float, weight: float) -> None:
        self.squared_error[scheme] = self.squared_error.get(scheme, 0.0) + error
        self.squared_weight[scheme] = self.squared_weight.get(scheme, 0.0) + weight

    def relative_errors(self) -> dict[str, float]:
        """rms(W_deq - W) / rms(W) over all linears of a scheme, W after rotation and smoothing."""
        return {k: (self.squared_error[k] / max(self.squared_weight[k], 1e-30)) ** 0.5 for k in self.squared_error}


class FloatLayer:
    """`LayerWeights` over a dict of fp32 tensors, recording the inputs of the named linears."""

    def __init__(self, tensors: Tensors, record: Iterable[str] = ()) -> None:
        self.tensors = tensors
        self.statistics = {name: InputStatistics(SEARCH_ROWS) for name in record}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name in self.statistics:
            self.statistics[name].add(x)
        return x @ self.tensors[f"{name}.weight"].T

    def vector(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class LayerQuantizer:
    """Quantizes layer after layer; holds the residual stream of all calibration sequences between calls."""

    def __init__(
        self, plan: Plan, rotations: Rotations | None, write: Write, on_expert: Callable[[int, int], None]
    ) -> None:
        self.plan, self.config, self.source = plan, plan.config, plan.source
        self.rotations, self.write, self.on_expert = rotations, write, on_expert
        self.hidden: list[torch.Tensor] = []  # one [S, hidden] per sequence, in the rotated basis
        self.selections: list[torch.Tensor | None] = []
        self._layer_prefix = ""  # of the layer at hand

    def start(self, embeddings: list[torch.Tensor]) -> None:
        """Begin with the (rotated) embeddings of the sequences."""
        self.hidden, self.selections = embeddings, [None] * len(embeddings)

    def run(self, layer: int, mtp_inputs: Callable[[FloatLayer], list[torch.Tensor]] | None = None) -> LayerReport:
        """Quantize and write one layer. `mtp_inputs` computes an MTP layer's input from its own weights."""
        report = LayerReport(layer)
        self._layer_prefix = S.layer_prefix(layer)
        parts = S.backbone(self.config, layer)
        tensors = read_parts(self.source, self._layer_prefix, parts)
        gains = gains_of(tensors, parts)
        self._transform(tensors, parts, gains)
        searches = list(self.plan.smoothing(layer, S.subgraphs(self.config, layer)))
        weights = FloatLayer(tensors, self._recorded(parts, searches))
        routed: _Routed | None = None
        calibrated = layer <= self.plan.last_calibrated_layer and bool(self.hidden)
        if calibrated:
            if mtp_inputs is not None:
                self.start(mtp_inputs(weights))
            routed = self._forward(layer, weights)
        scales = {s.subgraph.targets: self._smooth(tensors, s, weights.statistics) for s in searches if calibrated}
        if self.config.is_moe(layer):
            self._experts(layer, gains, routed, report)
        if routed is not None:
            self._add_to_stream(routed.out)
        self._write_parts(self._layer_prefix, parts, tensors, weights.statistics, scales, report)
        return report

    # -- transforms ---------------------------------------------------------------------------------------------

    def _transform(self, tensors: Tensors, parts: Iterable[Linear | Vector], gains: Tensors) -> None:
        if self.rotations is not None:
            fuse_norms(tensors, parts, gains)
            rotate(tensors, parts, self.rotations)

    def _smooth(self, tensors: Tensors, search: SmoothPlan, statistics: dict[str, InputStatistics]) -> torch.Tensor:
        seen = statistics[search.subgraph.targets[0]]
        weights = [tensors[f"{target}.weight"] for target in self._quantized(search)]
        if search.algorithm == "flex_awq_ssz":
            scale = flex_awq_ssz(weights[0], seen, search.scheme, search.steps)
        else:
            scale = flex_smooth_quant(weights, seen, search.scheme)
        return move_scale(tensors, self.config, search.subgraph, scale)

    def _quantized(self, search: SmoothPlan) -> list[str]:
        """Targets whose rounding the search should care about: FLOAT ones lose nothing."""
        layer = self._layer_prefix
        return [t for t in search.subgraph.targets if self.plan.linears[layer + t].scheme != schemes.FLOAT]

    # -- forward --------------------------------------------------------------------------------------------------

    def _recorded(self, parts: Iterable[Linear | Vector], searches: list[SmoothPlan]) -> set[str]:
        static = {p.name for p in parts if self._scheme(p) == schemes.W8A8}
        return static | {search.subgraph.targets[0] for search in searches}

    def _scheme(self, part: Linear | Vector) -> str:
        return self.plan.linears[self._layer_prefix + part.name].scheme if isinstance(part, Linear) else schemes.FLOAT

    def _forward(self, layer: int, weights: FloatLayer) -> _Routed:
        """Attention and everything of the MLP but the routed experts; leaves their inputs in the result."""
        c, eps = self.config, self.config.rms_norm_eps
        for i, hidden in enumerate(self.hidden):
            x = M.rms_norm(hidden, weights.vector("input_layernorm.weight"), eps)
            out, self.selections[i] = M.attention(c, weights, x, self.selections[i], c.has_indexer(layer))
            self.hidden[i] = hidden + out
        x = M.rms_norm(torch.cat(self.hidden), weights.vector("post_attention_layernorm.weight"), eps)
        if not c.is_moe(layer):
            return _Routed(x, M.mlp(weights, "mlp", x), x[:, :0], torch.zeros(len(x), 0, dtype=torch.int64))
        weight, ids = M.route(c, weights, x)
        return _Routed(x, M.mlp(weights, "mlp.shared_experts", x), weight, ids)

    def _add_to_stream(self, out: torch.Tensor) -> None:
        pieces = out.split([len(hidden) for hidden in self.hidden])
        self.hidden = [hidden + piece for hidden, piece in zip(self.hidden, pieces, strict=True)]

    # -- experts --------------------------------------------------------------------------------------------------

    def _experts(self, layer: int, gains: Tensors, routed: _Routed | None, report: LayerReport) -> None:
        prefix = S.layer_prefix(layer)
        for expert in range(self.config.n_routed_experts):
            self.on_expert(layer, expert)
            parts = S.expert_linears(expert)
            tensors = read_parts(self.source, prefix, parts)
            self._transform(tensors, parts, gains)
            scales = {}
            if routed is not None:
                seen = self._run_expert(tensors, parts, expert, routed)
                for search in self.plan.smoothing(layer, [S.expert_subgraph(expert)]):
                    if seen.tokens < COLD_EXPERT_TOKENS:
                        report.cold_experts.append(expert)
                    else:
                        name = search.subgraph.targets[0]
                        scales[search.subgraph.targets] = self._smooth(tensors, search, {name: seen})
            self._write_parts(prefix, parts, tensors, {}, scales, report)

    def _run_expert(self, tensors: Tensors, parts: tuple[Linear, ...], expert: int, routed: _Routed) -> InputStatistics:
        """The expert's output goes to the stream, the input of its down_proj into the statistics."""
        gate, up, down = (tensors[S.tensor_name(part)] for part in parts)
        seen = InputStatistics(SEARCH_ROWS)
        token, slot = torch.where(routed.ids == expert)
        if len(token):
            x = routed.x[token]
            inner = F.silu(x @ gate.T) * (x @ up.T)
            seen.add(inner)
            routed.out.index_add_(0, token, (inner @ down.T) * routed.weight[token, slot, None])
        return seen

    # -- output ---------------------------------------------------------------------------------------------------

    def _write_parts(
        self,
        prefix: str,
        parts: Iterable[Linear | Vector],
        tensors: Tensors,
        statistics: dict[str, InputStatistics],
        scales: dict[tuple[str, ...], torch.Tensor],
        report: LayerReport,
    ) -> None:
        scale_of = {target: scale for targets, scale in scales.items() for target in targets}
        for part in parts:
            name, tensor = S.tensor_name(part), tensors[S.tensor_name(part)]
            scheme = self._scheme(part)
            if isinstance(part, Vector):
                self.write(prefix + name, tensor)
            elif scheme == schemes.FLOAT:
                self.write(prefix + name, tensor.to(self.source.dtype(prefix + name)))
            else:
                seen = statistics.get(part.name)
                activation = seen.range_after(scale_of.get(part.name)) if seen and scheme == schemes.W8A8 else None
                method = self.plan.linears[prefix + part.name].method
                stored = quantize_linear(part.name, tensor, scheme, method, activation)
                for suffix, value in stored.items():
                    self.write(f"{prefix}{part.name}.{suffix}", value)
                error = schemes.dequantize(scheme, stored) - tensor
                report.add(scheme, float(error.square().sum()), float(tensor.square().sum()))


@dataclass
class _Routed:
    """Inputs x [T, hidden] of the MLP, its output so far, and the routing of each token."""

    x: torch.Tensor
    out: torch.Tensor
    weight: torch.Tensor
    ids: torch.Tensor


def read_parts(source: SourceCheckpoint, prefix: str, parts: Iterable[Linear | Vector]) -> Tensors:
    return {S.tensor_name(part): source.read(prefix + S.tensor_name(part)) for part in parts}
