"""One layer through the whole chain: read, fuse, rotate, calibrate, smooth, round, write, free.

The forward pass uses the *float* (rotated, not yet rounded) weights. Every layer then sees the inputs the original
model would produce, so a layer's result does not depend on how the layers before it were rounded: the order of
experts, a restart, or another recipe for one layer change nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.spec import Linear, Weight, input_readers
from glm5_ascend.quantize.calibration.forward import (
    LayerStreams,
    Routed,
    forward_layer,
    output_checksum,
)
from glm5_ascend.quantize.calibration.stream import Stream
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.method import RoundingState
from glm5_ascend.quantize.methods.rounding import ActivationRange
from glm5_ascend.quantize.methods.smoothing import search_scale
from glm5_ascend.quantize.methods.transforms import Tensors, move_scale
from glm5_ascend.quantize.plan import LinearPlan, QuantizationPlan, SmoothPlan
from glm5_ascend.quantize.progress import Progress
from glm5_ascend.quantize.run.blocks import ErrorSums, add_errors, blocks
from glm5_ascend.quantize.run.expert import quantize_expert, rerun_expert
from glm5_ascend.quantize.run.journal import UnitRecord, WorkUnit
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.store import Store

Statistics = dict[str, InputStatistics]


class LayerQuantizer:
    """Quantizes and writes one layer.

    Args:
        streams: the residual streams around it; None without calibration.
    """

    def __init__(
        self,
        weights: FloatWeights,
        store: Store,
        workers: Workers,
        layer: int,
        streams: LayerStreams | None,
        progress: Progress,
    ) -> None:
        self.weights, self.store, self.workers = weights, store, workers
        self.layer, self.streams, self.progress = layer, streams, progress
        self.plan, self.config = store.plan, store.plan.config
        self.prefix = self.config.spec.layer_prefix(layer)
        self.parts = self.config.backbone(layer)
        self.gains = weights.gains(self.prefix, self.parts)
        # The first experts are read during calibration.
        self.experts = weights.experts_ahead(layer, lambda expert: self._reads(WorkUnit.expert(layer, expert)))

    def _reads(self, unit: WorkUnit) -> bool:
        return unit not in self.store.journal or (self.streams is not None and self.streams.out is not None)

    def run(self) -> None:
        """Do what the journal does not have yet."""
        inputs = None if self.streams is None else self.streams.expert_inputs(self.config, self.layer)
        routed = self._backbone(inputs)
        if self.config.is_moe(self.layer):
            self._experts(routed)
        if inputs is not None:
            inputs.remove()
        checksum = ""
        if self.streams is not None and self.streams.out is not None:
            self.streams.out.sync()
            checksum = output_checksum(self.config, self.streams.folder, self.layer)
        self.store.journal.finish(WorkUnit.layer(self.layer), UnitRecord(checksum=checksum))

    def _backbone(self, inputs: Stream | None) -> Routed | None:
        routed: Routed | None = None
        written = WorkUnit.backbone(self.layer) in self.store.journal
        if self.streams is None and written:
            return None
        parts = [weight for weight in self.parts if not weight.is_table]
        tensors = self.weights.load_all(self.prefix, parts, self.gains, self.workers)
        statistics: Statistics = {}
        if self.streams is not None:
            statistics, routed = self._forward(tensors, self.streams, inputs, searched=not written)
        if not written:
            scales: Tensors = {}
            if statistics:
                scales = smooth_layer(self.plan, self.layer, self._searches, tensors, statistics, self.workers)
            self._write(tensors, statistics, scales)
        return routed

    # -- calibration ------------------------------------------------------------------------------------------------

    @cached_property
    def _searches(self) -> list[SmoothPlan]:
        return list(self.plan.smoothing(self.layer, self.config.subgraphs(self.layer)))

    def _forward(
        self, tensors: Tensors, streams: LayerStreams, inputs: Stream | None, searched: bool
    ) -> tuple[Statistics, Routed | None]:
        """Run the layer in float; statistics of the inputs that something is decided by, by linear."""
        reader = input_readers(self.parts)
        static = {p.name for p in self.parts if self.store.scheme(self.prefix, p) == schemes.W8A8}
        targets = {search.subgraph.targets[0] for search in self._searches} if searched else set()
        recorded = static | targets | set(self.plan.uses_inputs(self.prefix, self.parts))
        names = {reader[name] for name in recorded}
        statistics, routed = forward_layer(
            self.config, self.layer, tensors, streams, inputs, record=names, workers=self.workers
        )
        return {name: statistics[reader[name]] for name in recorded}, routed

    def _prepare(self, statistics: Statistics, scales: Tensors) -> dict[str, RoundingState | None]:
        """States by linear; one for equal plans that read the same input after the same smoothing."""
        reader = input_readers(self.parts)
        shared: dict[tuple[str, int, LinearPlan], list[str]] = {}
        for name in self.plan.uses_inputs(self.prefix, self.parts):
            planned = self.plan.linears[self.prefix + name]
            shared.setdefault((reader[name], id(scales.get(name)), planned), []).append(name)

        def prepare(key: tuple[str, int, LinearPlan]) -> RoundingState | None:
            name, planned = shared[key][0], key[2]
            rows, scale = statistics[name].rows, scales.get(name)
            try:
                return planned.method.prepare(rows if scale is None else rows / scale, planned.steps)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # the squares of its inputs are not finite
                raise CheckpointError(
                    f"{self.weights.source.directory}: {self.prefix}{name}: the calibration texts give it inputs that "
                    "are too large", "weights of an impossible size in the layers before? download them again",
                ) from None  # fmt: skip

        states = zip(shared, self.workers.map(prepare, shared), strict=True)
        return {name: state for key, state in states for name in shared[key]}

    # -- output -----------------------------------------------------------------------------------------------------

    def _write(self, tensors: Tensors, statistics: Statistics, scales: Tensors) -> None:
        for weight in self.parts:
            if isinstance(weight, Linear) and weight.is_table:
                write_table(self.weights, self.store, self.workers, self.prefix, weight, self.gains)
        states = self._prepare(statistics, scales) if statistics else {}

        def write_block(block: tuple[Weight, int, int]) -> ErrorSums:
            weight, start, stop = block
            rows, activation = tensors[weight.tensor_name][start:stop], self._range(weight, statistics, scales)
            return self.store.write_rows(self.prefix, weight, rows, start, activation, states.get(weight.name))

        parts = [weight for weight in self.parts if not weight.is_table]
        pieces = [(weight, *block) for weight in parts for block in blocks(tuple(tensors[weight.tensor_name].shape))]
        errors: ErrorSums = {}
        for block_errors in self.workers.map(write_block, pieces):
            add_errors(errors, block_errors)
        unit = WorkUnit.backbone(self.layer)
        self.store.finish(unit, UnitRecord(errors, checksum=self.store.checksum(unit)))

    def _range(self, weight: Weight, statistics: Statistics, scales: Tensors) -> ActivationRange | None:
        if weight.name not in statistics or self.store.scheme(self.prefix, weight) != schemes.W8A8:
            return None
        return statistics[weight.name].range_after(scales.get(weight.name))

    # -- routed experts ---------------------------------------------------------------------------------------------

    def _experts(self, routed: Routed | None) -> None:
        layer, store, count = self.layer, self.store, self.config.n_routed_experts

        def quantize_or_rerun(expert: int) -> UnitRecord | None:
            if WorkUnit.expert(layer, expert) not in store.journal:
                return quantize_expert(self.weights, store, layer, expert, self.gains, routed)
            if routed is not None and routed.out is not None:
                rerun_expert(self.weights, layer, expert, self.gains, routed)
            return None

        for expert, record in enumerate(self.workers.map(quantize_or_rerun, self.experts)):
            if record is not None:
                store.finish(WorkUnit.expert(layer, expert), record)
            done = layer + (expert + 0.5) / count
            self.progress(f"layer {layer} expert {expert}", done, self.config.num_layers_with_mtp)


def smooth_layer(
    plan: QuantizationPlan,
    layer: int,
    searches: Sequence[SmoothPlan],
    tensors: Tensors,
    statistics: Statistics,
    workers: Workers,
) -> Tensors:
    """Search and move the scales of a layer's pairs, which share no tensor, in `tensors`; returns them by target.

    Args:
        statistics: of the targets' inputs, by linear.
    """
    prefix = plan.config.spec.layer_prefix(layer)

    def search_and_move(search: SmoothPlan) -> torch.Tensor:
        targets = search.subgraph.targets
        quantized = [name for name in targets if plan.linears[prefix + name].scheme != schemes.FLOAT]
        scale = search_scale([tensors[f"{name}.weight"] for name in quantized], statistics[targets[0]], search)
        return move_scale(tensors, plan.config, search.subgraph, scale)

    scales = zip(searches, workers.map(search_and_move, searches), strict=True)
    return {target: scale for search, scale in scales for target in search.subgraph.targets}


def write_table(
    weights: FloatWeights, store: Store, workers: Workers, prefix: str, table: Linear, gains: Tensors
) -> None:
    """Write an embedding table or a head, in blocks of rows."""

    def write_block(block: tuple[int, int]) -> None:
        store.write_rows(prefix, table, weights.rows(prefix, table, gains, *block), block[0])

    workers.for_each(write_block, blocks(table.shape(store.plan.config.sizes)))
