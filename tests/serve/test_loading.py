"""A tensor that the checkpoint lacks is an error, not uninitialised memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve.plugin.loading import ExpertTensors, require_tensors, without_experts
from tests.support.tiny_model import write_tiny_model

LAYER = "model.layers.1"
UP = f"{LAYER}.mlp.experts.1.up_proj"


@pytest.fixture
def model(tmp_path: Path) -> tuple[CheckpointDir, ModelConfig]:
    """A float checkpoint without the MTP layer's copies of embedding and head."""
    directory = write_tiny_model(tmp_path, mtp_copies=False)
    return CheckpointDir(directory), load_config(directory)


def store(files: CheckpointDir, module: str, scheme: str) -> dict[str, str]:
    """Replace a linear of the headers by what a quantized one has without scales of static types; its type."""
    rows, columns = files.entries.pop(f"{module}.weight").shape
    entry = next(iter(files.entries.values()))
    shapes: dict[str, tuple[int, ...]] = {"weight": (rows // 2 if scheme == W4A8_DYNAMIC else rows, columns)}
    shapes |= {"deq_scale": (rows,), "quant_bias": (rows,), "input_scale": (1,), "input_offset": (1,)}
    shapes |= {"weight_scale": (rows, 1), "scale_bias": (rows, 1)} if scheme != W8A8 else {}
    for suffix, shape in shapes.items():
        dtype = torch.int8 if suffix == "weight" else torch.float32
        name = f"{module}.{suffix}"
        files.entries[name] = dataclasses.replace(entry, name=name, dtype=dtype, shape=shape)
    return {f"{module}.weight": scheme}


@pytest.mark.parametrize("draft", [False, True])
def test_what_target_and_draft_need(draft: bool, model: tuple[CheckpointDir, ModelConfig]) -> None:
    """The target nothing of the MTP layer; the draft nothing but it, and not its embedding and head."""
    files, config = model
    require_tensors(files, config, {}, draft)
    other, needed = f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", "model.layers.3.hnorm.weight"
    assert config.num_hidden_layers == 3
    if not draft:
        other, needed = needed, other
    del files.entries[other]
    require_tensors(files, config, {}, draft)
    del files.entries[needed]
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors .* first is {needed}"):
        require_tensors(files, config, {}, draft)


@pytest.mark.parametrize("scheme", [W8A8_DYNAMIC, W8A8, W4A8_DYNAMIC])
def test_what_a_quantized_linear_needs(scheme: str, model: tuple[CheckpointDir, ModelConfig]) -> None:
    """Not the offsets, which are zero, nor the scale beside static W8A8's deq_scale."""
    files, config = model
    types = store(files, UP, scheme)
    require_tensors(files, config, types, draft=False)
    lost = {W8A8_DYNAMIC: "weight_scale", W8A8: "input_offset", W4A8_DYNAMIC: "scale_bias"}[scheme]
    with pytest.raises(CheckpointError, match=r"up_proj.weight is torch.int8 .* expected FLOAT"):
        require_tensors(files, config, {}, draft=False)
    del files.entries[f"{UP}.{lost}"]
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors .* first is {UP}.{lost}"):
        require_tensors(files, config, types, draft=False)


def test_tensors_that_do_not_fit(model: tuple[CheckpointDir, ModelConfig]) -> None:
    files, config = model
    with pytest.raises(CheckpointError, match=r"up_proj.weight is torch.bfloat16 .* expected W8A8_DYNAMIC"):
        require_tensors(files, config, {f"{UP}.weight": W8A8_DYNAMIC}, draft=False)
    types = store(files, UP, W4A8_DYNAMIC)
    entry = files.entries[f"{UP}.scale_bias"]
    files.entries[f"{UP}.scale_bias"] = dataclasses.replace(entry, shape=(entry.shape[0], 16))
    with pytest.raises(CheckpointError, match=r"up_proj.scale_bias is .* 16\], expected W4A8_DYNAMIC \[\d+, 1\]"):
        require_tensors(files, config, types, draft=False)


def expert_file(experts: int, bits: int = 4) -> dict[str, torch.Tensor]:
    """Experts of width 4 of a model of hidden size 6."""
    tensors = {}
    for e in range(experts):
        for projection, rows, columns, sums in (("gate_proj", 4, 6, 1), ("up_proj", 4, 6, 1), ("down_proj", 6, 4, 16)):
            name = f"{LAYER}.mlp.experts.{e}.{projection}"
            if bits == 4:
                tensors[f"{name}.weight"] = torch.randint(-128, 128, (rows // 2, columns), dtype=torch.int8)
                tensors[f"{name}.weight_scale"] = torch.rand(rows, 1)
                tensors[f"{name}.scale_bias"] = torch.rand(rows, sums)
            else:
                tensors[f"{name}.weight"] = torch.randn(rows, columns)
    return tensors


def test_experts_stay_where_they_lie() -> None:
    """Gate before up; every other tensor but rot goes to vLLM's loader."""
    experts, tensors = ExpertTensors(2, W4A8_DYNAMIC), expert_file(2)
    others = [("model.norm.weight", torch.ones(2)), ("rot.weight", torch.eye(2))]
    rest = without_experts([*tensors.items(), *others], {f"{LAYER}.mlp.experts": experts})
    assert [name for name, _ in rest] == ["model.norm.weight"]
    w13, w13_scale, w2, w2_scale = experts.operands()
    for e in range(2):
        gate, up, down = (f"{LAYER}.mlp.experts.{e}.{name}_proj" for name in ("gate", "up", "down"))
        blocks = *w13.blocks[2 * e : 2 * e + 2], w2.blocks[e]
        for name, block in zip((gate, up, down), blocks, strict=True):
            assert block.data_ptr() == tensors[f"{name}.weight"].data_ptr() and block.dtype is torch.uint8
        scales = torch.cat([tensors[f"{name}.weight_scale"] for name in (gate, up)]).flatten()
        assert torch.equal(w13_scale[e], scales)
        assert torch.equal(w2_scale[e], tensors[f"{down}.weight_scale"].flatten())


def test_float_experts_stay_where_they_lie() -> None:
    """In the file's dtype; another one is a copy."""
    experts, tensors = ExpertTensors(2, FLOAT), expert_file(2, bits=32)
    assert not list(without_experts(tensors.items(), {f"{LAYER}.mlp.experts": experts}))
    for dtype in (torch.float32, torch.bfloat16):
        for e, linears in enumerate(experts.floats(dtype)):
            for projection, linear in zip(("gate_proj", "up_proj", "down_proj"), linears, strict=True):
                tensor = tensors[f"{LAYER}.mlp.experts.{e}.{projection}.weight"]
                assert torch.equal(linear.weight, tensor.to(dtype))
                assert (linear.weight.data_ptr() == tensor.data_ptr()) == (dtype is torch.float32)
