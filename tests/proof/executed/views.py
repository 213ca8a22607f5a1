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
    """The operation as a function of the values, or None if it makes no view."""
    make = _maker(operation, spaces)
    if make is None:
        return None
    (result,) = operation.results

    def step(env: Values) -> None:
        env[result] = make(env)

    return step


def _maker(operation: Operation, spaces: Spaces) -> Make | None:
    name, rest = operation.name, operation.rest
    if name == "hivm.hir.pointer_cast":
        return _allocation(operation, spaces)
    if name == "memref.cast":
        source = values(rest)[0]
        return lambda env: env[source]
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
    return lambda env: View(space, env[addresses[0]], 0, kind.sizes, strides, kind.kind, owner)


def _numbers(text: str) -> Callable[[Values], tuple[int, ...]]:
    """The numbers of a list such as `16, %3, 1`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    fixed = [None if part.startswith("%") else int(part) for part in parts]
    if None not in fixed:
        constant = tuple(int(part) for part in parts)
        return lambda env: constant
    return lambda env: tuple(int(env[part]) if part.startswith("%") else int(part) for part in parts)


def _reinterpreted(rest: str) -> Make:
    match = re.match(rf"({VALUE}) to offset: \[(.*?)\], sizes: \[(.*?)\], strides: \[(.*?)\]", rest)
    if match is None:
        raise UncoveredError(f"reinterpret_cast {rest[:60]}")
    source, offset, sizes, strides = match[1], _numbers(match[2]), _numbers(match[3]), _numbers(match[4])
    return lambda env: env[source].part(offset(env)[0], sizes(env), strides(env))


def _subview(rest: str) -> Make:
    match = re.match(rf"({VALUE})\[(.*?)\] \[(.*?)\] \[(.*?)\]", rest)
    if match is None:
        raise UncoveredError(f"subview {rest[:60]}")
    source, offsets, sizes, steps = match[1], _numbers(match[2]), _numbers(match[3]), _numbers(match[4])
    result = rest.rpartition(" to ")[2]
    rank, named = len(view_type(result).sizes), re.search(r"strided<\[(.*?)\]", result)
    expected = [part.strip() for part in named[1].split(",")] if named else []

    def make(env: Values) -> View:
        view: View = env[source]
        at, size, step = offsets(env), sizes(env), steps(env)
        offset = view.offset + sum(a * s for a, s in zip(at, view.strides, strict=True))
        strides = tuple(a * s for a, s in zip(step, view.strides, strict=True))
        axes = _kept(size, strides, rank, expected)
        return view.part(offset, tuple(size[i] for i in axes), tuple(strides[i] for i in axes))

    return make


def _kept(size: tuple[int, ...], strides: tuple[int, ...], rank: int, expected: list[str]) -> tuple[int, ...]:
    """Dropping sizes of 1 reduces a rank: the first that leave the strides which the result's type names."""
    match = [
        axes
        for axes in itertools.combinations(range(len(size)), rank)
        if all(size[axis] == 1 for axis in range(len(size)) if axis not in axes)
    ]
    for axes in reversed(match):
        if all(word in ("?", str(strides[axis])) for word, axis in zip(expected, axes, strict=False)):
            return axes
    return match[-1]


def _groups(rest: str) -> list[list[int]]:
    match = re.search(r"\[(\[.*?\])\]", rest)
    if match is None:
        return []
    return [[int(axis) for axis in group.split(",")] for group in re.findall(r"\[([\d, ]+)\]", match[1])]


def _collapsed(rest: str) -> Make:
    source, groups = values(rest)[0], _groups(rest)

    def make(env: Values) -> View:
        view: View = env[source]
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
    match = re.search(r"output_shape \[(.*?)\]", rest)
    if match is None:
        raise UncoveredError(f"expand_shape {rest[:60]}")
    shape = _numbers(match[1])

    def make(env: Values) -> View:
        view: View = env[source]
        sizes, strides = shape(env), [0] * len(shape(env))
        for outer, group in enumerate(groups):
            stride = view.strides[outer]
            for axis in reversed(group):
                strides[axis] = stride
                stride *= sizes[axis]
        return view.part(view.offset, sizes, tuple(strides))

    return make


def _other_kind(rest: str) -> Make:
    source, kind = values(rest)[0], view_type(rest.rpartition(" -> ")[2])
    return lambda env: replace(env[source], kind=kind.kind)


def _bytes_as(rest: str) -> Make:
    match = re.match(rf"({VALUE})\[({VALUE})\]\[(.*?)\]", rest)
    kind = view_type(rest.rpartition(" to ")[2])
    if match is None or match[3] or -1 in kind.sizes:
        raise UncoveredError(f"view {rest[:60]}")
    source, shift = match[1], match[2]

    def make(env: Values) -> View:
        view: View = env[source]
        address = view.start() + env[shift]
        return View(view.space, address, 0, kind.sizes, packed(kind.sizes), kind.kind, view.owner)

    return make


def element(operation: Operation) -> tuple[str, Callable[[Values], View]]:
    """The value that memref.store stores ("" for memref.load), and the element as a view."""
    match = re.match(rf"(?:({VALUE}), )?({VALUE})\[(.*?)\]", operation.rest)
    if match is None:
        raise UncoveredError(f"{operation.name} {operation.rest[:60]}")
    source, indices = match[2], _numbers(match[3])

    def locate(env: Values) -> View:
        view: View = env[source]
        at = view.offset + sum(i * s for i, s in zip(indices(env), view.strides, strict=True))
        return view.part(at, (1,), (1,))

    return match[1] or "", locate


def scalar(view: View) -> int | np.float32:
    """The one value of a view of one element."""
    value = view.read()[0]
    return np.float32(value) if np.dtype(DTYPES[view.kind]).kind == "f" or view.kind == "bf16" else int(value)
