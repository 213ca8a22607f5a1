"""The training forward is transformers', of GLM-5 and of Flash; a few steps lower the losses; export loads again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import attention, export, flash, loading, optim, stages, train, trunk
from benchmarks.training.rows import RowSource
from glm5_ascend.demo_model.resources import data_folder
from glm5_ascend.fidelity.evaluation.python_docs import documents

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 48,
    "qk_rope_head_dim": 16, "index_head_dim": 32, "index_topk": 16,
}  # fmt: skip
TINY_FLASH = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full"] * 3,
    "linear_attn_config": {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
    "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 48, "index_head_dim": 32,
    "index_topk": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A random model and its MTP layer, the angles of positions, and the multiple at which packed texts begin."""

    model: Any
    mtp: Any
    rotary: Any
    pool: int

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, mode: attention.Mode, segments: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the training forward; positions begin at 0 in each segment."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        segments = torch.zeros_like(tokens) if segments is None else segments
        positions = positions - torch.tensor([[int((row == s).nonzero()[0]) for s in row] for row in segments])
        layout = attention.packed(self.rotary, segments, positions)
        hidden, _ = trunk.trunk_forward(self.model, tokens, layout, mode, learn=False)
        output: torch.Tensor = self.model.lm_head(hidden)
        return output


@torch.no_grad()
def glm5(tokenizer: Any) -> Tiny:
    model, mtp = train.build_model(tokenizer, seed=1, **TINY)
    model.lm_head.weight.normal_(0, 0.3)
    for norm in [module for module in model.modules() if hasattr(module, "variance_epsilon")]:
        norm.weight.uniform_(0.5, 1.5)
    for block in [*model.model.layers[1:], mtp.block]:
        block.mlp.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    return Tiny(model.eval(), mtp.eval(), model.model.rotary_emb, 1)


@torch.no_grad()
def glm5_flash(tokenizer: Any) -> Tiny:
    model = train.build_flash(tokenizer, seed=1, **TINY_FLASH)
    model.lm_head.weight.normal_(0, 0.3)
    for name, weight in model.named_parameters():
        if "_hc." in name or "A_log" in name or "dt_bias" in name:
            weight.normal_(0, 0.5)
        elif "norm" in name and name.endswith("weight"):
            weight.uniform_(0.5, 1.5)
    return Tiny(model.eval(), None, flash.no_rotation, flash.POOL)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits
    return loading.load_tokenizer(data_folder())


@pytest.fixture(scope="module", params=[glm5, glm5_flash], ids=lambda build: build.__name__)
def tiny(request: pytest.FixtureRequest, tokenizer: Any) -> Tiny:
    model: Tiny = request.param(tokenizer)
    return model


def tokens_of(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize(("mode", "length"), [("sparse", 71), ("sparse", 48), ("dense", 16)])
def test_forward_equals_transformers(tiny: Tiny, mode: attention.Mode, length: int) -> None:
    tokens = tokens_of(3, length)
    expected = tiny.model(tokens, use_cache=False).logits
    torch.testing.assert_close(tiny.logits(tokens, mode), expected, atol=1e-4, rtol=1e-4)


def test_packed_texts_do_not_see_each_other(tiny: Tiny) -> None:
    """Texts of odd lengths as `RowSource` packs them: of Flash each at a multiple of the indexer's pool."""
    texts = [tokens_of(1, length, length) for length in (31, 25, 40)]
    row, segments, at = torch.zeros(1, 100, dtype=torch.int64), torch.full((1, 100), -1), 0
    starts = []
    for number, text in enumerate(texts):
        starts.append(at)
        row[0, at : at + text.shape[1]], segments[0, at : at + text.shape[1]] = text, number
        at += -(-text.shape[1] // tiny.pool) * tiny.pool
    together = tiny.logits(row, "sparse", segments)
    for start, text in zip(starts, texts, strict=True):
        alone = tiny.logits(text, "sparse")
        torch.testing.assert_close(together[:, start : start + text.shape[1]], alone, atol=1e-4, rtol=1e-4)


def test_export_loads_again(tiny: Tiny, tokenizer: Any, tmp_path: Path) -> None:
    export.export_checkpoint(tmp_path / "out", tiny.model, tiny.mtp, tokenizer)
    loaded = loading.load_model(tmp_path / "out")
    pairs = [(tiny.model, loaded)]
    if tiny.mtp is not None:
        pairs.append((tiny.mtp, loading.load_mtp(tmp_path / "out", loaded)))
    for ours, theirs in pairs:
        weights = theirs.state_dict()
        for name, weight in ours.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-2, atol=1e-6)


def test_a_few_steps_of_every_stage_lower_the_losses(tokenizer: Any, tmp_path: Path) -> None:
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
