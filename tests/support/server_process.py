"""A real server in a process of its own, for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from glm5_ascend.serve.local_server import free_port
from tests.support.command import SMALL_SERVER

#: Only to end what hangs, on the slowest machine.
START_LIMIT_S = 1800
#: One engine in one process and one thread: fast to start, and hooks and dispatch modes see the model.
ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    **SMALL_SERVER,
}


@contextmanager
def running(
    command: Sequence[str], port: int, log: Path, folder: Path | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The server that `command` starts, from its first healthy answer on; `settings` are added to the environment."""
    with log.open("w") as file:
        process = subprocess.Popen(
            list(command), stdout=file, stderr=subprocess.STDOUT, cwd=folder,
            env={**os.environ, **SMALL_SERVER, **(settings or {})},
        )  # fmt: skip
        family = psutil.Process(process.pid)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
            yield process
        finally:
            members = [family, *family.children(recursive=True)] if process.poll() is None else []
            process.terminate()
            for member in psutil.wait_procs(members, timeout=60)[1]:
                member.kill()
            process.wait(timeout=60)


def started_server(checkpoint: Path, folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """Serve `checkpoint` as `glm5-ascend serve` does, log into `folder`; yields the base URL, then stops the server."""
    port = free_port()
    flags = ["--max-num-seqs", "8", "--block-size", "16", *flags]
    code = f"from glm5_ascend.deploy import serve; serve({str(checkpoint)!r}, {flags!r}, port={port}, skip_verify=True)"
    with running([sys.executable, "-c", code], port, folder / "server.log"):
        yield f"http://127.0.0.1:{port}"


def wait_for(condition: Callable[[], bool], name: str, seconds: float = START_LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {name}"
        time.sleep(0.05)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path, seconds: int = START_LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-6000:]}")


def peak_bytes(process: int) -> int:
    """Most memory that any one process of a family has held so far."""
    family = [process, *(child.pid for child in psutil.Process(process).children(recursive=True))]
    found = (re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{member}/status").read_text()) for member in family)
    return max(1024 * int(match[1]) for match in found if match)
