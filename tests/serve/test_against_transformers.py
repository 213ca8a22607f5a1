"""Served tokens equal transformers', in fp32 and greedy, however the engine cuts, caches, batches or drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serve.support.oracle import NEW_TOKENS, hf_continue, hf_model

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

Oracle = dict[str, list[list[int]]]


def tokens(passed: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in passed]


@pytest.fixture(scope="module")
def chunked(run_engine: Any, float_checkpoint: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """All prompts at once, 64 tokens per step, twice: chunked prefill and, in pass two, the prefix cache."""
    engine = {"model": str(float_checkpoint), "dtype": "float32", "max_num_batched_tokens": 64}
    return run_engine(engine=engine, prompts=prompts, new_tokens=NEW_TOKENS, passes=2, count_ops=True)


def test_dense_attention_would_be_noticed(oracle: Oracle) -> None:
    """Negative control: every prompt longer than index_topk continues differently with dense attention."""
    for prompt_length, sparse, dense in zip((10, 150, 300, 33, 700), oracle["sparse"], oracle["dense"], strict=True):
        assert prompt_length <= 32 or sparse != dense


def test_chunked_prefill_equals_transformers(chunked: dict[str, Any], oracle: Oracle) -> None:
    assert chunked["chunked_prefill"] is True
    assert tokens(chunked["passes"][0]) == oracle["sparse"]


def test_prefix_cache_equals_transformers(chunked: dict[str, Any], oracle: Oracle) -> None:
    assert chunked["prefix_caching"] is True
    assert [output["cached"] > 0 for output in chunked["passes"][1]] == [False, True, True, False, True]
    assert tokens(chunked["passes"][1]) == oracle["sparse"]


def test_each_op_once_per_layer_and_step(chunked: dict[str, Any]) -> None:
    counted = chunked["counted"]
    calls = counted["layers"] * counted["steps"]
    assert counted["steps"] >= 4
    assert counted["ops"] == dict.fromkeys(
        ("mla_preprocess", "indexer_preprocess", "lightning_indexer", "sparse_flash_attention", "v_up_proj"), calls
    )


def test_rope_op_is_switched_off(chunked: dict[str, Any]) -> None:
    """vLLM's C++ rope is wrong for 3-D queries (test_rope.py); the plugin must have replaced it."""
    assert "-rotary_embedding" in chunked["custom_ops"] and "+rotary_embedding" not in chunked["custom_ops"]


@pytest.mark.parametrize("drafted", [pytest.param(1, marks=pytest.mark.long), 3])
def test_mtp_changes_no_token(
    run_engine: Any, float_checkpoint: Path, prompts: list[list[int]], oracle: Oracle, drafted: int
) -> None:
    report = run_engine(
        engine={
            "model": str(float_checkpoint),
            "dtype": "float32",
            "speculative_config": {"method": "mtp", "num_speculative_tokens": drafted},
        },
        prompts=prompts,
        new_tokens=NEW_TOKENS,
    )
    assert tokens(report["passes"][0]) == oracle["sparse"]
    assert report["spec_decode"]["vllm:spec_decode_num_draft_tokens"] > 0


@pytest.mark.parametrize("types_only", [pytest.param(False, marks=pytest.mark.long), True])
def test_layers_that_share_an_indexer(
    run_engine: Any,
    shared_indexer_checkpoint: Path,
    prompts: list[list[int]],
    shared_indexer_oracle: list[list[int]],
    types_only: bool,
    tmp_path: Path,
) -> None:
    """GLM-5.2: one lightning_indexer call less per step, and the same tokens as transformers; also where config.json
    has `indexer_types` alone, which vLLM does not read."""
    model = shared_indexer_checkpoint
    if types_only:
        model = Path(shutil.copytree(shared_indexer_checkpoint, tmp_path / "types"))
        config = json.loads((model / "config.json").read_text())
        del config["index_topk_pattern"]
        (model / "config.json").write_text(json.dumps(config))
    engine = {"model": str(model), "dtype": "float32"}
    report = run_engine(engine=engine, prompts=prompts, new_tokens=NEW_TOKENS, count_ops=True)
    steps = report["counted"]["steps"]
    assert report["counted"]["ops"] == {
        "mla_preprocess": 3 * steps,
        "indexer_preprocess": 2 * steps,
        "lightning_indexer": 2 * steps,
        "sparse_flash_attention": 3 * steps,
        "v_up_proj": 3 * steps,
    }
    assert tokens(report["passes"][0]) == shared_indexer_oracle


def test_trained_model_equals_transformers(run_engine: Any, trained_checkpoint: Path) -> None:
    """The shipped model in fp32: real chats and text, shorter and longer than its index_topk of 64."""
    from transformers import AutoTokenizer

    from benchmarks.training.evaluate import validation_tokens
    from benchmarks.training.held_out import held_out_questions, render_question

    tokenizer = AutoTokenizer.from_pretrained(trained_checkpoint, trust_remote_code=False)
    questions = held_out_questions(seed=3, n=7)
    prompts = [tokenizer(render_question(tokenizer, q), add_special_tokens=False)["input_ids"] for q in questions]
    prompts.append(validation_tokens(tokenizer)[:500])
    assert min(map(len, prompts)) < 64 < max(map(len, prompts[:-1]))
    engine = {"model": str(trained_checkpoint), "dtype": "float32", "max_num_batched_tokens": 256}
    report = run_engine(engine=engine, prompts=prompts, new_tokens=NEW_TOKENS)
    assert tokens(report["passes"][0]) == hf_continue(hf_model(trained_checkpoint), prompts)
