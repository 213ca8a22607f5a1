"""Runs `glm5-ascend` as a user's shell would."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **extra}


def glm5_ascend(*arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5_ascend", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=environment(**extra),
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def in_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same command line in this process: no second import of torch."""
    from glm5_ascend.cli import run

    words, out, err = list(map(str, arguments)), io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def assert_one_clear_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line saying what is wrong, one saying what to do, no traceback, the right exit code."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "  fix:"))]
    assert [line.split(":")[0] for line in lines] == ["error", "  fix"], done.stderr
    for word in words:
        assert word in lines[0], lines[0]
