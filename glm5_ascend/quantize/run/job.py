"""What the steps of one run share, and how a finished layer is reported and accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from glm5_ascend.files.written import file_checksum
from glm5_ascend.model.spec import Linear, Vector
from glm5_ascend.quantize.methods.transforms import Tensors
from glm5_ascend.quantize.plan import ROT_NAME, QuantizationPlan
from glm5_ascend.quantize.progress import Progress
from glm5_ascend.quantize.run.blocks import WeightErrors, blocks
from glm5_ascend.quantize.run.journal import GLOBALS, Journal, WorkUnit
from glm5_ascend.quantize.run.ranks import Ranks
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.writer import Store
from glm5_ascend.quantize.workers import Workers

#: The rotation's matrix for the engine, below the checkpoint's directory.
ROTATION_FILE = "optional/quarot.safetensors"


@dataclass(frozen=True)
class RunContext:
    """Everything a step needs; `folder` holds the activations."""

    plan: QuantizationPlan
    weights: FloatWeights
    store: Store
    journal: Journal
    workers: Workers
    ranks: Ranks
    progress: Progress
    folder: Path

    def experts(self, layer: int) -> range:
        """The routed experts of a layer; none where the MLP is dense."""
        return range(self.plan.config.n_routed_experts if self.plan.config.is_moe(layer) else 0)

    def own_experts(self, layer: int) -> list[int]:
        """Those of them that are this rank's."""
        return [expert for expert in self.experts(layer) if self.ranks.mine(expert)]

    def stored_names(self, layer: int, parts: Iterable[Linear | Vector]) -> list[str]:
        """Names of all tensors that parts of a layer become."""
        return [name for part in parts for name in self.store.names(self.plan.config.spec.layer_prefix(layer), part)]

    def global_names(self) -> list[str]:
        """Names of all tensors outside the layers."""
        names = [name for part in self.plan.config.spec.global_weights for name in self.store.names("", part)]
        return names if self.weights.rotations is None else [*names, ROT_NAME]

    def units(self, layer: int) -> list[WorkUnit]:
        """What a layer is written in."""
        return [WorkUnit.backbone(layer), *(WorkUnit.expert(layer, expert) for expert in self.experts(layer))]

    def names_of(self, unit: WorkUnit) -> list[str]:
        """Names of all tensors a unit writes."""
        if unit == GLOBALS:
            return self.global_names()
        layer, expert = unit.place
        parts = self.plan.config.backbone(layer) if expert is None else self.plan.config.spec.expert_linears(expert)
        return self.stored_names(layer, parts)

    def checksum(self, unit: WorkUnit) -> str:
        """Of what a unit has left on disk."""
        value = self.store.writer.checksum(self.names_of(unit))
        if unit == GLOBALS and self.weights.rotations is not None:
            value += f" {file_checksum(self.store.writer.directory / ROTATION_FILE)}"
        return value

    def as_recorded(self, unit: WorkUnit) -> bool:
        """Whether a unit in the journal lies on disk as it was written."""
        return self.checksum(unit) == self.journal.record(unit).checksum

    def accept_written(self, layer: int) -> None:
        """What the journal has of a layer, by another run or another rank, is not missing."""
        done = [unit for unit in self.units(layer) if unit in self.journal]
        self.store.writer.expect_no_more(*(name for unit in done for name in self.names_of(unit)))

    def write_table(self, prefix: str, table: Linear, gains: Tensors) -> None:
        """An embedding table or a head, in blocks of rows."""

        def write_block(block: tuple[int, int]) -> None:
            self.store.write_rows(prefix, table, self.weights.rows(prefix, table, gains, *block), block[0])

        shape = table.shape(self.plan.config.sizes)
        self.workers.each(write_block, blocks(shape))


@dataclass
class QuantizedLayer:
    """What is worth knowing about one finished layer."""

    layer: int
    cold_experts: list[int] = field(default_factory=list)
    errors: WeightErrors = field(default_factory=WeightErrors)

    @classmethod
    def of(cls, run: RunContext, layer: int) -> QuantizedLayer:
        """From the journal: the same whether the layer was done in one run or several."""
        found = cls(layer)
        found.errors.include(run.journal.record(WorkUnit.backbone(layer)).errors)
        for expert in run.experts(layer):
            record = run.journal.record(WorkUnit.expert(layer, expert))
            found.errors.include(record.errors)
            if record.cold:
                found.cold_experts.append(expert)
        return found

    def in_words(self) -> str:
        """For the progress line."""
        errors = ", ".join(f"{scheme} {error:.4f}" for scheme, error in sorted(self.errors.relative().items()))
        return f"weight error: {errors or 'FLOAT'}"
