"""A random GLM-5.3-Flash whose MTP layer guesses many tokens, and its engine in every way that a state can go.

python flash.py JOB.json RESULT.json; a job: {"engine": {LLM arguments}, "batches": [[[token ids]]], "new_tokens": 16,
"aborted": [token ids]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.tiny_flash import tiny_flash_config, with_floats, write_tiny_flash

#: Of the embeddings: the larger, the more the next token follows from the last one alone.
SCALE = 8


def write_flash(directory: Path) -> Path:
    """fp32; the next token follows mostly from the last one, which the MTP layer knows as well as the target."""
    import torch
    from safetensors.torch import load_file, save_file

    unstated = dict.fromkeys(("mhc", "mla_use_nope"))  # transformers leaves out what is always so
    write_tiny_flash(directory, dtype="float32", index_head_dim=128, max_position_embeddings=1024, **unstated)
    with_floats(directory)
    text = tiny_flash_config()["text_config"]
    (shard,) = directory.glob("*.safetensors")
    tensors, language = load_file(shard), "model.language_model."
    draft, hidden = f"{language}layers.{text['num_hidden_layers']}.", text["hidden_size"]
    tensors[f"{language}embed_tokens.weight"] *= SCALE
    tensors[f"{draft}eh_proj.weight"] = torch.cat([SCALE * torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    tensors[f"{draft}enorm.weight"] = torch.ones(hidden)
    tensors[f"{draft}shared_head.norm.weight"] = tensors[f"{language}norm.weight"].clone()
    tensors[f"{draft}embed_tokens.weight"] = tensors[f"{language}embed_tokens.weight"].clone()
    save_file(tensors, shard, {"format": "pt"})
    return directory


def run(job: dict[str, Any]) -> dict[str, Any]:
    from tests.serve.support.engine import generate, start

    llm = start({"max_num_seqs": 4, "kv_cache_memory_bytes": 2**28} | job["engine"])
    config = llm.llm_engine.vllm_config
    if "aborted" in job:
        abort(llm, job["aborted"])
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    result = {
        "batches": [generate(llm, batch, job["new_tokens"]) for batch in job["batches"]],
        "block_size": config.cache_config.block_size,
        "async_scheduling": config.scheduler_config.async_scheduling,
    }
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return result | {
        "accepted": list(accepted.values) if accepted else [],
        "preemptions": metrics["vllm:num_preemptions"].value,
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


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:3])
    result_file.write_text(json.dumps(run(json.loads(job_file.read_text()))))


if __name__ == "__main__":
    main()
