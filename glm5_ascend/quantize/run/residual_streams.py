"""The residual streams between the layers: which exist, where each comes from, and when it may go."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5_ascend.files.written import file_checksum
from glm5_ascend.model import layers
from glm5_ascend.model.spec import find
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.calibration.forward import (
    SELECTIONS,
    FloatLayer,
    LayerStreams,
    Selections,
    shares_selections,
)
from glm5_ascend.quantize.calibration.row_file import Stream
from glm5_ascend.quantize.run.job import RunContext
from glm5_ascend.quantize.run.journal import WorkUnit


def behind(run: RunContext, layer: int, calibration: CalibrationSet) -> str:
    """`LayerStreams.checksum_behind` of what a stopped run left; another text where the files are not as needed."""
    config, lengths = run.plan.config, [len(sequence) for sequence in calibration.sequences]
    sizes = {_stream_path(run.folder, layer + 1): sum(lengths) * config.hidden_size * torch.int64.itemsize}
    if shares_selections(config, layer + 1):
        sizes[run.folder / SELECTIONS] = sum(lengths) * max(lengths)
    return " ".join(str(file_checksum(path, size)) for path, size in sizes.items())


def _stream_path(folder: Path, layer: int) -> Path:
    """The stream in front of a layer."""
    return folder / f"stream-{layer}"


def embed(run: RunContext, calibration: CalibrationSet, stream: Stream) -> None:
    """Fill the stream in front of the first layer."""
    table = find(run.plan.config.spec.global_weights, "model.embed_tokens")

    def embed_sequence(number: int) -> None:
        stream.set_sequence(number, run.weights.lookup("", table, calibration.sequences[number]))

    run.workers.each(embed_sequence, range(len(calibration.sequences)))


class ResidualStreams:
    """Hands every layer its input stream; a stopped run finds the last one on disk.

    Args:
        calibration: None if no layer needs any.
    """

    def __init__(self, run: RunContext, calibration: CalibrationSet | None) -> None:
        self.run, self.config = run, run.plan.config
        self.calibration = calibration
        self._here: Stream | None = None
        self._next: Stream | None = None
        self._mtp: Stream | None = None
        self.selections: Selections | None = None
        if calibration is not None:
            self.lengths = tuple(len(sequence) for sequence in calibration.sequences)
            self.selections = Selections(self.config, run.folder, self.lengths)

    def __enter__(self) -> ResidualStreams:
        return self

    def __exit__(self, *_: object) -> None:
        files = [stream.file for stream in (self._here, self._next, self._mtp) if stream is not None]
        if self.selections is not None and self.selections.file is not None:
            files.append(self.selections.file)
        for file in files:
            file.close()

    def of(self, layer: int) -> LayerStreams | None:
        """The streams around a layer; None where nothing is decided by calibration, here or behind."""
        if self.selections is None or layer > self.run.plan.last_calibrated_layer:
            return None
        if self.config.is_mtp(layer):
            self._mtp = self._mtp_stream(layer)
            return LayerStreams(self._mtp, None, self.selections)
        if self._here is None:
            self._here = self._stream(layer) if self._stored(layer) else self._embedded(layer)
        if layer < self.run.plan.last_calibrated_layer:
            self._next = Stream(self._path(layer + 1), self.lengths, self.config.hidden_size)
        return LayerStreams(self._here, self._next, self.selections)

    def layer_done(self) -> None:
        """The journal has the layer: what lies behind it is what comes next."""
        if self._next is not None:
            if self._here is not None:
                self._here.file.remove()
            self._here, self._next = self._next, None

    def _path(self, layer: int) -> Path:
        return _stream_path(self.run.folder, layer)

    def _stored(self, layer: int) -> bool:
        return layer > 0 and WorkUnit.layer(layer - 1) in self.run.journal

    def _stream(self, layer: int) -> Stream:
        return Stream(self._path(layer), self.lengths, self.config.hidden_size, keep=True)

    def _embedded(self, layer: int) -> Stream:
        assert self.calibration is not None
        stream = Stream(self._path(layer), self.lengths, self.config.hidden_size)
        embed(self.run, self.calibration, stream)
        return stream

    def _mtp_stream(self, layer: int) -> Stream:
        """The MTP layer reads the main model's normalised output at i and the embedding of token i+1."""
        assert self.calibration is not None
        run, config, sequences = self.run, self.config, self.calibration.sequences
        main = self._here or self._stream(config.num_hidden_layers)
        self._here = main
        prefix, weights = config.spec.layer_prefix(layer), run.weights
        parts, gain = config.backbone(layer), weights.gains("", config.spec.global_weights)
        gains = weights.gains(prefix, parts)
        own = FloatLayer(weights.load_all(prefix, [find(parts, name) for name in config.spec.mtp_input], gains))
        final = weights.load("", find(config.spec.global_weights, "model.norm"), gain)
        rot = weights.rotations.mtp_rotation(gain["model.norm"]) if weights.rotations is not None else None
        stream = Stream(run.folder / "stream-mtp", tuple(n - 1 for n in self.lengths), config.hidden_size)
        table = find(parts, "embed_tokens")

        def set_mtp_input(number: int) -> None:
            normed = layers.rms_norm(main.sequence(number).to(weights.device), final, config.rms_norm_eps)
            if rot is not None:
                normed = normed @ rot.T  # what the engine's `rot` linear does
            embedding = weights.lookup(prefix, table, sequences[number][1:]).to(weights.device)
            stream.set_sequence(number, layers.mtp_input(config, own, embedding, normed[:-1]))

        run.workers.each(set_mtp_input, range(len(sequences)))
        return stream
