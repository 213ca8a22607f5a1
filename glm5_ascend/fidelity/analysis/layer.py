"""One layer: calibrate, smooth, round unit by unit, measure. The steps are the quantizer's; nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.fidelity.analysis.probe import Probe, RoundedLinear, round_linear, row_energy
from glm5_ascend.fidelity.analysis.units import Unit, fallbacks, units
from glm5_ascend.model import streams
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.layers import swiglu
from glm5_ascend.model.spec import Linear, input_readers
from glm5_ascend.quantize.calibration.forward import LayerStreams, Routed, forward_layer
from glm5_ascend.quantize.calibration.stream import Stream
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.expert import smooth_expert
from glm5_ascend.quantize.run.layer import smooth_layer
from glm5_ascend.quantize.run.source_weights import FloatWeights

#: Calibration sequences on which units are rounded one by one.
PROBE_SEQUENCES = 4


@dataclass(frozen=True)
class CacheReport:
    """An INT8 indexer cache: the share of keys that it does not change, and how many layers attend to them."""

    same_keys: float
    readers: int

    @property
    def lost(self) -> float:
        """Share of changed keys, counted once for every layer that attends to them."""
        return (1 - self.same_keys) * self.readers


@dataclass
class AnalyzedLayer:
    """Measurements of one layer.

    Attributes:
        expert_tokens: number of tokens of each routed expert.
        cache: the indexer cache, where the recipe makes it INT8.
    """

    layer: int
    expert_tokens: list[int] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    cache: CacheReport | None = None

    @property
    def noise(self) -> float:
        """Relative energy that all units of the recipe add to the stream, taken as independent."""
        return sum(unit.noise[unit.scheme] for unit in self.units)


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


class LayerAnalysis:
    """Measures one layer.

    Args:
        around: residual streams before and after the layer; the latter is written.
        advance: called with the share of the routed experts that are done.
    """

    def __init__(
        self,
        plan: QuantizationPlan,
        weights: FloatWeights,
        layer: int,
        around: LayerStreams,
        workers: Workers,
        advance: Callable[[float], object],
    ) -> None:
        self.plan, self.config, self.weights, self.layer = plan, plan.config, weights, layer
        self.around, self.workers = around, workers
        self.prefix, self.backbone = self.config.spec.layer_prefix(layer), self.config.backbone(layer)
        self.advance = advance
        self.gains = weights.gains(self.prefix, self.backbone)
        self.experts = weights.experts_ahead(layer)  # the first ones are read during calibration
        self.report = AnalyzedLayer(layer, units=list(units(plan, layer)))
        self._noise: dict[str, dict[str, torch.Tensor]] = {}  # by unit and type, energy of each probed token

    def run(self) -> AnalyzedLayer:
        attention_energy, routed = self._analyze_backbone(self.around.expert_inputs(self.config, self.layer))
        if routed is not None:
            self._analyze_experts(routed)
        self._set_relative_noise(attention_energy)
        return self.report

    def _set_relative_noise(self, attention_energy: torch.Tensor) -> None:
        """Divide noise by the energy of the stream that it is added to: after attention, or after the layer.

        Keys that an indexer selects wrongly are wrong in every layer that shares it: its noise counts once for each.
        """
        out = self.around.out
        assert out is not None
        layer_energy = torch.cat([row_energy(out.sequence(index)) for index in self._probe_sequences()])
        for unit in self.report.units:
            energy = attention_energy if unit.modules[0].startswith("self_attn.") else layer_energy
            for scheme, noise in self._noise.get(unit.label, {}).items():
                times = self.config.indexer_readers(self.layer) if ".indexer." in unit.modules[0] else 1
                unit.noise[scheme] = times * float((noise / energy.clamp_min(1e-30)).mean())

    def _analyze_backbone(self, inputs: Stream | None) -> tuple[torch.Tensor, Routed | None]:
        """Analyze everything but the routed experts; returns the energy after attention, and the experts' inputs."""
        tensors = self.weights.load_all(self.prefix, self.backbone, self.gains, self.workers)
        reader = input_readers(self.backbone)
        linears = [weight.name for weight in self.backbone if isinstance(weight, Linear)]
        quantized = {name for name in linears if self.plan.linears[self.prefix + name].scheme != schemes.FLOAT}
        searches = list(self.plan.smoothing(self.layer, self.config.subgraphs(self.layer)))
        names = quantized | {search.subgraph.targets[0] for search in searches}
        by_input, routed = forward_layer(
            self.config, self.layer, tensors, self.around, inputs,
            record={reader[name] for name in names}, workers=self.workers,
        )  # fmt: skip

        statistics = {name: by_input[reader[name]] for name in names}
        smooth = smooth_layer(self.plan, self.layer, searches, tensors, statistics, self.workers)
        probed = [self._probed(index) for index in self._probe_sequences()]
        probe = Probe(self.config, self.layer, tensors, probed, self.workers)

        def noise_of(unit: Unit) -> torch.Tensor:
            rounded = {
                name: self._rounded(name, tensors[f"{name}.weight"], statistics[name], smooth.get(name))
                for name in unit.modules
            }
            return probe.noise(rounded)

        single = [unit for unit in self.report.units if not unit.experts]
        for unit, noise in zip(single, self.workers.map(noise_of, single), strict=True):
            self._noise[unit.label] = {unit.scheme: noise}
        if self.layer in self.plan.cache_layers() and (same := probe.same_keys()) is not None:
            self.report.cache = CacheReport(same, self.config.indexer_readers(self.layer))
        return probe.energy, routed

    def _probe_sequences(self) -> range:
        return range(min(PROBE_SEQUENCES, len(self.around.before.lengths)))

    def _probed(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        shared = None if self.config.has_indexer(self.layer) else self.around.selection(index)
        return self.around.before.sequence(index), shared

    def _rounded(
        self, name: str, weight: torch.Tensor, statistics: InputStatistics, smooth: torch.Tensor | None
    ) -> RoundedLinear:
        """Round one linear. weight: smoothed. statistics: of its input before smoothing."""
        plan, rows = self.plan.linears[self.prefix + name], statistics.rows
        state = plan.method.prepare(rows if smooth is None else rows / smooth, plan.steps)
        return round_linear(name, weight, plan.scheme, plan.method, statistics, smooth, state)

    def _analyze_experts(self, routed: Routed) -> None:
        unit = next((unit for unit in self.report.units if unit.experts), None)
        types = () if unit is None else (unit.scheme, *fallbacks(unit.scheme)[:-1])  # FLOAT, the last, adds no noise
        probed = sum(self.around.before.lengths[:PROBE_SEQUENCES])
        change = {scheme: torch.zeros(probed, self.config.hidden_size) for scheme in types}
        shares = None if routed.shares is None else routed.shares[:probed]
        for noise in self.workers.map(lambda expert: self._expert_noise(expert, routed, types, probed), self.experts):
            self.advance((noise.expert + 0.5) / self.config.n_routed_experts)
            self.report.expert_tokens.append(noise.seen)
            for scheme in types:
                change[scheme].index_add_(0, noise.tokens, noise.change[scheme])
        if unit is not None:
            self._noise[unit.label] = {scheme: row_energy(streams.share(shares, change[scheme])) for scheme in types}

    def _expert_noise(self, expert: int, routed: Routed, types: tuple[str, ...], probed: int) -> ExpertNoise:
        """Run, smooth and round one routed expert.

        Args:
            types: types to try, the recipe's first. probed: number of tokens of the probe, which are the first.
        """
        config, linears = self.config, self.config.spec.expert_linears(expert)
        tensors = self.weights.load_all(self.prefix, linears, self.gains)
        smoothed = smooth_expert(self.plan, tensors, self.layer, expert, routed)
        token, slot = torch.where(routed.ids == expert)
        share = routed.weight[token, slot]
        token, share = token[token < probed], share[token < probed]
        probe = routed.inputs.rows(token)
        weights = [tensors[linear.tensor_name] for linear in linears]
        exact = _expert_output(
            config, [partial(torch.nn.functional.linear, weight=weight) for weight in weights], probe
        )
        change: dict[str, torch.Tensor] = {}
        for scheme in types:
            rounded = [
                round_linear(
                    linear.name, weight, scheme, self.plan.linears[self.prefix + linear.name].method,
                    InputStatistics(1, 0), None, smoothed.states.get(linear.name),
                )
                for linear, weight in zip(linears, weights, strict=True)
            ]  # fmt: skip
            change[scheme] = (_expert_output(config, rounded, probe) - exact) * share[:, None]
        return ExpertNoise(expert, smoothed.inputs.down.tokens, token, change)


def _expert_output(
    config: ModelConfig, linears: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> torch.Tensor:
    gate, up, down = linears
    return down(swiglu(config, gate(x), up(x)))
