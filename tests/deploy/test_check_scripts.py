"""The scripts of probes and of the init container, as pods run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.deploy.rendering.templates import rendered
from glm5_ascend.serve.local_server import free_port
from tests.support.command import ROOT, ran
from tests.support.listening import listening
from tests.support.programs import stand_in

Done = subprocess.CompletedProcess[str]
LATE_NAME = """\
import os, socket
known = socket.gethostbyname
def late(name):
    note = os.environ["NOTE"]
    if name == "leader" and not os.path.exists(note):
        open(note, "w").close()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return known("127.0.0.1" if name == "leader" else name)
socket.gethostbyname = late
"""


def bash(script: Path, *arguments: object, **environ: str) -> Done:
    return ran("bash", script, *arguments, env={**os.environ, **environ})


def answering(port: int, answer: Callable[[str], tuple[int, str]]) -> AbstractContextManager[str]:
    """An HTTP server: path -> status and text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    return listening(Handler, port)


@pytest.fixture
def health(tmp_path: Path) -> Path:
    script = tmp_path / "health.sh"
    script.write_text(rendered("health.sh.j2"))
    return script


def neighbours() -> int:
    """The first of two free ports in a row."""
    for _ in range(100):
        port = free_port()
        try:
            ThreadingHTTPServer(("127.0.0.1", port + 1), BaseHTTPRequestHandler).server_close()
            return port
        except OSError:
            continue
    raise AssertionError("no two free ports")


def test_every_server_of_a_machine_is_asked_at_once_and_past_proxies(health: Path) -> None:
    """Each answers only when both have been asked: one after the other, they would share the time of one."""
    port, both = neighbours(), threading.Barrier(2)

    def together(_: str) -> tuple[int, str]:
        both.wait(60)
        return 200, ""

    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
    with answering(port, together), answering(port + 1, together):
        done = bash(health, "127.0.0.1", port, 2, 60, **proxies)
    assert (done.returncode, done.stderr) == (0, "")
    with answering(port, lambda _: (200, "")):
        done = bash(health, "127.0.0.1", port, 2, 60)
        assert done.returncode == 1 and f"port {port + 1}" in done.stderr and f"port {port}:" not in done.stderr
    with answering(port, lambda _: (503, "")):
        assert "status 503" in bash(health, "127.0.0.1", port, 1, 60).stderr


def test_an_engine_that_stands_still_is_seen(health: Path) -> None:
    """One of two engines of a server makes no progress. Idle engines and prompts in parts are healthy."""
    port, seconds = free_port(), "0.2"
    state = Path(f"/tmp/glm5-steps-{port}")  # the script's own
    state.unlink(missing_ok=True)
    counted = {"num_requests_running": [0, 1], "generation_tokens_total": [7, 7], "kv_cache_usage_perc": [0.0, 0.1]}

    def answer(path: str) -> tuple[int, str]:
        lines = [
            f'vllm:{name}{{engine="{engine}",model_name="glm-5"}} {value}'
            for name, values in counted.items()
            for engine, value in enumerate(values)
        ]
        return 200, "\n".join(lines) if path == "/metrics" else ""

    try:
        with answering(port, answer):
            assert bash(health, "127.0.0.1", port, 1, 60, seconds).returncode == 0
            for name, value in (("generation_tokens_total", 8), ("kv_cache_usage_perc", 0.2)):
                time.sleep(0.4)
                counted[name][1] = value
                assert bash(health, "127.0.0.1", port, 1, 60, seconds).returncode == 0, name
            time.sleep(0.4)
            assert bash(health, "127.0.0.1", port, 1, 60).returncode == 0  # readiness: it answers
            done = bash(health, "127.0.0.1", port, 1, 60, seconds)
            assert done.returncode == 1 and "engine 1 " in done.stderr and "engine 0 " not in done.stderr
            counted["num_requests_running"][1] = 0
            assert bash(health, "127.0.0.1", port, 1, 60, seconds).returncode == 0
    finally:
        state.unlink(missing_ok=True)


@pytest.fixture
def checks(tmp_path: Path) -> Callable[..., Done]:
    """checks.sh in an image whose torch loads a back end that finds no driver, as torch_npu does without CANN."""
    (tmp_path / "checks.sh").write_text(rendered("checks.sh.j2"))
    ours = f'#!/bin/sh\nexec "{sys.executable}" -m glm5_ascend "$@"\n'
    meta = tmp_path / "site" / "driverless-1.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: driverless\nVersion: 1\n")
    (meta / "entry_points.txt").write_text("[torch.backends]\ndriverless = driverless:load\n")
    (tmp_path / "site" / "driverless.py").write_text("raise ImportError('libascend_hal.so: cannot open')\n")
    path = {
        "PATH": stand_in(tmp_path / "bin", "glm5-ascend", ours),
        "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}:{ROOT / 'kernels'}",
    }
    return lambda *words: bash(tmp_path / "checks.sh", *words, **path)


def test_the_checks_before_a_server_loads(checks: Callable[..., Done], tiny_w4a8: Path, tmp_path: Path) -> None:
    good = (tiny_w4a8, "a3-single-w4a8", "server", "vllm-ascend")
    done = checks(*good)
    assert done.returncode == 0 and "ok: no problems" in done.stdout, done.stdout + done.stderr
    done = checks(*good, "--decode-context-parallel-size", "2")
    assert done.returncode == 1 and "problem" in done.stdout, done.stdout + done.stderr
    damaged = shutil.copytree(tiny_w4a8, tmp_path / "damaged")
    shard = max(damaged.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    done = checks(damaged, *good[1:])
    assert done.returncode == 1 and shard.name in done.stdout and "no problems" not in done.stdout


def test_a_pods_name_may_be_known_late(tmp_path: Path) -> None:
    """A LeaderWorkerSet's pod begins before its name resolves; its end would end the whole group."""
    (tmp_path / "sitecustomize.py").write_text(LATE_NAME)
    script = tmp_path / "serve.sh"
    script.write_text(rendered_texts(load("a3-2node"), "shell", "/m")["serve-server.sh"])
    variables = {"IP": "127.0.0.1", "OPEN": "1", "NOTE": str(tmp_path / "note"), "PYTHONPATH": str(tmp_path)}
    variables["PATH"] = stand_in(tmp_path / "bin", "vllm", '#!/bin/bash\necho "$HCCL_SOCKET_IFNAME"\n')
    once = bash(script, NODE="0", HEAD="leader", **variables)
    assert once.returncode != 0 and "error: HEAD=leader" in once.stderr and once.stdout == ""
    (tmp_path / "note").unlink()
    done = bash(script, LWS_WORKER_INDEX="0", LWS_LEADER_ADDRESS="leader", **variables)
    assert (done.returncode, done.stdout) == (0, "lo\n"), done.stderr
