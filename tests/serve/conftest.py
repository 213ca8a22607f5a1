"""Checkpoints, the HF oracle and engine runs in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.support import tiny_checkpoints
from tests.serve.support.chat import ANSWER_LIMIT, API_KEY
from tests.support.command import environment
from tests.support.fork_server import ForkServer
from tests.support.server_process import ENGINE_ENVIRONMENT
from tests.support.tiny_model import edited_json

SUPPORT = Path(__file__).parent / "support"
ENGINE = "tests.serve.support.engine:main"
#: Seconds; only to end an engine that hangs.
ENGINE_LIMIT = 1800
PROMPT_LENGTHS = (10, 150, 300, 33, 700)  # index_topk is 32: shorter, just longer, much longer
Job = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def float_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random fp32 model with an MTP layer; as in GLM-5.2, the middle layer has no indexer and uses the first one's.

    config.json has `indexer_types` alone, which vLLM does not read.
    """
    model = tiny_checkpoints.write_float_checkpoint(tmp_path_factory.mktemp("float"), indexers="FSF")
    with edited_json(model / "config.json") as config:
        del config["index_topk_pattern"]
    return model


@pytest.fixture(scope="session")
def quantized_checkpoint(float_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.quantize_by_every_type(float_checkpoint, tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Byte-level text as token ids; every prompt differs from the first token on."""
    text = (SUPPORT / "tiny_checkpoints.py").read_bytes()
    return [[15 + b for b in text[100 + n : 100 + 2 * n]] for n in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory, vllm_forks: ForkServer) -> Job:
    """Run an offline engine in a process of its own (see engine.py) and return its report."""

    def run(function: str = ENGINE, *argument: str, **job: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        (folder / "job.json").write_text(json.dumps(job))
        arguments = [*(argument or [str(folder / "job.json")]), str(folder / "result.json")]
        done = vllm_forks.run(function, arguments, environment(**ENGINE_ENVIRONMENT), folder, ENGINE_LIMIT)
        assert done.returncode == 0, f"{function} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        report: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return report

    return run


@pytest.fixture(scope="session")
def probe(vllm_forks: ForkServer) -> Job:
    """Run a function of probes.py in a fork that has only imported vLLM; its report."""

    def run(*arguments: str) -> dict[str, Any]:
        variables = environment(**ENGINE_ENVIRONMENT, VLLM_PLUGINS="") if "stock" in arguments else environment()
        done = vllm_forks.run("tests.serve.support.probes:main", list(arguments), variables)
        assert done.returncode == 0, done.stderr[-3000:]
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report

    return run


@pytest.fixture(scope="session")
def client(server: str) -> Any:
    """The official client of that server."""
    import openai

    return openai.OpenAI(base_url=f"{server}/v1", api_key=API_KEY, timeout=ANSWER_LIMIT)
