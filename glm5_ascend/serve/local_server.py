"""`glm5-ascend serve` as a child process on a free port of this machine."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.foreground import end, wait_until_ready

START_TIMEOUT_S = 600
#: Well-known services mostly use lower ports. Linux gives ports from 32768 on to outgoing connections, IANA from 49152.
PORTS = range(15000, 32000)


def free_port() -> int:
    """A free port of 127.0.0.1, outside the range of outgoing connections, which could take it before the server does.

    Drawn by the system: vLLM seeds `random` with 0, so two processes would draw the same port.
    """
    for _ in range(100):
        port = secrets.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise MissingEnvironmentError("no port of 127.0.0.1 is free", "end some servers")


@contextlib.contextmanager
def server(
    directory: Path,
    log: Path,
    flags: Sequence[str] = (),
    options: Sequence[str] = (),
    start_timeout: float = START_TIMEOUT_S,
) -> Iterator[int]:
    """Run a server while the block runs; yields its port on 127.0.0.1.

    Args:
        log: file for its output. flags: of vLLM. options: of `serve`, such as --profile NAME.
        start_timeout: seconds until it must answer.

    Raises:
        MissingEnvironmentError: it ended or did not answer in time; quotes its last error.
    """
    port = free_port()
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(directory), "--verbose", "--port", str(port)]
    command += [*options, "--", *flags] if flags else options
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}", log, seconds=start_timeout)
            yield port
        finally:
            end(process)
