"""Rows and whole-linear values go to their own places; nothing is written beyond a tensor's end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.checkpoint.writer import ShardWriter
from glm5_ascend.model.spec import find
from glm5_ascend.quantize.methods.rounding import ActivationRange
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.quantize.run import blocks as blocks_module
from glm5_ascend.quantize.run.blocks import blocks
from glm5_ascend.quantize.run.journal import Journal
from glm5_ascend.quantize.run.store import Store


def test_a_last_block_of_one_row(tiny_source: Path, tmp_path: Path) -> None:
    """The static input's scale has as many rows as the block, but belongs to the whole linear."""
    plan = QuantizationPlan(open_source(tiny_source), load_recipe(find_recipe("w8a8")))
    prefix, parts = plan.config.spec.layer_prefix(1), plan.config.backbone(1)
    part = find(parts, "self_attn.q_a_proj")
    shape = part.shape(plan.config.sizes)
    writer = ShardWriter(tmp_path, plan.stored(prefix, part), 2**30)
    store = Store(plan, writer, Journal(tmp_path / "journal.jsonl", {}))
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for start, stop in ((0, shape[0] - 1), (shape[0] - 1, shape[0])):
        store.write_rows(prefix, part, rows[start:stop], start, ActivationRange(-1.0, 2.0))
    names = [tensor.name for tensor in plan.stored(prefix, part)]
    writer.sync(names)
    writer.expect_no_more(*names)
    writer.finish()
    (shard,) = tmp_path.glob("*.safetensors")
    stored = load_file(shard)
    name = f"{prefix}{part.name}"
    assert stored[f"{name}.input_scale"].shape == (1,) and float(stored[f"{name}.input_scale"]) > 0
    assert bool((stored[f"{name}.weight_scale"] > 0).all())
    back = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
    assert float((back - rows).norm() / rows.norm()) < 0.02


def test_blocks_cover_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_WEIGHTS", 64 * blocks_module.BLOCK_ROWS)
    assert list(blocks((50, 64))) == [(0, 16), (16, 32), (32, 48), (48, 50)]
    assert list(blocks((5,))) == [(0, 5)]
