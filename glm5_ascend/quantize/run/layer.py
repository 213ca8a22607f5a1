"""One layer through the whole chain: read, fuse, rotate, calibrate, smooth, round, write, free.

The forward pass uses the *float* (rotated, not yet rounded) weights. Every layer then sees the inputs the original
model would produce, so a layer's result does not depend on how the layers before it were rounded: the order of
experts, a restart, or another recipe for one layer change nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.model import structure
from glm5_ascend.model.structure import Linear, Vector
from glm5_ascend.quantize.calibration.forward import Routed, Selections, forward_layer, partial_stream
from glm5_ascend.quantize.calibration.row_file import RowFile, Stream
from glm5_ascend.quantize.methods.error_feedback import Feedback
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.rounding import ActivationRange
from glm5_ascend.quantize.methods.smoothing import search_scale
from glm5_ascend.quantize.methods.transforms import Tensors, move_scale
from glm5_ascend.quantize.plan import Plan, SmoothPlan
from glm5_ascend.quantize.run.expert import quantize_expert, rerun_expert
from glm5_ascend.quantize.run.journal import Journal
from glm5_ascend.quantize.run.ranks import Ranks
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.writer import Store, WeightErrors, blocks
from glm5_ascend.quantize.workers import Workers


@dataclass
class LayerReport:
    """What is worth knowing about one finished layer."""

    layer: int
    cold_experts: list[int] = field(default_factory=list)
    errors: WeightErrors = field(default_factory=WeightErrors)


class Progress(Protocol):
    """Where progress goes; the command line draws it, tests ignore it."""

    def begin(self, layers: int, experts: int, done: int) -> None: ...
    def expert(self, layer: int, expert: int) -> None: ...
    def layer(self, report: LayerReport) -> None: ...


class NoProgress:
    """A `Progress` that shows nothing."""

    def begin(self, layers: int, experts: int, done: int) -> None: ...
    def expert(self, layer: int, expert: int) -> None: ...
    def layer(self, report: LayerReport) -> None: ...


@dataclass(frozen=True)
class Job:
    """What the steps of one run share."""

    plan: Plan
    weights: FloatWeights
    store: Store
    journal: Journal
    workers: Workers
    ranks: Ranks
    progress: Progress
    folder: Path  # activations


def unit(layer: int, part: str = "") -> str:
    """Name of a unit of work in the journal."""
    return f"layer {layer} {part}".rstrip()


def report_of(job: Job, layer: int) -> LayerReport:
    """The report of a finished layer, from the journal: the same whether it was done in one run or several."""
    report = LayerReport(layer)
    report.errors.include(job.journal.done[unit(layer, "backbone")]["errors"])
    for expert in range(job.plan.config.n_routed_experts if job.plan.config.is_moe(layer) else 0):
        record = job.journal.done[unit(layer, f"expert {expert}")]
        report.errors.include(record["errors"])
        if record["cold"]:
            report.cold_experts.append(expert)
    return report


def accept_written(job: Job, layer: int) -> None:
    """What the journal has of a layer, by another run or another rank, is not missing."""
    names: list[str] = []
    if unit(layer, "backbone") in job.journal.done:
        names += _names(job, layer, structure.backbone(job.plan.config, layer))
    for expert in range(job.plan.config.n_routed_experts if job.plan.config.is_moe(layer) else 0):
        if unit(layer, f"expert {expert}") in job.journal.done:
            names += _names(job, layer, structure.expert_linears(expert))
    job.store.writer.expect_no_more(*names)


def _names(job: Job, layer: int, parts: Iterable[Linear | Vector]) -> list[str]:
    return [name for part in parts for name in job.store.names(structure.layer_prefix(layer), part)]


def write_table(job: Job, prefix: str, part: Linear, gains: Tensors) -> None:
    """An embedding table or a head, in blocks of rows."""

    def one(block: tuple[int, int]) -> None:
        job.store.write_rows(prefix, part, job.weights.rows(prefix, part, gains, *block), block[0])

    shape = structure.shape(part, structure.sizes(job.plan.config))
    job.workers.each(one, blocks(shape))


class LayerQuantizer:
    """Quantizes and writes one layer.

    Args:
        stream: the residual stream in front of the layer; None without calibration.
        out: gets the stream behind it; None if nobody reads that.
    """

    def __init__(
        self, job: Job, layer: int, stream: Stream | None, out: Stream | None, selections: Selections | None
    ) -> None:
        self.job, self.layer, self.stream, self.out, self.selections = job, layer, stream, out, selections
        self.plan, self.config = job.plan, job.plan.config
        self.prefix = structure.layer_prefix(layer)
        self.parts = structure.backbone(self.config, layer)
        self.gains = job.weights.gains(self.prefix, self.parts)

    def run(self) -> LayerReport:
        """Do what the journal does not have yet."""
        with self._inputs() as inputs:
            routed = self._backbone(unit(self.layer, "backbone"), inputs)
            if self.config.is_moe(self.layer):
                self._all_experts(routed)
        if self.out is not None:
            self.out.file.sync()
        self.job.journal.finish(unit(self.layer))
        return report_of(self.job, self.layer)

    def _names(self, parts: Iterable[Linear | Vector]) -> list[str]:
        return _names(self.job, self.layer, parts)

    @contextmanager
    def _inputs(self) -> Iterator[RowFile | None]:
        """Room for the inputs of the routed experts, if this layer has some that are calibrated."""
        if self.stream is None or not self.config.is_moe(self.layer):
            yield None
            return
        path = self.job.folder / "expert-inputs"
        with RowFile(path, self.stream.tokens, self.config.hidden_size, torch.float32) as file:
            yield file
        path.unlink()

    def _backbone(self, name: str, inputs: RowFile | None) -> Routed | None:
        """Everything but the routed experts; what they need to go on."""
        routed: Routed | None = None
        written = name in self.job.journal.done
        if self.stream is None and written:
            return None
        held = [part for part in self.parts if not structure.is_table(part)]
        tensors = self.job.weights.load_all(self.prefix, held, self.gains, self.job.workers)
        statistics: dict[str, InputStatistics] = {}
        if self.stream is not None:
            statistics, routed = self._forward(tensors, inputs, [] if written else self._searches())
        if not written:
            self._write(name, tensors, statistics, self._smooth(tensors, statistics) if statistics else {})
        return routed

    # -- calibration ------------------------------------------------------------------------------------------------

    def _searches(self) -> list[SmoothPlan]:
        return list(self.plan.smoothing(self.layer, structure.subgraphs(self.config, self.layer)))

    def _forward(
        self, tensors: Tensors, inputs: RowFile | None, searches: Iterable[SmoothPlan]
    ) -> tuple[dict[str, InputStatistics], Routed | None]:
        assert self.stream is not None and self.selections is not None
        reader = structure.input_readers(self.parts)
        static = {p.name for p in self.parts if self.job.store.scheme(self.prefix, p) == schemes.W8A8}
        wanted = static | {search.subgraph.targets[0] for search in searches} | set(self._compensated)
        statistics, routed = forward_layer(
            self.config, self.layer, tensors, self.stream, self.out, inputs, self.selections,
            {reader[name] for name in wanted}, self.job.workers,
        )  # fmt: skip
        return {name: statistics[reader[name]] for name in wanted}, routed

    def _smooth(self, tensors: Tensors, statistics: dict[str, InputStatistics]) -> Tensors:
        """Search and move the scales of the layer's pairs, which share no tensor; returns them by target."""

        def one(search: SmoothPlan) -> torch.Tensor:
            targets = search.subgraph.targets
            weights = [tensors[f"{t}.weight"] for t in targets if self._quantized(t)]  # FLOAT ones lose nothing
            scale = search_scale(weights, statistics[targets[0]], search)
            return move_scale(tensors, self.config, search.subgraph, scale)

        searches = self._searches()
        found = zip(searches, self.job.workers.map(one, searches), strict=True)
        return {target: scale for search, scale in found for target in search.subgraph.targets}

    def _quantized(self, name: str) -> bool:
        return self.plan.linears[self.prefix + name].scheme != schemes.FLOAT

    @property
    def _compensated(self) -> list[str]:
        return self.plan.compensated(self.prefix, self.parts)

    def _feedback(self, statistics: dict[str, InputStatistics], scales: Tensors) -> dict[str, Feedback | None]:
        """By linear; one for those that read the same input after the same smoothing."""
        reader = structure.input_readers(self.parts)
        alike: dict[tuple[str, int, int], list[str]] = {}
        for name in self._compensated:
            steps = self.plan.linears[self.prefix + name].steps
            alike.setdefault((reader[name], id(scales.get(name)), steps), []).append(name)

        def one(key: tuple[str, int, int]) -> Feedback | None:
            name = alike[key][0]
            rows, scale = statistics[name].rows, scales.get(name)
            return Feedback.on(rows if scale is None else rows / scale, key[2])

        found = zip(alike, self.job.workers.map(one, alike), strict=True)
        return {name: feedback for key, feedback in found for name in alike[key]}

    # -- output -----------------------------------------------------------------------------------------------------

    def _write(self, name: str, tensors: Tensors, statistics: dict[str, InputStatistics], scales: Tensors) -> None:
        store = self.job.store
        for part in self.parts:
            if isinstance(part, Linear) and structure.is_table(part):
                write_table(self.job, self.prefix, part, self.gains)

        feedback = self._feedback(statistics, scales) if statistics else {}

        def one(block: tuple[Linear | Vector, int, int]) -> WeightErrors:
            part, start, stop = block
            rows, seen = tensors[structure.tensor_name(part)][start:stop], self._range(part, statistics, scales)
            return store.write_rows(self.prefix, part, rows, start, seen, feedback.get(part.name))

        held = [part for part in self.parts if not structure.is_table(part)]
        pieces = [
            (part, *block) for part in held for block in blocks(tuple(tensors[structure.tensor_name(part)].shape))
        ]
        errors = WeightErrors()
        for piece in self.job.workers.map(one, pieces):
            errors.include(piece.sums())
        store.commit(self._names(self.parts), lambda: self.job.journal.finish(name, errors=errors.sums()))

    def _range(
        self, part: Linear | Vector, statistics: dict[str, InputStatistics], scales: Tensors
    ) -> ActivationRange | None:
        if part.name not in statistics or self.job.store.scheme(self.prefix, part) != schemes.W8A8:
            return None
        return statistics[part.name].range_after(scales.get(part.name))

    def _all_experts(self, routed: Routed | None) -> None:
        """Our share and, where there are other ranks, theirs: handed out through the folder, collected from it."""
        ranks, folder = self.job.ranks, self.job.folder
        if routed is not None and ranks.count > 1:
            routed.publish(folder)
        ranks.meet()
        self.experts(routed)
        ranks.meet()
        if ranks.count > 1:
            self.job.journal.refresh()
            accept_written(self.job, self.layer)
        if self.out is not None:
            for rank in range(1, ranks.count):
                self.out.include(partial_stream(folder, rank))

    def experts(self, routed: Routed | None) -> None:
        """This rank's share of the routed experts."""
        job, layer = self.job, self.layer

        def one(expert: int) -> dict[str, Any] | None:
            if unit(layer, f"expert {expert}") not in job.journal.done:
                return quantize_expert(self.plan, job.weights, job.store, layer, expert, self.gains, routed)
            if routed is not None and routed.out is not None:
                rerun_expert(job.weights, layer, expert, self.gains, routed)
            return None

        mine = [expert for expert in range(self.config.n_routed_experts) if job.ranks.mine(expert)]
        for expert, record in zip(mine, job.workers.map(one, mine), strict=True):
            if record is not None:
                names = self._names(structure.expert_linears(expert))
                job.store.commit(names, lambda e=expert, r=record: job.journal.finish(unit(layer, f"expert {e}"), **r))  # type: ignore[misc]
            job.progress.expert(layer, expert)
