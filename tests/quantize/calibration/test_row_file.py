"""Activation files: what must hold beyond the results of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from glm5_ascend.quantize.calibration.row_file import RowFile


def test_signal_in_close_does_not_close_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyboardInterrupt when os.close has returned; the cleaning up then closes once more."""
    file = RowFile(tmp_path / "rows", 2, 3, torch.float32)
    close = os.close

    def interrupted(descriptor: int) -> None:
        close(descriptor)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.remove()
    monkeypatch.undo()
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)  # takes the number that has become free
    file.close()
    os.write(other, b"still open")
    os.close(other)
