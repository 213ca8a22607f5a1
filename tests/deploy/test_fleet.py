"""Two replicas behind vllm-router: conversations stick, and servers that are killed or hang."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.deploy.rendering.templates import rendered
from glm5_ascend.serve.local_server import free_port
from tests.deploy.support.judges import tool_environment
from tests.deploy.support.replicas import BROKEN, COMPLETE, Program, Replica, Request, chat, healthy, replica
from tests.support.server_process import START_LIMIT_S, wait_for

pytestmark = [pytest.mark.server, pytest.mark.long]
#: Conversations for each server.
EACH = 4
CLIENTS = 4
PROMPT_TOKENS, HITS = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"


class Fleet:
    """The router and its two servers.

    Attributes:
        sessions: EACH conversations of each server, by turns. Which server one goes to depends on the random ports.
    """

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
        homes: list[list[str]] = [[], []]
        for session in (f"conversation-{i}" for i in range(1000)):
            homes[home_of(self.url, session, self.servers)].append(session)
            if min(map(len, homes)) >= EACH:
                break
        self.sessions = [session for pair in zip(*homes, strict=False) for session in pair][: 2 * EACH]

    def kill(self) -> None:
        for program in (self.process, *self.servers):
            program.kill()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, rotated_checkpoint: Path) -> Iterator[Fleet]:
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


def asked(url: str, session: str, servers: list[Replica], question: str = "What is 47 + 38?") -> list[float]:
    """Prompt tokens that each server read for one request of a conversation."""
    before = [server.metric(PROMPT_TOKENS) for server in servers]
    request = Request(url, session, chat([{"role": "user", "content": question}]))
    request.run()
    assert request.fate == COMPLETE, (request.status, request.detail, request.text[-300:])
    return [server.metric(PROMPT_TOKENS) - old for server, old in zip(servers, before, strict=True)]


def home_of(url: str, session: str, servers: list[Replica]) -> int:
    """Which server a conversation goes to."""
    (home,) = (i for i, tokens in enumerate(asked(url, session, servers)) if tokens)
    return home


def test_a_conversation_stays_with_its_server_and_finds_its_cache(fleet: Fleet) -> None:
    url, servers = fleet.url, fleet.servers
    homes = {session: home_of(url, session, servers) for session in fleet.sessions}
    assert Counter(homes.values()) == {0: EACH, 1: EACH}
    long_question = "What is 47 + 38? " * 24
    for session in fleet.sessions[:4]:
        assert home_of(url, session, servers) == homes[session]
        first = asked(url, session, servers, f"{long_question} {session}")
        hits = [server.metric(HITS) for server in servers]
        second = asked(url, session, servers, f"{long_question} {session}")
        gained = [server.metric(HITS) - old for server, old in zip(servers, hits, strict=True)]
        assert first == second and gained[homes[session]] >= 64 and gained[1 - homes[session]] == 0


def test_killing_one_server_under_load(fleet: Fleet) -> None:
    """Then it comes back, is let in again, and gets its conversations back."""
    url, servers = fleet.url, fleet.servers
    homes = {session: home_of(url, session, servers) for session in fleet.sessions}
    requests = []
    for session in fleet.sessions:
        for stream in (False, True):
            length = 1800 if stream and homes[session] == 0 else 400  # the kill must fall into the long ones
            hello = [{"role": "user", "content": f"Hello from {session}"}]
            body = chat(hello, stream=stream, max_tokens=length, ignore_eos=True)
            requests.append(Request(url, session, body))
    threads = [threading.Thread(target=request.run) for request in requests]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(server.metric("vllm:num_requests_running") >= 1 for server in servers), "the load")
    wait_for(lambda: any(r.bytes_seen and homes[r.session] == 0 for r in requests), "a stream that has begun")
    in_flight = sum(request.fate != COMPLETE for request in requests)
    servers[0].kill()
    for thread in threads:
        thread.join(timeout=START_LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    fates = Counter(f"stream {r.body['stream']}, server {homes[r.session]}: {r.fate}" for r in requests)
    print(f"in flight at kill -9: {in_flight} of {len(requests)}: {dict(fates)}")
    for request in requests:
        if not (request.body["stream"] and homes[request.session] == 0 and request.status == 200):
            assert request.fate == COMPLETE, (request.session, request.status, request.text[-200:])
    broken = [request for request in requests if request.fate == BROKEN]
    # Whether a stream had begun is the answer's to say: at the kill its first byte may be on its way to the client.
    assert broken and all(request.bytes_seen and "[DONE]" not in request.text for request in broken)

    orphan = next(session for session in fleet.sessions if homes[session] == 0)
    assert home_of(url, orphan, servers) == 1
    servers[0].start()
    servers[0].wait_until_healthy(servers[0].url)
    deadline = time.monotonic() + START_LIMIT_S
    while home_of(url, orphan, servers) != 0:
        assert time.monotonic() < deadline, "the server is not let in again"
        time.sleep(1)


class Load:
    """Clients who ask one request after the other, whole and streamed, until `stop`; notes what became of each."""

    def __init__(self, url: str, sessions: list[str]) -> None:
        self.url, self.sessions, self.over = url, sessions, threading.Event()
        self.requests: list[Request] = []
        self.seconds: list[float] = []
        self.threads = [threading.Thread(target=self.ask, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def ask(self, client: int) -> None:
        turn = 0
        while not self.over.is_set():
            turn += 1
            hello = [{"role": "user", "content": f"What is {11 + turn % 80} + {12 + client}?"}]
            long = {"max_tokens": 400, "ignore_eos": True} if turn % 4 == 0 else {}
            session = self.sessions[(client + turn) % len(self.sessions)]
            request = Request(self.url, session, chat(hello, stream=(client + turn) % 2 == 0, **long))
            self.requests.append(request)
            began = time.monotonic()
            request.run()
            self.seconds.append(time.monotonic() - began)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def test_a_hung_engine_is_found_under_load(fleet: Fleet, tmp_path: Path) -> None:
    """SIGSTOP: /health still answers, health.sh tells. The server's end gives its whole requests to the other one."""
    wait_for(lambda: all(healthy(server.url) for server in fleet.servers), "both servers")
    victim = fleet.servers[0]
    (tmp_path / "health.sh").write_text(rendered("health.sh.j2"))
    arguments = ("127.0.0.1", str(victim.port), "1", "15", "20")

    def hangs() -> bool:
        command = ["bash", str(tmp_path / "health.sh"), *arguments]
        return "no step" in subprocess.run(command, capture_output=True, text=True, check=False).stderr

    with Load(fleet.url, fleet.sessions) as traffic:
        wait_for(lambda: victim.metric("vllm:num_requests_running") >= 1, "the load")
        assert not hangs()
        victim.engine().send_signal(signal.SIGSTOP)
        assert healthy(victim.url)
        wait_for(hangs, "health.sh")
        end(victim)
        count = len(traffic.requests)
        wait_for(lambda: len(traffic.requests) > count + 2 * CLIENTS, "requests after it")
    lost = [request for request in traffic.requests if request.fate != COMPLETE]
    print(f"{len(traffic.requests)} requests, {len(lost)} lost, longest {max(traffic.seconds):.1f} s")
    assert all(request.body.get("stream") for request in lost) and len(lost) <= CLIENTS
