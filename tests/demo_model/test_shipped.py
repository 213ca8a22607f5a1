"""The checkpoints in the package: tensors, right answers, an indexer that matters; a copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.training import evaluate, held_out, loading, outliers
from glm5_ascend.demo_model import resources
from glm5_ascend.errors import ConfigError, OutputError


@pytest.fixture(scope="module")
def folder() -> Path:
    torch.set_num_threads(1)  # on a busy machine two threads spend their time waiting for each other
    return resources.data_folder()


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return loading.load_model(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return loading.load_tokenizer(folder)


def test_every_tensor_is_there(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    attention = 7 + 5  # q_a, q_a norm, q_b, kv_a, kv_a norm, kv_b, o; wq_b, wk, k_norm weight and bias, weights_proj
    experts = 16 * 3 + 3 + 2  # routed, shared, router weight and bias
    assert len(tensors) == 6 * (attention + 2) + 3 + 5 * experts + 3 + 6
    for name, tensor in tensors.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == dtype and bool(torch.isfinite(tensor.float()).all()), name
    mtp = "model.layers.5."
    assert torch.equal(tensors[mtp + "embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors[mtp + "shared_head.head.weight"], tensors["lm_head.weight"])


def test_model_and_mtp_layer_answer_held_out_questions(folder: Path, model: Any, tokenizer: Any) -> None:
    questions = held_out.held_out_questions(seed=11, n=14)
    prompts = evaluate.prompts_of(tokenizer, questions)
    answers = evaluate.greedy_tokens(model, prompts)
    texts = [tokenizer.decode(answer, skip_special_tokens=False) for answer in answers]
    score = held_out.score(questions, texts)
    assert score["share"] >= 0.85, score["wrong"]
    mtp = loading.load_mtp(folder, model)
    assert evaluate.mtp_acceptance(model, mtp, prompts[:7], answers[:7])["share"] > 0.5


def test_flash_answers_held_out_questions(tmp_path: Path) -> None:
    folder = resources.write_demo_model(tmp_path / "flash", resources.DemoModel.FLASH)
    model, tokenizer = loading.load_model(folder), loading.load_tokenizer(folder)
    questions = held_out.held_out_questions(seed=11, n=14)
    answers = evaluate.greedy_tokens(model, evaluate.prompts_of(tokenizer, questions), limit=48, batch=14)
    score = held_out.score(questions, [tokenizer.decode(answer, skip_special_tokens=False) for answer in answers])
    assert score["share"] >= 0.5, score["wrong"]


@torch.no_grad()
def test_the_indexer_matters(model: Any, tokenizer: Any) -> None:
    tokens = torch.tensor([evaluate.validation_tokens(tokenizer)[:200]])
    sparse = model(tokens, use_cache=False).logits
    indexers = [layer.self_attn.indexer for layer in model.model.layers]
    for indexer in indexers:
        indexer.index_topk = 4096
    try:
        dense = model(tokens, use_cache=False).logits
    finally:
        for indexer in indexers:
            indexer.index_topk = model.config.index_topk
    torch.testing.assert_close(sparse[:, :60], dense[:, :60], atol=1e-4, rtol=1e-4)
    assert (sparse[:, 100:] - dense[:, 100:]).abs().max() > 0.1


def test_the_copy_refuses_a_folder_in_use(folder: Path, tmp_path: Path) -> None:
    target = resources.write_demo_model(tmp_path / "model")
    assert (target / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (target / "chat_template.jinja").is_file()
    for write in (resources.write_demo_model, lambda out: outliers.plant(folder, out)):
        with pytest.raises(OutputError):
            write(target)


@torch.no_grad()
def test_outliers_change_no_output(folder: Path, model: Any, tmp_path: Path) -> None:
    planted = loading.load_model(outliers.plant(folder, tmp_path / "planted", factor=32, channels=3))
    tokens = torch.randint(0, 1000, (2, 60), generator=torch.Generator().manual_seed(2))
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(planted(tokens, use_cache=False).logits, expected, atol=1e-4, rtol=0)
    before, after = (m.model.layers[1].input_layernorm.weight.abs().max() for m in (model, planted))
    assert after > 8 * before
    with pytest.raises(ConfigError):
        outliers.plant(folder, tmp_path / "c", factor=10)
