"""No false alarms: correct checkpoints give warnings at most, and every weight matches its source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.training.outliers import plant
from glm5_ascend.checkpoint.schemes import QUANTIZED
from glm5_ascend.errors import CheckpointError, ConfigError
from glm5_ascend.verify import verify
from tests.conftest import Copy, Quantized
from tests.support.tiny_model import SHARED_INDEXER, as_hub_cache, write_tiny_model
from tests.verify.support.checkpoints import LAYOUTS, RECIPES, Shelf, assert_clean


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_own_output_is_clean_and_matches_its_source(tiny_quantized: Quantized, tiny_source: Path, recipe: str) -> None:
    report = verify(tiny_quantized(recipe), against=tiny_source)
    assert_clean(report)
    assert report.errors_by_tensor
    described = json.loads(read(tiny_quantized(recipe), "quant_model_description.json"))
    quantized = [key for key, kind in described.items() if key.endswith(".weight") and kind in QUANTIZED]
    assert len([row for row in report.errors_by_tensor if row.scheme != "FLOAT"]) == len(quantized) > 30
    for row in report.errors_by_tensor:
        assert row.relative_error < row.limit / 2, row  # far from the limit: the limits are not tuned to pass


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["w4a8", "w8a8", "w4a8-best", "w8a8-best"])
def test_a_model_with_outliers_is_clean(
    tiny_quantized: Quantized, trained_checkpoint: Path, tmp_path: Path, recipe: str
) -> None:
    """GPTQ moves weights with small inputs by several times their size."""
    source = plant(trained_checkpoint, tmp_path / "outliers")
    assert_clean(verify(tiny_quantized(recipe, source), against=source))


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8-best"])
def test_shared_indexer_layers_are_not_asked_for_an_indexer(
    tiny_quantized: Quantized, tmp_path: Path, recipe: str
) -> None:
    source = write_tiny_model(tmp_path / "glm52", **SHARED_INDEXER)
    out = tiny_quantized(recipe, source)
    assert not any(
        "layers.3.self_attn.indexer" in name for name in json.loads(read(out, "quant_model_description.json"))
    )
    assert_clean(verify(out, against=source))


@pytest.mark.parametrize("dtype", ["float16", "fp8", "float32"])
def test_other_source_dtypes(tiny_quantized: Quantized, tmp_path: Path, dtype: str) -> None:
    source = write_tiny_model(tmp_path / dtype, dtype=dtype, shards=2, index=False)
    assert_clean(verify(tiny_quantized("w4a8", source), against=source))


def test_static_float16_warns_how_to_serve(tiny_quantized: Quantized, tmp_path: Path) -> None:
    """An engine in float16 copies deq_scale into int64: fp32 values would become 0."""
    source = write_tiny_model(tmp_path / "fp16", dtype="float16", mtp_copies=False)
    report = verify(tiny_quantized("w8a8", source), against=source)
    assert_clean(report, {"tensor.deq_scale_dtype"})
    assert "--dtype bfloat16" in report.findings[0].fix


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_clean(name: str, shelf: Shelf) -> None:
    """Several shards, GLM-5.2's layers, msModelSlim's names without our provenance and without stored static scales."""
    correct = shelf[name]
    expected = {"index.missing", "against.skipped"} if name.startswith("msmodelslim") else set()
    for source in (None, correct.source):
        assert_clean(verify(correct.directory, against=source), expected)
    assert len(list(correct.directory.glob("*.safetensors"))) > (4 if LAYOUTS[name][1] == "several" else 0)


def test_a_rotation_with_entries_rounded_to_bf16_is_one(tiny_w4a8: Path, editable: Copy) -> None:
    """msModelSlim's: a Hadamard matrix of 192 columns gets 0.0027 too large a diagonal of Q Q^T."""
    directory = editable(tiny_w4a8)
    path = directory / "optional/quarot.safetensors"
    size = (192**-0.5, float(torch.tensor(192**-0.5).bfloat16()))
    save_file({name: q * (size[1] / size[0]) for name, q in load_file(path).items()}, path)
    assert not [finding for finding in verify(directory).findings if "orthogonal" in finding.message]


def test_without_provenance_only_the_attention_is_skipped(tiny_w4a8: Path, tiny_source: Path, editable: Copy) -> None:
    out = editable(tiny_w4a8)
    (out / "glm5_ascend_provenance.json").unlink()
    report = verify(out, against=tiny_source)
    assert_clean(report, {"against.skipped"})
    compared = {row.module for row in report.errors_by_tensor or ()}
    assert "model.layers.1.mlp.experts.3.down_proj" in compared
    assert "model.layers.1.self_attn.q_b_proj" not in compared


def test_links_into_the_hub_cache_are_fine(tiny_w4a8: Path, tiny_source: Path, tmp_path: Path) -> None:
    """Every file of a snapshot is a link."""
    snapshot = Path(shutil.copytree(tiny_w4a8, tmp_path / "models--x" / "snapshots" / "abc"))
    as_hub_cache(snapshot)
    assert_clean(verify(snapshot, against=tiny_source))


def test_shallow_reads_no_values(tiny_w4a8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("glm5_ascend.checkpoint.shards.Shard.read", refuse)
    monkeypatch.setattr("glm5_ascend.checkpoint.shards.Shard.read_span", refuse)
    assert_clean(verify(tiny_w4a8, deep=False))


def test_large_tensors_are_read_in_pieces(tiny_w4a8: Path, tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verify(tiny_w4a8, against=tiny_source)
    for size in ("read_once._PIECE_BYTES", "expected_weight.ROWS", "tolerances._BLOCK"):
        monkeypatch.setattr(f"glm5_ascend.verify.{size}", 1000)
    pieces = verify(tiny_w4a8, against=tiny_source)
    assert_clean(pieces)
    for a, b in zip(whole.errors_by_tensor or (), pieces.errors_by_tensor or (), strict=True):
        assert a.module == b.module
        assert a.relative_error == pytest.approx(b.relative_error, rel=1e-3, abs=1e-6)


def test_what_is_no_checkpoint_raises(tmp_path: Path, tiny_w4a8: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        verify(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not found"):
        verify(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="llama"):
        verify(tmp_path)
    shutil.copytree(tiny_w4a8, tmp_path / "copy")
    (tmp_path / "copy" / "quant_model_description.json").unlink()
    with pytest.raises(CheckpointError, match="already quantized"):
        verify(tiny_w4a8, against=tmp_path / "copy")


def read(directory: Path, name: str) -> str:
    return (directory / name).read_text()
