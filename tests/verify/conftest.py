"""The correct checkpoints, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.verify.support.checkpoints import Shelf


@pytest.fixture(scope="session")
def shelf(
    tmp_path_factory: pytest.TempPathFactory, tiny_source: Path, tiny_quantized: Callable[[str, Path], Path]
) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"), tiny_source, tiny_quantized)
