"""Served tokens equal transformers', in fp32 and greedy, however the engine cuts, caches, batches or drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.support import tiny_checkpoints

pytestmark = pytest.mark.server

Oracle = dict[str, list[list[int]]]
NEW_TOKENS = 32
MTP = {"method": "mtp", "num_speculative_tokens": 3}


def tokens(passed: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in passed]


def hf_model(directory: Path) -> Any:
    """transformers' model in fp32 with vLLM's eps in the two low-rank norms (transformers uses its class default)."""
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(
        directory, trust_remote_code=False, dtype="float32", attn_implementation="eager"
    ).eval()
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def hf_continue(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of NEW_TOKENS tokens, one prompt at a time."""
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    outputs = [model.generate(torch.tensor([prompt]), do_sample=False, **length)[0] for prompt in prompts]
    return [output[len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


@pytest.fixture(scope="module")
def oracle(float_checkpoint: Path, prompts: list[list[int]]) -> Oracle:
    """transformers' greedy continuations, with sparse attention as trained and (negative control) dense."""
    model = hf_model(float_checkpoint)
    sparse = hf_continue(model, prompts)
    for module in model.modules():
        if type(module).__name__ == "GlmMoeDsaIndexer":
            module.index_topk = 4096
    return {"sparse": sparse, "dense": hf_continue(model, prompts)}


@pytest.fixture(scope="module")
def chunked(run_engine: Any, float_checkpoint: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """All prompts at once, 64 tokens per step, with drafts; twice, so that the second pass has the prefix cache."""
    engine = {
        "model": str(float_checkpoint), "dtype": "float32", "max_num_batched_tokens": 64, "speculative_config": MTP,
    }  # fmt: skip
    report: dict[str, Any] = run_engine(engine=engine, batches=[prompts, prompts], new_tokens=NEW_TOKENS)
    return report


def test_dense_attention_would_be_noticed(oracle: Oracle) -> None:
    """Negative control: every prompt longer than index_topk continues differently with dense attention."""
    for prompt_length, sparse, dense in zip((10, 150, 300, 33, 700), oracle["sparse"], oracle["dense"], strict=True):
        assert prompt_length <= 32 or sparse != dense


def test_chunked_prefill_equals_transformers(chunked: dict[str, Any], oracle: Oracle) -> None:
    assert chunked["chunked_prefill"] is True
    assert chunked["counters"]["spec_decode_num_draft_tokens"] > 0
    assert tokens(chunked["batches"][0]) == oracle["sparse"]


def test_prefix_cache_equals_transformers(chunked: dict[str, Any], oracle: Oracle) -> None:
    assert chunked["prefix_caching"] is True
    assert [output["cached"] > 0 for output in chunked["batches"][1]] == [False, True, True, False, True]
    assert tokens(chunked["batches"][1]) == oracle["sparse"]


@pytest.mark.long
@pytest.mark.parametrize(("indexers", "drafted"), [("FFF", 0), ("FFF", 1), ("FSF", 0)])
def test_whole_prompts(run_engine: Any, prompts: list[list[int]], indexers: str, drafted: int, tmp_path: Path) -> None:
    """Without chunks; FSF by `index_topk_pattern`, which vLLM reads."""
    model = tiny_checkpoints.write_float_checkpoint(tmp_path, indexers)
    drafts = {"speculative_config": MTP | {"num_speculative_tokens": drafted}} if drafted else {}
    report = run_engine(
        engine={"model": str(model), "dtype": "float32", **drafts}, batches=[prompts], new_tokens=NEW_TOKENS
    )
    assert tokens(report["batches"][0]) == hf_continue(hf_model(model), prompts)


@pytest.mark.long
def test_trained_model_equals_transformers(run_engine: Any, trained_checkpoint: Path) -> None:
    """The shipped model in fp32: real chats and text, shorter and longer than its index_topk of 64."""
    from transformers import AutoTokenizer

    from benchmarks.training.evaluate import prompts_of, validation_tokens
    from benchmarks.training.held_out import held_out_questions

    tokenizer = AutoTokenizer.from_pretrained(trained_checkpoint, trust_remote_code=False)
    prompts = prompts_of(tokenizer, held_out_questions(seed=3, n=7))
    prompts.append(validation_tokens(tokenizer)[:500])
    assert min(map(len, prompts)) < 64 < max(map(len, prompts[:-1]))
    engine = {"model": str(trained_checkpoint), "dtype": "float32", "max_num_batched_tokens": 256}
    report = run_engine(engine=engine, batches=[prompts], new_tokens=NEW_TOKENS)
    assert tokens(report["batches"][0]) == hf_continue(hf_model(trained_checkpoint), prompts)


@pytest.mark.long
def test_64_requests_of_mixed_lengths(run_engine: Any, float_checkpoint: Path) -> None:
    """Prompts of 1 to 441 tokens, all at once and one at a time: the same tokens, but after a tie of two logits."""
    requests, new_tokens, tie = 64, 16, 1e-4
    text = Path(__file__).read_bytes() * 4
    prompts = [[15 + byte for byte in text[17 * i : 17 * i + 1 + 7 * i]] for i in range(requests)]
    engine = {
        "model": str(float_checkpoint), "dtype": "float32", "max_num_seqs": requests, "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
    }  # fmt: skip
    batches = [prompts, *([prompt] for prompt in prompts)]
    all_at_once, *one_by_one = run_engine(engine=engine, batches=batches, new_tokens=new_tokens)["batches"]
    for together, (alone,) in zip(all_at_once, one_by_one, strict=True):
        different = [i for i, (a, b) in enumerate(zip(together["tokens"], alone["tokens"], strict=True)) if a != b]
        assert not different or alone["gaps"][different[0]] < tie
