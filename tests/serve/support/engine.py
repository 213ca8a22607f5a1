"""Runs one vLLM engine in this process and reports what the tests ask for.  python engine.py JOB.json RESULT.json

A job: {"engine": {LLM arguments}, "batches": [[[token ids]]], "new_tokens": 32, "ends": bool, "score": [[token ids]],
"aborted": [token ids], "drawn": {"prompt", "n", "temperature", "new_tokens"}}; all but "engine" may be left out.
conftest.py sets the environment; VLLM_ENABLE_V1_MULTIPROCESSING=0 lets dispatch modes and hooks see the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def start(engine: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(**({"max_model_len": 2048, "max_num_seqs": 8, "seed": 0, "disable_log_stats": False} | engine))


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def generate(llm: Any, prompts: list[list[int]], new_tokens: int, ends: bool = False) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    least = 0 if ends else new_tokens
    params = SamplingParams(temperature=0, max_tokens=new_tokens, min_tokens=least, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
            ],
            "gaps": [gap(step) for step in output.outputs[0].logprobs],
            "cached": output.num_cached_tokens,
        }
        for output in outputs
    ]


def gap(step: Any) -> float:
    """Difference of the two best log-probabilities."""
    best, second, *_ = sorted((entry.logprob for entry in step.values()), reverse=True)
    return float(best - second)


def scores(llm: Any, prompts: list[list[int]]) -> list[list[list[float]]]:
    """Per prompt and position from the second on, the log-probability of every token of the vocabulary."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        [[position[token].logprob for token in range(len(position))] for position in output.prompt_logprobs[1:]]
        for output in outputs
    ]


def drawn(llm: Any, job: dict[str, Any]) -> list[list[list[int]]]:
    """`n` samples of one prompt, twice with the same seed."""
    from vllm import SamplingParams

    params = SamplingParams(
        n=job["n"], temperature=job["temperature"], seed=1, max_tokens=job["new_tokens"], ignore_eos=True
    )
    passes = [llm.generate([job["prompt"]], params, use_tqdm=False)[0] for _ in range(2)]
    return [[list(output.token_ids) for output in result.outputs] for result in passes]


def cache_bytes(config: Any) -> dict[str, int]:
    """Bytes per token of every layer's cache, by name; states of linear attention are no tokens."""
    import torch

    layers = config.compilation_config.static_forward_context.items()
    caches = {name: getattr(layer, "kv_cache", None) for name, layer in layers}
    return {
        name: cache[0, 0].numel() * cache.element_size()
        for name, cache in caches.items()
        if isinstance(cache, torch.Tensor)
    }


def abort(llm: Any, prompt: list[int]) -> None:
    """End a request in the middle of its answer."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    engine.add_request("aborted", {"prompt_token_ids": prompt}, params)
    for _ in range(4):
        engine.step()
    engine.abort_request(["aborted"])


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own, those of draft positions as lists."""
    found = {metric.name: getattr(metric, "values", getattr(metric, "value", None)) for metric in llm.get_metrics()}
    return {name.removeprefix("vllm:"): value for name, value in found.items() if value is not None}


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = start(job["engine"])
    config = llm.llm_engine.vllm_config
    if "aborted" in job:
        abort(llm, job["aborted"])
    result: dict[str, Any] = {
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "block_size": config.cache_config.block_size,
        "cache_bytes": cache_bytes(config),
        "batches": [
            generate(llm, batch, job["new_tokens"], job.get("ends", False)) for batch in job.get("batches", [])
        ],
        "scores": scores(llm, job["score"]) if "score" in job else [],
    }
    if "drawn" in job:
        result["drawn"] = drawn(llm, job["drawn"])
        ids = llm.get_tokenizer().encode(job["drawn"]["prompt"], add_special_tokens=False)
        result["greedy"] = generate(llm, [ids], job["drawn"]["new_tokens"])[0]["tokens"]
    return result | {"counters": counters(llm)}


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:3])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))


if __name__ == "__main__":
    main()
