"""Loads that other tools measured: results of vllm bench serve, AISBench, evalscope and SGLang's bench_serving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5_ascend.errors import PlanError, shortened, shown
from glm5_ascend.files.untrusted import parse_json, read_bytes
from glm5_ascend.serve.load import MeasuredLoad

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
    "ttft_ms": ("mean_ttft_ms",), "tpot_ms": ("mean_tpot_ms",),
    "ttft_s": ("Average time to first token (s)",), "tpot_s": ("Average time per output token (s)",),
    "prompt": ("Average input tokens per request",), "answer": ("Average output tokens per request",),
}  # fmt: skip


def read_text(path: Path) -> str:
    """Text of a file with measured loads; raises PlanError if it cannot be read."""
    try:
        return read_bytes(path, _MAX_BYTES, PlanError, FORMATS).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: cannot be read: {error}", FORMATS) from None


def read_results(path: Path, text: str | None = None) -> list[MeasuredLoad]:
    """Loads in a benchmark's JSON or JSON lines, with means in place of the medians, and 0 for what is not in the file.

    Raises:
        PlanError: the file cannot be read, or a value is missing or wrong; names the file, the line and the key.
    """
    text, loads = read_text(path) if text is None else text, []
    lines = text.splitlines()
    if len(lines) < 2 or not lines[0].rstrip().endswith("}"):
        lines = [text]  # one object in the whole file, or one on each line, as SGLang's bench_serving appends them
    for number, line in enumerate(lines, 1):
        name, problem = str(path) if len(lines) == 1 else f"{path}, line {number}", "not valid JSON: "
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
    """The load of a benchmark's result; AISBench has each value under `total`, followed by its unit."""

    def value(what: str, default: float | None = 0.0) -> float:
        name = next((name for name in _NAMES[what] if name in result), "")
        entry = result.get(name)
        entry = entry.get("total") if isinstance(entry, dict) else entry
        if entry is None:
            if default is None:
                raise ValueError(f"{_NAMES[what][0]} is missing")
            return default
        try:
            number = math.nan if isinstance(entry, bool) else float(str(entry).partition(" ")[0])
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise ValueError(f"{name} is {shown(entry)}, not above 0")
        return number

    speed, requests, rate = value("speed", None), value("requests", None), result.get("request_rate")
    prompt = value("prompt") or value("input", None) / requests
    answer = value("answer") or value("output", None) / requests
    ttft, tpot = (value(f"{name}_ms") or 1e3 * value(f"{name}_s") for name in ("ttft", "tpot"))
    return MeasuredLoad(
        max(1, round(prompt)), max(1, round(answer)), round(value("concurrency") or requests), round(requests), 0,
        requests * answer / speed, speed, ttft, 0.0, tpot, 0.0,
        rate=rate if isinstance(rate, int | float) and 0 < rate < math.inf else None,
    )  # fmt: skip
