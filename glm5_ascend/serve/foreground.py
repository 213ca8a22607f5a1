"""Runs a server as a child of this process: its log in a file, one line when it is ready, and its end.

The child has its own session, so that only this process receives Ctrl-C. The kernel ends it when this process ends,
also by SIGKILL. Processes whose parent ends become this process's children, and end with the server: a rank of tensor
parallel that waits for another one in compiled code sees no signal but SIGKILL.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.cores import BIND
from glm5_ascend.serve.environment import on_ascend
from glm5_ascend.serve.failed_start import explained
from glm5_ascend.serve.flags import ServerCommand, number_of, value_of
from glm5_ascend.serve.memory import FROM_DISK, cache_bytes

#: Seconds from the first Ctrl-C to SIGKILL. vLLM ends running requests at once, and then waits for their connections
#: for ever (0.32); SGLang lets them run on.
GRACE_S, SGLANG_GRACE_S = 5.0, 30.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Text in vLLM's log -> stage of the start.
STAGES = {
    "Initializing a V1 LLM engine": "starting the engine",
    "Starting to load model": "loading weights",
    "Loading drafter model": "loading the MTP layer",
    "GPU KV cache size": "preparing the caches",
    "CPU KV cache size": "preparing the caches",
    "Started server process": "opening the port",
}


def run_server(command: ServerCommand, log: Path | None) -> None:
    """Start the server, print a line when it answers, and wait for its end, which only a headless one has by itself.

    Args:
        log: file for its output; None shows the output instead.

    Raises:
        MissingEnvironmentError: it failed, quoting the root cause. KeyboardInterrupt: Ctrl-C or SIGTERM, after its end.
    """
    start, others = 0, psutil.Process().children(recursive=True)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.ExitStack() as stack:
        out = None
        if log is not None:
            print(f"log: {log}", flush=True)
            out = stack.enter_context(log.open("ab"))
            start = out.tell()
        process = subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )  # fmt: skip
        try:
            if "--headless" not in command.argv:
                _wait_and_report(process, command, log, start)
                start = log.stat().st_size if log else 0
            if process.wait() or "--headless" not in command.argv:  # vLLM's code is 0 when its engine has died
                raise _failure(process, log, start, "")
        except KeyboardInterrupt:
            end(process, grace_seconds(command.argv))
            raise
        finally:
            end(process, grace=0)
            _kill(child for child in psutil.Process().children(recursive=True) if child not in others)


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
    limits = ", ".join(_limits(command, _text(log, start)))
    print("  ".join(filter(None, [f"ready: {url}/v1", f"model {name}", limits, f"({chat})"])), flush=True)


def _limits(command: ServerCommand, log: str) -> Iterator[str]:
    """Threads, cache and context of a server on a CPU ("2 x " of what each rank has), and where its weights are."""
    context, groups = value_of(command.argv, "--max-model-len"), command.env.get(BIND, "").split("|")
    if on_ascend():
        return
    times = f"{len(groups)} x " if len(groups) > 1 else ""
    count = str(len(groups[0].split(","))) if times else command.env.get("OMP_NUM_THREADS", "")
    if count := count or os.environ.get("OMP_NUM_THREADS", ""):
        yield f"{times}{count} thread{'s' * (count != '1')}"
    if size := cache_bytes(command):
        yield f"cache {times}{size / 1e9:.1f} GB"
    if context:
        yield f"context {context}"
    if FROM_DISK in log:
        yield "weights read from disk"


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
        if process.poll() is not None:
            raise _failure(process, log, start, " before it answered")
        if time.monotonic() > deadline:
            raise MissingEnvironmentError(f"the server did not answer within {seconds:.0f} s", _see(log))
        on_wait()
        time.sleep(0.2)


def _failure(process: subprocess.Popen[bytes], log: Path | None, start: int, when: str) -> MissingEnvironmentError:
    how, why, fix = explained(process.returncode, _text(log, start).splitlines())
    tip = f"{fix}; {_see(log)}" if fix else _see(log)
    return MissingEnvironmentError(f"the server ended with {how}{when}: {why}", tip)


def _see(log: Path | None) -> str:
    return f"see {log or 'its output above'}"


def _text(log: Path | None, start: int) -> str:
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _stage(text: str) -> str:
    stages = [(text.index(mark), stage) for mark, stage in STAGES.items() if mark in text]
    return max(stages)[1] if stages else "importing vLLM"


def grace_seconds(argv: Sequence[str]) -> float:
    """Seconds that a server has to end, with those that vLLM's --shutdown-timeout gives to running requests."""
    if any("sglang" in word for word in argv[:3]):
        return SGLANG_GRACE_S
    return GRACE_S + number_of(argv, "--shutdown-timeout")


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
        _kill(descendants)
        if process.poll() is None:
            process.kill()
        process.wait()


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def default_log(command: ServerCommand) -> Path:
    """Create an empty log file in the user's log directory, else in the temporary directory.

    Raises:
        MissingEnvironmentError: neither can be written.
    """
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    for folder in (Path(state) / "glm5-ascend" / "log", Path(tempfile.gettempdir()) / f"glm5-ascend-{os.geteuid()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"serve-{value_of(command.argv, '--port')}-{os.getpid()}.log"
            path.touch(mode=0o600)
            return path
    raise MissingEnvironmentError("no directory for the server's log can be written", "--log FILE, or --verbose")


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
