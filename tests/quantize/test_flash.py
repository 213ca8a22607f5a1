"""GLM-5.3-Flash: data-free W4A8 and W8A8, what is carried over, both spellings of its names, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.fidelity import evaluate
from glm5_ascend.verify import verify
from tests.conftest import Copy, Quantized
from tests.support.command import assert_one_clear_line, in_process
from tests.support.mixed_experts import fused_experts
from tests.support.tiny_flash import rename_as_msmodelslim, tiny_flash_config, with_floats, write_tiny_flash
from tests.support.tiny_model import SHARD, edited_json, edited_tensors, write_tiny_model
from tests.verify.support.checkpoints import assert_clean

LAYERS = "model.language_model.layers."
EXPERT_TYPES = {"flash-w4a8": "W4A8_DYNAMIC", "flash-w8a8": "W8A8_DYNAMIC", "flash-w4a8-best": "W4A8_DYNAMIC"}


def description(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "quant_model_description.json").read_text())
    return content


@pytest.mark.parametrize("recipe", EXPERT_TYPES)
def test_types_are_those_of_the_published_checkpoint(recipe: str, tiny_quantized: Quantized, tiny_flash: Path) -> None:
    described = description(tiny_quantized(recipe, tiny_flash))
    assert described["group_size"] == 0 and described["version"] == "1.0.0" and "is_rot_used" not in described
    for name, kind in described.items():
        if "." not in name:
            continue
        mtp = ".layers.4." in name
        if ".mlp.experts." in name and not mtp:
            assert kind == EXPERT_TYPES[recipe], name
        elif ".mlp." in name and ".mlp.gate." not in name and "visual" not in name and not mtp:
            assert kind == "W8A8_DYNAMIC", name
        else:
            assert kind == "FLOAT", name
    assert described.keys() >= {f"{LAYERS}0.self_attn.A_log", "model.visual.blocks.1.attn.qkv.bias"}


@pytest.mark.parametrize("recipe", EXPERT_TYPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "fp8"])
def test_output_is_clean_and_matches_its_source(
    recipe: str, dtype: str, tiny_quantized: Quantized, tmp_path: Path
) -> None:
    source = write_tiny_flash(tmp_path / "source", dtype=dtype, shards=2)
    out = tiny_quantized(recipe, source)
    assert_clean(verify(out))
    report = verify(out, against=source)
    assert_clean(report)
    assert report.errors_by_tensor
    for row in report.errors_by_tensor:
        assert row.relative_error < row.limit / 2, row


def test_calibration_makes_the_error_of_the_outputs_smaller(tiny_quantized: Quantized, tiny_flash: Path) -> None:
    """GPTQ knows the inputs of the experts, which come through linear attention, pooled indexer and four streams."""
    kl = {}
    for recipe in ("flash-w8a8", "flash-w4a8-best", "flash-w4a8"):
        report = evaluate(tiny_quantized(recipe, tiny_flash), against=tiny_flash, window=64, windows=8)
        figures = {row.name: row.value for row in report.rows}
        kl[recipe] = figures["kl_mean"]
        assert 0.5 < figures["indexer_overlap"] <= 1  # of all selected keys: complete pools and the tail
    assert 0 < kl["flash-w8a8"] < kl["flash-w4a8-best"] < kl["flash-w4a8"], kl


def test_tower_streams_and_files_keep_their_bytes(tiny_quantized: Quantized, tiny_flash: Path) -> None:
    out = tiny_quantized("flash-w4a8", tiny_flash)
    ours, theirs = CheckpointDir(out), CheckpointDir(tiny_flash)
    parts = "visual", "hc_", "A_log", "dt_bias", "conv1d"
    unchanged = [name for name in theirs.entries if any(part in name for part in parts)]
    assert len(unchanged) == 78
    for name in (*unchanged, f"{LAYERS}1.self_attn.indexer.index_kpool_compress_gate", "lm_head.weight"):
        assert ours.read(name).dtype is theirs.read(name).dtype
        assert torch.equal(ours.read(name), theirs.read(name)), name
    for name in ("config.json", "processor_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (tiny_flash / name).read_bytes()
    hashed = json.loads((out / "glm5_ascend_provenance.json").read_text())["outputs"]
    assert "processor_config.json" in hashed


def test_a_checkpoint_with_msmodelslims_names_is_verified(
    tiny_quantized: Quantized, tiny_flash: Path, tmp_path: Path
) -> None:
    out = rename_as_msmodelslim(tiny_quantized("flash-w8a8", tiny_flash), tmp_path / "out")
    assert_clean(verify(out))
    assert_clean(verify(out, against=tiny_flash))


def test_keys_that_transformers_leaves_out_are_stated(tmp_path: Path) -> None:
    """It writes what differs from its defaults; vllm-ascend has other defaults."""
    source = write_tiny_flash(tmp_path / "source", index_kpool=16, swiglu_limit=10.0)
    with edited_json(source / "config.json") as config:
        for key in ("index_kpool", "swiglu_limit", "topk_method", "scoring_func", "hc_mult", "n_shared_experts"):
            del config["text_config"][key]
        del config["vision_config"]["swiglu_limit"]
    assert in_process("quantize", source, tmp_path / "out", "--recipe", "flash-w4a8").returncode == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"]["index_kpool"] == 16 and written["text_config"]["topk_method"] == "noaux_tc"
    assert written["vision_config"]["swiglu_limit"] == 10.0
    assert_clean(verify(tmp_path / "out", against=source))


def fused(source: Path, transposed: bool = False) -> None:
    """Store experts and convolutions of each layer as transformers holds them, or experts along the wrong axis."""
    with edited_tensors(source) as tensors:
        for first in [name for name in tensors if ".q_conv1d." in name]:
            convolutions = [tensors.pop(first.replace(".q_", f".{side}_")) for side in "qkv"]
            tensors[first.replace(".q_", ".")] = torch.cat(convolutions)
        experts = {name: tensors.pop(name) for name in list(tensors) if ".mlp.experts." in name}
        for layer in range(1, 5):
            stacks = fused_experts(experts, f"{LAYERS}{layer}.mlp.experts.")
            tensors |= {n: x.transpose(1, 2).contiguous() if transposed else x for n, x in stacks.items()}
    (source / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize("names", ["msModelSlim's", "fused experts"])
def test_other_names_give_the_same_checkpoint(
    names: str, tiny_quantized: Quantized, tiny_flash: Path, tmp_path: Path
) -> None:
    source = write_tiny_flash(tmp_path / "source", msmodelslim=names == "msModelSlim's")
    if names == "fused experts":
        fused(source)
    out = tiny_quantized("flash-w4a8", source)
    first, second = CheckpointDir(tiny_quantized("flash-w4a8", tiny_flash)), CheckpointDir(out)
    assert first.entries.keys() == second.entries.keys() != CheckpointDir(source).entries.keys()
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.entries)
    assert_clean(verify(out, against=source))


def without(*names: str) -> Callable[[Path], None]:
    """Remove tensors of a source with one shard."""

    def edit(source: Path) -> None:
        with edited_tensors(source) as tensors:
            for name in names:
                del tensors[name]
        (source / "model.safetensors.index.json").unlink()

    return edit


def text_key(name: str, value: object) -> Callable[[Path], None]:
    def edit(source: Path) -> None:
        with edited_json(source / "config.json") as config:
            config["text_config"][name] = value

    return edit


def cut_off(source: Path) -> None:
    (source / SHARD).write_bytes((source / SHARD).read_bytes()[:-100])


def smaller_tower_tensor(source: Path) -> None:
    with edited_tensors(source) as tensors:
        name = "model.visual.blocks.1.attn.qkv.weight"
        tensors[name] = tensors[name][:-4].clone()


def flat_config(source: Path) -> None:
    config = tiny_flash_config()
    (source / "config.json").write_text(json.dumps(config | config.pop("text_config") | {"model_type": "glm5_next"}))


def glm5_with_this_config(source: Path) -> None:
    config = (source / "config.json").read_text()
    write_tiny_model(source)
    (source / "config.json").write_text(config)


BAD = {
    "a missing expert": (without(f"{LAYERS}2.mlp.experts.3.up_proj.weight"), "experts.3.up_proj.weight is missing"),
    "fused experts of a wrong axis": (lambda source: fused(source, transposed=True), "mlp.experts.down_proj"),
    "index_kpool 16": (text_key("index_kpool", 16), "index_kpool_compress_ape has shape [4, 16], config.json says [16"),
    "index_kpool 3": (text_key("index_kpool", 3), "index_topk 16 is no multiple of index_kpool 3"),
    "layer_types too short": (text_key("layer_types", ["linear_attention"] * 3), "layer_types has 3 entries"),
    "layer_types unknown": (text_key("layer_types", ["mamba"] * 4), "expected 4 times one of linear_attention"),
    "no layer_types": (text_key("layer_types", None), "layer_types is None"),
    "KDA where sparse": (text_key("layer_types", ["linear_attention"] * 4), "layers.1.self_attn.q_proj.weight is miss"),
    "a shared indexer": (text_key("indexer_types", ["full", "shared", "full", "full"]), "every sparse layer"),
    "RoPE": (text_key("qk_rope_head_dim", 64), "qk_rope_head_dim is 64, GLM-5.3-Flash has 0"),
    "hc_mult 2": (text_key("hc_mult", 2), "hc_attn_fn has shape [24, 256], config.json says [8, 128]"),
    "swiglu_limit": (text_key("swiglu_limit", "ten"), "swiglu_limit is 'ten': Input should be a valid number"),
    "the shard cut off": (cut_off, "truncated"),
    "a tower tensor too small": (smaller_tower_tensor, "blocks.1.attn.qkv.weight has shape [92, 32]"),
    "a flat config.json": (flat_config, "text_config is None, expected an object"),
    "GLM-5 with Flash's config": (glm5_with_this_config, "tensor model.language_model.embed_tokens.weight is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_lost(case: str, tmp_path: Path) -> None:
    edit, words = BAD[case]
    source = write_tiny_flash(tmp_path / "source")
    edit(source)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    done = in_process("quantize", source, tmp_path / "out", "--recipe", "flash-w4a8")
    assert_one_clear_line(done, 2, words)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == files
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_vllm_ascend_of_the_right_line_is_named(tiny_quantized: Quantized, tiny_flash: Path) -> None:
    report = verify(tiny_quantized("flash-w4a8", tiny_flash), engine="vllm-ascend", deep=False)
    assert report.engine is not None and report.engine.version == "vllm-ascend 0.30.0rc2"


def test_sglang_finds_every_type_under_its_own_name(tiny_quantized: Quantized, editable: Copy, tmp_path: Path) -> None:
    """SGLang's modules are model.layers.N; other writers have types under the names of the tensors only."""
    source = with_floats(write_tiny_flash(tmp_path / "source"))
    out = editable(tiny_quantized("flash-w4a8", source))
    assert_clean(verify(out, engine="sglang", deep=False))
    with edited_json(out / "quant_model_description.json") as described:
        aliases = [key for key in described if key.startswith("model.layers.")]
        assert {described.pop(key) for key in aliases} == {"FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC"}
    (finding,) = verify(out, engine="sglang", deep=False).findings
    assert finding.id == "engine.names" and verify(out, deep=False).ok


def test_keys_that_sglang_needs(tiny_quantized: Quantized, tmp_path: Path) -> None:
    """A config.json as transformers saves it, and one with integers, end its start or build other layers."""
    groups = {
        "linear_attn_config": {"num_heads": 2, "head_dim": 128, "gate_lower_bound": -5, "short_conv_kernel_size": 4}
    }
    source = write_tiny_flash(tmp_path / "source", first_k_dense_replace=None, mhc=None, **groups)
    findings = verify(tiny_quantized("flash-w4a8", source), engine="sglang", deep=False).findings
    assert {finding.id for finding in findings} == {"engine.config"}
    messages = " ".join(finding.message for finding in findings)
    for word in ("first_k_dense_replace", "mhc", "kda_layers", "swiglu_limit is 10", "vision_config.swiglu_limit"):
        assert word in messages


def test_its_profile_serves_it_and_others_refuse_it(tiny_quantized: Quantized, tiny_flash: Path) -> None:
    out = tiny_quantized("flash-w4a8", tiny_flash)
    done = in_process("serve", out, "--profile", "a2-single-flash", "--dry-run")
    assert done.returncode == 0 and "--tensor-parallel-size 8" in done.stdout, done.stderr
    done = in_process("serve", out, "--profile", "a3-single-w4a8", "--dry-run")
    assert done.returncode == 1 and "does not know GLM-5.3-Flash" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("quantize", "{flash}", "{out}"), "recipe w4a8: GLM-5.3-Flash cannot be rotated"),
        (("quantize", "{flash}", "{out}", "--recipe", "rtn-w4a8"), "bf16 only"),
        (("analyze", "{flash}"), "recipe w4a8: GLM-5.3-Flash cannot be rotated"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, tuple) else None,
)
def test_what_flash_does_not_have_is_refused(
    command: tuple[str, ...], words: str, tiny_flash: Path, tmp_path: Path
) -> None:
    done = in_process(*(word.format(flash=tiny_flash, out=tmp_path / "out") for word in command))
    assert_one_clear_line(done, 2, words)
