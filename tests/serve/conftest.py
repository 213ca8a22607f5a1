"""Checkpoints, the HF oracle, engine runs in subprocesses and one HTTP server per session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.support import tiny_checkpoints
from tests.serve.support.chat import API_KEY
from tests.serve.support.oracle import hf_continue, hf_model
from tests.support.command import environment
from tests.support.server_process import ENGINE_ENVIRONMENT, started_server

SUPPORT = Path(__file__).parent / "support"
PROMPT_LENGTHS = (10, 150, 300, 33, 700)  # index_topk is 32: shorter, just longer, much longer
Job = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def float_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random fp32 model with an MTP layer."""
    return tiny_checkpoints.write_float_checkpoint(tmp_path_factory.mktemp("float"))


@pytest.fixture(scope="session")
def w4a8_checkpoint(float_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W8A8_DYNAMIC linears, W4A8_DYNAMIC routed experts."""
    target = tmp_path_factory.mktemp("w4a8")
    return tiny_checkpoints.quantize(float_checkpoint, target, static_attention=False, int4_experts=True)


@pytest.fixture(scope="session")
def w8a8_checkpoint(float_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W8A8 (static) attention, W8A8_DYNAMIC everything else."""
    target = tmp_path_factory.mktemp("w8a8")
    return tiny_checkpoints.quantize(float_checkpoint, target, static_attention=True, int4_experts=False)


@pytest.fixture(scope="session")
def trained_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped demo model, or the directory named by GLM5_TEST_TRAINED (while it is being trained)."""
    if "GLM5_TEST_TRAINED" in os.environ:
        return Path(os.environ["GLM5_TEST_TRAINED"])
    from glm5_ascend.demo_model.resources import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("trained") / "demo")


@pytest.fixture(scope="session")
def rotated_checkpoint(trained_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`glm5-ascend quantize --recipe w4a8` of the trained model: rotated, with rot.weight."""
    return quantize_by_command(trained_checkpoint, tmp_path_factory.mktemp("rotated") / "w4a8", "w4a8")


@pytest.fixture(scope="session")
def rotated_w8a8_checkpoint(trained_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with `--recipe w8a8`: static attention."""
    return quantize_by_command(trained_checkpoint, tmp_path_factory.mktemp("rotated") / "w8a8", "w8a8")


def quantize_by_command(source: Path, out: Path, recipe: str) -> Path:
    command = [sys.executable, "-m", "glm5_ascend", "quantize", str(source), str(out), "--recipe", recipe]
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Byte-level text as token ids; every prompt differs from the first token on."""
    text = (SUPPORT / "tiny_checkpoints.py").read_bytes()
    return [[15 + b for b in text[100 + n : 100 + 2 * n]] for n in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Run an offline engine in a subprocess (see engine.py) and return its report."""

    def run(script: str = "engine.py", *argument: str, **job: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        (folder / "job.json").write_text(json.dumps(job))
        arguments = list(argument) or [str(folder / "job.json")]
        command = [sys.executable, str(SUPPORT / script), *arguments, str(folder / "result.json")]
        variables = environment(**ENGINE_ENVIRONMENT)
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=folder, env=variables)
        assert done.returncode == 0, f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        report: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return report

    return run


@pytest.fixture(scope="session")
def oracle(float_checkpoint: Path, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """transformers' greedy continuations, with sparse attention as trained and (negative control) dense."""
    model = hf_model(float_checkpoint)
    sparse = hf_continue(model, prompts)
    for module in model.modules():
        if type(module).__name__ == "GlmMoeDsaIndexer":
            module.index_topk = 4096
    return {"sparse": sparse, "dense": hf_continue(model, prompts)}


@pytest.fixture(scope="session")
def shared_indexer_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5.2's kind: the middle layer has no indexer and reuses the first one's choice."""
    return tiny_checkpoints.write_float_checkpoint(tmp_path_factory.mktemp("shared"), indexers="FSF")


@pytest.fixture(scope="session")
def shared_indexer_oracle(shared_indexer_checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    return hf_continue(hf_model(shared_indexer_checkpoint), prompts)


@pytest.fixture(scope="session")
def server(rotated_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`glm5-ascend serve` on the trained model, quantized to W4A8, with MTP; yields the base URL."""
    flags = ["--api-key", API_KEY, "--enable-prompt-tokens-details"]
    flags += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    yield from started_server(rotated_checkpoint, tmp_path_factory.mktemp("server"), flags)


@pytest.fixture(scope="session")
def client(server: str) -> Any:
    """The official client of that server."""
    import openai

    return openai.OpenAI(base_url=f"{server}/v1", api_key=API_KEY, timeout=60)
