"""A load on a running server: completions of random prompts, some at a time, and their latencies."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from glm5_ascend.errors import Glm5Error
from glm5_ascend.serve.client import Client

#: Token ids of prompts: the first ones are bytes in any of these tokenizers.
IDS = 256


@dataclass(frozen=True)
class MeasuredLoad:
    """Medians and the 99th percentile over requests, in ms; tokens per second over the whole run.

    Attributes:
        failed: requests without a complete answer. error: message of the first of them.
        per_step: tokens per step of MTP, None without. rate: requests sent per second, None: without a limit.
    """

    prompt: int
    output: int
    concurrency: int
    requests: int
    failed: int
    seconds: float
    output_tokens_per_s: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    per_step: float | None = None
    error: str = ""
    rate: float | None = None

    @property
    def workload(self) -> str:
        """The load as `plan --workload` reads it."""
        rate = f",rate={self.rate:g}" if self.rate else ""
        return f"in={self.prompt},out={self.output},requests={self.requests}{rate},concurrency={self.concurrency}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_load(client: Client, prompt: int, output: int, concurrency: int, requests: int) -> MeasuredLoad:
    """Streamed completions of random prompts, `concurrency` at once, each of `output` tokens.

    Raises:
        MissingEnvironmentError, CheckFailedError: /metrics cannot be read. Errors of single requests are counted.
    """
    generator, before = random.Random(0), client.metrics()
    prompts = [[generator.randrange(IDS) for _ in range(prompt)] for _ in range(requests)]
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        runs = list(pool.map(lambda ids: _arrivals(client, ids, output), prompts))
    seconds = time.perf_counter() - began
    answered = [run for run in runs if isinstance(run, list)]
    failures = [run for run in runs if isinstance(run, str)]
    ttft = [1e3 * run[0] for run in answered]
    tpot = [1e3 * (run[-1] - run[0]) / max(1, output - 1) for run in answered]
    after = client.metrics()
    drafts, accepted = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    return MeasuredLoad(
        prompt, output, concurrency, requests, len(failures), round(seconds, 3),
        round(len(answered) * output / seconds, 3), *_percentiles(ttft), *_percentiles(tpot),
        round(1 + accepted / drafts, 3) if drafts > 0 else None, failures[0] if failures else "",
    )  # fmt: skip


def _arrivals(client: Client, prompt: Sequence[int], output: int) -> list[float] | str:
    """Seconds from the request to each token; the error message of a request that failed."""
    body = {
        "model": client.model, "prompt": list(prompt), "max_tokens": output, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    began, times = time.perf_counter(), list[float]()
    try:
        for event in client.stream("/v1/completions", body):
            tokens = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices") or ())
            times += [time.perf_counter() - began] * tokens
    except Glm5Error as error:
        return error.message
    return times if len(times) == output else f"{len(times)} of {output} tokens arrived"


def _percentiles(values: list[float]) -> tuple[float, float]:
    """(median, 99th percentile: the nearest value above); 0 without values."""
    if not values:
        return 0.0, 0.0
    return round(statistics.median(values), 3), round(sorted(values)[int(0.99 * (len(values) - 1) + 0.999)], 3)
