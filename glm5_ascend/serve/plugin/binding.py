"""What a layer bound to its operands is made of: the places that steps share, and the calls that one repeats.

A step of decoding makes some twenty short calls per layer. Which code makes them, with which addresses and sizes,
depends on the number of tokens alone: it is found out once (`ops.bind`) and repeated. What a step brings is copied to
its place; its tables are looked at once for all layers (`ops.StepTables`). The numbers are those of the ops one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from glm5_ascend.serve.plugin.backend import SparseMLAMetadata
from glm5_ascend.serve.plugin.linear import is_ours, packed_product
from glm5_kernels import ops


class NotBoundError(Exception):
    """The compiled ops do not run here, would have to copy what they are bound to, or the layer is of another kind."""


class StepInputs:
    """What all layers of a step of T tokens read: tables, slots, and angles for each rotary table."""

    def __init__(self, tokens: int, max_blocks: int, cache: torch.Tensor) -> None:
        self.tables, self.tokens = ops.StepTables(tokens, max_blocks, cache), tokens
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._positions = b""

    def angles(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where cos, sin fp32 [T, rope / 2] of a rotary table are put from the next step on."""
        key = table.data_ptr()
        if key not in self._angles:
            cos, sin = (torch.zeros(self.tokens, table.shape[1] // 2) for _ in range(2))
            self._angles[key], self._positions = (table, cos, sin), b""
        return self._angles[key][1:]

    def fill(self, positions: torch.Tensor, metadata: SparseMLAMetadata) -> None:
        """Take over a step; nothing is left to do in its second layer."""
        self.tables.fill(metadata.paged, metadata.slot_mapping)
        held = positions.numpy().tobytes()
        if held != self._positions:
            for table, cos, sin in self._angles.values():
                for place, values in zip((cos, sin), metadata.angles(table, positions), strict=True):
                    place.copy_(values)
            self._positions = held


class _OfThread(threading.local):
    """Places that the layers of all models of a thread share."""

    def __init__(self) -> None:
        self.room = ops.Workspace()
        self.inputs: dict[tuple[int, ...], StepInputs] = {}


_own = _OfThread()


def room() -> ops.Workspace:
    """The places of this thread."""
    return _own.room


def step_inputs(tokens: int, max_blocks: int, cache: torch.Tensor) -> StepInputs:
    """Those of steps of so many tokens, for a cache of such blocks."""
    key = tokens, max_blocks, *cache.shape[:2]
    if key not in _own.inputs:
        _own.inputs[key] = StepInputs(tokens, max_blocks, cache)
    return _own.inputs[key]


class Calls:
    """The calls of a layer, in order."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self) -> None:
        for call, given, named in self._calls:
            call(*given, **named)

    def add(self, call: Callable[..., object], *given: Any, **named: Any) -> None:
        self._calls.append((call, given, named))

    def bind(self, op: str, *operands: Any) -> tuple[torch.Tensor, ...]:
        """Add a call of an op; where its results will be."""
        bound = ops.bind(op, *operands)
        if bound is None:
            raise NotBoundError
        self.add(bound)
        return bound.outputs

    def linear(self, use: str, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Add a linear layer of vLLM; where its result will be: a place for `use`, in x's dtype."""
        if layer.bias is not None:
            raise NotBoundError
        out = room().tensor(use, (len(x), layer.output_size), x.dtype)
        packed = packed_product(layer)
        if is_ours(layer):
            self.bind("int8_linear", x, layer.op_weights, out, room())
        elif packed is not None:
            self.add(packed, x, out)
        else:
            self.add(lambda: out.copy_(layer.quant_method.apply(layer, x)))
        return out
