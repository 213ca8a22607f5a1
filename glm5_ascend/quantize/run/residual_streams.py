"""The residual streams between the layers: which exist, where each comes from, and when it is removed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.model import layers, streams
from glm5_ascend.model.spec import find
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.calibration.forward import FloatLayer, LayerStreams, open_selections, stream_name
from glm5_ascend.quantize.calibration.stream import Stream
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.journal import Journal, WorkUnit
from glm5_ascend.quantize.run.source_weights import FloatWeights


def embedded(weights: FloatWeights, folder: Path, sequences: Sequence[torch.Tensor], workers: Workers) -> Stream:
    """The input stream of layer 0: the embeddings of all sequences."""
    config = weights.source.config
    stream = Stream(folder / stream_name(0), tuple(map(len, sequences)), config.stream_width)
    table = find(config.spec.global_weights, config.spec.embedding)

    def embed(index: int) -> None:
        stream.set_sequence(index, streams.spread(config, weights.lookup("", table, sequences[index])))

    workers.for_each(embed, range(len(sequences)))
    return stream


class ResidualStreams:
    """Gives every layer its input stream; a resumed run finds the last one on disk.

    Args:
        folder: for the files.
        calibration: None if no layer needs any.
    """

    def __init__(
        self,
        plan: QuantizationPlan,
        weights: FloatWeights,
        journal: Journal,
        workers: Workers,
        folder: Path,
        calibration: CalibrationSet | None,
    ) -> None:
        self.plan, self.config, self.weights, self.journal = plan, plan.config, weights, journal
        self.workers, self.folder = workers, folder
        self.sequences = () if calibration is None else calibration.sequences
        self.lengths = tuple(len(sequence) for sequence in self.sequences)
        self._current: Stream | None = None
        self._next: Stream | None = None
        self.selections = None if calibration is None else open_selections(self.config, folder, self.lengths)

    def around(self, layer: int) -> LayerStreams | None:
        """The streams around a layer; None where nothing is decided by calibration, here or in later layers."""
        if not self.sequences or layer > self.plan.last_calibrated_layer:
            return None
        if self.config.is_mtp(layer):
            return LayerStreams(self._mtp_stream(layer), None, self.selections)
        if self._current is None:
            stored = layer > 0 and WorkUnit.layer(layer - 1) in self.journal
            self._current = (
                self._stream(layer) if stored else embedded(self.weights, self.folder, self.sequences, self.workers)
            )
        if layer < self.plan.last_calibrated_layer:
            self._next = Stream(self.folder / stream_name(layer + 1), self.lengths, self.config.stream_width)
        return LayerStreams(self._current, self._next, self.selections)

    def layer_done(self) -> None:
        """The journal has the layer: its output is the input of the next one."""
        if self._next is not None:
            if self._current is not None:
                self._current.remove()
            self._current, self._next = self._next, None

    def _stream(self, layer: int) -> Stream:
        return Stream(self.folder / stream_name(layer), self.lengths, self.config.stream_width, keep=True)

    def _mtp_stream(self, layer: int) -> Stream:
        """Input of the MTP layer: the main model's normalised output at i and the embedding of token i+1."""
        config, spec, weights = self.config, self.config.spec, self.weights
        main = self._current = self._current or self._stream(config.num_hidden_layers)
        prefix, parts = spec.layer_prefix(layer), config.backbone(layer)
        gain, gains = weights.gains("", spec.global_weights), weights.gains(prefix, parts)
        mtp = FloatLayer(weights.load_all(prefix, [find(parts, name) for name in spec.mtp_input], gains))
        final = weights.load("", find(spec.global_weights, spec.final_norm), gain)
        rot = weights.rotations.mtp_rotation(gain[spec.final_norm]) if weights.rotations is not None else None
        stream = Stream(self.folder / "stream-mtp", tuple(n - 1 for n in self.lengths), config.hidden_size)
        table = find(parts, "embed_tokens")

        def set_mtp_input(index: int) -> None:
            hidden = streams.merged(config, main.sequence(index).to(weights.device))
            normed = layers.rms_norm(hidden, final, config.rms_norm_eps)
            if rot is not None:
                normed = normed @ rot.T  # what the engine's `rot` linear does
            embedding = weights.lookup(prefix, table, self.sequences[index][1:]).to(weights.device)
            stream.set_sequence(index, layers.mtp_input(config, mtp, embedding, normed[:-1]))

        self.workers.for_each(set_mtp_input, range(len(self.sequences)))
        return stream
