"""Two replicas behind vllm-router: conversations stick, kill -9 of one loses what had begun and nothing else."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.serve.local_server import free_port
from tests.deploy.support.judges import tool_environment
from tests.deploy.support.replicas import (
    BROKEN,
    COMPLETE,
    START_LIMIT_S,
    Program,
    Replica,
    Request,
    chat,
    replica,
    wait_for,
)

pytestmark = [pytest.mark.server, pytest.mark.long]
pytest.importorskip("vllm")
SESSIONS = [f"conversation-{i}" for i in range(8)]
PROMPT_TOKENS, HITS = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Replica]]]:
    """The router's URL, and its two servers."""
    from glm5_ascend.demo_model.resources import write_demo_model

    folder = tmp_path_factory.mktemp("fleet")
    python = tool_environment(folder / "venv", "vllm-router")
    model = write_demo_model(folder / "demo")
    servers = [replica(model, folder / f"server-{i}.log") for i in range(2)]
    script = folder / "router.sh"
    script.write_text(rendered_texts(load("cpu"), "shell", "/models/glm5")["router.sh"])
    port = free_port()
    workers = " ".join(server.url for server in servers)
    environ = {"WORKERS": workers, "PORT": str(port), "PATH": f"{python.parent}:/usr/bin:/bin"}
    router = Program(["bash", str(script), "--prometheus-port", str(free_port())], folder / "router.log", environ)
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_healthy(server.url)
        router.start()
        router.wait_until_healthy(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}", servers
    finally:
        for program in (router, *servers):
            program.kill()


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


def test_a_conversation_stays_with_its_server_and_finds_its_cache(fleet: tuple[str, list[Replica]]) -> None:
    url, servers = fleet
    homes = {session: home_of(url, session, servers) for session in SESSIONS}
    print(f"conversations per server: {dict(Counter(homes.values()))}")
    assert set(homes.values()) == {0, 1}
    long_question = "What is 47 + 38? " * 24
    for session in SESSIONS[:4]:
        assert home_of(url, session, servers) == homes[session]
        first = asked(url, session, servers, f"{long_question} {session}")
        hits = [server.metric(HITS) for server in servers]
        second = asked(url, session, servers, f"{long_question} {session}")
        gained = [server.metric(HITS) - old for server, old in zip(servers, hits, strict=True)]
        assert first == second and gained[homes[session]] >= 64 and gained[1 - homes[session]] == 0


def test_killing_one_server_under_load(fleet: tuple[str, list[Replica]]) -> None:
    """Then it comes back, is let in again, and gets its conversations back."""
    url, servers = fleet
    homes = {session: home_of(url, session, servers) for session in SESSIONS}
    requests = []
    for session in SESSIONS:
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
    counts: Counter[str] = Counter()
    for request in requests:
        kind = "stream" if request.body.get("stream") else "whole"
        counts[f"{kind}, server {homes[request.session]}: {request.fate}"] += 1
    print(
        f"in flight at kill -9: {in_flight} of {len(requests)}",
        *sorted(f"{v} x {k}" for k, v in counts.items()),
        sep="\n",
    )
    for request in requests:
        if not (request.body["stream"] and homes[request.session] == 0 and request.status == 200):
            assert request.fate == COMPLETE, (
                request.session,
                request.body["stream"],
                request.status,
                request.text[-200:],
            )
    broken = [request for request in requests if request.fate == BROKEN]
    # Whether a stream had begun is the answer's to say: at the kill its first byte may be on its way to the client.
    assert broken and all(request.bytes_seen and "[DONE]" not in request.text for request in broken)

    orphan = next(session for session in SESSIONS if homes[session] == 0)
    assert home_of(url, orphan, servers) == 1
    servers[0].start()
    servers[0].wait_until_healthy(servers[0].url)
    deadline = time.monotonic() + START_LIMIT_S
    while home_of(url, orphan, servers) != 0:
        assert time.monotonic() < deadline, "the server is not let in again"
        time.sleep(1)
