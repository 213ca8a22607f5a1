"""One seed for every op test; every implementation for those that ask."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["reference", "cpu"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once per implementation that a CPU has."""
    monkeypatch.setenv("GLM5_KERNELS", request.param)
    return str(request.param)
