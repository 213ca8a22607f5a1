"""A minute of unfriendly traffic by the script that runs half an hour of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT, TIMEOUT_S, environment


@pytest.mark.long
def test_a_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from glm5_ascend.demo_model.resources import write_demo_model

    model = write_demo_model(tmp_path / "demo")
    command = [sys.executable, ROOT / "benchmarks" / "report_soak.py", model, "--minutes", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(), timeout=TIMEOUT_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the probe's answer is the same" in done.stdout
    with capsys.disabled():
        print(f"\n{done.stdout}")
