"""`smoke`, `eval --url` and the routers against SGLang 0.5.23's own server, with our W4A8 checkpoint.

HTTP, parsers, scheduler, prefix cache, log-probabilities and sampling are SGLang's; the NPU's operators and the
attention over the cache are plain torch (`sglang_on_cpu`). Without MTP.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.errors import CheckFailedError
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.windows import read_windows
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.local_server import free_port
from tests.contract.support.sglang import SGLang
from tests.deploy.support.judges import tool_environment
from tests.deploy.support.replicas import Program, Replica, wait_for
from tests.support.command import glm5_ascend

pytestmark = pytest.mark.contract
WINDOW, WINDOWS = 96, 4
SGLANG_ROUTER, VLLM_ROUTER = "sglang-router==0.3.2", "vllm-router"
PROMPT_TOKENS, RUNNING = "sglang:prompt_tokens_histogram_sum", "sglang:num_running_reqs"
QUESTION = [{"role": "user", "content": "What is 47 + 38?"}]


@pytest.fixture(scope="module")
def servers(
    sglang: SGLang, rotated_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Replica]]:
    folder = tmp_path_factory.mktemp("sglang-servers")
    servers = [sglang.replica(rotated_checkpoint, folder / f"server-{i}.log") for i in range(2)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_healthy(server.url)
        yield servers
    finally:
        for server in servers:
            server.kill()


def test_smoke(servers: list[Replica]) -> None:
    done = glm5_ascend("smoke", servers[0].url, "--long-tokens", "512", "--json")
    assert done.stdout, done.stderr
    checks = {line["check"]: line for line in json.loads(done.stdout)["checks"]}
    print({name: (line["status"], line["detail"]) for name, line in checks.items()})
    assert done.returncode == 0
    for check in ("canary answers", "tool call", "thinking", "streaming"):
        assert checks[check]["status"] == "ok", checks[check]
    assert checks["long prompt"]["values"]["prompt_tokens"] >= 512
    assert checks["MTP acceptance"]["status"] == "skipped"


def test_eval_of_the_server_is_that_of_its_files(
    servers: list[Replica], trained_checkpoint: Path, rotated_checkpoint: Path
) -> None:
    """Log-probabilities of prompts come from /generate; NLL and top-1 as computed from the files it serves."""
    sizes = ["--window", WINDOW, "--windows", WINDOWS]
    done = glm5_ascend(
        "eval", "--url", servers[0].url, "--against", trained_checkpoint, *sizes, "--json"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout)
    windows = read_windows(None, trained_checkpoint, WINDOW, WINDOWS)
    here = {row.name: row.value for row in metrics(compare(rotated_checkpoint, trained_checkpoint, windows))}
    print({name: (served[name], here[name]) for name in ("nll_quantized", "top1_agreement", "kl_mean")})
    assert served["nll_source"] == pytest.approx(here["nll_source"], rel=1e-6)
    assert served["nll_quantized"] == pytest.approx(here["nll_quantized"], abs=0.02)
    assert served["top1_agreement"] == pytest.approx(here["top1_agreement"], abs=0.04)
    assert served["kl_is_lower_bound"] and 0.3 * here["kl_mean"] < served["kl_mean"] < 3 * here["kl_mean"]


def test_a_refused_prompt_is_one_line(servers: list[Replica], trained_checkpoint: Path) -> None:
    """A prompt beyond its context."""
    long = ["--window", 1536, "--windows", 1]
    done = glm5_ascend("eval", "--url", servers[0].url, "--against", trained_checkpoint, *long)
    assert done.returncode == 1 and "HTTP 400" in done.stderr and "Traceback" not in done.stderr, done.stderr


@contextmanager
def router(folder: Path, package: str, script: str, environ: dict[str, str]) -> Iterator[Client]:
    """A rendered script with the real router from PyPI."""
    python = tool_environment(folder / "venv", package)
    path, port = folder / "router.sh", free_port()
    path.write_text(script)
    variables = environ | {"PORT": str(port), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    command = ["bash", str(path), "--open", "--prometheus-port", str(free_port())]
    program = Program(command, folder / "router.log", variables)
    program.start()
    try:
        client = Client(f"http://127.0.0.1:{port}", "glm-5", timeout=60)
        program.wait_until_healthy(client.url)
        wait_for(lambda: answers(client), f"its servers: {program.log}", 300)
        yield client
    finally:
        program.kill()


def answers(client: Client) -> bool:
    """A router is up before it knows its servers: it says 503 until then."""
    try:
        return bool(client.models()) and client.chat(QUESTION, max_tokens=1).completion_tokens == 1
    except CheckFailedError:
        return False


def asked(client: Client, servers: list[Replica]) -> list[bool]:
    """Which servers read the prompt of one question; its answer is right, whole and streamed."""
    before = [server.metric(PROMPT_TOKENS) for server in servers]
    assert "85" in client.chat(QUESTION).content
    streamed = client.chat(QUESTION, stream=True)
    assert "85" in streamed.content and streamed.chunks > 1 and streamed.finish == "stop"
    return [server.metric(PROMPT_TOKENS) > old for server, old in zip(servers, before, strict=True)]


def test_the_router_of_prefill_and_decode_asks_both(servers: list[Replica], tmp_path: Path) -> None:
    """SGLang's own router takes the rendered line and sends every request to both halves.

    The servers here are whole ones that compute the prompt each for itself: a cache is not moved.
    """
    script = rendered_texts(load("a3-pd-sglang"), "shell", "/models/glm5")["proxy.sh"]
    script = script.replace("http://$node:8000", "http://$node")  # ports that are free here
    first, second = (server.url.removeprefix("http://") for server in servers)
    with router(tmp_path, SGLANG_ROUTER, script, {"PREFILL_NODES": first, "DECODE_NODES": second}) as client:
        assert asked(client, servers) == [True, True]
