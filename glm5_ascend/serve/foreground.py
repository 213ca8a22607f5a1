"""Runs a server as a child of this process: its log in a file, one line when it is ready, and its end.

The child has its own session, so that only this process receives Ctrl-C. The kernel ends it when this process ends,
also by SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.activation import on_ascend
from glm5_ascend.serve.failed_start import explained
from glm5_ascend.serve.flags import ServerCommand, value_of
from glm5_ascend.serve.memory import cache_bytes
from glm5_kernels.registry import cache

#: Seconds that running requests have to end after the first Ctrl-C.
GRACE_S = 30.0
_PR_SET_PDEATHSIG = 1
#: Text in vLLM's log -> stage of the start.
STAGES = {
    "Initializing a V1 LLM engine": "starting the engine",
    "Starting to load model": "loading weights",
    "Loading drafter model": "loading the MTP layer",
    "GPU KV cache size": "preparing the caches",
    "CPU KV cache size": "preparing the caches",
    cache.MESSAGE: cache.MESSAGE,
    "Started server process": "opening the port",
}


def run_server(command: ServerCommand, log: Path | None) -> int:
    """Start the server, print a line when it answers, wait for its end and return its exit code.

    Args:
        log: file for its output; None shows the output instead.

    Raises:
        MissingEnvironmentError: it ended before it answered. KeyboardInterrupt: Ctrl-C or SIGTERM, after its end.
    """
    start = 0
    with contextlib.ExitStack() as stack:
        out = None
        if log is not None:
            print(f"log: {log}", flush=True)
            out = stack.enter_context(log.open("ab"))
            start = out.tell()
        process = subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        try:
            if "--headless" not in command.argv:
                _wait_and_report(process, command, log, start)
            return process.wait()
        except KeyboardInterrupt:
            end(process)
            raise
        finally:
            end(process, grace=0)


def _wait_and_report(process: subprocess.Popen[bytes], command: ServerCommand, log: Path | None, start: int) -> None:
    from rich.console import Console

    argv = command.argv
    host, port = value_of(argv, "--host") or "127.0.0.1", value_of(argv, "--port") or "8000"
    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url, began, last = f"http://{address}:{port}", time.monotonic(), ""
    console = Console(stderr=True, highlight=False)
    with console.status("importing vLLM") if console.is_terminal else contextlib.nullcontext() as status:

        def show_stage() -> None:
            nonlocal last
            stage = _stage(_text(log, start))
            if status is not None:
                status.update(f"{stage} ({time.monotonic() - began:.0f} s)")
            elif stage != last:
                print(stage, file=sys.stderr, flush=True)
            last = stage

        wait_until_ready(process, url, log, start, on_wait=show_stage)
    name = value_of(argv, "--served-model-name") or value_of(argv, "--model")
    chat = "glm5-ascend chat" + ("" if url == "http://127.0.0.1:8000" else f" {url}")
    words = [f"ready: {url}/v1", f"model {name}", *filter(None, [", ".join(_limits(command))]), f"({chat})"]
    print("  ".join(words), flush=True)


def _limits(command: ServerCommand) -> Iterator[str]:
    """Threads, cache and context of a server on a CPU, as far as they are stated."""
    count, context = command.env.get("OMP_NUM_THREADS", ""), value_of(command.argv, "--max-model-len")
    if on_ascend():
        return
    if count := count or os.environ.get("OMP_NUM_THREADS", ""):
        yield f"{count} thread{'s' * (count != '1')}"
    if size := cache_bytes(command):
        yield f"cache {size / 1e9:.1f} GB"
    if context:
        yield f"context {context}"


def wait_until_ready(
    process: subprocess.Popen[bytes],
    url: str,
    log: Path | None,
    start: int = 0,
    seconds: float = float("inf"),
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the server answers GET /health.

    Args:
        log: file with its output, from byte `start` on. on_wait: called five times a second.

    Raises:
        MissingEnvironmentError: it ended, quoting the root cause, or did not answer within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not _healthy(f"{url}/health"):
        tip = f"see {log or 'its output above'}"
        if (code := process.poll()) is not None:
            why, fix = explained(code, _text(log, start).splitlines())
            raise MissingEnvironmentError(f"the server ended with {why}", f"{fix}; {tip}" if fix else tip)
        if time.monotonic() > deadline:
            raise MissingEnvironmentError(f"the server did not answer within {seconds:.0f} s", tip)
        on_wait()
        time.sleep(0.2)


def _text(log: Path | None, start: int) -> str:
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _stage(text: str) -> str:
    stages = [(text.index(mark), stage) for mark, stage in STAGES.items() if mark in text]
    return max(stages)[1] if stages else "importing vLLM"


def end(process: subprocess.Popen[bytes], grace: float = GRACE_S) -> None:
    """End a server and all its descendants: SIGTERM first, SIGKILL after `grace` seconds or at a second Ctrl-C."""
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = []
    try:
        if process.poll() is None and grace:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace)
    finally:
        for descendant in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        if process.poll() is None:
            process.kill()
        process.wait()


def default_log(port: str) -> Path:
    """Create an empty log file in the user's log directory, else in the temporary directory.

    Raises:
        MissingEnvironmentError: neither can be written.
    """
    from platformdirs import user_log_path

    for folder in (user_log_path("glm5-ascend"), Path(tempfile.gettempdir()) / f"glm5-ascend-{os.geteuid()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"serve-{port}-{os.getpid()}.log"
            path.touch(mode=0o600)
            return path
    raise MissingEnvironmentError("no directory for the server's log can be written", "--log FILE, or --verbose")


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
