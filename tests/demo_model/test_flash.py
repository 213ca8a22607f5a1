"""The small GLM-5.3-Flash: the training forward is transformers', training lowers losses, the shipped one answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import attention, evaluate, export, flash, held_out, loading, train
from glm5_ascend.demo_model.resources import DemoModel, data_folder, write_demo_model
from tests.demo_model.support.forward import logits, tokens_of

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full"] * 3,
    "linear_attn_config": {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
    "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 48, "index_head_dim": 32,
    "index_topk": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits
    return loading.load_tokenizer(data_folder())


@pytest.fixture(scope="module")
def tiny(tokenizer: Any) -> Any:
    model = train.build_flash(tokenizer, seed=1, **TINY)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.3)
        for name, weight in model.named_parameters():
            if "_hc." in name or "A_log" in name or "dt_bias" in name:
                weight.normal_(0, 0.5)
            elif "norm" in name and name.endswith("weight"):
                weight.uniform_(0.5, 1.5)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(("mode", "length"), [("sparse", 71), ("sparse", 48), ("dense", 16)])
def test_forward_equals_transformers(tiny: Any, mode: attention.Mode, length: int) -> None:
    tokens = tokens_of(3, length)
    expected = tiny(tokens, use_cache=False).logits
    torch.testing.assert_close(logits(tiny, flash.no_rotation, tokens, mode), expected, atol=1e-4, rtol=1e-4)


def test_packed_texts_do_not_see_each_other(tiny: Any) -> None:
    """Texts of odd lengths, each at a multiple of the indexer's pool, as `RowSource` packs them."""
    texts = [tokens_of(1, length, length) for length in (31, 25, 40)]
    row, segments, at = torch.zeros(1, 100, dtype=torch.int64), torch.full((1, 100), -1), 0
    starts = []
    for number, text in enumerate(texts):
        starts.append(at)
        row[0, at : at + text.shape[1]], segments[0, at : at + text.shape[1]] = text, number
        at += -(-text.shape[1] // flash.POOL) * flash.POOL
    together = logits(tiny, flash.no_rotation, row, "sparse", segments)
    for start, text in zip(starts, texts, strict=True):
        alone = logits(tiny, flash.no_rotation, text, "sparse")
        torch.testing.assert_close(together[:, start : start + text.shape[1]], alone, atol=1e-4, rtol=1e-4)


def test_export_loads_again(tiny: Any, tokenizer: Any, tmp_path: Path) -> None:
    export.export_checkpoint(tmp_path / "out", tiny, None, tokenizer)
    weights = loading.load_model(tmp_path / "out").state_dict()
    for name, weight in tiny.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-2, atol=1e-6)


def test_the_shipped_model_answers_held_out_questions(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path / "flash", DemoModel.FLASH)
    tokenizer = loading.load_tokenizer(folder)
    questions = held_out.held_out_questions(seed=11, n=14)
    answers = evaluate.greedy_tokens(
        loading.load_model(folder), evaluate.prompts_of(tokenizer, questions), limit=48, batch=14
    )
    score = held_out.score(questions, [tokenizer.decode(answer, skip_special_tokens=False) for answer in answers])
    assert score["share"] >= 0.5, score["wrong"]
