"""From finished fp32 tensors to their places in the output, a block of rows at a time: memory never holds a copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.writer import ShardWriter
from glm5_ascend.model.spec import Linear, Vector
from glm5_ascend.quantize.methods.method import RoundingState
from glm5_ascend.quantize.methods.rounding import ActivationRange, quantize_linear
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.blocks import WeightErrors, blocks


class Store:
    """Writes the parts of a model as the plan wants them."""

    def __init__(self, plan: QuantizationPlan, writer: ShardWriter) -> None:
        self.plan, self.writer = plan, writer

    def scheme(self, prefix: str, part: Linear | Vector) -> str:
        return self.plan.linears[prefix + part.name].scheme if isinstance(part, Linear) else schemes.FLOAT

    def write_rows(
        self,
        prefix: str,
        part: Linear | Vector,
        rows: torch.Tensor,
        start: int,
        activation: ActivationRange | None = None,
        state: RoundingState | None = None,
    ) -> WeightErrors:
        """Write rows fp32 [n, K] of one part from row `start` on, quantized as planned; returns what that cost."""
        errors = WeightErrors()
        name, scheme = prefix + part.tensor_name, self.scheme(prefix, part)
        if scheme == schemes.FLOAT:
            dtype = torch.float32 if isinstance(part, Vector) else self.plan.source.dtype(name)
            self.writer.write_rows(name, start, rows.to(dtype))
            return errors
        method = self.plan.linears[prefix + part.name].method
        rounded = quantize_linear(part.name, rows, scheme, method, activation, state)
        for suffix, value in rounded.per_row.items():
            # INT4 packs two rows into one, so a row of the weight is half a row of what is stored.
            self.writer.write_rows(f"{prefix}{part.name}.{suffix}", start * len(value) // len(rows), value)
        for suffix, value in rounded.per_tensor.items():
            self.writer.write_rows(f"{prefix}{part.name}.{suffix}", 0, value)
        errors.add(scheme, rounded.squared_error, rounded.squared_weight)
        return errors

    def write(
        self, prefix: str, part: Linear | Vector, tensor: torch.Tensor, state: RoundingState | None = None
    ) -> WeightErrors:
        """Write a whole part."""
        errors = WeightErrors()
        for start, stop in blocks(tuple(tensor.shape)):
            errors.include(self.write_rows(prefix, part, tensor[start:stop], start, state=state).sums())
        return errors

    def names(self, prefix: str, part: Linear | Vector) -> list[str]:
        """Names of all tensors `part` becomes."""
        return [tensor.name for tensor in self.plan.stored(prefix, part)]

    def sync(self, names: Iterable[str]) -> None:
        """Everything of `names` is written: make it durable. Only then may the journal say so."""
        names = list(names)
        self.writer.sync(names)
        self.writer.expect_no_more(*names)
