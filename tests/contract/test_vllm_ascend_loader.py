"""vllm-ascend's real loader, of both lines, takes our checkpoints, and its parameters hold what our files mean.

Covered: its type lookup, schemes, weight loaders, patched model classes, `process_weights_after_loading` and the choice
of MLAPO, for the target model and the MTP draft, on one rank. Not covered: the NZ layout, the NPU's kernels, tensor and
expert parallel loading, graph mode, any forward.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.schemes import unpack_int4
from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from tests.contract.support.damage import damage
from tests.contract.support.loaded import ROT, Checkpoint, Load, Loaded, check_schemes, equal
from tests.contract.support.tiny_glm5 import SIZES
from tests.support.mixed_experts import write_mixed_experts
from tests.support.tiny_model import SHARED_INDEXER, write_tiny_model

pytestmark = pytest.mark.contract
GLM52 = "glm-5.2"  # w4a8 of a model with indexers shared between layers
MIXED = "mixed experts"  # INT4, and in one layer INT8
RECIPES = ("w4a8", "w8a8", "w4a8-mlapo", "w8a8-best")
CASES = (*RECIPES, GLM52, MIXED)
STATIC_ATTENTION = ("w8a8", "w4a8-mlapo")
FLOAT_QUERIES = ("w8a8-best",)
MTP = "model.layers.3"
#: Tensors of its MLAPO path: what they are in the file, and of which linears.
MLAPO = {
    "wd_qkv": ("weight", "q_a_proj", "kv_a_proj_with_mqa"),
    "deq_scale_qkv": ("deq_scale", "q_a_proj", "kv_a_proj_with_mqa"),
    "quant_bias_qkv": ("quant_bias", "q_a_proj", "kv_a_proj_with_mqa"),
    "wu_q": ("weight", "q_b_proj"),
    "qb_deq_scl": ("deq_scale", "q_b_proj"),
    "qb_qt_bias": ("quant_bias", "q_b_proj"),
    "quant_scale0": ("input_scale", "q_a_proj"),
    "quant_offset0": ("input_offset", "q_a_proj"),
    "quant_scale1": ("input_scale", "q_b_proj"),
    "quant_offset1": ("input_offset", "q_b_proj"),
}


@pytest.fixture(scope="module")
def checkpoints(tiny_quantized: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    source = write_tiny_model(folder / "glm5", shards=2, **SIZES)
    shared = write_tiny_model(folder / "glm52", **SIZES, **SHARED_INDEXER)
    quantized = {recipe: tiny_quantized(recipe, source) for recipe in RECIPES}
    mixed = write_mixed_experts(folder / "mixed.yaml", source, 2)
    return quantized | {GLM52: tiny_quantized("w4a8", shared), MIXED: tiny_quantized(str(mixed), source)}


def norm_biases(checkpoint: Path, loaded: dict[str, Loaded]) -> set[str]:
    """What no file holds: vllm-ascend gives every RMSNorm a bias once the description lists one, that of k_norm.

    k_norm is a LayerNorm, its bias is real.
    """
    assert any(name.endswith("k_norm.bias") for name in Checkpoint(checkpoint).description)
    names = {name for item in loaded.values() for name in item.tensors if name.endswith("norm.bias")}
    return {name for name in names if not name.endswith("k_norm.bias")}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_holds_what_the_file_means(case: str, checkpoints: dict[str, Path], load: Load) -> None:
    loaded, stored = load(checkpoints[case]), Checkpoint(checkpoints[case])
    result = stored.compare(loaded)
    print(f"{case}: {len(result.equal)} tensors equal, {len(result.used)} of {len(stored.files.entries)} used")
    biases = norm_biases(checkpoints[case], loaded)
    assert result.different == biases
    assert not any(item.tensors[name].any() for item in loaded.values() for name in biases & item.tensors.keys())
    assert result.used == stored.files.entries.keys()  # nothing in the file is left over


@pytest.mark.parametrize("case", CASES)
def test_every_module_gets_the_scheme_of_its_type(case: str, checkpoints: dict[str, Path], load: Load) -> None:
    loaded = load(checkpoints[case])
    assert {item.report["quant_config"] for item in loaded.values()} == {"AscendModelSlimConfig"}
    check_schemes(loaded, Checkpoint(checkpoints[case]))


@pytest.mark.parametrize("case", CASES)
def test_static_attention_and_nothing_else_turns_mlapo_on(
    case: str, checkpoints: dict[str, Path], load: Load, line: RehearsalEnvironment
) -> None:
    loaded = load(checkpoints[case])
    fused = line.line.copies.prolog and case not in FLOAT_QUERIES
    expected = "mlapo" if case in STATIC_ATTENTION else "prolog_v3" if fused else "native"
    assert set(loaded["target"].report["preprocess"].values()) == {expected}
    assert set(loaded["draft"].report["preprocess"].values()) == {"native"}  # float


@pytest.mark.parametrize("case", STATIC_ATTENTION)
def test_mlapo_gets_the_numbers_of_the_file(case: str, checkpoints: dict[str, Path], load: Load) -> None:
    """In an order of its own (RoPE's halves, blocks of rows), so by value: the same numbers, each as often."""
    target, stored = load(checkpoints[case])["target"], CheckpointDir(checkpoints[case])
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        for name, (suffix, *linears) in MLAPO.items():
            expected = torch.cat([stored.read(f"{attention}.{linear}.{suffix}").flatten() for linear in linears])
            actual = target.tensors[f"{attention}.mla_attn.mla_attn.impl.{name}"].flatten()
            assert torch.equal(actual.double().sort()[0], expected.double().sort()[0]), (layer, name)
        assert not target.tensors[f"{attention}.mla_attn.mla_attn.impl.beta1"].any()  # the bias of q_a_layernorm


def rot_of(loaded: dict[str, Loaded]) -> str:
    """Below the draft's layer, or in 0.30 beside it."""
    (name,) = (name for name in loaded["draft"].tensors if name in (f"{MTP}.rot.weight", f"{ROT}.weight"))
    return name


def test_int4_experts_are_what_vllm_ascend_packs_itself(
    checkpoints: dict[str, Path], load: Load, line: RehearsalEnvironment, tmp_path: Path
) -> None:
    """vllm-ascend packs plain integers of another format itself: nibble order and scale_bias must be equal."""
    files, experts = CheckpointDir(checkpoints["w4a8"]), "model.layers.1.mlp.experts"
    plain: dict[str, torch.Tensor] = {}
    for stack, linears in {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}.items():
        q, scale = [], []
        for expert in range(4):
            read = [f"{experts}.{expert}.{linear}" for linear in linears]
            q.append(torch.cat([unpack_int4(files.read(f"{name}.weight")) for name in read]))
            scale.append(torch.cat([files.read(f"{name}.weight_scale") for name in read]))
        plain |= {f"{stack}_weight": torch.stack(q), f"{stack}_weight_scale": torch.stack(scale)}
    save_file(plain, tmp_path / "integers.safetensors")
    line.run(
        "vllm_ascend_on_cpu.pack",
        checkpoints["w4a8"],
        tmp_path / "integers.safetensors",
        tmp_path / "packed.safetensors",
    )
    loaded = load(checkpoints["w4a8"])["target"].tensors
    for name, packed in load_file(tmp_path / "packed.safetensors").items():
        assert equal(name, loaded[f"{experts}.{name}"], packed), name


def test_damage_that_the_loader_does_not_notice_is_found(
    checkpoints: dict[str, Path], load: Load, tmp_path: Path
) -> None:
    """The negative control of the comparison."""
    intact = checkpoints["w4a8"]
    loaded = load(damage(intact, tmp_path / "damaged"))
    biases = norm_biases(intact, loaded)
    assert Checkpoint(intact).compare(loaded).different - biases == {
        "model.layers.0.self_attn.q_b_proj.weight",
        "model.layers.0.self_attn.q_b_proj.weight_scale",
        "model.layers.0.self_attn.q_b_proj.weight_scale_fp32",
        "model.layers.1.mlp.experts.w13_weight",
        "model.layers.1.mlp.experts.w2_scale_bias",
        "model.layers.2.mlp.experts.w13_weight",
        rot_of(loaded),
    }
