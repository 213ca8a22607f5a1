"""The calibration forward of one layer on float weights, sequence by sequence, inputs of chosen linears recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.files.written import file_checksum
from glm5_ascend.model import layers, streams
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.device import native_bf16
from glm5_ascend.model.memory import ROWS_AT_ONCE
from glm5_ascend.quantize.calibration.stream import Stream
from glm5_ascend.quantize.methods.input_statistics import SEARCH_ROWS, InputStatistics
from glm5_ascend.quantize.methods.transforms import Tensors

ROUTER = "mlp.gate"
#: File of the selections that layers share.
SELECTIONS = "selections"


def product(x: torch.Tensor, weight: torch.Tensor, rows: int = ROWS_AT_ONCE) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T -> fp32 [..., N], with operands and result rounded to bf16 where that is native.

    That is what the bf16 model itself computes; sums are fp32 inside. The weight is rounded `rows` rows at a time, so
    memory holds no second copy of it.
    """
    if not native_bf16(x.device):
        return x @ weight.T
    low = x.to(torch.bfloat16)
    out = torch.empty(*x.shape[:-1], len(weight), device=x.device)
    for some_rows, columns in zip(weight.split(rows), out.split(rows, dim=-1), strict=True):
        columns.copy_(low @ some_rows.to(torch.bfloat16).T)
    return out


class FloatLayer:
    """`LayerWeights` over a dict of fp32 tensors for one sequence, recording the inputs of the named linears."""

    def __init__(self, tensors: Tensors, record: Iterable[str] = (), row_limit: int = SEARCH_ROWS) -> None:
        self.tensors, self.record, self.row_limit = tensors, record, row_limit
        self.statistics: dict[str, InputStatistics] = {}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name in self.record:
            self.statistics[name] = InputStatistics.of(x, self.row_limit)
        weight = self.tensors[f"{name}.weight"]
        return x @ weight.T if name == ROUTER else product(x, weight)  # a rounded score sends a token elsewhere

    def vector(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass
class Routed:
    """What the routed experts of a layer work on.

    Attributes:
        inputs: fp32 [tokens, hidden] on disk.
        out: the next layer's stream, which already holds everything but the routed experts; None if no layer reads it.
        weight, ids: [tokens, num_experts_per_tok].
        shares: fp32 [tokens, streams], how much of an output each residual stream gets; None with one stream.
    """

    inputs: Stream
    out: Stream | None
    weight: torch.Tensor
    ids: torch.Tensor
    shares: torch.Tensor | None = None

    def add(self, tokens: torch.Tensor, output: torch.Tensor) -> None:
        """Add the output [T, hidden] of an expert for `tokens` to the next layer's stream."""
        if self.out is not None:
            self.out.add(tokens, output if self.shares is None else streams.share(self.shares[tokens], output))


def stream_name(layer: int) -> str:
    return f"stream-{layer}"


def open_selections(config: ModelConfig, folder: Path, lengths: tuple[int, ...]) -> Stream | None:
    """Keys that every query attends to, bool, stored for layers that share the indexer of an earlier one (GLM-5.2).

    None for models in which every layer has an indexer. An MTP layer always has one.
    """
    if not any(map(config.shares_indexer, range(config.num_hidden_layers))):
        return None
    return Stream(folder / SELECTIONS, lengths, max(lengths), torch.bool, keep=True)


@dataclass(frozen=True)
class LayerStreams:
    """The residual streams around a layer.

    Attributes:
        before: the layer's input.
        out: gets its output; None if no layer reads it.
        selections: of the layers whose indexer others share, see `open_selections`.
    """

    before: Stream
    out: Stream | None
    selections: Stream | None

    @property
    def folder(self) -> Path:
        return self.before.path.parent

    def expert_inputs(self, config: ModelConfig, layer: int) -> Stream | None:
        """A file for the inputs of a layer's routed experts; None where it has none."""
        if not config.is_moe(layer):
            return None
        return Stream(self.folder / "expert-inputs", self.before.lengths, config.hidden_size, torch.float32)

    def selection(self, index: int) -> torch.Tensor | None:
        """Stored selection bool [S, S] of one sequence; None if nothing is stored."""
        return None if self.selections is None else self.selections.sequence(index)[:, : self.before.lengths[index]]


def output_checksum(config: ModelConfig, folder: Path, layer: int) -> str:
    """Checksum of the input of the layers after `layer`: stream, and selections if the next layer needs them."""
    shares = layer + 1 < config.num_layers_with_mtp and config.shares_indexer(layer + 1)
    names = [stream_name(layer + 1)] + [SELECTIONS] * shares
    return " ".join(str(file_checksum(folder / name)) for name in names)


class _SequenceResult(NamedTuple):
    """Statistics by linear, and the routing [S, num_experts_per_tok], empty in a dense layer.

    `shares` [S, streams] as in `Routed`; [S, 0] with one stream.
    """

    statistics: dict[str, InputStatistics]
    weight: torch.Tensor
    ids: torch.Tensor
    shares: torch.Tensor


def forward_layer(
    config: ModelConfig,
    layer: int,
    tensors: Tensors,
    around: LayerStreams,
    inputs: Stream | None,
    *,
    record: Iterable[str],
    workers: Workers,
) -> tuple[dict[str, InputStatistics], Routed | None]:
    """Attention and everything of the MLP but the routed experts, on all sequences of the stream before the layer.

    Args:
        inputs: gets the routed experts' inputs, in a MoE layer; None in a dense one.
        record: linears whose inputs to gather statistics of.
    """
    names = sorted(record)
    limit = max(1, SEARCH_ROWS // len(around.before.lengths))
    device = tensors["input_layernorm.weight"].device

    def forward_sequence(index: int) -> _SequenceResult:
        weights = FloatLayer(tensors, names, limit)
        hidden = _attend(config, layer, weights, around, index, device)
        x, mixing = layers.mlp_entry(config, layer, weights, hidden)
        weight = ids = torch.empty(0, 0)
        if inputs is not None:
            weight, ids = layers.route(config, weights, x)
            inputs.set_sequence(index, x)
        hidden = streams.joined(mixing, hidden, layers.unrouted_mlp(config, layer, weights, x))
        if around.out is not None:
            around.out.set_sequence(index, hidden)
        shares = torch.empty(len(x), 0) if mixing is None else mixing.out.cpu()
        return _SequenceResult(weights.statistics, weight.cpu(), ids.cpu(), shares)

    lengths = around.before.lengths
    statistics = {name: InputStatistics(SEARCH_ROWS, sum(min(limit, n) for n in lengths)) for name in names}
    top_k = config.num_experts_per_tok if inputs is not None else 0
    weight, ids = (torch.empty(around.before.tokens, top_k, dtype=dtype) for dtype in (torch.float32, torch.int64))
    shares = []
    for start, result in zip(around.before.starts, workers.map(forward_sequence, range(len(lengths))), strict=True):
        for name in names:
            statistics[name].include(result.statistics[name])
        weight[start : start + len(result.weight)], ids[start : start + len(result.ids)] = result.weight, result.ids
        shares.append(result.shares)
        release_memory()
    if inputs is None:
        return statistics, None
    of_streams = torch.cat(shares)
    return statistics, Routed(inputs, around.out, weight, ids, of_streams if of_streams.numel() else None)


def release_memory() -> None:
    """Return freed activations to the system: glibc's heaps, one per thread, keep pieces of up to 32 MiB, and grew by
    half over 64 sequences."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries have none
    if trim is not None:
        trim(0)


def _attend(
    config: ModelConfig, layer: int, weights: FloatLayer, around: LayerStreams, index: int, device: torch.device
) -> torch.Tensor:
    """The stream after attention, of one sequence; its selection is stored for layers that share the indexer."""
    has_indexer = config.has_indexer(layer)
    shared = None if has_indexer else around.selection(index)
    shared = None if shared is None else shared.to(device)
    hidden, selected = layers.attention_block(config, layer, weights, around.before.sequence(index).to(device), shared)
    if around.selections is not None and has_indexer and not config.is_mtp(layer) and selected is not None:
        around.selections.set_sequence(index, selected)
    return hidden
