"""What fuzzing has found to reach something new in a reader breaks nothing: `fuzz.py` made the corpora."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.command import ROOT, TIMEOUT_S, environment


@pytest.mark.parametrize("target", ["safetensors", "recipe", "journal", "template"])
def test_stored_inputs(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.hostile.fuzz", target, "--replay"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment(), timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with capsys.disabled():
        print(f"\n{done.stdout.strip()}")


def test_a_template_that_writes_is_noticed(tmp_path: object) -> None:
    """The guard itself: a target that opens a file outside of its folder, or starts a program."""
    code = """
import subprocess, sys, tempfile
from pathlib import Path
from tests.hostile.fuzz import guarded
for act in (lambda data, folder: open(sys.argv[1] + "/x", "w"), lambda data, folder: subprocess.run(["true"])):
    try:
        guarded(act, b"", Path(tempfile.mkdtemp()))
    except AssertionError as error:
        print("noticed", error)
guarded(lambda data, folder: (folder / "a").write_bytes(data), b"", Path(tempfile.mkdtemp()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment(), timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("noticed") == 2, done.stderr
