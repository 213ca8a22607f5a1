"""`make demo` ends with a chat answer and a tool call from the W4A8 model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ran

pytestmark = pytest.mark.server


def run_demo(directory: Path, *model: str) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, "-m", "glm5_ascend", "demo", directory, *model, env=os.environ)


def test_demo_answers_and_calls_a_tool(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answer    47 + 38 = 85" in done.stdout
    assert "tool call get_weather(city='Oslo')" in done.stdout
    assert "thinking" in done.stdout
    log = (tmp_path / "demo" / "serve.log").read_text()
    assert "quantization=ascend" in log or "--quantization ascend" in log


@pytest.mark.long
def test_demo_of_flash_is_compared_with_its_source_and_answers(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "demo", "glm-5.3-flash")
    assert done.returncode == 0, done.stdout + done.stderr
    commands = re.findall(r"^\$ glm5-ascend (\S+)", done.stdout, re.MULTILINE)
    assert commands == ["demo-model", "quantize", "verify", "eval", "serve"]
    assert "ok: 0 errors, 0 warnings" in done.stdout
    kl = re.search(r"^ *KL to the reference, mean +([\d.]+)", done.stdout, re.MULTILINE)
    assert kl is not None and 0 < float(kl[1]) < 0.1, done.stdout
    verified = sorted(path.name for path in (tmp_path / "demo").iterdir())
    assert verified == ["flash-demo", "flash-demo-w4a8", "serve.log"]
    assert "answer    Hello Anna!" in done.stdout
    assert "answer    Anna 9325." in done.stdout


def test_demo_does_not_touch_other_files(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    done = run_demo(tmp_path)
    assert done.returncode == 2
    assert "not the demo's" in done.stderr
    assert (tmp_path / "letter.txt").read_text() == "mine"
