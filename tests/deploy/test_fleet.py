"""Two replicas behind vllm-router: a server whose engine hangs is taken out under load."""

from __future__ import annotations

import json
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from glm5_ascend.deploy.heartbeat import FleetHeartbeat
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.serve.local_server import free_port
from glm5_ascend.serve.router import RunningRouter
from tests.deploy.support.judges import tool_environment
from tests.deploy.support.replicas import COMPLETE, Program, Replica, Request, chat, healthy, replica, wait_for

SESSIONS = [f"conversation-{i}" for i in range(8)]
CLIENTS = 4


class Fleet:
    """The router and its two servers."""

    def __init__(self, folder: Path, checkpoint: Path, python: Path) -> None:
        self.folder = folder
        self.servers = [replica(checkpoint, folder / f"server-{i}.log") for i in range(2)]
        script = folder / "router.sh"
        script.write_text(rendered_texts(load("cpu"), "shell", "/models/glm5")["router.sh"])
        self.port = free_port()
        workers = " ".join(server.url for server in self.servers)
        environ = {"WORKERS": workers, "PORT": str(self.port), "PATH": f"{python.parent}:/usr/bin:/bin"}
        command = ["bash", str(script), "--host", "127.0.0.1", "--prometheus-port", str(free_port())]
        self.process = Program(command, folder / "router.log", environ)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.wait_until_healthy(server.url)
        self.process.start()
        self.process.wait_until_healthy(self.url)

    def server(self, url: str) -> Replica:
        return next(server for server in self.servers if server.url == url)

    def kill(self) -> None:
        for program in (self.process, *self.servers):
            program.kill()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, rotated_checkpoint: Path) -> Iterator[Fleet]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("fleet")
    started = Fleet(folder, rotated_checkpoint, tool_environment(folder / "venv", "vllm-router"))
    try:
        started.start()
        yield started
    finally:
        started.kill()


def end(server: Replica) -> None:
    """kill -9, and until its port is free: the processes it had started may go a moment later."""
    server.kill()

    def free() -> bool:
        try:
            socket.create_server(("127.0.0.1", server.port)).close()
        except OSError:
            return False
        return True

    wait_for(free, "the port")


class Load:
    """Clients who ask one request after the other, whole and streamed, until `stop`; notes what became of each."""

    def __init__(self, url: str) -> None:
        self.url, self.requests, self.over = url, [], threading.Event()
        self.requests: list[Request] = []
        self.seconds: list[float] = []
        self.threads = [threading.Thread(target=self.ask, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def ask(self, client: int) -> None:
        number = 0
        while not self.over.is_set():
            number += 1
            hello = [{"role": "user", "content": f"What is {11 + number % 80} + {12 + client}?"}]
            long = {"max_tokens": 400, "ignore_eos": True} if number % 4 == 0 else {}
            session = SESSIONS[(client + number) % len(SESSIONS)]
            request = Request(self.url, session, chat(hello, stream=(client + number) % 2 == 0, **long))
            self.requests.append(request)
            began = time.monotonic()
            request.run()
            self.seconds.append(time.monotonic() - began)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def counts(self) -> dict[str, Any]:
        kinds = Counter(f"{'stream' if r.body.get('stream') else 'whole'} {r.fate}" for r in self.requests)
        lost = [r for r in self.requests if r.fate != COMPLETE]
        return {"sent": len(self.requests), "completed": len(self.requests) - len(lost), "lost": len(lost), **kinds}


@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("what", ["engine", "server"])
def test_a_hung_server_is_taken_out_under_load(fleet: Fleet, what: str) -> None:
    """SIGSTOP of the engine, whose HTTP server still answers, or of all. Whole requests are answered by the other."""
    wait_for(lambda: all(healthy(server.url) for server in fleet.servers), "both servers")
    victim = fleet.servers[0]
    messages: list[str] = []
    heart = FleetHeartbeat(
        RunningRouter(fleet.url),
        patience=4,
        timeout=15,
        on_hung=lambda url: end(fleet.server(url)),
        report=messages.append,
    )
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            heart.beat()
            time.sleep(2)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with Load(fleet.url) as traffic:
            wait_for(lambda: victim.metric("vllm:num_requests_running") >= 1, "the load")
            hung = [victim.engine()] if what == "engine" else [victim.engine(), *_servers(victim)]
            for process in hung:
                process.send_signal(signal.SIGSTOP)
            assert what == "server" or healthy(victim.url)  # nothing but the heartbeat can know
            wait_for(lambda: any(f"{victim.url}: removed" in line for line in messages), "the heartbeat")
            at = len(traffic.requests)
            wait_for(lambda: len(traffic.requests) > at + 2 * CLIENTS, "requests after it")
        counts = traffic.counts()
        print(
            what,
            json.dumps(counts),
            f"longest {max(traffic.seconds):.1f} s, median {statistics.median(traffic.seconds):.2f} s",
        )
        assert RunningRouter(fleet.url).workers() == [fleet.servers[1].url]
        lost = [request for request in traffic.requests if request.fate != COMPLETE]
        assert all(request.body.get("stream") for request in lost) and len(lost) <= CLIENTS, counts
        victim.start()
        wait_for(lambda: any(f"{victim.url}: added again" in line for line in messages), "the restarted server")
        assert len(RunningRouter(fleet.url).workers()) == 2
    finally:
        over.set()
        beating.join()
    print(*messages, sep="\n")


def _servers(server: Replica) -> list[psutil.Process]:
    assert server.process is not None
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]
