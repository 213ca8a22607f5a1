"""Inputs that fuzzing once found to reach new code of a reader break nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT, TIMEOUT_S, environment

WRITES = """
import subprocess, sys, tempfile
from pathlib import Path
from tests.hostile import replay
sys.addaudithook(replay._hook)
for act in (lambda data, folder: open(sys.argv[1] + "/x", "w"), lambda data, folder: subprocess.run(["true"])):
    try:
        replay.guarded(act, b"", Path(tempfile.mkdtemp()))
    except AssertionError as error:
        print("noticed", error)
replay.guarded(lambda data, folder: (folder / "a").write_bytes(data), b"", Path(tempfile.mkdtemp()))
"""


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("target", ["safetensors", "recipe", "journal", "template"])
def test_stored_inputs(target: str) -> None:
    run("-m", "tests.hostile.replay", target)


def test_the_guard_notices_writes_and_programs(tmp_path: Path) -> None:
    assert run("-c", WRITES, str(tmp_path)).count("noticed") == 2
