"""Shared by the tests of deployments."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of an engine is set."""
    for name in [name for name in os.environ if name.startswith(("HCCL_", "OMP_", "VLLM_"))]:
        monkeypatch.delenv(name)
