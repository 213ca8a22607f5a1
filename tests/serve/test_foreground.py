"""`glm5-ascend serve` in the foreground: its messages and its end; no process is left over."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.flags import ServerCommand
from glm5_ascend.serve.foreground import _stage, end, grace_seconds, run_server
from glm5_ascend.serve.local_server import free_port
from tests.support.command import environment, glm5_ascend, interruptible, worked
from tests.support.server_process import wait_for

#: A server that answers /health, with a child of its own in another session, as vLLM's engine is.
SERVER = """
import http.server, subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ENGINE", engine.pid, flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
#: As the command does: Ctrl-C and SIGTERM are KeyboardInterrupt.
PARENT = """
import signal, sys
from pathlib import Path
from glm5_ascend.serve.flags import ServerCommand
from glm5_ascend.serve.foreground import run_server
signal.signal(signal.SIGTERM, signal.default_int_handler)
argv = [sys.executable, "-c", Path(sys.argv[1]).read_text(), "--port", sys.argv[3], "--served-model-name", "m"]
argv += ["--max-model-len", "4096", "--kv-cache-memory-bytes", "2500000000"]
try:
    run_server(ServerCommand({"OMP_NUM_THREADS": "2"}, argv), Path(sys.argv[2]))
except KeyboardInterrupt:
    sys.exit(130)
"""


def wait_until_gone(*pids: int) -> None:
    def gone(pid: int) -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    wait_for(lambda: all(map(gone, pids)), "the end of its processes", 60)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that runs the server in its foreground and has said that it is ready; the engine's process id."""
    (tmp_path / "server.py").write_text(SERVER)
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-c", PARENT, str(tmp_path / "server.py"), str(log), str(port)]
    process = interruptible(command, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"log: {log}\n"
    assert process.stdout.readline() == (
        f"ready: http://127.0.0.1:{port}/v1  model m  2 threads, cache 2.5 GB, context 4096  "
        f"(glm5-ascend chat http://127.0.0.1:{port})\n"
    )
    engine = int(log.read_text().split()[1])
    yield process, engine
    process.kill()
    process.wait()
    with contextlib.suppress(psutil.NoSuchProcess):  # it outlives a server whose parent was killed
        psutil.Process(engine).kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_its_engine(
    parent: tuple[subprocess.Popen[str], int], number: signal.Signals
) -> None:
    process, engine = parent
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    wait_until_gone(engine)


def test_a_killed_parent_leaves_no_server(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, _ = parent
    (server,) = psutil.Process(process.pid).children()
    process.kill()
    wait_until_gone(server.pid)


def test_a_server_that_ends_too_early_is_one_line(tmp_path: Path) -> None:
    code = "import sys; print('loading'); print('ValueError: no such dtype'); print('bye'); sys.exit(3)"
    command = ServerCommand({}, [sys.executable, "-c", code, "--port", str(free_port())])
    with pytest.raises(MissingEnvironmentError) as error:
        run_server(command, tmp_path / "log")
    assert error.value.message == "the server ended with exit code 3 before it answered: ValueError: no such dtype"
    assert str(tmp_path / "log") in error.value.tip


def test_end_kills_a_process_that_ignores_sigterm() -> None:
    ignoring = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    end(process, grace=0.2)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("argv", "seconds"),
    [
        (["vllm", "serve"], 5),
        (["vllm", "serve", "--shutdown-timeout", "300"], 305),
        (["vllm", "serve", "--shutdown-timeout=7"], 12),
        (["vllm", "serve", "--shutdown-timeout", "soon"], 5),
        (["python", "-m", "sglang.launch_server"], 30),
    ],
)
def test_running_requests_get_the_time_that_their_engine_gives_them(argv: list[str], seconds: int) -> None:
    assert grace_seconds(argv) == seconds


@pytest.mark.long
def test_serve_smoke_and_ctrl_c(rotated_checkpoint: Path, tmp_path: Path) -> None:
    """The real server with its defaults: ready, smoke without flags is content, Ctrl-C ends in one line."""
    port = free_port()
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(rotated_checkpoint), "--port", str(port)]
    command += ["--log", str(tmp_path / "l")]
    with (tmp_path / "out").open("w") as out:
        process = interruptible(
            command, stdout=subprocess.PIPE, stderr=out, text=True, start_new_session=True,
            env=environment() | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            assert lines[1].startswith(f"ready: http://127.0.0.1:{port}/v1  model glm-5 ")
            smoked = worked(glm5_ascend("smoke", f"http://127.0.0.1:{port}"))
            assert smoked.stdout.splitlines()[-1].startswith("ok: ")
            children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) == 130
            wait_until_gone(*children)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    lines = (tmp_path / "out").read_text().strip().splitlines()
    assert lines[0].startswith("memory: ") and lines[1] == "importing vLLM" and lines[-1].startswith("interrupted")


def test_two_processes_with_the_same_seed_get_different_ports() -> None:
    """vLLM seeds `random` with 0 in every process."""
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(10)])
    assert drawn[0] != drawn[1]


def test_the_stage_is_the_last_one_that_began() -> None:
    lines = ("", "Starting to load model x", "Loading drafter model", "CPU KV cache size: 9")
    stages = [_stage("\n".join(lines[:count])) for count in range(1, len(lines) + 1)]
    assert stages == ["importing vLLM", "loading weights", "loading the MTP layer", "preparing the caches"]
