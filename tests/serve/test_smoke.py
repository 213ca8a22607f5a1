"""`glm5-ascend smoke` against the real server, and against servers with bad answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from glm5_ascend.serve.client import Client
from glm5_ascend.serve.smoke import SmokeBounds, acceptance, degenerate
from tests.serve.support.chat import API_KEY
from tests.support.command import glm5_ascend
from tests.support.listening import listening

pytestmark = pytest.mark.server


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    return glm5_ascend("smoke", *arguments, OPENAI_API_KEY=API_KEY)


def test_a_good_server_passes(server: str) -> None:
    """`server` is the trained model in W4A8 with MTP."""
    done = smoke(server, "--json")
    report = json.loads(done.stdout)
    checks = {line["check"]: line for line in report["checks"]}
    assert (done.returncode, report["ok"]) == (0, True), done.stdout
    for check in ("canary answers", "tool call", "thinking", "streaming"):
        assert checks[check]["status"] == "ok", checks[check]
    assert checks["canary answers"]["values"] == {"right": 3, "asked": 3}
    assert checks["long prompt"]["status"] in ("ok", "warning")
    assert checks["long prompt"]["values"]["prompt_tokens"] >= 1024
    assert checks["MTP acceptance"]["values"]["tokens_per_step"] > 1


def test_the_table_and_a_bound_on_acceptance(server: str) -> None:
    done = smoke(server, "--long-tokens", "0")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("canary answers") and len(lines) == 7 and done.returncode == 0
    assert lines[4].split()[2] == "skipped" and lines[6].startswith("ok: ")


def test_no_server() -> None:
    done = smoke("http://127.0.0.1:9")
    assert done.returncode == 3 and "no answer" in done.stderr and "Traceback" not in done.stderr
    assert smoke("127.0.0.1:8000").returncode == 2


@pytest.mark.parametrize(
    ("length", "bound", "status"), [(3.16, None, "ok"), (1.2, None, "warning"), (1.2, 2.0, "failed")]
)
def test_acceptance_of_sglang(length: float, bound: float | None, status: str) -> None:
    """A line of SGLang's observability/metrics_collector.py: the mean of its last steps."""
    labels = 'engine_type="unified",model_name="glm-5",pp_rank="0",tp_rank="0"'
    with bad_server("", metrics=f"sglang:spec_accept_length{{{labels}}} {length}\n") as url:
        result = acceptance(Client(url), SmokeBounds(0, bound), {})
    assert (result.status, result.values) == (status, {"tokens_per_step": length})


@contextmanager
def bad_server(content: str, metrics: str = "") -> Iterator[str]:
    """A server that answers everything with one text, as broken weights do."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "metrics" in self.path:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(metrics.encode())
                return
            self.answer({"data": [{"id": "glm-5", "max_model_len": 4096}]} if "models" in self.path else {})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            message = {"role": "assistant", "content": content}
            usage = {"prompt_tokens": 9, "completion_tokens": 9}
            self.answer({"choices": [{"message": message, "finish_reason": "length"}], "usage": usage})

        def answer(self, value: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

    with listening(Handler) as url:
        yield url


def test_garbage_fails_every_check() -> None:
    with bad_server("!" * 200) as url:
        done = smoke(url, "--json")
    assert done.returncode == 1
    checks = {line["check"]: line for line in json.loads(done.stdout)["checks"]}
    failed = {name for name, line in checks.items() if line["status"] == "failed"}
    assert failed == {"canary answers", "tool call", "thinking", "streaming", "long prompt"}
    assert "degenerate" in checks["canary answers"]["detail"]


@pytest.mark.parametrize(
    ("text", "is_it"),
    [("", True), ("!!!!!!!!!!!!!!!!", True), ("the " * 20, True), ("47 + 38 = 85.", False), ("1, 2, 3, 4, 5", False)],
)
def test_degenerate_texts(text: str, is_it: bool) -> None:
    assert degenerate(text) is is_it
