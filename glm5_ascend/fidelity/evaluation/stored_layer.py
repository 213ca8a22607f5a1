"""One layer of a checkpoint on disk, float or quantized, for the layer maths: fp32 between the linears, int8 inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.workers import Workers, in_order
from glm5_ascend.model.weights import fp32_linear
from glm5_kernels import ops

#: Weights that are widened to fp32 together: they stay in a processor's cache until they are multiplied.
BLOCK_WEIGHTS = 2**22


class Tensors(Protocol):
    """Reads tensors by full name."""

    def __contains__(self, name: str) -> bool: ...
    def read(self, name: str) -> torch.Tensor: ...
    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor: ...
    def read_ahead(self, name: str) -> int: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


class StoredLayer:
    """`LayerWeights` that reads what it needs: a float linear at each use, block by block, if it was not loaded."""

    def __init__(self, files: Tensors, description: dict[str, object], prefix: str) -> None:
        self.files, self.description, self.prefix = files, description, prefix
        self._floats: dict[str, torch.Tensor] = {}
        self._quantized: dict[str, ops.LinearWeights] = {}

    def load(self, names: Iterable[str], workers: Workers | None) -> None:
        """Read linears whole, for more than one use."""
        blocks: list[tuple[str, int, int]] = []
        modules: list[tuple[str, str]] = []
        for name in names:
            module = self.prefix + name
            if (scheme := self.scheme(name)) == schemes.FLOAT:
                shape = self.files.shape(f"{module}.weight")
                self._floats[f"{name}.weight"] = torch.empty(shape)
                blocks += ((name, start, stop) for start, stop in _blocks(shape))
            else:
                modules.append((module, scheme))

        def load_block(block: tuple[str, int, int]) -> None:
            name, start, stop = block
            rows = self.files.read_rows(f"{self.prefix}{name}.weight", start, stop)
            self._floats[f"{name}.weight"][start:stop] = rows

        def load_quantized(linear: tuple[str, str]) -> None:
            self._quantized[linear[0]] = self._read_quantized(*linear)

        list(in_order(workers, load_quantized, modules))
        list(in_order(workers, load_block, blocks))

    def vector(self, name: str) -> torch.Tensor:
        if name not in self._floats:
            self._floats[name] = self.files.read(self.prefix + name).float()
        return self._floats[name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = self.prefix + name
        scheme = self.scheme(name)
        if scheme != schemes.FLOAT:
            if module not in self._quantized:
                self._quantized[module] = self._read_quantized(module, scheme)
            return ops.int8_linear(x, self._quantized[module])
        if f"{name}.weight" in self._floats:
            return fp32_linear(x, self._floats[f"{name}.weight"])
        shape = self.files.shape(f"{module}.weight")
        out = torch.empty(*x.shape[:-1], shape[0])
        for start, stop in _blocks(shape):
            out[..., start:stop] = fp32_linear(x, self.files.read_rows(f"{module}.weight", start, stop).float())
        return out

    def scheme(self, name: str) -> str:
        return str(self.description.get(f"{self.prefix}{name}.weight", schemes.FLOAT))

    def _read_quantized(self, module: str, scheme: str) -> ops.LinearWeights:
        def read(suffix: str) -> torch.Tensor:
            return self.files.read(f"{module}.{suffix}")

        weight = schemes.integer_weight(scheme, {"weight": read("weight")})
        if scheme == schemes.W8A8:
            scale = read("deq_scale")
            inputs = [read(suffix) for suffix in ("input_scale", "input_offset", "quant_bias")]
            return ops.LinearWeights(weight, ops.PER_TENSOR, scale, *inputs)
        return ops.LinearWeights(weight, ops.PER_TOKEN, read("weight_scale").flatten())


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK_WEIGHTS // shape[1])
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])
