"""memref operations: views of memories (dialect memref of LLVM 19, `hivm.hir.pointer_cast` of AscendNPU-IR 1.2.0)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.proof.executed.places import DTYPES, Space, View, packed
from tests.proof.executed.scalars import Step, Values
from tests.proof.executed.text import VALUE, Operation, UncoveredError, values, view_type

Spaces = dict[str, Space]
Make = Callable[[Values], View]


def compiled(operation: Operation, spaces: Spaces) -> Step | None:
    """What the operation does to the values; None if it makes no view."""
    make = _maker(operation, spaces)
    if make is None:
        return None
    (result,) = operation.results

    def step(known: Values) -> None:
        known[result] = make(known)

    return step


def _maker(operation: Operation, spaces: Spaces) -> Make | None:
    name, rest = operation.name, operation.rest
    if name == "hivm.hir.pointer_cast":
        return _allocation(operation, spaces)
    if name == "memref.cast":
        source = values(rest)[0]
        return lambda known: known[source]
    if name == "memref.reinterpret_cast":
        return _reinterpreted(rest)
    if name == "memref.subview":
        return _subview(rest)
    if name == "memref.collapse_shape":
        return _collapsed(rest)
    if name == "memref.expand_shape":
        return _expanded(rest)
    if name == "hivm.hir.bitcast":
        return _other_kind(rest)
    if name == "memref.view":
        return _bytes_as(rest)
    return None


def _allocation(operation: Operation, spaces: Spaces) -> Make:
    addresses, kind = values(operation.rest.split(":")[0]), view_type(operation.rest)
    if len(addresses) != 1 or -1 in kind.sizes:
        raise UncoveredError("pointer_cast with several addresses or a dynamic size")
    strides, space, owner = packed(kind.sizes), spaces[kind.space], operation.number
    return lambda known: View(space, known[addresses[0]], 0, kind.sizes, strides, kind.kind, owner)


def _numbers(text: str) -> Callable[[Values], tuple[int, ...]]:
    """Of a list as `16, %3, 1`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    fixed = [None if part.startswith("%") else int(part) for part in parts]
    if None not in fixed:
        constant = tuple(int(part) for part in parts)
        return lambda known: constant
    return lambda known: tuple(int(known[part]) if part.startswith("%") else int(part) for part in parts)


def _reinterpreted(rest: str) -> Make:
    found = re.match(rf"({VALUE}) to offset: \[(.*?)\], sizes: \[(.*?)\], strides: \[(.*?)\]", rest)
    if found is None:
        raise UncoveredError(f"reinterpret_cast {rest[:60]}")
    source, offset, sizes, strides = found[1], _numbers(found[2]), _numbers(found[3]), _numbers(found[4])
    return lambda known: known[source].part(offset(known)[0], sizes(known), strides(known))


def _subview(rest: str) -> Make:
    found = re.match(rf"({VALUE})\[(.*?)\] \[(.*?)\] \[(.*?)\]", rest)
    if found is None:
        raise UncoveredError(f"subview {rest[:60]}")
    source, offsets, sizes, steps = found[1], _numbers(found[2]), _numbers(found[3]), _numbers(found[4])
    result = rest.rpartition(" to ")[2]
    rank, named = len(view_type(result).sizes), re.search(r"strided<\[(.*?)\]", result)
    wanted = [part.strip() for part in named[1].split(",")] if named else []

    def make(known: Values) -> View:
        view: View = known[source]
        at, size, step = offsets(known), sizes(known), steps(known)
        offset = view.offset + sum(a * s for a, s in zip(at, view.strides, strict=True))
        strides = tuple(a * s for a, s in zip(step, view.strides, strict=True))
        kept = _kept(size, strides, rank, wanted)
        return view.part(offset, tuple(size[i] for i in kept), tuple(strides[i] for i in kept))

    return make


def _kept(size: tuple[int, ...], strides: tuple[int, ...], rank: int, wanted: list[str]) -> tuple[int, ...]:
    """Dropping sizes of 1 reduces a rank: the first that leave the strides which the result's type names."""
    found = [
        kept
        for kept in itertools.combinations(range(len(size)), rank)
        if all(size[axis] == 1 for axis in range(len(size)) if axis not in kept)
    ]
    for kept in reversed(found):
        if all(word in ("?", str(strides[axis])) for word, axis in zip(wanted, kept, strict=False)):
            return kept
    return found[-1]


def _groups(rest: str) -> list[list[int]]:
    found = re.search(r"\[(\[.*?\])\]", rest)
    if found is None:
        return []
    return [[int(axis) for axis in group.split(",")] for group in re.findall(r"\[([\d, ]+)\]", found[1])]


def _collapsed(rest: str) -> Make:
    source, groups = values(rest)[0], _groups(rest)

    def make(known: Values) -> View:
        view: View = known[source]
        sizes, strides = [], []
        for group in groups:
            axes = [axis for axis in group if view.sizes[axis] != 1] or [group[-1]]
            size = view.sizes[axes[-1]]
            for outer, inner in zip(reversed(axes[:-1]), reversed(axes[1:]), strict=True):
                if view.strides[outer] != view.sizes[inner] * view.strides[inner]:
                    raise UncoveredError("collapse_shape of axes that do not follow each other")
                size *= view.sizes[outer]
            sizes.append(size)
            strides.append(view.strides[axes[-1]])
        return view.part(view.offset, tuple(sizes), tuple(strides))

    return make


def _expanded(rest: str) -> Make:
    source, groups = values(rest)[0], _groups(rest)
    found = re.search(r"output_shape \[(.*?)\]", rest)
    if found is None:
        raise UncoveredError(f"expand_shape {rest[:60]}")
    shape = _numbers(found[1])

    def make(known: Values) -> View:
        view: View = known[source]
        sizes, strides = shape(known), [0] * len(shape(known))
        for outer, group in enumerate(groups):
            stride = view.strides[outer]
            for axis in reversed(group):
                strides[axis] = stride
                stride *= sizes[axis]
        return view.part(view.offset, sizes, tuple(strides))

    return make


def _other_kind(rest: str) -> Make:
    source, kind = values(rest)[0], view_type(rest.rpartition(" -> ")[2])
    return lambda known: replace(known[source], kind=kind.kind)


def _bytes_as(rest: str) -> Make:
    found = re.match(rf"({VALUE})\[({VALUE})\]\[(.*?)\]", rest)
    kind = view_type(rest.rpartition(" to ")[2])
    if found is None or found[3] or -1 in kind.sizes:
        raise UncoveredError(f"view {rest[:60]}")
    source, shift = found[1], found[2]

    def make(known: Values) -> View:
        view: View = known[source]
        address = view.start() + known[shift]
        return View(view.space, address, 0, kind.sizes, packed(kind.sizes), kind.kind, view.owner)

    return make


def element(operation: Operation) -> tuple[str, Callable[[Values], View]]:
    """Of memref.load and memref.store: the value stored ("" at a load) and the place, a view of one element."""
    found = re.match(rf"(?:({VALUE}), )?({VALUE})\[(.*?)\]", operation.rest)
    if found is None:
        raise UncoveredError(f"{operation.name} {operation.rest[:60]}")
    source, indices = found[2], _numbers(found[3])

    def place(known: Values) -> View:
        view: View = known[source]
        at = view.offset + sum(i * s for i, s in zip(indices(known), view.strides, strict=True))
        return view.part(at, (1,), (1,))

    return found[1] or "", place


def scalar(view: View) -> int | np.float32:
    """The one value of a view of one element."""
    value = view.read()[0]
    return np.float32(value) if np.dtype(DTYPES[view.kind]).kind == "f" or view.kind == "bf16" else int(value)
