"""From finished fp32 tensors to their places in the output, a block of rows at a time: memory never holds a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.writer import ShardWriter
from glm5_ascend.model import structure
from glm5_ascend.model.structure import Linear, Vector
from glm5_ascend.quantize.methods.error_feedback import Feedback
from glm5_ascend.quantize.methods.rounding import ActivationRange, quantize_linear
from glm5_ascend.quantize.plan import Plan

BLOCK = 2**22  # weights per block
_ROWS = 16  # a block's rows are a multiple of this: INT4 packs two rows into one


@dataclass
class WeightErrors:
    """Sums over linears of (W_deq - W)^2 and W^2, by scheme; W after rotation and smoothing."""

    squared_error: dict[str, float] = field(default_factory=dict)
    squared_weight: dict[str, float] = field(default_factory=dict)

    def add(self, scheme: str, error: float, weight: float) -> None:
        self.squared_error[scheme] = self.squared_error.get(scheme, 0.0) + error
        self.squared_weight[scheme] = self.squared_weight.get(scheme, 0.0) + weight

    def include(self, other: Mapping[str, tuple[float, float]]) -> None:
        for scheme, (error, weight) in other.items():
            self.add(scheme, error, weight)

    def sums(self) -> dict[str, tuple[float, float]]:
        return {scheme: (self.squared_error[scheme], self.squared_weight[scheme]) for scheme in self.squared_error}

    def relative(self) -> dict[str, float]:
        """rms(W_deq - W) / rms(W) per scheme."""
        return {k: (self.squared_error[k] / max(self.squared_weight[k], 1e-30)) ** 0.5 for k in self.squared_error}


def blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the blocks of rows a tensor of `shape` is worked on in."""
    width = shape[1] if len(shape) > 1 else 1
    rows = max(_ROWS, BLOCK // width // _ROWS * _ROWS)
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


class Store:
    """Writes the parts of a model as the plan wants them."""

    def __init__(self, plan: Plan, writer: ShardWriter) -> None:
        self.plan, self.writer = plan, writer

    def scheme(self, prefix: str, part: Linear | Vector) -> str:
        return self.plan.linears[prefix + part.name].scheme if isinstance(part, Linear) else schemes.FLOAT

    def write_rows(
        self,
        prefix: str,
        part: Linear | Vector,
        rows: torch.Tensor,
        start: int,
        seen: ActivationRange | None = None,
        feedback: Feedback | None = None,
    ) -> WeightErrors:
        """Write rows of one part from row `start` on, quantized as planned; returns what that cost."""
        errors = WeightErrors()
        name, scheme = prefix + structure.tensor_name(part), self.scheme(prefix, part)
        if scheme == schemes.FLOAT:
            dtype = torch.float32 if isinstance(part, Vector) else self.plan.source.dtype(name)
            self.writer.write_rows(name, start, rows.to(dtype))
            return errors
        method = self.plan.linears[prefix + part.name].method
        rounded = quantize_linear(part.name, rows, scheme, method, seen, feedback)
        for suffix, value in rounded.stored.items():
            if len(value) == 1 < len(rows):  # the static input's scale and offset: of the whole linear
                self.writer.write_rows(f"{prefix}{part.name}.{suffix}", 0, value)
            else:
                self.writer.write_rows(f"{prefix}{part.name}.{suffix}", start * len(value) // len(rows), value)
        errors.add(scheme, rounded.squared_error, rounded.squared_weight)
        return errors

    def write(
        self, prefix: str, part: Linear | Vector, tensor: torch.Tensor, feedback: Feedback | None = None
    ) -> WeightErrors:
        """Write a whole part."""
        errors = WeightErrors()
        for start, stop in blocks(tuple(tensor.shape)):
            errors.include(self.write_rows(prefix, part, tensor[start:stop], start, feedback=feedback).sums())
        return errors

    def names(self, prefix: str, part: Linear | Vector) -> list[str]:
        """Names of all tensors `part` becomes."""
        return [tensor.name for tensor in self.plan.stored(prefix, part)]

    def commit(self, names: list[str], record: Callable[[], None]) -> None:
        """Everything of `names` is written: make it durable, then let `record` say so."""
        self.writer.sync(names)
        self.writer.expect_no_more(*names)
        record()
