"""SIGTERM under load: what has begun completes. The rendered scripts, as process 1 of a pod would run them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.serve.local_server import free_port
from tests.deploy.support.replicas import COMPLETE, Program, Replica, Request, chat
from tests.support.programs import stand_in
from tests.support.server_process import START_LIMIT_S, wait_for

#: An engine that takes its time to end after SIGTERM, and notes both.
SLOW = """#!/usr/bin/env python3
import os, signal, sys, time
note = os.path.join(os.environ["RECORD"], sys.argv[sys.argv.index("--port") + 1])
def stop(*_):
    time.sleep(1)
    os.rename(note, note + ".drained")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open(note, "w").close()
while True:
    time.sleep(0.1)
"""


def test_the_script_of_several_servers_waits_for_them(tmp_path: Path) -> None:
    """PD's: four servers of a machine each end in order, then the script, with status 0."""
    script = tmp_path / "serve.sh"
    script.write_text(rendered_texts(load("a3-pd"), "shell", "/m")["serve-decode.sh"])
    record = tmp_path / "record"
    record.mkdir()
    variables = {"NODE": "0", "HEAD": "127.0.0.1", "IP": "127.0.0.1", "OPEN": "1", "RECORD": str(record)}
    environ = {**os.environ, **variables, "PATH": stand_in(tmp_path / "bin", "vllm", SLOW)}
    running = subprocess.Popen(["bash", str(script)], env=environ, start_new_session=True)
    try:
        wait_for(lambda: len(list(record.iterdir())) == 4, "four servers")
        running.send_signal(signal.SIGTERM)
        assert running.wait(START_LIMIT_S) == 0
        assert sorted(path.name for path in record.iterdir()) == [f"{port}.drained" for port in range(9900, 9904)]
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.server
@pytest.mark.long
def test_requests_in_flight_complete(tmp_path: Path) -> None:
    from glm5_ascend.demo_model.resources import write_demo_model

    model = write_demo_model(tmp_path / "demo")
    script = tmp_path / "serve.sh"
    script.write_text(rendered_texts(load("cpu"), "shell", str(model))["serve-server.sh"])
    port = free_port()
    environ = {"PORT": str(port), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    server = Replica(["bash", str(script), "--shutdown-timeout", "60"], tmp_path / "server.log", environ, port=port)
    requests = [
        Request(server.url, str(i), chat([{"role": "user", "content": f"What is {i} + 38?"}], stream=i % 2 == 0,
                                         max_tokens=400, ignore_eos=True))
        for i in range(8)
    ]  # fmt: skip
    try:
        server.start()
        server.wait_until_healthy(server.url)
        threads = [threading.Thread(target=request.run) for request in requests]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.metric("vllm:num_requests_running") == len(requests), "all in flight")
        assert server.process is not None
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(START_LIMIT_S)
        server.process.wait(START_LIMIT_S)
        completed = sum(request.fate == COMPLETE for request in requests)
        took = time.monotonic() - started
        print(f"sent {len(requests)}, completed {completed}, lost {len(requests) - completed}, {took:.1f} s")
        assert completed == len(requests), [(r.fate, r.status, r.detail, r.text[-200:]) for r in requests]
    finally:
        Program.kill(server)
