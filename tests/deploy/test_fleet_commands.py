"""The heartbeat with fake servers that only report requests: which it takes out, which it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from glm5_ascend.deploy.heartbeat import FleetHeartbeat, fill_command, run_command
from glm5_ascend.errors import CheckFailedError, ConfigError, MissingEnvironmentError
from glm5_ascend.serve.router import RunningRouter
from tests.serve.support.stub import stub_server
from tests.support.command import assert_one_clear_line, glm5_ascend
from tests.support.listening import listening


@dataclass
class FakeRouter:
    """Address and workers of a server with the three routes of vllm-router that are used."""

    workers: list[str]
    url: str = ""


@pytest.fixture
def routed() -> Iterator[Callable[[list[str]], FakeRouter]]:
    with ExitStack() as stack:

        def start(workers: list[str]) -> FakeRouter:
            router = FakeRouter(workers)

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    self.answer(json.dumps({"urls": workers}))

                def do_POST(self) -> None:
                    what, _, url = self.path.partition("?url=")
                    workers.remove(url) if what == "/remove_worker" else workers.append(url)
                    self.answer("done")

                def answer(self, text: str) -> None:
                    self.send_response(200)
                    self.send_header("content-length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text.encode())

            router.url = stack.enter_context(listening(Handler))
            return router

        yield start


IDLE = "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
STUCK = "vllm:num_requests_running 2.0\nvllm:num_requests_waiting 0.0\nvllm:iteration_tokens_total_sum 77.0\n"
Routed = Callable[[list[str]], FakeRouter]


def test_a_router_that_does_not_answer_as_one() -> None:
    with pytest.raises(MissingEnvironmentError):
        RunningRouter("http://127.0.0.1:9").workers()
    with stub_server("85") as server, pytest.raises(CheckFailedError, match="list_workers"):
        RunningRouter(server).workers()


def test_heartbeat_of_one_that_is_stuck_and_one_that_is_busy(routed: Routed) -> None:
    """Both have requests; only one finishes steps. The last server is never taken out."""
    hung: list[str] = []
    messages: list[str] = []
    with stub_server("85", STUCK) as stuck, stub_server("Hello", IDLE) as idle:
        router = routed([stuck, idle])
        heart = FleetHeartbeat(
            RunningRouter(router.url), patience=2, timeout=60, on_hung=hung.append, report=messages.append
        )
        heart.beat()  # the first one only reads
        heart.beat()
        assert (router.workers, hung) == ([stuck, idle], [])
        heart.beat()
        assert (router.workers, hung) == ([idle], [stuck]) and "finishes no step" in messages[0]
        heart.run(0, beats=2)
        assert hung == [stuck]
    heart.run(0, beats=3)  # now nobody answers
    assert router.workers == [idle] and "last server" in messages[-1]


def test_a_server_that_an_operator_took_out_is_left_alone(routed: Routed) -> None:
    hung: list[str] = []
    with stub_server("Hello", IDLE) as idle:
        router = routed([idle, "http://127.0.0.1:9"])
        heart = FleetHeartbeat(RunningRouter(router.url), patience=2, timeout=60, on_hung=hung.append)
        heart.beat()
        router.workers.remove("http://127.0.0.1:9")
        heart.run(0, beats=3)
        assert (router.workers, hung) == ([idle], [])
        router.workers.append("http://127.0.0.1:9")
        heart.run(0, beats=2)
        assert (router.workers, hung) == ([idle], ["http://127.0.0.1:9"])


def test_commands(tmp_path: Path) -> None:
    assert fill_command("ssh {host} 'restart {port}' {url}", "http://atlas:8000") == [
        "ssh", "atlas", "restart 8000", "http://atlas:8000",
    ]  # fmt: skip
    for bad in ("", "ssh 'a", "echo {nothing}", "echo {0}"):
        with pytest.raises(ConfigError):
            fill_command(bad, "http://a:1")
    run_command(f"touch {tmp_path}/{{host}}", "http://a:1")
    assert (tmp_path / "a").exists()
    with pytest.raises(CheckFailedError, match="ended with exit code"):
        run_command("ls {url}/none", "http://a:1")
    with pytest.raises(ConfigError):
        run_command("/nowhere/program", "http://a:1")


def test_on_the_command_line(routed: Routed) -> None:
    heartbeat = ("deploy", "heartbeat")
    assert_one_clear_line(glm5_ascend(*heartbeat, "http://127.0.0.1:9", "--beats", "1"), 3, "no answer")
    assert_one_clear_line(glm5_ascend(*heartbeat, "x", "--on-hung", "echo {what}"), 2, "echo {what}")
    done = glm5_ascend(*heartbeat, routed(["http://127.0.0.1:9"]).url, "--beats", "1")
    assert done.returncode == 0, done.stderr
