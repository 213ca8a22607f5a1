"""`glm5-ascend serve` as a process of this machine: started on a free port, waited for, ended."""

from __future__ import annotations

import contextlib
import secrets
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
#: Below it are the ports that well-known services use most.
LOWEST_PORT = 15000


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on.

    Of those that the kernel does not give to outgoing connections: one of these could take it before the server does.
    Drawn by the system: vLLM seeds `random` with 0, and two processes that did so would draw the same port.
    """
    for _ in range(100):
        port = secrets.choice(range(LOWEST_PORT, _first_of_outgoing()))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise MissingEnvironmentError("no port of 127.0.0.1 is free", "end some servers")


def _first_of_outgoing() -> int:
    """Linux tells it, and may be told another one; others begin at 49152 (IANA)."""
    try:
        return max(LOWEST_PORT + 1000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    except (OSError, ValueError):
        return 49152


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
