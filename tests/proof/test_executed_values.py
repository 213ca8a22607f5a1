"""Level 5's scalars and views on lines that the device's compiler writes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.proof.executed import scalars, sorting, views
from tests.proof.executed.places import Space, View, packed
from tests.proof.executed.steps import Flag, Instruction
from tests.proof.executed.text import UncoveredError


@pytest.mark.parametrize(("end", "least"), [(20, 4), (10, 2), (4, 1), (3, 0)])
def test_how_many_of_four_iterations_are_left(end: int, least: int) -> None:
    maps = {"#map3": "(d0)[s0] -> ((-d0 + s0) ceildiv 4, 4)"}
    left = scalars._affine("min", "#map3(%start)[%end]", maps)
    assert left({"%start": 3, "%end": end}) == least


@pytest.mark.parametrize(
    ("result", "sizes", "strides"),
    [
        ("memref<2x4xi32, strided<[8, 1], offset: ?>, #hivm.address_space<ub>>", (2, 4), (8, 1)),
        ("memref<1x2x4xi32, strided<[16, 8, 1]>, #hivm.address_space<ub>>", (1, 2, 4), (16, 8, 1)),
        ("memref<2x4x1xi32, strided<[8, 1, 1]>, #hivm.address_space<ub>>", (2, 4, 1), (8, 1, 1)),
    ],
)
def test_a_subview_drops_the_axes_that_its_strides_say(
    result: str, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    whole = View(Space("ub", np.zeros(64, np.uint8)), 0, 0, (1, 2, 8, 1), packed((1, 2, 8, 1)), "i32")
    source = "memref<1x2x8x1xi32, #hivm.address_space<ub>>"
    made = views._subview(f"%a[0, 0, 0, 0] [1, 2, 4, 1] [1, 1, 1, 1] : {source} to {result}")({"%a": whole})
    assert (made.sizes, made.strides) == (sizes, strides)


def sort_call(keys: np.ndarray, descending: int = 0) -> tuple[list[Instruction | Flag], View]:
    """The steps of sorting these keys, and where the result will lie: keys, result and buffer one behind the other."""
    kind, count = {2: "f16", 4: "f32"}[keys.itemsize], len(keys)
    space = Space("ub", np.zeros(1 << 16, np.uint8))

    def at(start: int, size: int) -> View:
        return View(space, start * keys.itemsize, 0, (size,), (1,), kind)

    source, target, buffer = at(0, count), at(count, count), at(2 * count, 11 * count)
    source.write(keys)
    build = sorting.primitive({"f16": "sort_1d_half", "f32": "sort_1d_float"}[kind])
    assert build is not None
    return build([source, target, buffer, descending]), target


@pytest.mark.parametrize(("dtype", "count"), [(np.float16, 128), (np.float16, 512), (np.float32, 2048)])
def test_a_sort_sorts_in_ascending_order(dtype: type, count: int) -> None:
    keys = np.random.default_rng(0).integers(-99, 2048, count).astype(dtype)
    steps, target = sort_call(keys)
    merges = 0
    for step in steps:
        if isinstance(step, Instruction):
            step.run()
            merges += step.name == "vmrgsort4"
    assert (target.read() == np.sort(keys)).all() and 32 * 4**merges == count


def test_instructions_of_a_sort_that_share_bytes_have_a_barrier_between_them() -> None:
    """Of two calls in a row with one buffer, too: between the last that reads it and the next that writes there."""
    steps, _ = sort_call(np.zeros(512, np.float16))
    since: list[Instruction] = []
    for step in [*steps, *steps]:
        if isinstance(step, Flag):
            since = [] if step.verb == "barrier" else since
            continue
        for other in since:
            assert not shared(step.written, (*other.read, *other.written)) and not shared(step.read, other.written)
        since.append(step)


def shared(some: tuple[View, ...], others: tuple[View, ...]) -> bool:
    spans = [[(v.start(), v.start() + v.count * v.item) for v in views] for views in (some, others)]
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


@pytest.mark.parametrize(("count", "descending"), [(96, 0), (256, 0), (512, 1)])
def test_a_sort_that_is_not_modelled_is_refused(count: int, descending: int) -> None:
    with pytest.raises(UncoveredError, match="sort_1d"):
        sort_call(np.zeros(count, np.float16), descending)


def test_a_sort_of_what_is_no_number_is_refused() -> None:
    steps, _ = sort_call(np.full(128, np.nan, np.float16))
    with pytest.raises(UncoveredError, match="no number"):
        for step in steps:
            if isinstance(step, Instruction):
                step.run()
