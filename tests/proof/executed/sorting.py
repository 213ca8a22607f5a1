"""Sorting in UB: `sort_1d`, every instruction of which is here, since calls in a row use one temporary buffer.

From AscendNPU-IR v1.2.0, `bishengir/lib/Template/lib/Vector/Sort/Sort1D.cpp`. The vector pipe sorts 32 keys at a time
from the largest down, each with its place (a proposal of 8 bytes), and merges four such lists to one until one is left.
For ascending order the sign bits are turned before and after. The order of proposals inside the buffers is the
library's own affair and simplified here: keys first, the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.proof.executed.places import View
from tests.proof.executed.steps import LIBRARY_EVENT, Flag, Instruction, Step
from tests.proof.executed.text import UncoveredError

PROPOSAL, LIST, WAYS = 8, 32, 4
Build = Callable[[list[Any]], list[Step]]
_KINDS = {"half": ("f16", "i16"), "float": ("f32", "i32")}


def primitive(name: str) -> Build | None:
    """How to make the steps of a call from its arguments; None if it is no sort that our kernels use."""
    found = re.fullmatch(r"sort_1d_(half|float)", name)
    return (lambda arguments: _sort(*_KINDS[found[1]], arguments)) if found else None


def _sort(kind: str, bits: str, arguments: list[Any]) -> list[Step]:
    source, target, temporary, descending = arguments
    (count,), item = source.sizes, source.item
    if descending or source.strides != (1,) or target.strides != (1,) or not _merges(count):
        raise UncoveredError(f"sort_1d of {count} keys, descending {descending}")

    def buffer(start: int, bytes_each: int, kind: str) -> View:
        view = View(temporary.space, temporary.start() + start, 0, (), (), kind, temporary.owner)
        return view.part(0, (count * bytes_each // view.item,), (1,))

    # Places, keys with their sign bits turned, and proposals, twice: in the order of the buffer.
    places, turned = buffer(0, 4, "i32"), buffer(4 * count, item, bits)
    lists = [buffer((4 + item + PROPOSAL * i) * count, PROPOSAL, kind) for i in range(2)]

    def place() -> None:
        places.write(np.arange(count, dtype=np.int32))

    def turn() -> None:
        turned.write(source.array().view(turned.array().dtype) ^ np.iinfo(turned.array().dtype).min)

    def keys(view: View) -> Any:
        return view.part(view.offset, (count,), (1,))

    def ordered(into: View, values: Any, length: int) -> None:
        if np.isnan(values).any():
            raise UncoveredError("sort_1d of a key that is no number")
        keys(into).write(-np.sort(-values.reshape(-1, length), axis=1).reshape(-1))

    def first() -> None:
        ordered(lists[0], turned.array().view(source.array().dtype), LIST)
        places.read()

    def merge(into: View, of: View, length: int) -> Instruction:
        return _named("vmrgsort4", (of,), into, lambda: ordered(into, keys(of).read(), length))

    def back() -> None:
        target.write(-target.read())

    steps = [
        _named("arange_1d_int32_t", (), places, place),
        *(Flag(verb, *ends, LIBRARY_EVENT) for ends in (("V", "S"), ("S", "V")) for verb in ("set", "wait")),
        _named(f"vadds_vs_1d_{bits}", (source,), turned, turn),
        Flag("barrier", "V"),
        _named("vbitsort", (turned, places), lists[0], first),
        Flag("barrier", "V"),
    ]
    for index, length in enumerate(_merges(count)):
        of, into = lists[index % 2], lists[(index + 1) % 2]
        steps += [Flag("barrier", "V"), merge(into, of, length), Flag("barrier", "V")]
        last = into
    return [
        *steps,
        Flag("barrier", "V"),
        _named("vreducev2", (last,), target, lambda: target.write(keys(last).read())),
        Flag("barrier", "V"),
        _named(f"vadds_vs_1d_{bits}", (target,), target, back),
    ]


def _merges(count: int) -> list[int]:
    """The lengths of lists after each merge; nothing if lists are left over in one of them."""
    lengths, length = [], LIST
    while length < count:
        length *= WAYS
        lengths.append(length)
    return lengths if length == count else []


def _named(name: str, read: tuple[View, ...], written: View, run: Callable[[], None]) -> Instruction:
    return Instruction("V", read, (written,), run, name)
