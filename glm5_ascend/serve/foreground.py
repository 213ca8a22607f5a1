"""A server as a child of the command that started it: its log in a file, one line when it is ready, a quiet end.

The child has a session of its own, so that Ctrl-C reaches it through us alone and once. It is told to end when we do,
even by SIGKILL.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.flags import ServerCommand, value_of
from glm5_kernels.registry import cache

#: How long requests in flight have to end after the first Ctrl-C.
GRACE_S = 30.0
_PR_SET_PDEATHSIG = 1
#: What a line of vLLM's log says about how far the start is.
STAGES = (
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading drafter model", "loading the MTP layer"),
    ("GPU KV cache size", "preparing the caches"),
    ("CPU KV cache size", "preparing the caches"),
    (cache.MESSAGE, cache.MESSAGE),
    ("Started server process", "opening the port"),
)


@dataclass(frozen=True)
class Foreground:
    """How a server runs in the foreground.

    Attributes:
        log: file for its output; None shows the output instead.
    """

    log: Path | None

    def run(self, command: ServerCommand) -> int:
        """Start the server, say when it answers, and wait for its end; its exit code.

        Raises:
            MissingEnvironmentError: it ended before it answered. KeyboardInterrupt: Ctrl-C or SIGTERM, after its end.
        """
        if self.log is not None:
            print(f"log: {self.log}", flush=True)
        with self._output() as out:
            process = subprocess.Popen(
                command.argv, env={**os.environ, **command.env}, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
            try:
                if "--headless" not in command.argv:
                    self._wait_until_ready(process, command.argv)
                return process.wait()
            except KeyboardInterrupt:
                end(process)
                raise
            finally:
                end(process, grace=0)

    @contextlib.contextmanager
    def _output(self) -> Iterator[int | None]:
        if self.log is None:
            yield None
            return
        with self.log.open("ab") as file:
            yield file.fileno()

    def _wait_until_ready(self, process: subprocess.Popen[bytes], argv: list[str]) -> None:
        host, port = value_of(argv, "--host") or "127.0.0.1", value_of(argv, "--port") or "8000"
        reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        began, start = time.monotonic(), self.log.stat().st_size if self.log is not None else 0
        with _Stages() as stages:
            while not _healthy(f"http://{reached}:{port}/health"):
                if process.poll() is not None:
                    raise MissingEnvironmentError(*self._ended(process.returncode, start))
                stages.show(self._stage(start), time.monotonic() - began)
                time.sleep(0.2)
        name = value_of(argv, "--served-model-name") or value_of(argv, "--model")
        chat = "glm5-ascend chat" + ("" if (reached, port) == ("127.0.0.1", "8000") else f" http://{reached}:{port}")
        print(f"ready: http://{reached}:{port}/v1  model {name}  ({chat})", flush=True)

    def _text(self, start: int) -> str:
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def _stage(self, start: int) -> str:
        text = self._text(start)
        reached = [(text.index(mark), words) for mark, words in STAGES if mark in text]
        return max(reached)[1] if reached else "importing vLLM"

    def _ended(self, code: int, start: int) -> tuple[str, str]:
        """What is said of a server that ended too early."""
        said = [line.strip() for line in self._text(start).splitlines() if line.strip()]
        errors = [line for line in said if "Error" in line or "error:" in line]
        last = (errors or said or ["no output"])[-1]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the server ended with {how} before it answered: {last}", f"see {self.log or 'its output above'}"


class _Stages:
    """One moving line on a terminal, a line per stage elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        self.status = console.status("", spinner="dots") if console.is_terminal else None
        self.last = ""

    def __enter__(self) -> _Stages:
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()

    def show(self, stage: str, seconds: float) -> None:
        if self.status is not None:
            self.status.update(f"{stage} ({seconds:.0f} s)")
        elif stage != self.last:
            print(stage, file=sys.stderr, flush=True)
        self.last = stage


def end(process: subprocess.Popen[bytes], grace: float = GRACE_S) -> None:
    """End a server and all its descendants: asked first, killed after `grace` seconds or at a second Ctrl-C."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    try:
        if process.poll() is None and grace:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace)
    finally:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        if process.poll() is None:
            process.kill()
        process.wait()


def default_log(port: str) -> Path:
    """A file in the user's folder for logs, else in the temporary one."""
    from platformdirs import user_log_path

    for folder in (user_log_path("glm5-ascend"), Path(tempfile.gettempdir()) / f"glm5-ascend-{os.geteuid()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"serve-{port}-{os.getpid()}.log"
            path.touch(mode=0o600)
            return path
    raise MissingEnvironmentError("no folder for the server's log can be written", "--log FILE, or --verbose")


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def _end_with_parent() -> None:
    """In the child, before it becomes the server: SIGTERM when the parent is gone, however it ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
