"""Inputs that fuzzing once found to reach new code of a reader break nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.command import ROOT, TIMEOUT_S, environment


@pytest.mark.parametrize("target", ["safetensors", "template"])
def test_stored_inputs(target: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.replay", target],
        capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
