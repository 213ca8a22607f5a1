"""The sweep for gradients (`method: yaqa`): once through the float model and back, before layers are rounded.

Forward keeps the stream in front of every layer on disk. Backward begins with tokens that the model itself draws, goes
from the last layer to the first that is rounded so, reads each layer's weights once more, and leaves the second moments
of the gradients behind it. A layer is the unit that a stopped run goes on from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from glm5_ascend.model import structure
from glm5_ascend.quantize.calibration.backward import Handed, layer_gradient
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.calibration.forward import LayerStreams, Routed, forward_layer, give_back, partial_stream
from glm5_ascend.quantize.calibration.row_file import RowFile, Stream, from_units
from glm5_ascend.quantize.calibration.sampled_loss import DRAWS, output_gradient
from glm5_ascend.quantize.limits import GRADIENT_ROWS, HEAD_TOKENS
from glm5_ascend.quantize.methods.output_feedback import GradientMoments
from glm5_ascend.quantize.methods.transforms import Tensors
from glm5_ascend.quantize.run.blocks import blocks
from glm5_ascend.quantize.run.gradient_experts import ExpertGradients, add_outputs
from glm5_ascend.quantize.run.gradient_files import GradientFiles
from glm5_ascend.quantize.run.job import RunContext
from glm5_ascend.quantize.run.journal import WorkUnit
from glm5_ascend.quantize.run.residual_streams import embed


class GradientSweep:
    """Rank 0's part: everything but the other ranks' experts."""

    def __init__(self, run: RunContext, calibration: CalibrationSet) -> None:
        self.run, self.config, self.calibration = run, run.plan.config, calibration
        self.files = GradientFiles(run, tuple(len(sequence) for sequence in calibration.sequences))
        self.tokens = sum(self.files.lengths)

    def sweep(self) -> None:
        """Do what the journal does not have yet."""
        journal, first, last = self.run.journal, self.files.first, self.files.last
        for layer in range(last):
            if WorkUnit.streamed(layer) not in journal:
                self._report(f"layer {layer} of {last} forward")
                self._forward(layer)
                journal.finish(WorkUnit.streamed(layer), self.files.streamed(layer))
        if WorkUnit.gradient(last) not in journal:
            self._report("output")
            self._from_output()
            journal.finish(WorkUnit.gradient(last), self.files.differentiated(last))
        for layer in range(last - 1, first - 1, -1):
            if WorkUnit.gradient(layer) not in journal:
                self._report(f"layer {layer} of {last} backward")
                self._backward(layer)
                journal.finish(WorkUnit.gradient(layer), self.files.differentiated(layer))
            self.files.forget(layer)
        self.files.clear()

    def _report(self, text: str) -> None:
        self.run.progress(f"gradients: {text}", 0, self.config.num_layers_with_mtp)

    def _weights(self, layer: int) -> tuple[Tensors, Tensors]:
        """All of a layer but its routed experts, and its norms' gains."""
        prefix, parts, weights = structure.layer_prefix(layer), structure.backbone(self.config, layer), self.run.weights
        gains = weights.gains(prefix, parts)
        return weights.load_all(prefix, parts, gains, self.run.workers), gains

    @contextmanager
    def _run(self, layer: int, tensors: Tensors, before: Stream, out: Stream | None) -> Iterator[Routed | None]:
        """The layer run but for its routed experts: what they work on, None in a dense layer."""
        path, selections = self.run.folder / "expert-inputs", self.files.selections(layer)
        moe = self.config.is_moe(layer)
        inputs = RowFile(path, self.tokens, self.config.hidden_size, torch.float32) if moe else None
        streams = LayerStreams(before, out, selections)
        try:
            yield forward_layer(self.config, layer, tensors, streams, inputs, record=(), workers=self.run.workers)[1]
        finally:
            if inputs is not None:
                inputs.remove()
            if selections.file is not None:
                selections.file.sync()
                selections.file.close()

    @contextmanager
    def _shared(self, routed: Routed) -> Iterator[None]:
        """All ranks work on their experts while the block runs; behind it what they made is there."""
        if self.run.ranks.count > 1:
            routed.publish(self.run.folder)
        self.run.ranks.meet()
        yield
        self.run.ranks.meet()

    # -- forward ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _summed(self, layer: int) -> Iterator[Stream]:
        """Where the stream in front of a layer is summed; behind the block its file is there."""
        sums = self.files.sums()
        try:
            yield sums
            with closing_file(self.files.stream(layer, keep=False)) as stream:
                sums.hand_over(stream)
                stream.file.sync()
        finally:
            sums.file.remove()

    def _forward(self, layer: int) -> None:
        run = self.run
        if layer == 0:
            with self._summed(0) as embedded:
                embed(run, self.calibration, embedded)
        with closing_file(self.files.stream(layer)) as before, self._summed(layer + 1) as out:
            tensors, gains = self._weights(layer)
            with self._run(layer, tensors, before, out) as routed:
                if routed is not None:
                    with self._shared(routed):
                        add_outputs(run, layer, gains, routed)
                    for rank in range(1, run.ranks.count):
                        out.include(partial_stream(run.folder, rank))

    # -- backward ---------------------------------------------------------------------------------------------------

    def _from_output(self) -> None:
        """Gradients at the stream behind the last layer."""
        weights, sizes = self.run.weights, structure.sizes(self.config)
        gains, head = weights.gains("", structure.GLOBAL), structure.find(structure.GLOBAL, "lm_head")
        norm = weights.load("", structure.find(structure.GLOBAL, "model.norm"), gains)
        count = len(self.files.lengths)
        with (
            closing_file(self.files.stream(self.files.last)) as stream,
            closing_file(self.files.gradient(self.files.last, keep=False)) as found,
        ):

            def differentiate(numbers: list[int]) -> None:
                rows = (weights.rows("", head, gains, *block) for block in blocks(structure.shape(head, sizes)))
                hidden = torch.cat([stream.sequence(number) for number in numbers])
                generator = torch.Generator().manual_seed(numbers[0])
                gradients = output_gradient(hidden, norm, self.config.rms_norm_eps, rows, generator)
                for draw, gradient in enumerate(gradients):
                    pieces = gradient.split([stream.lengths[number] for number in numbers])
                    for number, piece in zip(numbers, pieces, strict=True):
                        found.set_sequence(draw * count + number, piece)

            self.run.workers.each(differentiate, together(stream.lengths, HEAD_TOKENS))
            found.file.sync()
        give_back()

    def _backward(self, layer: int) -> None:
        with closing_file(self.files.gradient(layer + 1)) as behind:
            if layer in self.run.plan.output_weighted:
                self.files.write_outputs(layer, self._moments(behind.file))
            if layer == self.files.first:
                return
            with (
                closing_file(self.files.stream(layer)) as before,
                closing_file(self.files.gradient(layer, keep=False)) as found,
            ):
                tensors, gains = self._weights(layer)
                with self._run(layer, tensors, before, None) as routed:
                    assert routed is not None  # dense layers are in front of the first with experts
                    with ExpertGradients(self.run.folder, 0, routed.ids, self.config.hidden_size) as experts:
                        with self._shared(routed):
                            experts.add(self.run, layer, gains, routed, behind.file)
                        experts.include(self.run.ranks.count)
                        self._differentiate(layer, tensors, (before, behind, found), experts)
                found.file.sync()

    def _differentiate(
        self, layer: int, tensors: Tensors, streams: tuple[Stream, Stream, Stream], experts: ExpertGradients
    ) -> None:
        """`streams`: in front of the layer, and the gradients behind it and in front of it; the last is written."""
        before, behind, found = streams
        count, own = len(before.lengths), self.config.has_indexer(layer)
        selections = self.files.selections(layer)

        def differentiate(number: int) -> None:
            start, length = before.starts[number], before.lengths[number]
            reached = torch.stack([behind.sequence(draw * count + number) for draw in range(DRAWS)])
            handed = Handed(reached, *experts.of_tokens(start, start + length))
            shared = None if own else selections.load(number)
            made = layer_gradient(self.config, layer, tensors, before.sequence(number), shared, handed)
            for draw, gradient in enumerate(made):
                found.set_sequence(draw * count + number, gradient)

        try:
            self.run.workers.each(differentiate, range(count))
            give_back()
        finally:
            if selections.file is not None:
                selections.file.close()

    def _moments(self, behind: RowFile) -> GradientMoments:
        """Of the gradients behind a layer, all draws and tokens together."""
        hidden = self.config.hidden_size
        starts = range(0, behind.rows, GRADIENT_ROWS)

        def rows(start: int) -> torch.Tensor:
            return from_units(behind.read(start, min(start + GRADIENT_ROWS, behind.rows)))

        def part(first: int) -> torch.Tensor:
            columns = slice(first, first + GRADIENT_ROWS)
            total = torch.zeros(min(GRADIENT_ROWS, hidden - first), hidden)
            for start in starts:
                some = rows(start)
                total.addmm_(some[:, columns].T, some)
            return total

        energy = torch.cat([rows(start).double().square().sum(1) for start in starts])
        total = torch.cat(list(self.run.workers.map(part, range(0, hidden, GRADIENT_ROWS))))
        return GradientMoments(total, behind.rows, float(energy.sum()), float(energy.square().sum()))


def together(lengths: tuple[int, ...], tokens: int) -> list[list[int]]:
    """Numbers of sequences that follow each other, as many as hold no more than `tokens`, one at the least."""
    groups: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if length > room:
            groups.append([])
            room = tokens
        groups[-1].append(number)
        room -= length
    return groups


@contextmanager
def closing_file(stream: Stream) -> Iterator[Stream]:
    """The stream, its file closed behind the block."""
    with stream.file:
        yield stream
