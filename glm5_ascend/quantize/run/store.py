"""The output side of a run: rounds and writes tensors as planned, and records finished units in the journal.

Tensors are written a block of rows at a time, so memory never holds a second copy of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.checkpoint.writer import ShardWriter
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.written import file_checksum
from glm5_ascend.model.spec import Linear, Vector, Weight
from glm5_ascend.quantize.methods.method import RoundingState
from glm5_ascend.quantize.methods.rounding import ActivationRange, quantize_linear
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.blocks import ErrorSums, add_errors, blocks, relative_errors
from glm5_ascend.quantize.run.journal import GLOBALS, Journal, UnitRecord, WorkUnit

#: The rotation's matrix for the engine, below the checkpoint's directory.
ROTATION_FILE = "optional/quarot.safetensors"


@dataclass
class QuantizedLayer:
    """Report of one finished layer.

    Attributes:
        cold_experts: experts that saw too few tokens for a search.
        errors: of all its linears.
    """

    layer: int
    cold_experts: list[int] = field(default_factory=list)
    errors: ErrorSums = field(default_factory=dict)

    def __str__(self) -> str:
        errors = ", ".join(f"{scheme} {error:.4f}" for scheme, error in sorted(relative_errors(self.errors).items()))
        return f"weight error: {errors or 'FLOAT'}"

    def to_dict(self) -> dict[str, object]:
        """Values for `--json` and the provenance file."""
        errors = relative_errors(self.errors)
        return {"layer": self.layer, "cold_experts": self.cold_experts, "relative_weight_error": errors}


class Store:
    """Owner of the shards and of the journal."""

    def __init__(self, plan: QuantizationPlan, writer: ShardWriter, journal: Journal) -> None:
        self.plan, self.writer, self.journal = plan, writer, journal

    # -- tensors ----------------------------------------------------------------------------------------------------

    def scheme(self, prefix: str, weight: Weight) -> str:
        return self.plan.linears[prefix + weight.name].scheme if isinstance(weight, Linear) else schemes.FLOAT

    def write_rows(
        self,
        prefix: str,
        weight: Weight,
        rows: torch.Tensor,
        start: int,
        activation: ActivationRange | None = None,
        state: RoundingState | None = None,
    ) -> ErrorSums:
        """Round rows fp32 [n, K] of a part as planned and write them from row `start` on; returns their errors.

        Raises:
            CheckpointError: an error is NaN.
        """
        name, scheme = prefix + weight.tensor_name, self.scheme(prefix, weight)
        if scheme == schemes.FLOAT:
            dtype = torch.float32 if isinstance(weight, Vector) else self.plan.source.dtype(name)
            self.writer.write_rows(name, start, rows.to(dtype))
            return {}
        method = self.plan.linears[prefix + weight.name].method
        rounded = quantize_linear(weight.name, rows, scheme, method, activation, state)
        if not math.isfinite(rounded.squared_error):
            raise CheckpointError(
                f"{self.plan.source.directory}: {name}: the error of its {scheme} weights is {rounded.squared_error}",
                "glm5-ascend verify DIR; its values, or those of the calibration, are not finite",
            )
        for suffix, value in rounded.per_row.items():
            # INT4 packs two rows into one, so a row of the weight is half a row of what is stored.
            self.writer.write_rows(f"{prefix}{weight.name}.{suffix}", start * len(value) // len(rows), value)
        for suffix, value in rounded.per_tensor.items():
            self.writer.write_rows(f"{prefix}{weight.name}.{suffix}", 0, value)
        return {scheme: (rounded.squared_error, rounded.squared_weight)}

    def write(self, prefix: str, weight: Weight, tensor: torch.Tensor, state: RoundingState | None = None) -> ErrorSums:
        errors: ErrorSums = {}
        for start, stop in blocks(tuple(tensor.shape)):
            add_errors(errors, self.write_rows(prefix, weight, tensor[start:stop], start, state=state))
        return errors

    # -- units of work ----------------------------------------------------------------------------------------------

    def units(self, layer: int) -> list[WorkUnit]:
        """Units that a layer is written in: its backbone, then its routed experts."""
        experts = range(self.plan.config.n_routed_experts if self.plan.config.is_moe(layer) else 0)
        return [WorkUnit.backbone(layer), *(WorkUnit.expert(layer, expert) for expert in experts)]

    def tensor_names(self, unit: WorkUnit) -> list[str]:
        config, spec = self.plan.config, self.plan.config.spec
        if unit == GLOBALS:
            prefix, parts = "", config.global_weights
        else:
            prefix, expert = spec.layer_prefix(unit.layer_number), unit.expert_number
            parts = config.backbone(unit.layer_number) if expert is None else spec.expert_linears(expert)
        names = [tensor.name for weight in parts for tensor in self.plan.stored(prefix, weight)]
        return [*names, ROT_NAME] if unit == GLOBALS and self.plan.recipe.rotates else names

    def checksum(self, unit: WorkUnit) -> str:
        checksum = self.writer.checksum(self.tensor_names(unit))
        if unit == GLOBALS and self.plan.recipe.rotates:
            checksum += f" {file_checksum(self.writer.directory / ROTATION_FILE)}"
        return checksum

    def is_intact(self, unit: WorkUnit) -> bool:
        """True if the bytes of a unit in the journal are the recorded ones."""
        return self.checksum(unit) == self.journal.record(unit).checksum

    def finish(self, unit: WorkUnit, record: UnitRecord) -> None:
        """Make a written unit durable, then record it."""
        names = self.tensor_names(unit)
        self.writer.sync(names)
        self.writer.expect_no_more(*names)
        self.journal.finish(unit, record)

    def accept_written(self, layer: int) -> None:
        """Count the units of a layer that a stopped run has finished as written."""
        done = [unit for unit in self.units(layer) if unit in self.journal]
        self.writer.expect_no_more(*(name for unit in done for name in self.tensor_names(unit)))

    def report(self, layer: int) -> QuantizedLayer:
        """Report from the journal: the same whether the layer was done in one run or several."""
        report = QuantizedLayer(layer)
        for unit in self.units(layer):
            record = self.journal.record(unit)
            add_errors(report.errors, record.errors)
            if record.cold and unit.expert_number is not None:
                report.cold_experts.append(unit.expert_number)
        return report
