"""Loads on a running server: made by `vllm bench serve`, or read from the results of other benchmarks."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError, PlanError, shortened, shown
from glm5_ascend.files.untrusted import parse_json, read_bytes
from glm5_ascend.serve.client import Client

#: Seconds for a whole load.
LIMIT_S = 3600
#: A benchmark's result may list every request.
_MAX_BYTES = 256 * 1024**2
FORMATS = "a CSV, or the result of vllm bench serve, AISBench, evalscope or SGLang's bench_serving (.json, .jsonl)"
#: Names of a run's values in results: vllm bench serve and SGLang's bench_serving, AISBench, evalscope.
_NAMES = {
    "requests": ("completed", "num_prompts", "Total Requests", "Success Requests", "Succeed requests"),
    "input": ("total_input_tokens", "Total Input Tokens", "Total input tokens"),
    "output": ("total_output_tokens", "Total Generated Tokens", "Total generated tokens"),
    "concurrency": ("max_concurrency", "Max Concurrency", "Concurrency", "Number of concurrency"),
    "speed": ("output_throughput", "Output Token Throughput", "Output token throughput (tok/s)"),
    "ttft_ms": ("median_ttft_ms", "mean_ttft_ms"), "tpot_ms": ("median_tpot_ms", "mean_tpot_ms"),
    "ttft_s": ("Average time to first token (s)",), "tpot_s": ("Average time per output token (s)",),
    "prompt": ("Average input tokens per request",), "answer": ("Average output tokens per request",),
    "failed": ("failed",), "per_step": ("spec_decode_acceptance_length",),
}  # fmt: skip


@dataclass(frozen=True)
class MeasuredLoad:
    """A load and its speed; 0 for what the benchmark's result does not say.

    Attributes:
        prompt, output: tokens of a request, mean.
        ttft_ms, tpot_ms: medians over requests, means where a result has no others.
        failed: requests without a complete answer.
        per_step: tokens per step of MTP. rate: requests sent per second, None: without a limit.
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
    rate: float | None = None

    @property
    def workload(self) -> str:
        """The load as `plan --workload` reads it."""
        rate = f",rate={self.rate:g}" if self.rate else ""
        return f"in={self.prompt},out={self.output},requests={self.requests}{rate},concurrency={self.concurrency}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_load(
    client: Client, tokenizer: Path, prompt: int, output: int, concurrency: int, requests: int
) -> MeasuredLoad:
    """Let `vllm bench serve` send completions of random prompts, `concurrency` at once, each of `output` tokens.

    Args:
        tokenizer: directory of the served checkpoint.
    Raises:
        MissingEnvironmentError: vLLM is not installed here. CheckFailedError: the benchmark ended with an error.
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
        command += ["--ignore-eos", "--save-result", "--disable-tqdm"]
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
        return read_results(result)[0]


def read_text(path: Path) -> str:
    """Text of a file with measured loads; raises PlanError if it cannot be read."""
    try:
        return read_bytes(path, _MAX_BYTES, PlanError, FORMATS).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: cannot be read: {error}", FORMATS) from None


def read_results(path: Path, text: str | None = None) -> list[MeasuredLoad]:
    """Loads in a benchmark's JSON or JSON lines.

    Raises:
        PlanError: the file cannot be read, or a value is missing or wrong; names the file, the line and the key.
    """
    text, loads = read_text(path) if text is None else text, []
    lines = text.splitlines()
    if len(lines) < 2 or not lines[0].rstrip().endswith("}"):
        lines = [text]  # one object in the whole file, or one on each line, as SGLang's bench_serving appends them
    for index, line in enumerate(lines, 1):
        name, problem = str(path) if len(lines) == 1 else f"{path}, line {index}", "not valid JSON: "
        if not line:
            continue
        try:
            result = parse_json(line)
            problem = "not a benchmark's result: "
            if not isinstance(result, dict):
                raise PlanError(f"{name}: not one object", FORMATS)
            loads.append(_load(result))
        except ValueError as error:
            raise PlanError(f"{name}: {problem}{shortened(str(error), 160)}", FORMATS) from None
    return loads


def _load(result: Mapping[str, Any]) -> MeasuredLoad:
    """The load of a benchmark's result."""
    speed, requests, rate = _value(result, "speed"), _value(result, "requests"), result.get("request_rate")
    prompt = _value(result, "prompt", 0) or _value(result, "input") / requests
    answer = _value(result, "answer", 0) or _value(result, "output") / requests
    ttft, tpot = (_value(result, f"{name}_ms", 0) or 1e3 * _value(result, f"{name}_s", 0) for name in ("ttft", "tpot"))
    return MeasuredLoad(
        max(1, round(prompt)), max(1, round(answer)), round(_value(result, "concurrency", 0) or requests),
        round(requests), speed, ttft, tpot, round(_value(result, "failed", 0)), _value(result, "per_step", 0),
        rate if isinstance(rate, int | float) and 0 < rate < math.inf else None,
    )  # fmt: skip


def _value(result: Mapping[str, Any], what: str, default: float | None = None) -> float:
    """A value above 0, or the default; AISBench has each value under `total`, followed by its unit."""
    name = next((name for name in _NAMES[what] if name in result), "")
    entry = result.get(name)
    entry = entry.get("total") if isinstance(entry, dict) else entry
    if entry is None and default is None:
        raise ValueError(f"{_NAMES[what][0]} is missing")
    if entry is None or (entry == 0 and default is not None and not isinstance(entry, bool)):
        return default or 0.0
    try:
        value = math.nan if isinstance(entry, bool) else float(str(entry).partition(" ")[0])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {shown(entry)}, not above 0")
    return value
