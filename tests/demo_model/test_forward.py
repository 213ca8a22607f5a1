"""The training forward is transformers' forward; a few steps of every stage lower the losses; export loads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import attention, export, loading, optim, stages, train
from benchmarks.training.rows import RowSource
from glm5_ascend.demo_model.resources import data_folder
from glm5_ascend.fidelity.evaluation.python_docs import documents
from tests.demo_model.support.forward import logits, tokens_of

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 48,
    "qk_rope_head_dim": 16, "index_head_dim": 32, "index_topk": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any, Any]:
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits
    tokenizer = loading.load_tokenizer(data_folder())
    model, mtp = train.build_model(tokenizer, seed=1, **TINY)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.3)
        for norm in [module for module in model.modules() if hasattr(module, "variance_epsilon")]:
            norm.weight.uniform_(0.5, 1.5)
        for block in [*model.model.layers[1:], mtp.block]:
            block.mlp.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    return model.eval(), mtp.eval(), tokenizer


@torch.no_grad()
@pytest.mark.parametrize(("mode", "length"), [("sparse", 70), ("dense", 16)])
def test_forward_equals_transformers(tiny: tuple[Any, Any, Any], mode: attention.Mode, length: int) -> None:
    tokens = tokens_of(3, length)
    expected = tiny[0](tokens, use_cache=False).logits
    torch.testing.assert_close(logits(tiny[0], tiny[0].model.rotary_emb, tokens, mode), expected, atol=1e-4, rtol=1e-4)


def test_packed_texts_do_not_see_each_other(tiny: tuple[Any, Any, Any]) -> None:
    first, second = tokens_of(1, 30, 1), tokens_of(1, 25, 2)
    segments = torch.tensor([[0] * 30 + [1] * 25])
    both = logits(tiny[0], tiny[0].model.rotary_emb, torch.cat((first, second), 1), "sparse", segments)
    torch.testing.assert_close(
        both[:, 30:], logits(tiny[0], tiny[0].model.rotary_emb, second, "sparse"), atol=1e-4, rtol=1e-4
    )


def test_export_loads_again(tiny: tuple[Any, Any, Any], tmp_path: Path) -> None:
    model, mtp, tokenizer = tiny
    export.export_checkpoint(tmp_path / "out", model, mtp, tokenizer)
    loaded = loading.load_model(tmp_path / "out")
    loaded_mtp = loading.load_mtp(tmp_path / "out", loaded)
    for ours, theirs in ((model, loaded), (mtp, loaded_mtp)):
        weights = theirs.state_dict()
        for name, weight in ours.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-2, atol=1e-6)


def test_a_few_steps_of_every_stage_lower_the_losses(tiny: tuple[Any, Any, Any], tmp_path: Path) -> None:
    tokenizer = tiny[2]
    model, mtp = train.build_model(tokenizer, seed=2, **TINY)
    rows = RowSource(tokenizer, documents(held_out=False)[:40], rows=4, length=96, text_share=0.3, seed=0)
    run = stages.Run(model, mtp, rows, tmp_path / "log.jsonl", bf16=False)
    weights = [*model.named_parameters(), *(("mtp." + name, w) for name, w in mtp.named_parameters())]
    optimizers = optim.build(weights, 0.02, 0.003)
    batch = rows.batch()
    layout = attention.packed(model.model.rotary_emb, batch.segments, batch.positions)

    def losses() -> dict[str, float]:
        with torch.no_grad():
            return {name: loss.item() for name, loss in stages.sparse_step(run, batch, layout).items()}

    before = losses()
    for name, step in (("dense", stages.dense_step), ("warmup", stages.warmup_step), ("sparse", stages.sparse_step)):
        stages.train_stage(run, name, step, optimizers, 10, (1.0, 1.0, 0.5))
    after = losses()
    assert after["lm"] < before["lm"] - 0.2
    assert after["mtp"] < before["mtp"]
    assert after["index"] < before["index"]
    assert [line["stage"] for line in run.history] == ["dense", "warmup", "sparse"]
