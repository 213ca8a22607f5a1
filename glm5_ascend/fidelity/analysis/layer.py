"""One layer: calibrate, smooth, round unit by unit, measure; the same steps as the quantizer's, nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.fidelity.analysis.experts import ExpertNoise, ExpertReport, analyze_expert, candidates
from glm5_ascend.fidelity.analysis.measure import (
    LinearErrors,
    Outliers,
    RoundedLinear,
    errors,
    rounded,
    scale_histogram,
)
from glm5_ascend.fidelity.analysis.outliers import Unrotated, states
from glm5_ascend.fidelity.analysis.probe import Probe, energy
from glm5_ascend.fidelity.analysis.units import Unit, units
from glm5_ascend.model.spec import Linear, find, input_readers
from glm5_ascend.quantize.calibration.forward import LayerStreams, Routed, Selections, forward_layer
from glm5_ascend.quantize.calibration.row_file import RowFile, Stream
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.smoothing import search_scale
from glm5_ascend.quantize.methods.transforms import Tensors, move_scale
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.workers import Workers

#: Calibration sequences that units are rounded one by one on.
PROBE_SEQUENCES = 4


@dataclass
class LinearReport:
    """One linear of the backbone; `activations` and `weights` by state (source, rotated, smoothed)."""

    name: str
    scheme: str
    tokens: int
    errors: LinearErrors
    activations: dict[str, Outliers]
    weights: dict[str, Outliers]


@dataclass(frozen=True)
class CacheReport:
    """An INT8 indexer cache: the share of keys that it leaves as they were, and how many layers attend to them."""

    same_keys: float
    readers: int

    @property
    def lost(self) -> float:
        """Share of changed keys, counted once for every layer that attends to them."""
        return (1 - self.same_keys) * self.readers


@dataclass
class AnalyzedLayer:
    """What is known of one layer; `scales` are histograms of weight scales by type. cache: where the recipe has C8."""

    layer: int
    linears: list[LinearReport] = field(default_factory=list)
    experts: list[ExpertReport] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    cache: CacheReport | None = None

    @property
    def noise(self) -> float:
        """Energy all units of the recipe add to the stream, as if they were independent; relative."""
        return sum(unit.noise[unit.scheme] for unit in self.units)


class LayerAnalysis:
    """Args: stream, out: residual stream in front of and behind the layer; folder: for the experts' inputs."""

    def __init__(
        self,
        plan: QuantizationPlan,
        weights: FloatWeights,
        layer: int,
        stream: Stream,
        out: Stream,
        selections: Selections,
        workers: Workers,
        folder: Path,
    ) -> None:
        self.plan, self.config, self.weights, self.layer = plan, plan.config, weights, layer
        self.stream, self.out, self.selections, self.workers, self.folder = stream, out, selections, workers, folder
        self.prefix, self.parts = self.config.spec.layer_prefix(layer), self.config.backbone(layer)
        self.gains = weights.gains(self.prefix, self.parts)
        self.report = AnalyzedLayer(layer, units=list(units(plan, layer)))
        self._rotated: dict[str, Outliers] = {}
        self._behind_attention = torch.empty(0)
        self._noise: dict[str, dict[str, torch.Tensor]] = {}  # by unit and type, energy of each probed token

    def run(self, unrotated: Unrotated, expert_done: Callable[[int], None]) -> AnalyzedLayer:
        if not self.config.is_moe(self.layer):
            self._backbone(unrotated, None)
            self._relative()
            return self.report
        with RowFile(self.folder / "inputs", self.stream.tokens, self.config.hidden_size, torch.float32) as inputs:
            routed = self._backbone(unrotated, inputs)
            assert routed is not None
            self._experts(routed, expert_done)
        self._relative()
        return self.report

    def _relative(self) -> None:
        """Noise relative to the stream it is written to: the stream behind attention, or behind the whole layer.

        Keys that an indexer chooses wrongly are wrong in every layer that shares it: its noise counts once for each.
        """
        behind = torch.cat([energy(self.out.sequence(number)) for number in self._probe_numbers()])
        for unit in self.report.units:
            stream = self._behind_attention if unit.modules[0].startswith("self_attn.") else behind
            for kind, tokens in self._noise.get(unit.label, {}).items():
                times = self.config.indexer_readers(self.layer) if ".indexer." in unit.modules[0] else 1
                unit.noise[kind] = times * float((tokens / stream.clamp_min(1e-30)).mean())

    def _quantized(self) -> list[Linear]:
        return [p for p in self.parts if isinstance(p, Linear) and self._scheme(p.name) != schemes.FLOAT]

    def _scheme(self, name: str) -> str:
        return self.plan.linears[self.prefix + name].scheme

    def _backbone(self, unrotated: Unrotated, inputs: RowFile | None) -> Routed | None:
        """Everything but the routed experts; what they need to go on."""
        tensors = self.weights.load_all(self.prefix, self.parts, self.gains, self.workers)
        reader = input_readers(self.parts)
        searches = list(self.plan.smoothing(self.layer, self.config.subgraphs(self.layer)))
        wanted = {part.name for part in self._quantized()} | {search.subgraph.targets[0] for search in searches}
        streams = LayerStreams(self.stream, self.out, self.selections)
        seen, routed = forward_layer(
            self.config, self.layer, tensors, streams, inputs,
            record={reader[name] for name in wanted}, workers=self.workers,
        )  # fmt: skip
        self._rotated = {part.name: Outliers.of(tensors[part.tensor_name]) for part in self._quantized()}
        smooth: Tensors = {}
        for search in searches:
            targets = search.subgraph.targets
            some = [tensors[f"{target}.weight"] for target in targets if self._scheme(target) != schemes.FLOAT]
            scale = search_scale(some, seen[reader[targets[0]]], search)
            scale = move_scale(tensors, self.config, search.subgraph, scale)
            smooth |= dict.fromkeys(targets, scale)
        probe = Probe(self.config, self.layer, tensors, [self._probed(i) for i in self._probe_numbers()])
        for unit in self.report.units:
            if not unit.experts:
                self._unit(unit, tensors, {name: seen[reader[name]] for name in unit.modules}, smooth, probe, unrotated)
        self._behind_attention = probe.energy
        if self.layer in self.plan.cache_layers() and (same := probe.same_keys()) is not None:
            self.report.cache = CacheReport(same, self.config.indexer_readers(self.layer))
        return routed

    def _weight_states(self, name: str, smoothed: torch.Tensor) -> dict[str, Outliers]:
        source = Outliers.of(self.weights.source.read(f"{self.prefix}{name}.weight"))
        return {"source": source, "rotated": self._rotated[name], "smoothed": Outliers.of(smoothed)}

    def _probe_numbers(self) -> range:
        return range(min(PROBE_SEQUENCES, len(self.stream.lengths)))

    def _probed(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        shared = None if self.config.has_indexer(self.layer) else self.selections.load(number)
        return self.stream.sequence(number), shared

    def _unit(
        self, unit: Unit, tensors: Tensors, seen: dict[str, InputStatistics], smooth: Tensors, probe: Probe,
        unrotated: Unrotated,
    ) -> None:  # fmt: skip
        made: dict[str, RoundedLinear] = {}
        for name in unit.modules:
            weight, planned = tensors[f"{name}.weight"], self.plan.linears[self.prefix + name]
            rows, part = seen[name].rows, find(self.parts, name)
            x = rows if name not in smooth else rows / smooth[name]
            state = planned.method.prepare(x, planned.steps)
            made[name] = linear = rounded(
                name, weight, planned.scheme, planned.method, seen[name], smooth.get(name), state
            )
            assert isinstance(part, Linear)
            activations = states(unrotated(rows, part, self.gains), rows, x)
            weights = self._weight_states(name, weight)
            found = LinearReport(
                name, planned.scheme, seen[name].tokens, errors(linear, weight, x), activations, weights
            )
            self.report.linears.append(found)
            self._count(planned.scheme, scale_histogram(linear.scales))
        self._noise[unit.label] = {unit.scheme: probe.noise(made)}

    def _experts(self, routed: Routed, expert_done: Callable[[int], None]) -> None:
        unit = next((unit for unit in self.report.units if unit.experts), None)
        kinds = candidates(unit.scheme) if unit is not None else ()
        probed = sum(self.stream.lengths[:PROBE_SEQUENCES])
        change = {kind: torch.zeros(probed, self.config.hidden_size) for kind in kinds}

        def one(expert: int) -> ExpertNoise:
            return analyze_expert(self.plan, self.weights, self.layer, expert, self.gains, routed, kinds, probed)

        for found in self.workers.map(one, range(self.config.n_routed_experts)):
            self.report.experts.append(found.report)
            for kind in kinds:
                change[kind].index_add_(0, found.tokens, found.change[kind])
            if kinds:
                self._count(kinds[0], found.scales[kinds[0]])
            expert_done(found.report.expert)
        if unit is not None:
            self._noise[unit.label] = {kind: energy(change[kind]) for kind in kinds}

    def _count(self, scheme: str, histogram: torch.Tensor) -> None:
        self.report.scales[scheme] = self.report.scales.get(scheme, torch.zeros_like(histogram)) + histogram
