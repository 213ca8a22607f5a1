"""`verify --engine`: what each engine would do with a checkpoint. tests/contract asks SGLang itself."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.verify import verify
from glm5_ascend.verify.engines import ServingEngine
from tests.conftest import Copy, Quantized
from tests.support.tiny_model import quantize_tiny
from tests.verify.support.editor import ROT, Checkpoint

EXPERT = "model.layers.1.mlp.experts.0.gate_proj"


def flags(directory: Path, engine: str) -> list[str]:
    report = verify(directory, engine=engine, deep=False)
    assert report.engine is not None and report.engine.loads is report.ok
    return [note.flag.split()[0] for note in report.engine.notes if note.flag]


def test_sglang_gets_the_flags_that_a_checkpoint_needs(tiny_quantized: Quantized) -> None:
    unquant = "--speculative-draft-model-quantization"
    assert flags(tiny_quantized("w4a8"), "sglang") == ["--moe-a2a-backend", unquant]
    assert flags(tiny_quantized("w8a8"), "sglang") == [unquant]  # no scale_bias


def test_float_experts_end_the_start_of_sglang_alone(tiny_source: Path, tmp_path: Path) -> None:
    """A fall-back that `analyze` may name; vllm-ascend and our plugin run it."""
    recipe = tmp_path / "fallback.yaml"
    text = (Path(__file__).parents[2] / "quant_recipes/rtn-w4a8.yaml").read_text()
    assert text.count('exclude: ["model.layers.{mtp}.*"]') == 1
    excluded = 'exclude: ["model.layers.{mtp}.*", "model.layers.2.mlp.experts.*"]'
    recipe.write_text(text.replace('exclude: ["model.layers.{mtp}.*"]', excluded))
    out = quantize_tiny(tiny_source, tmp_path / "out", str(recipe))
    (finding,) = verify(out, engine="sglang", deep=False).findings
    assert (finding.id, finding.tensor) == ("engine.experts", "model.layers.2.mlp.experts.0.gate_proj.weight")
    assert "modelslim.py:430" in finding.message and "W8A8_DYNAMIC" in finding.fix
    for engine in ("vllm-ascend", "vllm"):
        assert verify(out, engine=engine, deep=False).findings == []


def test_a_rotation_in_a_shard_is_enough_for_vllm(tiny_w4a8: Path, editable: Copy) -> None:
    checkpoint = Checkpoint(editable(tiny_w4a8))
    rot, shard = checkpoint.read(ROT), next(file for file in checkpoint.shards if file != "rot.safetensors")
    checkpoint.store({ROT: None})
    checkpoint.store({ROT: rot}, shard)
    levels = {}
    for engine in (None, *ServingEngine):
        report = verify(checkpoint.directory, engine=engine, deep=False)
        levels[engine] = [finding.level for finding in report.findings if finding.id == "mtp.rot_file"]
    assert levels == {
        None: ["error"],
        ServingEngine.sglang: ["error"],
        ServingEngine.vllm_ascend: ["warning"],
        ServingEngine.vllm: ["warning"],
    }
