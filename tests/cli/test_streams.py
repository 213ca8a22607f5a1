"""Output and error output that are full, closed, or nobody's: an exit code that is right, and no traceback."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glm5_ascend.verify import verify
from tests.support.command import environment, ran

BUFFERED = {"PYTHONUNBUFFERED": ""}
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


def shell(line: str, extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`glm5` in `line` is the program."""
    words = line.replace("glm5 ", f"{sys.executable} -m glm5_ascend ", 1)
    return ran("sh", "-c", words, env=environment(**extra))


@pytest.mark.parametrize("extra", [BUFFERED, UNBUFFERED], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", ["plan --model glm-5 --json", "deploy list", "plan --model nosuch --json"])
def test_a_report_that_does_not_fit_is_an_error(words: str, extra: dict[str, str]) -> None:
    run = shell(f"glm5 {words} > /dev/full", extra)
    assert run.returncode == 2
    assert [line.split(":")[0] for line in run.stderr.splitlines()] == ["error", "  fix"]


@pytest.mark.parametrize("extra", [BUFFERED, UNBUFFERED], ids=["buffered", "unbuffered"])
def test_an_error_that_cannot_be_said_keeps_its_exit_code(extra: dict[str, str]) -> None:
    assert shell("glm5 plan --model nosuch 2> /dev/full", extra).returncode == 2


def test_a_closed_error_output_leaves_the_json_alone() -> None:
    run = shell("glm5 plan --model nosuch --json 2>&-", BUFFERED)
    assert run.returncode == 2 and json.loads(run.stdout)["exit_code"] == 2


@pytest.mark.parametrize("gone", ["disk", "terminal", "reader"])
def test_a_long_job_goes_on_unheard(gone: str, tiny_source: Path, tmp_path: Path) -> None:
    """Its words go to a log on a full disk, a terminal that was closed, a pipe that nobody reads any more."""
    out = tmp_path / "out"
    with unheard(gone) as stream:
        command = [sys.executable, "-m", "glm5_ascend", "quantize", str(tiny_source), str(out), "--recipe", "rtn-w4a8"]
        run = subprocess.run(command, stderr=stream, check=False, env=environment(), timeout=300)
    assert run.returncode == 0 and verify(out).ok


@contextmanager
def unheard(gone: str) -> Iterator[int]:
    """A descriptor that takes no words."""
    if gone == "disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = pty.openpty() if gone == "terminal" else os.pipe()
        os.close(reader)
    yield descriptor
    os.close(descriptor)


def test_no_file_of_ours_becomes_a_closed_stream(tmp_path: Path) -> None:
    """A library writes to descriptor 2, closed when we began, while a file of the command is open."""
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from glm5_ascend import cli\n"
        "def run_process(arguments, signals):\n"
        f"    with Path({str(tmp_path / 'weights')!r}).open('wb', buffering=0) as file:\n"
        "        os.write(2, b'warning')\n"
        "        os.system('echo more >&2')\n"
        "    return 0\n"
        "cli.run_process = run_process\n"
        "from glm5_ascend.__main__ import main\nmain()\n"
    )
    (tmp_path / "program.py").write_text(program)
    run = subprocess.run(
        f"{sys.executable} {tmp_path / 'program.py'} 2>&-", shell=True, check=False, env=environment(), timeout=300
    )
    assert run.returncode == 0
    assert (tmp_path / "weights").read_bytes() == b""
