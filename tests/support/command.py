"""Runs `glm5-ascend` as a user's shell would."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]
#: No command of a test takes so long on the slowest machine; it is there to end one that hangs.
TIMEOUT_S = 900


#: Tests run beside each other: one thread and a small cache for each server.
SMALL_SERVER = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def environment(**extra: str) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **SMALL_SERVER, **extra}


#: What commands import anyway; once for all of them.
_IMPORTED = (
    "torch", "pydantic", "yaml", "rich", "safetensors.torch", "tokenizers", "glm5_ascend.cli",
    "glm5_kernels.ops", "glm5_kernels.native.weights",
)  # fmt: skip
#: Variables that count when Python or a library starts: a command with one of them gets an interpreter of its own.
_AT_START = ("PYTHON", "OMP_", "ATEN_", "ONEDNN_", "LD_")


@cache
def _commands() -> ForkServer:
    return ForkServer(_IMPORTED, environment())


def glm5_ascend(*arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a fork of one that has imported torch already, or a new interpreter."""
    words = list(map(str, arguments))
    if not any(name.startswith(_AT_START) for name in extra):
        return _commands().run("glm5_ascend.__main__:main", words, environment(**extra), timeout=TIMEOUT_S)
    return ran(sys.executable, "-m", "glm5_ascend", *words, env=environment(**extra))


def ran(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Any program, in `environment()` if `env` is not given, with nothing to read if `input` is not."""
    usual = {"capture_output": True, "text": True, "env": environment(), "input": "", "timeout": TIMEOUT_S}
    return subprocess.run([*map(str, command)], **usual | options)


def said(*command: object, **options: Any) -> str:
    """What such a program writes on its standard output; it must end well."""
    return worked(ran(*command, **options)).stdout


def worked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def made_model(folder: Path, *flags: str) -> Path:
    """A model of random weights, or of holes, by benchmarks/tools/make_model.py."""
    said(sys.executable, ROOT / "benchmarks/tools/make_model.py", folder, *flags)
    return folder


def interruptible(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """A process that Ctrl-C ends, also where the tests run in a shell's background and ignore it themselves."""
    return subprocess.Popen(list(command), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)


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
