"""A layer with one unit rounded and the rest in float: the noise that this unit adds to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.model import layers, streams
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.method import Method, RoundingState
from glm5_ascend.quantize.methods.rounding import quantize_linear
from glm5_ascend.quantize.methods.smoothing import quantize_activation
from glm5_ascend.quantize.methods.transforms import Tensors


@dataclass
class RoundedLinear:
    """A linear as the engine will compute it, in fp32.

    Attributes:
        weight: dequantized, [N, K].
        statistics: of its inputs before smoothing. smooth: divisor of its inputs, [K].
    """

    scheme: str
    weight: torch.Tensor
    statistics: InputStatistics
    smooth: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Smoothed inputs x [T, K] -> [T, N]; the engine multiplies them as int8."""
        static = self.scheme == schemes.W8A8
        x, smooth = (x * self.smooth, self.smooth) if static else (x, torch.ones_like(self.smooth))
        return quantize_activation(x, self.scheme, self.statistics, smooth) @ self.weight.T


def round_linear(
    module: str,
    weight: torch.Tensor,
    scheme: str,
    method: Method,
    statistics: InputStatistics,
    smooth: torch.Tensor | None,
    state: RoundingState | None = None,
) -> RoundedLinear:
    """Round `weight` [N, K], already multiplied by `smooth`, as the quantizer does."""
    scale = torch.ones(weight.shape[1]) if smooth is None else smooth
    activation = statistics.range_after(scale) if scheme == schemes.W8A8 else None
    stored = quantize_linear(module, weight, scheme, method, activation, state).stored
    return RoundedLinear(scheme, schemes.dequantize(scheme, stored), statistics, scale)


def row_energy(x: torch.Tensor) -> torch.Tensor:
    """|x|^2 of each row, fp64."""
    return x.double().square().sum(-1)


class ProbeLayer:
    """`LayerWeights` of smoothed fp32 tensors; `rounded` linears compute as the engine does."""

    def __init__(self, tensors: Tensors, rounded: Mapping[str, RoundedLinear]) -> None:
        self.tensors, self.rounded = tensors, rounded

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name in self.rounded:
            return self.rounded[name](x)
        return x @ self.tensors[f"{name}.weight"].T

    def vector(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass
class ProbeSequence:
    """One calibration sequence before and inside the layer, in float.

    Attributes:
        x: normalised input [S, hidden]. shared: the selection of an earlier indexer.
        mixed: output of attention. after: residual stream after attention. inner: normalised input of the MLP.
        dense: output of the dense MLP or the shared expert.
        attention_shares, mlp_shares: [S, streams], how much of each output every residual stream gets; None with one.
    """

    x: torch.Tensor
    shared: torch.Tensor | None
    mixed: torch.Tensor
    after: torch.Tensor
    inner: torch.Tensor
    dense: torch.Tensor
    attention_shares: torch.Tensor | None
    mlp_shares: torch.Tensor | None


class Probe:
    """A few sequences that go through one layer once for every unit."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tensors: Tensors,
        sequences: list[tuple[torch.Tensor, torch.Tensor | None]],
        workers: Workers,
    ) -> None:
        self.config, self.layer, self.tensors = config, layer, tensors
        self.has_indexer = config.has_indexer(layer)
        self.sequences = list(workers.map(self._float, sequences))
        #: Energy of the stream after attention, fp64 [tokens of all sequences].
        self.energy = torch.cat([row_energy(s.after) for s in self.sequences])

    def _float(self, sequence: tuple[torch.Tensor, torch.Tensor | None]) -> ProbeSequence:
        hidden, shared = sequence
        config, weights = self.config, ProbeLayer(self.tensors, {})
        x, mixing = streams.entered(config, self.layer, weights, "attn", hidden)
        x = layers.attention_input(config, weights, x)
        mixed, _ = layers.mixed_tokens(config, self.layer, weights, x, shared)
        after = streams.joined(mixing, hidden, mixed)
        inner, mlp_mixing = layers.mlp_entry(config, self.layer, weights, after)
        dense = layers.unrouted_mlp(config, self.layer, weights, inner)
        shares = (None if some is None else some.out for some in (mixing, mlp_mixing))
        return ProbeSequence(x, shared, mixed, after, inner, dense, *shares)

    def same_keys(self) -> float | None:
        """Share of the indexer's keys that it also selects with an INT8 cache; None where the layer has no indexer.

        Counted are queries with more than index_topk keys; None where there are none.
        """
        topk, weights = self.config.index_topk, ProbeLayer(self.tensors, {})
        both = total = 0
        for s in self.sequences:
            if self.has_indexer and len(s.x) > topk:
                latent = layers.query_latent(self.config, weights, s.x)
                a, b = (layers.select_topk(self.config, weights, s.x, latent, int8) for int8 in (False, True))
                both += layers.count_common(a[topk:], b[topk:])
                total += layers.count_common(a[topk:], a[topk:])
        return both / total if total else None

    def noise(self, rounded: Mapping[str, RoundedLinear]) -> torch.Tensor:
        """Energy that rounding these linears adds to each token's stream, fp64 [tokens of all sequences]."""
        weights, energies = ProbeLayer(self.tensors, rounded), []
        attention = next(iter(rounded)).startswith("self_attn.")
        for s in self.sequences:
            if attention:
                output, _ = layers.mixed_tokens(self.config, self.layer, weights, s.x, s.shared)
                energies.append(row_energy(streams.share(s.attention_shares, output - s.mixed)))
            else:
                output = layers.unrouted_mlp(self.config, self.layer, weights, s.inner)
                energies.append(row_energy(streams.share(s.mlp_shares, output - s.dense)))
        return torch.cat(energies)
