"""A process that has imported what many tests would start a process for; each job is a fork of it.

    python -m tests.support.fork_server REPLY_FD MODULE ...    # jobs: lines of JSON on standard input

A job has an environment, a folder, an exit code and a memory of its own, as any process; what it is spared is to
import torch (2 s) or vLLM (8 s) again. One that must see a fresh interpreter is started as one (`command.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ForkServer:
    """Runs functions in forks of one process that has imported `modules`.

    Args:
        environment: of the process itself. It decides what modules read while they are imported.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._modules, self._environment = tuple(modules), dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._replies, self._rest = -1, b""
        self._lock = threading.Lock()

    def run(
        self,
        function: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`module:function`, called without arguments and with `arguments` in sys.argv, and what it printed.

        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
        """
        command = [function, *arguments]
        with self._lock, tempfile.TemporaryDirectory() as place:
            out, err = Path(place, "out"), Path(place, "err")
            job = {
                "command": command, "environment": dict(environment), "folder": str(folder or Path.cwd()),
                "out": str(out), "err": str(err),
            }  # fmt: skip
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            child = self._reply(None)
            code = self._reply(timeout)
            if code is None:
                os.kill(child, signal.SIGKILL)
                self._reply(None)
                raise subprocess.TimeoutExpired(command, timeout or 0, out.read_bytes(), err.read_bytes())
            texts = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
        return subprocess.CompletedProcess(command, code, *texts)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._replies, other = os.pipe()
            command = [sys.executable, "-m", __name__, str(other), *self._modules]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=self._environment, pass_fds=(other,), cwd=Path(__file__).parents[2]
            )
            os.close(other)
        return self._process

    def _reply(self, timeout: float | None) -> Any:
        while b"\n" not in self._rest:
            if not select.select([self._replies], [], [], timeout)[0]:
                return None
            read = os.read(self._replies, 4096)
            if not read:
                raise RuntimeError(f"the process with {', '.join(self._modules)} has ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return int(line)


def _serve(replies: int) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_do(json.loads(line), replies))
        os.write(replies, b"%d\n" % child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(replies, b"%d\n" % code)


def _do(job: dict[str, Any], replies: int) -> int:
    """In the fork: become the process that was asked for; its exit code."""
    os.close(replies)
    for path, number in (("/dev/null", 0), (job["out"], 1), (job["err"], 2)):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests run in a shell's background
    function, *sys.argv[1:] = job["command"]
    module, _, name = function.partition(":")
    code: Any = 1
    try:
        code = getattr(importlib.import_module(module), name)()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return int(code or 0) & 255


if __name__ == "__main__":
    for each in sys.argv[2:]:
        importlib.import_module(each)
    _serve(int(sys.argv[1]))
