"""The same weights under other names, as parts of larger tensors, or in FP8 with other scales."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint.checks.source import check_source
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.errors import CheckpointError
from tests.support.command import assert_one_clear_line, in_process, worked
from tests.support.mixed_experts import fused_experts
from tests.support.tiny_model import SHARD, SHARED_INDEXER, change_json, write_tiny_model

Tensors = dict[str, torch.Tensor]


def stored(directory: Path) -> Tensors:
    return load_file(directory / SHARD)


def written(directory: Path, change: Callable[[Tensors], Tensors], **config: object) -> Path:
    """A tiny model whose tensors went through `change`."""
    write_tiny_model(directory, index=False, **config)
    save_file(change(stored(directory)), directory / SHARD)
    return directory


def renamed(pattern: str, to: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(pattern, to, name): tensor for name, tensor in tensors.items()}


def fused(tensors: Tensors) -> Tensors:
    out = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in (1, 2, 3):
        out |= fused_experts(tensors, f"model.layers.{layer}.mlp.experts.")
    return out


WRITERS: dict[str, Callable[[Tensors], Tensors]] = {
    "transformers 5.1": renamed(r"\.self_attn\.indexer\.", ".self_attn."),
    "the model without its head's class": renamed(r"^model\.", ""),
    "fused experts": fused,
    "fused experts, .weight": lambda tensors: renamed(r"(experts\.(gate_up|down)_proj)$", r"\1.weight")(fused(tensors)),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_every_weight_is_read(writer: str, tmp_path: Path) -> None:
    plain = open_source(write_tiny_model(tmp_path / "plain", index=False))
    source = open_source(written(tmp_path / "other", WRITERS[writer]))
    check_source(source)  # nothing is left over
    assert source.names.renamed
    for prefix, part in plain.config.all_weights():
        name = prefix + part.tensor_name
        assert torch.equal(source.read(name), plain.read(name)), name
        assert torch.equal(source.read_rows(name, 1, 3), plain.read_rows(name, 1, 3)), name
        assert source.dtype(name) is plain.dtype(name)


def test_flattened_indexers_of_sharing_layers_are_allowed(tmp_path: Path) -> None:
    extra = {"model.layers.3.self_attn.wk.weight": torch.ones(2)}
    check_source(open_source(written(tmp_path / "a", lambda tensors: tensors | extra, **SHARED_INDEXER)))


def test_an_engine_does_not_know_them(tmp_path: Path) -> None:
    """quantize reads them, an engine would stop at a KeyError: doctor and serve say which, and what to do."""
    directory = written(tmp_path / "a", WRITERS["transformers 5.1"])
    for command in ("doctor", "serve"):
        done = in_process(command, directory)
        assert_one_clear_line(done, 2, "self_attn.wq_b.weight", "self_attn.indexer.wq_b.weight")
        assert "glm5-ascend quantize" in done.stderr


def lora(tensors: Tensors) -> Tensors:
    module = "model.layers.0.self_attn.o_proj"
    return tensors | {f"{module}.lora_A.weight": torch.ones(2, 2)}


def test_an_adapter_that_was_not_merged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 tensors are of no module .*lora_A") as caught:
        check_source(open_source(written(tmp_path / "a", lora)))
    assert "merge" in caught.value.tip


# -- numbers of experts -------------------------------------------------------------------------------------------


def pruned(layers: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    """Three of four experts in these layers."""

    def change(tensors: Tensors) -> Tensors:
        out = dict(tensors)
        for layer in layers:
            for name in [name for name in out if name.startswith(f"model.layers.{layer}.mlp.experts.3.")]:
                del out[name]
            for end in ("weight", "e_score_correction_bias"):
                name = f"model.layers.{layer}.mlp.gate.{end}"
                out[name] = out[name][:3].clone()
        return out

    return change


@pytest.mark.parametrize(
    ("layers", "words", "fix"),
    [
        ((2,), "layer 2 has 3 experts, config.json says n_routed_experts 4 for all layers (1 of 3", "one number"),
        ((1, 2, 3), "n_routed_experts is 4, but every layer has 3", "n_routed_experts: 3"),
    ],
)  # fmt: skip
def test_pruned_experts_are_counted(layers: tuple[int, ...], words: str, fix: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "a", pruned(layers))
    for command, *rest in (("quantize", tmp_path / "out"), ("doctor",), ("serve",), ("plan",)):
        done = in_process(command, directory, *rest)
        assert_one_clear_line(done, 2, words)
        assert fix in done.stderr and "REAP" in done.stderr
    assert words in in_process("verify", directory).stdout


# -- FP8 ----------------------------------------------------------------------------------------------------------

SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "per row": lambda weight: weight.abs().amax(1, keepdim=True) / 448,
    "per row, flat": lambda weight: weight.abs().amax(1) / 448,
    "per tensor": lambda weight: weight.abs().amax().reshape(1) / 448,
    "per tensor, scalar": lambda weight: weight.abs().amax() / 448,
}


def in_fp8(scale_of: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        out = {}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") and "eh_proj" not in name:
                scale = scale_of(tensor.float()).to(dtype)
                rows = scale.reshape(-1, 1).float()
                out[name] = (tensor.float() / rows).clamp(-448, 448).to(torch.float8_e4m3fn)
                out[f"{name}_scale"] = scale
                out[name.replace(".weight", ".input_scale")] = torch.ones(1)  # of static activations: not needed
            else:
                out[name] = tensor
        return out

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", SCALES)
def test_fp8_with_a_scale_of_rows_or_tensors(scales: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As llm-compressor (FP8_DYNAMIC), FBGEMM and ModelOpt store it: weight * weight_scale."""
    directory = written(tmp_path / "a", in_fp8(SCALES[scales], dtype))
    source = open_source(directory)
    check_source(source)
    tensors, name = stored(directory), "model.layers.1.mlp.experts.2.down_proj.weight"
    expected = tensors[name].float() * tensors[f"{name}_scale"].float().reshape(-1, 1)
    assert torch.equal(source.read(name), expected) and source.dtype(name) is torch.bfloat16
    assert torch.equal(source.read_rows(name, 5, 9), expected[5:9])


def test_fp8_quantizes_by_the_command(tmp_path: Path) -> None:
    directory = written(tmp_path / "a", in_fp8(SCALES["per row"], torch.bfloat16))
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    change_json(directory / "config.json", quantization_config=quantization)
    worked(in_process("quantize", directory, tmp_path / "out", "--recipe", "rtn-w4a8", "--quiet"))
    worked(in_process("verify", tmp_path / "out", "--against", directory))


@pytest.mark.parametrize("command", ["doctor", "serve"])
def test_fp8_is_not_served(command: str, tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU: "Failed to find a kernel that can implement the ScaledMM linear layer"."""
    done = in_process(command, write_tiny_model(tmp_path / "a", dtype="fp8"))
    assert_one_clear_line(done, 2, "FP8 weights, which neither an Atlas A2 or A3 nor vLLM on a CPU multiplies")
    assert "glm5-ascend quantize" in done.stderr
