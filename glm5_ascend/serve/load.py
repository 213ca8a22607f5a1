"""Loads on a running server, made by `vllm bench serve`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError, shortened
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.client import Client

#: Seconds for a whole load.
LIMIT_S = 3600


@dataclass(frozen=True)
class MeasuredLoad:
    """A load and its speed.

    Attributes:
        prompt, output: tokens of a request, mean.
        ttft_ms, tpot_ms: medians over requests.
        failed: requests without a complete answer.
        per_step: tokens per step of MTP, 0 without it.
    """

    prompt: int
    output: int
    concurrency: int
    requests: int
    output_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    failed: int = 0
    per_step: float = 0.0


def run_load(
    client: Client, tokenizer: Path, prompt: int, output: int, concurrency: int, requests: int
) -> MeasuredLoad:
    """Let `vllm bench serve` send completions of random prompts, `concurrency` at once, each of `output` tokens.

    Args:
        tokenizer: directory of the served checkpoint.
    Raises:
        MissingEnvironmentError: vLLM is not installed here.
        CheckFailedError: it ended with an error, or no request was answered.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingEnvironmentError("a load test needs `vllm bench serve`: vLLM is not installed here")
    with tempfile.TemporaryDirectory(prefix="glm5-load-") as folder:
        options = {
            "base-url": client.url, "model": client.model or client.entry()["id"], "tokenizer": tokenizer,
            "dataset-name": "random", "random-input-len": prompt, "random-output-len": output,
            "num-prompts": requests, "max-concurrency": concurrency, "num-warmups": 1, "temperature": 0,
            "result-dir": folder, "result-filename": "result.json",
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "glm5_ascend.serve.vllm_command", "bench", "serve", *words]
        command += ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
        environ = os.environ | {"OPENAI_API_KEY": client.key, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=environ, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise CheckFailedError(f"vllm bench serve took more than {LIMIT_S} s", "see the server's log") from None
        result = Path(folder, "result.json")
        if not result.is_file():
            last = next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), "no message")
            raise CheckFailedError(f"vllm bench serve failed: {shortened(last, 300)}", "see the server's log")
        answer: Any = parse_json(result.read_text(encoding="utf-8"))
    if not answer["completed"]:
        error = shortened(next(filter(None, answer["errors"]), "no message"), 300)
        raise CheckFailedError(
            f"vllm bench serve failed: no request of {requests} was answered: {error}", "see the server's log"
        )
    return MeasuredLoad(
        prompt=round(answer["total_input_tokens"] / answer["completed"]), output=output, concurrency=concurrency,
        requests=answer["completed"], output_tokens_per_s=answer["output_throughput"],
        ttft_ms=answer["median_ttft_ms"], tpot_ms=answer["median_tpot_ms"], failed=answer["failed"],
        per_step=answer.get("spec_decode_acceptance_length") or 0.0,
    )  # fmt: skip
