"""`glm5-ascend serve` as a process of this machine: started on a free port, waited for, ended."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.foreground import end

START_TIMEOUT_S = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(
    directory: Path,
    log: Path,
    flags: Sequence[str] = (),
    options: Sequence[str] = (),
    start_timeout: float = START_TIMEOUT_S,
) -> Iterator[int]:
    """A running server's port on 127.0.0.1; ended when the block ends.

    Args:
        log: file for its output. flags: of vLLM. options: of `serve`, such as --profile NAME.
        start_timeout: seconds until it must answer.

    Raises:
        MissingEnvironmentError: it ended or did not answer in time; quotes its last line.
    """
    port = free_port()
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(directory), "--verbose", "--port", str(port)]
    command += options
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--", *flags] if flags else command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_ready(process, port, log, start_timeout)
            yield port
        finally:
            end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise MissingEnvironmentError(f"the server ended with exit code {process.returncode}: {last}", f"see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise MissingEnvironmentError(f"the server did not answer within {seconds:.0f} s", f"see {log}")
