"""Every implementation, instruction set, one and two threads for the op tests that ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from glm5_kernels import registry
from glm5_kernels.native import library


@pytest.fixture(params=["reference", "cpu"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once per implementation that a CPU has."""
    registry.select(request.param)
    yield request.param
    registry.select(None)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs with one thread and with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=() if library.missing() else library.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once per instruction set that the library has and this CPU can run."""
    with library.using(request.param):
        yield request.param
