"""The reference and the compiled version of every op, called as `ops` calls them: with checked operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm5_kernels import registry


class Implementation:
    """`reference.hadamard(x, weight)` for any op."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op not in registry.OPS:
            raise AttributeError(op)
        return registry.load(op, self.name)


reference, cpu = Implementation("reference"), Implementation("cpu")
