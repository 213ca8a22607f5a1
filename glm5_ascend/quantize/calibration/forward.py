"""The calibration forward of one layer on float weights, sequence by sequence, inputs of chosen linears recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from glm5_ascend.model import layers
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.device import product
from glm5_ascend.quantize.calibration.row_file import RowFile, Stream
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.transforms import Tensors
from glm5_ascend.quantize.workers import Workers

#: Rows of an input kept for the smoothing searches, all sequences together.
SEARCH_ROWS = 512
ROUTER = "mlp.gate"


class FloatLayer:
    """`LayerWeights` over a dict of fp32 tensors, recording the inputs of the named linears."""

    def __init__(self, tensors: Tensors, record: Iterable[str] = (), row_limit: int = SEARCH_ROWS) -> None:
        self.tensors = tensors
        self.statistics = {name: InputStatistics(row_limit) for name in record}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name in self.statistics:
            self.statistics[name].add(x)
        weight = self.tensors[f"{name}.weight"]
        return x @ weight.T if name == ROUTER else product(x, weight)  # a rounded score sends a token elsewhere

    def vector(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass
class Routed:
    """What the routed experts of a layer work on.

    Attributes:
        inputs: fp32 [tokens, hidden] on disk.
        out: the next layer's stream, which already holds everything but the routed experts; None if nobody reads it.
        weight, ids: [tokens, num_experts_per_tok].
    """

    inputs: RowFile
    out: Stream | None
    weight: torch.Tensor
    ids: torch.Tensor

    def publish(self, folder: Path) -> None:
        """Leave the routing where other ranks find it; the inputs lie there already."""
        torch.save((self.weight, self.ids), folder / "routing.pt")


def partial_stream(folder: Path, rank: int) -> Path:
    """Where a rank sums up the output of its experts."""
    return folder / f"stream-of-rank-{rank}"


class Selections:
    """Which keys every query attends to, kept for layers that share the indexer of an earlier one (GLM-5.2).

    Nothing is kept for models in which every layer has its own, nor for an MTP layer, which has its own always.
    """

    def __init__(self, config: ModelConfig, folder: Path, lengths: tuple[int, ...]) -> None:
        main = range(config.num_hidden_layers)
        self.file: RowFile | None = None
        self.lengths, self.starts = lengths, [sum(lengths[:i]) for i in range(len(lengths))]
        if not all(config.has_indexer(layer) for layer in main):
            self.file = RowFile(folder / "selections", sum(lengths), max(lengths), torch.bool, keep=True)

    def load(self, number: int) -> torch.Tensor | None:
        if self.file is None:
            return None
        start, length = self.starts[number], self.lengths[number]
        return self.file.read(start, start + length)[:, :length]

    def keep(self, number: int, selected: torch.Tensor) -> None:
        if self.file is not None:
            rows = torch.zeros(len(selected), self.file.columns, dtype=torch.bool)
            rows[:, : selected.shape[1]] = selected.cpu()
            self.file.write(self.starts[number], rows)


def forward_layer(
    config: ModelConfig,
    layer: int,
    tensors: Tensors,
    stream: Stream,
    out: Stream | None,
    inputs: RowFile | None,
    selections: Selections,
    record: Iterable[str],
    workers: Workers,
) -> tuple[dict[str, InputStatistics], Routed | None]:
    """Attention and everything of the MLP but the routed experts, on all sequences of `stream`.

    Args:
        out: gets the residual stream behind the layer, without the routed experts' part.
        inputs: gets the routed experts' inputs, in a MoE layer.
        record: linears whose inputs to gather statistics of.
    """
    names = sorted(record)
    limit = max(1, SEARCH_ROWS // len(stream.lengths))
    eps, own = config.rms_norm_eps, config.has_indexer(layer)
    device = tensors["input_layernorm.weight"].device

    def one(number: int) -> tuple[FloatLayer, torch.Tensor, torch.Tensor]:
        weights = FloatLayer(tensors, names, limit)
        hidden = stream.sequence(number).to(device)
        x = layers.rms_norm(hidden, weights.vector("input_layernorm.weight"), eps)
        shared = None if own else selections.load(number)
        mixed, selected = layers.attention(config, weights, x, shared if shared is None else shared.to(device), own)
        if own and not config.is_mtp(layer):
            selections.keep(number, selected)
        hidden = hidden + mixed
        x = layers.rms_norm(hidden, weights.vector("post_attention_layernorm.weight"), eps)
        nothing = torch.empty(0)
        if inputs is None:
            weight, ids, hidden = nothing, nothing, hidden + layers.mlp(weights, "mlp", x)
        else:
            weight, ids = layers.route(config, weights, x)
            inputs.write(stream.starts[number], x)
            hidden = hidden + layers.mlp(weights, "mlp.shared_experts", x)
        if out is not None:
            out.set_sequence(number, hidden)
        weights.tensors = {}
        return weights, weight.cpu(), ids.cpu()

    done = list(workers.map(one, range(len(stream.lengths))))
    statistics = {
        name: InputStatistics.merged(SEARCH_ROWS, [weights.statistics[name] for weights, _, _ in done])
        for name in names
    }
    if inputs is None:
        return statistics, None
    weight, ids = torch.cat([weight for _, weight, _ in done]), torch.cat([ids for _, _, ids in done])
    return statistics, Routed(inputs, out, weight, ids)
