"""The training forward is transformers'; a few steps lower the losses; export loads again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import attention, export, loading, optim, stages, train, trunk
from benchmarks.training.rows import RowSource
from glm5_ascend.demo_model.resources import data_folder
from glm5_ascend.fidelity.evaluation.python_docs import documents

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 48,
    "qk_rope_head_dim": 16, "index_head_dim": 32, "index_topk": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A random model and its MTP layer."""

    model: Any
    mtp: Any

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, mode: attention.Mode, segments: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the training forward; positions begin at 0 in each segment."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        segments = torch.zeros_like(tokens) if segments is None else segments
        positions = positions - torch.tensor([[int((row == s).nonzero()[0]) for s in row] for row in segments])
        layout = attention.packed(self.model.model.rotary_emb, segments, positions)
        hidden, _ = trunk.trunk_forward(self.model, tokens, layout, mode, learn=False)
        output: torch.Tensor = self.model.lm_head(hidden)
        return output


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return loading.load_tokenizer(data_folder())


@pytest.fixture(scope="module")
@torch.no_grad()
def tiny() -> Tiny:
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits
    model, mtp = train.build_model(seed=1, **TINY)
    model.lm_head.weight.normal_(0, 0.3)
    for norm in [module for module in model.modules() if hasattr(module, "variance_epsilon")]:
        norm.weight.uniform_(0.5, 1.5)
    for block in [*model.model.layers[1:], mtp.block]:
        block.mlp.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    return Tiny(model.eval(), mtp.eval())


def tokens_of(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize(("mode", "length"), [("sparse", 71), ("sparse", 48), ("dense", 16)])
def test_forward_equals_transformers(tiny: Tiny, mode: attention.Mode, length: int) -> None:
    tokens = tokens_of(3, length)
    expected = tiny.model(tokens, use_cache=False).logits
    torch.testing.assert_close(tiny.logits(tokens, mode), expected, atol=1e-4, rtol=1e-4)


def test_packed_texts_do_not_see_each_other(tiny: Tiny) -> None:
    texts = [tokens_of(1, length, length) for length in (31, 25, 40)]
    segments = torch.cat([torch.full_like(text, number) for number, text in enumerate(texts)], 1)
    together = tiny.logits(torch.cat(texts, 1), "sparse", segments).split([31, 25, 40], 1)
    for packed, text in zip(together, texts, strict=True):
        torch.testing.assert_close(packed, tiny.logits(text, "sparse"), atol=1e-4, rtol=1e-4)


def test_export_loads_again(tiny: Tiny, tokenizer: Any, tmp_path: Path) -> None:
    export.export_checkpoint(tmp_path / "out", tiny.model, tiny.mtp, tokenizer)
    loaded = loading.load_model(tmp_path / "out")
    for ours, theirs in ((tiny.model, loaded), (tiny.mtp, loading.load_mtp(tmp_path / "out", loaded))):
        weights = theirs.state_dict()
        for name, weight in ours.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-2, atol=1e-6)


def test_a_few_steps_of_every_stage_lower_the_losses(tokenizer: Any) -> None:
    model, mtp = train.build_model(seed=2, **TINY)
    rows = RowSource(tokenizer, documents(held_out=False)[:40], rows=4, length=96, text_share=0.3, seed=0)
    run = stages.Run(model, mtp, rows, bf16=False)
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
