"""Wrong inputs: one clear line, the right exit code, and nothing lost."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Copy
from tests.support.command import (
    TIMEOUT_S,
    assert_one_clear_line,
    environment,
    glm5_ascend,
    in_process,
    interruptible,
    worked,
)
from tests.support.tiny_model import write_calibration, write_tiny_model


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def calib(tmp_path: Path) -> Path:
    return write_calibration(tmp_path / "calib.jsonl")


def left_over(parent: Path) -> list[str]:
    """Working directories in `parent`."""
    return [path.name for path in parent.iterdir() if path.name.endswith((".partial", ".replaced"))]


# -- the source ---------------------------------------------------------------------------------------------------


def test_source_without_tokenizer(tmp_path: Path, out: Path) -> None:
    source = write_tiny_model(tmp_path / "bare", tokenizer=False)
    assert_one_clear_line(in_process("quantize", source, out), 2, "tokenizer")
    assert not out.exists()
    assert not left_over(tmp_path)


# -- the output place ---------------------------------------------------------------------------------------------


def test_overwrite_replaces_our_own_output_only(tiny_source: Path, tiny_w4a8: Path, editable: Copy) -> None:
    out = editable(tiny_w4a8)
    (out / "notes.md").write_text("mine")
    arguments = ["quantize", tiny_source, out, "--recipe", "rtn-w4a8", "--overwrite"]
    assert_one_clear_line(in_process(*arguments), 2, "notes.md")
    (out / "notes.md").unlink()
    assert in_process(*arguments).returncode == 0
    assert json.loads((out / "glm5_ascend_provenance.json").read_text())["recipe"]["name"] == "rtn-w4a8"
    assert not left_over(out.parent)


def test_failed_overwrite_keeps_the_old_checkpoint(tiny_source: Path, tiny_w4a8: Path, editable: Copy) -> None:
    out = editable(tiny_w4a8)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    (out.parent / "bad.jsonl").write_text("{")
    done = in_process("quantize", tiny_source, out, "--overwrite", "--calib", out.parent / "bad.jsonl")
    assert_one_clear_line(done, 2, "bad.jsonl:1")
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


# -- disk and signals -----------------------------------------------------------------------------------------------


def test_disk_too_small_is_said_before_any_work(tiny_source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny_source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert_one_clear_line(in_process("quantize", tiny_source, out), 2, "free on this disk")
    assert not out.exists() and not left_over(out.parent)


@pytest.mark.parametrize("fail_after", [0, 150])
def test_write_error_at_any_point(
    fail_after: int, tiny_source: Path, tmp_path: Path, calib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the n-th write on."""
    write, numbers = os.pwrite, itertools.count(1)

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if next(numbers) > fail_after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    out = tmp_path / "out"
    arguments = ["quantize", tiny_source, out, "--calib", calib, "--samples", "4", "--seq-len", "64"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert_one_clear_line(in_process(*arguments), 2, "no space left on the disk")
    assert not out.exists()
    # What was finished is kept for the same command; a run that finished nothing leaves nothing.
    assert bool(left_over(tmp_path)) == (fail_after == 150)
    worked(in_process(*arguments))
    assert not left_over(tmp_path)


#: Put below the command as a sitecustomize module: the signal finds the run at work, whatever else the machine does.
SLOW_DISK = """
import os, time
real = os.pwrite
def pwrite(*arguments):
    time.sleep(0.05)
    return real(*arguments)
os.pwrite = pwrite
"""


def test_interrupted_run_goes_on(tiny_source: Path, tmp_path: Path) -> None:
    """By Ctrl-C; tests/hostile/test_signals.py has the other signals."""
    place = tmp_path / "place"
    place.mkdir()
    arguments = ["quantize", tiny_source, place / "out", "--samples", "4", "--seq-len", "64"]
    journal = place / ".out.partial" / "journal.jsonl"
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    slow = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]]))
    command = [sys.executable, "-m", "glm5_ascend", *arguments]
    run = interruptible(command, stderr=subprocess.PIPE, text=True, env=slow)
    while run.poll() is None and not (journal.is_file() and journal.read_text().count("\n") > 3):
        time.sleep(0.001)
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 130, stderr
    assert "interrupted: " in stderr
    assert "run the same command again" in stderr
    assert "Traceback" not in stderr
    assert not (place / "out").exists()
    other = glm5_ascend(*arguments, "--seed", "7")
    assert_one_clear_line(other, 2, "another seed")
    assert glm5_ascend(*arguments).returncode == 0
    assert [path.name for path in place.iterdir()] == ["out"]


def test_impossible_kernels(tiny_source: Path, tmp_path: Path) -> None:
    done = glm5_ascend("quantize", tiny_source, tmp_path / "out", GLM5_KERNELS="quick")
    assert_one_clear_line(done, 3, "GLM5_KERNELS=quick: unknown; use auto or one of reference, cpu, npu")
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_output(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert_one_clear_line(in_process("quantize", tiny_source, tmp_path / "file"), 2, "not a plain directory")
