"""The whole chain on a tiny model: same function, same bytes, right statistics, nothing left behind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.fidelity.evaluation.stored_layer import StoredLayer
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.model import layers
from glm5_ascend.quantize import quantize
from glm5_ascend.quantize.recipe import find_recipe
from glm5_ascend.verify import verify
from tests.conftest import Quantized
from tests.quantize.support.kill_runs import digest
from tests.support.decoder_layer import mtp_logits
from tests.support.tiny_model import SHARED_INDEXER, rotate_tiny, write_calibration, write_tiny_model

SEQUENCES = [torch.arange(5, 45), torch.arange(60, 20, -1), torch.arange(100, 228, 2)]


def relative_error(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    x, y = torch.cat(a), torch.cat(b)
    return float((x - y).norm() / y.norm())


@pytest.fixture(scope="module")
def fp32_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("fp32") / "source", dtype="float32")


def test_rotation_alone_keeps_the_function(fp32_source: Path, tmp_path: Path) -> None:
    """QuaRot and norm fusion written to disk and read back: logits of the source, to fp32 rounding."""
    out = rotate_tiny(fp32_source, tmp_path / "out")
    assert relative_error(StoredModel(out).logits(SEQUENCES), StoredModel(fp32_source).logits(SEQUENCES)) < 1e-5
    embedding = CheckpointDir(out).read("model.embed_tokens.weight")
    assert not torch.allclose(embedding, CheckpointDir(fp32_source).read("model.embed_tokens.weight"), atol=0.1)


def test_mtp_rot_undoes_the_folded_final_norm(fp32_source: Path, tiny_quantized: Quantized) -> None:
    """The rotated MTP layer computes from `rot @ hidden` the same as the source's MTP layer from its own hidden."""
    out = tiny_quantized("w4a8", fp32_source)
    models = [StoredModel(fp32_source), StoredModel(out)]
    source, config = open_source(fp32_source), StoredModel(fp32_source).config
    hidden = torch.randn(12, config.hidden_size, generator=torch.Generator().manual_seed(3))
    normed = layers.rms_norm(hidden, source.read("model.norm.weight"), config.rms_norm_eps)
    rotation = load_file(out / "optional" / "quarot.safetensors")["global_rotation"]
    rotated = layers.rms_norm(hidden @ rotation, torch.ones(config.hidden_size), config.rms_norm_eps)
    inputs = [normed, rotated @ CheckpointDir(out).read("rot.weight").float().T]
    prefix = f"model.layers.{config.num_hidden_layers}."
    results = []
    for model, previous in zip(models, inputs, strict=True):
        weights = StoredLayer(model.files, model.description, prefix)
        table = model.files.read(prefix + "embed_tokens.weight").float()
        results.append(mtp_logits(config, weights, table[torch.arange(12)], previous))
    assert relative_error([results[1]], [results[0]]) < 1e-4


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [("w8a8", 0.15), ("w4a8", 0.3), ("rtn-w4a8", 0.35), ("w4a8-best", 0.3)],
)
def test_quantized_model_stays_near_its_source(
    recipe: str, limit: float, tiny_quantized: Quantized, tiny_source: Path
) -> None:
    """Median over positions, because a flipped expert or key moves single positions by their whole size. The bound
    tells rounding from a wrong transform, which gives about 1.4: two unrelated vectors."""
    got = torch.cat(StoredModel(tiny_quantized(recipe)).logits(SEQUENCES))
    want = torch.cat(StoredModel(tiny_source).logits(SEQUENCES))
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median()
    assert 0 < error < limit


def test_sequences_that_never_need_the_indexer(tiny_source: Path, tmp_path: Path) -> None:
    """Up to index_topk tokens the indexer does not run; its static input range is that of q_b_proj, the same input."""
    calib, out = write_calibration(tmp_path / "calib.jsonl"), tmp_path / "out"
    quantize(tiny_source, out, recipe="w8a8", calib=calib, samples=8, seq_len=16)
    files = CheckpointDir(out)
    attention = "model.layers.1.self_attn."
    for suffix in ("input_scale", "input_offset"):
        assert torch.equal(files.read(f"{attention}indexer.wq_b.{suffix}"), files.read(f"{attention}q_b_proj.{suffix}"))


@pytest.mark.parametrize(("recipe", "threads"), [("w4a8", 3), ("w4a8-best", 1)])
def test_any_number_of_threads_gives_the_same_bytes(
    recipe: str, threads: int, tiny_source: Path, tiny_quantized: Quantized, tmp_path: Path
) -> None:
    calib, before = write_calibration(tmp_path / "calib.jsonl"), tiny_quantized(recipe)
    again = tmp_path / before.name
    quantize(tiny_source, again, recipe=recipe, calib=calib, samples=4, seq_len=64, threads=threads)
    assert digest(again) == digest(before)


def test_shared_indexers_by_indexer_types_alone(tmp_path: Path) -> None:
    """transformers reads them, engines do not: the output states them for both."""
    source = write_tiny_model(tmp_path / "source", num_hidden_layers=4, indexer_types=SHARED_INDEXER["indexer_types"])
    quantize(source, tmp_path / "out", recipe="rtn-w4a8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["index_topk_pattern"] == "FFFS" and config["indexer_types"] == SHARED_INDEXER["indexer_types"]
    assert not verify(tmp_path / "out", against=source).findings


def test_provenance_says_how_to_make_it_again(tiny_w4a8: Path, tiny_source: Path) -> None:
    written = json.loads((tiny_w4a8 / "glm5_ascend_provenance.json").read_text())
    assert {name: facts["bytes"] for name, facts in written["source"]["shards"].items()} == {
        p.name: p.stat().st_size for p in tiny_source.glob("*.safetensors")
    }
    assert written["recipe"]["sha256"] == hashlib.sha256(find_recipe("w4a8").read_bytes()).hexdigest()
    assert (tiny_w4a8 / "glm5_ascend_recipe.yaml").read_bytes() == find_recipe("w4a8").read_bytes()
    assert written["seed"] == 1234
    assert written["calibration"]["tokens"] > 0
    present = {p.relative_to(tiny_w4a8).as_posix() for p in tiny_w4a8.rglob("*") if p.is_file()}
    assert set(written["files"]) == present


def test_shards_stay_below_the_limit(tiny_source: Path, tmp_path: Path) -> None:
    raw = yaml.safe_load(find_recipe("rtn-w4a8").read_text())
    raw["spec"]["save"] = [{"type": "ascendv1_saver", "part_file_size": 0.0001}]
    recipe = tmp_path / "small-parts.yaml"
    recipe.write_text(yaml.safe_dump(raw))
    out = tmp_path / "out"
    quantize(tiny_source, out, recipe=str(recipe))
    shards = CheckpointDir(out).shards.values()
    assert len(shards) > 3
    for shard in shards:
        total = sum(entry.end - entry.start for entry in shard.entries.values())
        assert total <= 0.0001 * 1024**3 or len(shard.entries) == 1
