"""What the sweep for gradients leaves on disk: which files exist, and what a stopped one may go on from."""

from __future__ import annotations

import math
from pathlib import Path

import safetensors.torch
import torch

from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.written import file_checksum, write_file
from glm5_ascend.model.structure import indexer_readers
from glm5_ascend.quantize.calibration.forward import Selections
from glm5_ascend.quantize.calibration.row_file import Stream
from glm5_ascend.quantize.calibration.sampled_loss import DRAWS
from glm5_ascend.quantize.methods.output_feedback import GradientMoments, OutputFeedback, strongest
from glm5_ascend.quantize.run.job import RunContext
from glm5_ascend.quantize.run.journal import UnitRecord, WorkUnit

_NAME = "sweep-"


class GradientFiles:
    """The sweep's files for sequences of these lengths.

    `WorkUnit.streamed(layer)`: the stream behind a layer is there, and what it chose for layers that share its indexer.
    `WorkUnit.gradient(layer)`: what the layer's experts are rounded with is there, and the gradients in front of it; of
    the number behind the last layer: only those.
    """

    def __init__(self, run: RunContext, lengths: tuple[int, ...]) -> None:
        self.run, self.config, self.folder, self.lengths = run, run.plan.config, run.folder, lengths
        self.first, self.last = min(run.plan.output_weighted), run.plan.config.num_hidden_layers

    def sums(self) -> Stream:
        """What a stream is summed in before it stays."""
        return Stream(self.folder / f"{_NAME}sums", self.lengths, self.config.hidden_size)

    def stream(self, layer: int, keep: bool = True) -> Stream:
        """In front of a layer, all of it."""
        return Stream(self._stream(layer), self.lengths, self.config.hidden_size, keep, summed=True)

    def gradient(self, layer: int, keep: bool = True) -> Stream:
        """In front of a layer; sequence number n of draw d is number d * len(lengths) + n."""
        return Stream(self._gradient(layer), self.lengths * DRAWS, self.config.hidden_size, keep)

    def selections(self, layer: int) -> Selections:
        """Of the layer's own indexer, or of the one it shares."""
        owner = max(n for n in range(layer + 1) if self.config.has_indexer(n))
        return Selections(self.config, self.folder, self.lengths, f"{_NAME}selections-{owner}")

    def streamed(self, layer: int) -> UnitRecord:
        """For the journal, when the stream behind the layer is written."""
        return UnitRecord(checksum=self._checksum([self._stream(layer + 1), *self._shared(layer)]))

    def differentiated(self, layer: int) -> UnitRecord:
        """The same of a layer's gradients."""
        return UnitRecord(checksum=" ".join((self._outputs_checksum(layer), self._gradient_checksum(layer))))

    def write_outputs(self, layer: int, moments: GradientMoments) -> None:
        """What `OutputFeedback` of the layer is made of.

        Raises:
            CheckpointError: there are no gradients, or they are not finite.
        """
        if not (math.isfinite(moments.energy) and moments.energy > 0):
            found = "zero" if moments.energy == 0 else "not finite"
            raise CheckpointError(
                f"layer {layer}: the gradients of the model's output are {found}",
                "check the source with another recipe (w4a8-best) and glm5-ascend eval",
            )
        outputs, damping = strongest(moments)
        tensors = {"outputs": outputs.contiguous(), "damping": torch.tensor([damping], dtype=torch.float64)}
        write_file(_outputs(self.folder, layer), safetensors.torch.save(tensors))

    def sound(self) -> list[WorkUnit]:
        """Units of a stopped sweep to go on from: all that the journal has, or none where a needed file is damaged."""
        journal = self.run.journal
        streamed = [unit for n in range(self.last) if (unit := WorkUnit.streamed(n)) in journal]
        back = [n for n in range(self.last, self.first - 1, -1) if WorkUnit.gradient(n) in journal]
        done = [*streamed, *map(WorkUnit.gradient, back)]
        lowest = back[-1] if back else self.last + 1
        recorded = {n: journal.record(WorkUnit.gradient(n)).checksum.split(" ") for n in back}
        same = all(self._outputs_checksum(n) == outputs for n, (outputs, _) in recorded.items())
        if lowest == self.first:  # the sweep is finished, its other files are gone
            return done if same else []
        if back:
            same = same and self._gradient_checksum(lowest) == recorded[lowest][1]
        needed = [unit for unit in streamed if unit.place[0] + 1 < lowest]
        same = same and all(self.streamed(unit.place[0]) == journal.record(unit) for unit in needed)
        return done if same else []

    def forget(self, layer: int) -> None:
        """Remove what nobody reads when the layer's gradients are in the journal."""
        for path in (self._stream(layer), self._gradient(layer + 1)):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all but what the layers are rounded with."""
        for path in self.folder.glob(f"{_NAME}*"):
            path.unlink()

    def _stream(self, layer: int) -> Path:
        return self.folder / f"{_NAME}stream-{layer}"

    def _gradient(self, layer: int) -> Path:
        return self.folder / f"{_NAME}gradient-{layer}"

    def _shared(self, layer: int) -> list[Path]:
        if indexer_readers(self.config, layer) <= 1:
            return []
        return [self.folder / f"{_NAME}selections-{layer}"]

    def _checksum(self, paths: list[Path]) -> str:
        return " ".join(str(file_checksum(path)) for path in paths)

    def _outputs_checksum(self, layer: int) -> str:
        return str(file_checksum(_outputs(self.folder, layer))) if layer in self.run.plan.output_weighted else "-"

    def _gradient_checksum(self, layer: int) -> str:
        return str(file_checksum(self._gradient(layer))) if layer > self.first else "-"


def _outputs(folder: Path, layer: int) -> Path:
    return folder / f"outputs-{layer}.safetensors"


def read_outputs(run: RunContext, layer: int) -> OutputFeedback | None:
    """What `down_proj` of the layer's routed experts is rounded with besides its inputs; None if nothing."""
    if layer not in run.plan.output_weighted:
        return None
    tensors = safetensors.torch.load(_outputs(run.folder, layer).read_bytes())
    return OutputFeedback.of(tensors["outputs"], float(tensors["damping"]))
