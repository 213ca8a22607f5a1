"""Level 4's scalars and views on lines that the device's compiler writes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.proof.executed import scalars, views
from tests.proof.executed.places import Space, View, packed


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
    view = views._subview(f"%a[0, 0, 0, 0] [1, 2, 4, 1] [1, 1, 1, 1] : {source} to {result}")({"%a": whole})
    assert (view.sizes, view.strides) == (sizes, strides)
