"""One seed for every op test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
