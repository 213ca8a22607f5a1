"""Our training forward is transformers' forward; training and export run; planted outliers change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import attention, export, loading, optim, stages, train, trunk
from benchmarks.training.rows import RowSource
from glm5_ascend.demo_model import outliers
from glm5_ascend.errors import ConfigError, OutputError
from glm5_ascend.fidelity.evaluation.python_docs import documents

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 48,
    "qk_rope_head_dim": 16, "index_head_dim": 32, "index_topk": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any, Any]:
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits
    tokenizer = train.build_tokenizer()
    model, mtp = train.build_model(tokenizer, seed=1, **TINY)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.3)
        for norm in [module for module in model.modules() if hasattr(module, "variance_epsilon")]:
            norm.weight.uniform_(0.5, 1.5)
        for block in [*model.model.layers[1:], mtp.block]:
            block.mlp.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    return model.eval(), mtp.eval(), tokenizer


@torch.no_grad()
def ours(model: Any, tokens: torch.Tensor, mode: attention.Mode, segments: torch.Tensor | None = None) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if segments is None:
        segments = torch.zeros_like(tokens)
    else:
        positions = positions - torch.tensor([[int((row == s).nonzero()[0]) for s in row] for row in segments])
    place = attention.packed(model.model.rotary_emb, segments, positions)
    hidden, _ = trunk.trunk_forward(model, tokens, place, mode, learn=False)
    logits: torch.Tensor = model.lm_head(hidden)
    return logits


@torch.no_grad()
def test_sparse_forward_equals_transformers(tiny: tuple[Any, Any, Any]) -> None:
    model, _, _ = tiny
    tokens = torch.randint(0, 1000, (3, 70), generator=torch.Generator().manual_seed(0))
    stock = model(tokens, use_cache=False).logits
    torch.testing.assert_close(ours(model, tokens, "sparse"), stock, atol=1e-4, rtol=1e-4)
    assert (ours(model, tokens, "dense") - stock).abs().max() > 0.01


@torch.no_grad()
def test_dense_forward_equals_transformers_with_everything_selected(tiny: tuple[Any, Any, Any]) -> None:
    model, _, _ = tiny
    tokens = torch.randint(0, 1000, (2, 16), generator=torch.Generator().manual_seed(0))
    stock = model(tokens, use_cache=False).logits
    torch.testing.assert_close(ours(model, tokens, "dense"), stock, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_packed_texts_do_not_see_each_other(tiny: tuple[Any, Any, Any]) -> None:
    model, _, _ = tiny
    first, second = (torch.randint(0, 1000, (1, n), generator=torch.Generator().manual_seed(n)) for n in (30, 25))
    segments = torch.tensor([[0] * 30 + [1] * 25])
    both = ours(model, torch.cat((first, second), 1), "sparse", segments)
    torch.testing.assert_close(both[:, 30:], ours(model, second, "sparse"), atol=1e-4, rtol=1e-4)


def test_planted_heads_look_back(tiny: tuple[Any, Any, Any]) -> None:
    _, _, tokenizer = tiny
    model, _ = train.build_model(tokenizer, seed=3, num_hidden_layers=2)
    tokens = torch.randint(0, 1000, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = model(tokens, use_cache=False, output_attentions=True).attentions[0][0]
    for head, offset in enumerate(trunk.LOOK_BACK[0]):
        assert seen[head].diagonal(-offset)[10:].mean() > 0.4


def test_orthogonalise_brings_singular_values_near_one() -> None:
    update = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(optim.orthogonalise(update))
    assert values.min() > 0.5 and values.max() < 1.4


def test_export_loads_again_and_outliers_change_nothing(tiny: tuple[Any, Any, Any], tmp_path: Path) -> None:
    model, mtp, tokenizer = tiny
    source, planted = tmp_path / "a", tmp_path / "b"
    export.export_checkpoint(source, model, mtp, tokenizer)
    outliers.plant(source, planted, factor=32, channels=3)
    tokens = torch.randint(0, 1000, (2, 60), generator=torch.Generator().manual_seed(2))
    results = []
    for folder in (source, planted):
        loaded = loading.load_model(folder)
        ahead = loading.load_mtp(folder, loaded)
        place = attention.packed(loaded.model.rotary_emb, torch.zeros_like(tokens), torch.arange(60).expand_as(tokens))
        with torch.no_grad():
            hidden, _ = trunk.trunk_forward(loaded, tokens, place, "sparse", learn=False)
            following = loaded.model.embed_tokens(tokens.roll(-1, 1))
            drafted, _ = ahead(hidden, following, place, "sparse", learn=False)
            results.append((loaded(tokens, use_cache=False).logits, loaded.lm_head(drafted)))
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(after, before, atol=1e-6, rtol=0)
    norm = "model.layers.1.input_layernorm.weight"
    first, second = (loading.load_tensors(folder)[norm].abs().max() for folder in (source, planted))
    assert second > 8 * first
    with pytest.raises(OutputError):
        outliers.plant(source, planted)
    with pytest.raises(ConfigError):
        outliers.plant(source, tmp_path / "c", factor=10)


def test_a_few_steps_of_every_stage_lower_the_losses(tiny: tuple[Any, Any, Any], tmp_path: Path) -> None:
    _, _, tokenizer = tiny
    model, mtp = train.build_model(tokenizer, seed=2, **TINY)
    rows = RowSource(tokenizer, documents(held_out=False)[:40], rows=4, length=128, text_share=0.3, seed=0)
    run = stages.Run(model, mtp, rows, tmp_path / "log.jsonl", bf16=False)
    named = [*model.named_parameters(), *(("mtp." + n, w) for n, w in mtp.named_parameters())]
    optimizers = optim.build(named, 0.02, 0.003)
    batch = rows.batch()
    place = attention.packed(model.model.rotary_emb, batch.segments, batch.positions)

    def losses() -> dict[str, float]:
        with torch.no_grad():
            return {name: loss.item() for name, loss in stages.sparse_step(run, batch, place).items()}

    before = losses()
    for name, step in (
        ("dense", stages.dense_step),
        ("warmup", stages.warmup_step),
        ("sparse", stages.sparse_step),
    ):
        stages.train_stage(run, name, step, optimizers, 20, (1.0, 1.0, 0.5))
    after = losses()
    assert after["lm"] < before["lm"] - 0.2
    assert after["mtp"] < before["mtp"]
    assert after["index"] < before["index"]
    assert [line["stage"] for line in run.history[::2]] == ["dense", "warmup", "sparse"]
