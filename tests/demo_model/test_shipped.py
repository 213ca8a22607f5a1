"""The checkpoint in the package: size, configuration, tensors, right answers, an indexer that matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import evaluate, loading
from benchmarks.training.held_out import held_out_questions, render_question
from glm5_ascend.demo_model import resources
from glm5_ascend.errors import OutputError

KEYS = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "indexer_rope_interleave": True, "rope_interleave": True,
    "num_nextn_predict_layers": 1, "ep_size": 1, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4, "indexer_types": ["full"] * 5, "dtype": "bfloat16",
    "kv_lora_rank": 512, "index_head_dim": 128, "index_n_heads": 16, "index_topk": 64, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip


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


def test_size_and_config(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.glob("model*")) <= 16_000_000
    config = json.loads((folder / "config.json").read_text())
    assert {key: config.get(key) for key in KEYS} == KEYS
    assert config["rope_parameters"]["rope_theta"] == 1_000_000.0
    assert len(config["eos_token_id"]) == 3
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]


def test_every_tensor_is_there(folder: Path) -> None:
    tensors = loading.load_tensors(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    attention = 7 + 5  # q_a, q_a norm, q_b, kv_a, kv_a norm, kv_b, o; wq_b, wk, k_norm weight and bias, weights_proj
    experts = 16 * 3 + 3 + 2  # routed, shared, router weight and bias
    assert len(tensors) == 6 * (attention + 2) + 3 + 5 * experts + 3 + 6
    for name, tensor in tensors.items():
        wanted = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == wanted and bool(torch.isfinite(tensor.float()).all()), name
    mtp = "model.layers.5."
    assert torch.equal(tensors[mtp + "embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors[mtp + "shared_head.head.weight"], tensors["lm_head.weight"])
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "self_attn.indexer.wq_b", "mlp.experts.15.down_proj"):
        assert f"{mtp}{name}.weight" in tensors


def test_answers_held_out_questions(model: Any, tokenizer: Any) -> None:
    found = evaluate.evaluate_answers(evaluate.transformers_generate(model, tokenizer), tokenizer, n=42, seed=11)
    assert found["share"] >= 0.9, found["wrong"]


def test_mtp_layer_predicts(folder: Path, model: Any, tokenizer: Any) -> None:
    mtp = loading.load_mtp(folder, model)
    prompts = [
        tokenizer(render_question(tokenizer, each), add_special_tokens=False)["input_ids"]
        for each in held_out_questions(seed=12, n=14)
    ]
    found = evaluate.mtp_acceptance(model, mtp, prompts, evaluate.greedy_tokens(model, prompts))
    assert found["share"] > 0.5


@torch.no_grad()
def test_the_indexer_matters(model: Any, tokenizer: Any) -> None:
    tokens = torch.tensor([evaluate.validation_tokens(tokenizer)[:400]])
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


def test_write_demo_model_refuses_a_folder_in_use(folder: Path, tmp_path: Path) -> None:
    target = resources.write_demo_model(tmp_path / "model")
    assert (target / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (target / "chat_template.jinja").is_file()
    with pytest.raises(OutputError) as caught:
        resources.write_demo_model(target)
    assert caught.value.tip
