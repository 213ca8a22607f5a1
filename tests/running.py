"""`glm5-ascend serve` as a process that lives as long as a fixture."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path


def started_server(checkpoint: Path, folder: Path, flags: list[str]) -> Iterator[str]:
    """Serve `checkpoint` on a free port of 127.0.0.1, log into `folder`; yields the base URL, then stops the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--max-num-seqs", "8", "--max-model-len", "2048", "--block-size", "16", *flags]
    code = (
        "import sys; from pathlib import Path; from glm5_ascend.serve.launch import serve; "
        f"sys.exit(serve(Path({str(checkpoint)!r}), {flags!r}, port={port}))"
    )
    log_path = folder / "server.log"
    with log_path.open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log_path)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log_path: Path, seconds: int = 600) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log_path.read_text()[-6000:]}")
