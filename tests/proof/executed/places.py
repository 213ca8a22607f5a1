"""Memories as addressed bytes, and views of them: a memref is a base, sizes and strides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.proof.executed.text import UncoveredError

#: Bytes of a core's memories (AscendNPU-IR's target specification of A2 and A3).
SIZES = {"ub": 196608, "cbuf": 524288, "cc": 131072, "ca": 65536, "cb": 65536}
#: Element types as they lie in memory; bf16 as its bits, i1 as packed bits, lowest first.
DTYPES: dict[str, Any] = {
    "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i8": np.int8, "i16": np.int16, "i32": np.int32,
    "i64": np.int64, "i1": np.uint8,
}  # fmt: skip
Bytes = np.ndarray[Any, Any]


class FaultError(Exception):
    """The program goes where it must not: an address out of range, a deadlock. Holds one line of words."""


@dataclass
class Space:
    """One memory: its bytes, and a shadow per byte that `clocks` fills. GM's tensors are a space each.

    Attributes:
        shared: GM, which all cores and all blocks see.
        prepared: it holds something before the program starts, as tensors do and a workspace does not.
        shadow: arrays with an entry per byte, by name.
        latest: number of the last instruction that touched it, by thread and by ("written", thread).
        pending: reads of GM as long as nobody has written there.
    """

    name: str
    data: Bytes
    shared: bool = False
    prepared: bool = False
    shadow: dict[Any, Bytes] = field(default_factory=dict)
    latest: dict[Any, int] = field(default_factory=dict)
    pending: list[Any] = field(default_factory=list)

    def filled(self, key: Any, dtype: Any, value: int) -> Bytes:
        """The shadow array of that name, made when first asked for."""
        if key not in self.shadow:
            self.shadow[key] = np.full(len(self.data), value, dtype)
        return self.shadow[key]


@dataclass(frozen=True)
class View:
    """Elements of `kind` in `space`: element [i, j] at byte base + item * (offset + i * strides[0] + j * strides[1]).

    Attributes:
        owner: line of the allocation that it is a view of.
    """

    space: Space
    base: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kind: str
    owner: int = -1

    @property
    def item(self) -> int:
        return int(np.dtype(DTYPES[self.kind]).itemsize)

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def part(self, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> View:
        """Another view of the same allocation, its offset in elements from the base."""
        return View(self.space, self.base, offset, sizes, strides, self.kind, self.owner)

    def start(self) -> int:
        """Address of its first byte."""
        if self.kind == "i1":
            if self.offset % 8:
                raise UncoveredError("bits that start inside a byte")
            return self.base + self.offset // 8
        return self.base + self.offset * self.item

    def of(self, array: Bytes) -> Bytes:
        """Its bytes' entries in an array with one entry per byte of the space: [*sizes, bytes per element].

        Raises:
            FaultError: some lie outside.
        """
        first, sizes, strides, item = self.start(), self.sizes, self.strides, self.item
        if self.kind == "i1":
            if len(sizes) != 1 or strides[0] != 1:
                raise UncoveredError("bits that do not follow each other")
            sizes = (-(-sizes[0] // 8),)
        last = first + item * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))
        if first < 0 or last > len(array):
            raise FaultError(f"address out of range: bytes {first} to {last} of {len(array)} in {self.space.name}")
        wide = array.itemsize
        steps = (*(s * item * wide for s in strides), wide)
        return np.ndarray((*sizes, item), array.dtype, buffer=array.data, offset=first * wide, strides=steps)

    def array(self) -> Bytes:
        """The elements as they lie in memory (bf16 as uint16), writable; of i1 the bytes."""
        raw_bytes = self.of(self.space.data)
        if self.kind == "i1":
            return raw_bytes[..., 0]
        dtype = np.dtype(DTYPES[self.kind])
        offset = self.start()
        steps = tuple(s * self.item for s in self.strides)
        return np.ndarray(self.sizes, dtype, buffer=self.space.data.data, offset=offset, strides=steps)

    def read(self) -> Bytes:
        """Values: floats as float32, integers as they are, i1 as bool."""
        raw = self.array()
        if self.kind == "i1":
            return np.unpackbits(np.ascontiguousarray(raw), count=self.sizes[0], bitorder="little").astype(bool)
        if self.kind == "bf16":
            return widened(raw)
        return raw.astype(np.float32) if self.kind == "f16" else raw.copy()

    def write(self, new: Any) -> None:
        """Values rounded to nearest even where they must be, integers cut."""
        raw = self.array()
        if self.kind == "i1":
            raw[...] = np.packbits(np.asarray(new, bool), bitorder="little")
        elif self.kind == "bf16":
            raw[...] = narrowed(np.asarray(new, np.float32))
        else:
            with np.errstate(over="ignore"):
                raw[...] = np.asarray(new).astype(raw.dtype)


def widened(bits: Bytes) -> Bytes:
    """bf16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers: Bytes) -> Bytes:
    """float32 to bf16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype(np.uint16)


def packed(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of elements that follow each other."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if sizes else ()
