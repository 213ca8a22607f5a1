"""A tensor that the checkpoint lacks is an error, not uninitialised memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC
from glm5_ascend.errors import CheckpointError
from glm5_ascend.serve.plugin.loading import ExpertTensors, SeenTensors, require_complete, source_tensors

LAYER = "model.layers.1"


class FakeModel:
    def __init__(self, *names: str) -> None:
        self.names = names

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter([(name, torch.zeros(2, 4)) for name in self.names])


@pytest.mark.parametrize(
    ("parameter", "tensors"),
    [
        ("model.norm.weight", ["model.norm.weight"]),
        (f"{LAYER}.mlp.gate_up_proj.weight_scale", [f"{LAYER}.mlp.{p}_proj.weight_scale" for p in ("gate", "up")]),
        (f"{LAYER}.self_attn.indexer.wk_weights_proj.weight",
         [f"{LAYER}.self_attn.indexer.{p}.weight" for p in ("wk", "weights_proj")]),
        ("model.layers.5.mtp_block.self_attn.o_proj.weight", ["model.layers.5.self_attn.o_proj.weight"]),
        (f"{LAYER}.mlp.experts.routed_experts.w2_weight",
         [f"{LAYER}.mlp.experts.{e}.down_proj.weight" for e in (0, 1)]),
        (f"{LAYER}.mlp.experts.routed_experts.w13_weight",
         [f"{LAYER}.mlp.experts.{e}.{p}_proj.weight" for e in (0, 1) for p in ("gate", "up")]),
    ],
)  # fmt: skip
def test_source_tensors(parameter: str, tensors: list[str]) -> None:
    assert source_tensors(parameter, experts=2) == tensors


def seen(*names: str, experts: ExpertTensors | None = None) -> SeenTensors:
    """These names, and experts of which no tensor was read."""
    tensors = SeenTensors([], {} if experts is None else {f"{LAYER}.mlp.experts": experts})
    tensors.names.update(names)
    return tensors


def test_one_missing_shard_of_a_fused_module_is_named() -> None:
    model = FakeModel(f"{LAYER}.self_attn.fused_qkv_a_proj.weight")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* first is .*kv_a_proj_with_mqa.weight"):
        require_complete(model, seen(f"{LAYER}.self_attn.q_a_proj.weight"))


def test_tensors_that_the_format_may_leave_out() -> None:
    o_proj = f"{LAYER}.self_attn.o_proj"
    static = FakeModel(f"{o_proj}.deq_scale", f"{o_proj}.weight_scale", f"{o_proj}.weight_offset")
    require_complete(static, seen(f"{o_proj}.deq_scale"))
    draft = FakeModel("model.embed_tokens.weight", "model.layers.5.shared_head.head.weight")
    require_complete(draft, seen(), is_draft=True)
    with pytest.raises(CheckpointError):
        require_complete(draft, seen())
    with pytest.raises(CheckpointError, match="weight_scale"):
        require_complete(FakeModel(f"{o_proj}.weight_scale"), seen())


def test_extracted_tensors_do_not_reach_the_loader() -> None:
    pairs = [("rot.weight", torch.eye(2)), ("model.norm.weight", torch.ones(2))]
    tensors = SeenTensors(pairs, {}, extract=("rot.weight",))
    assert [name for name, _ in tensors] == ["model.norm.weight"]
    assert tensors.names == {"rot.weight", "model.norm.weight"}
    assert torch.equal(tensors.extracted["rot.weight"], torch.eye(2))


def expert_file(experts: int) -> dict[str, torch.Tensor]:
    """INT4 experts of width 4 of a model of hidden size 6."""
    tensors = {}
    for e in range(experts):
        for projection, rows, columns, sums in (("gate_proj", 4, 6, 1), ("up_proj", 4, 6, 1), ("down_proj", 6, 4, 16)):
            name = f"{LAYER}.mlp.experts.{e}.{projection}"
            tensors[f"{name}.weight"] = torch.randint(-128, 128, (rows // 2, columns), dtype=torch.int8)
            tensors[f"{name}.weight_scale"] = torch.rand(rows, 1)
            tensors[f"{name}.scale_bias"] = torch.rand(rows, sums)
    return tensors


def test_experts_stay_where_they_lie() -> None:
    """Gate before up; every other tensor goes to vLLM's loader."""
    experts, tensors = ExpertTensors(2, 6, 4, W4A8_DYNAMIC), expert_file(2)
    pairs = SeenTensors([*tensors.items(), ("model.norm.weight", torch.ones(2))], {f"{LAYER}.mlp.experts": experts})
    assert [name for name, _ in pairs] == ["model.norm.weight"]
    require_complete(FakeModel(), pairs)
    w13, w13_scale, w2, w2_scale = experts.operands()
    for e in range(2):
        gate, up, down = (f"{LAYER}.mlp.experts.{e}.{name}_proj" for name in ("gate", "up", "down"))
        blocks = *w13.blocks[2 * e : 2 * e + 2], w2.blocks[e]
        for name, block in zip((gate, up, down), blocks, strict=True):
            assert block.data_ptr() == tensors[f"{name}.weight"].data_ptr() and block.dtype is torch.uint8
        scales = torch.cat([tensors[f"{name}.weight_scale"] for name in (gate, up)]).flatten()
        assert torch.equal(w13_scale[e], scales)
        assert torch.equal(w2_scale[e], tensors[f"{down}.weight_scale"].flatten())


def test_one_missing_tensor_of_an_expert_is_named() -> None:
    needed = expert_file(2).keys() - {f"{LAYER}.mlp.experts.1.up_proj.scale_bias"}
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* first is .*experts.1.up_proj.scale_bias"):
        require_complete(FakeModel(), seen(*needed, experts=ExpertTensors(2, 6, 4, W4A8_DYNAMIC)))


def test_float_experts_stay_where_they_lie() -> None:
    """In the file's dtype; another one is a copy. They have no scales."""
    experts = ExpertTensors(2, 6, 4, FLOAT)
    tensors = {name: torch.randn(6, 4) if "down" in name else torch.randn(4, 6) for name in experts.names("e")}
    assert len(tensors) == 6
    for name, tensor in tensors.items():
        _, number, projection, kind = name.split(".")
        experts.add(name, int(number), projection, kind, tensor)
    for dtype in (torch.float32, torch.bfloat16):
        for e, parts in enumerate(experts.floats(dtype)):
            for projection, part in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
                tensor = tensors[f"e.{e}.{projection}.weight"]
                assert torch.equal(part.weight, tensor.to(dtype))
                assert (part.weight.data_ptr() == tensor.data_ptr()) == (dtype is torch.float32)
    with pytest.raises(CheckpointError, match="no such tensor"):
        experts.add("e.0.up_proj.weight_scale", 0, "up_proj", "weight_scale", torch.ones(4, 1))
    with pytest.raises(CheckpointError, match=r"is torch.int8"):
        experts.add("e.0.up_proj.weight", 0, "up_proj", "weight", torch.ones(4, 6, dtype=torch.int8))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (
            "0.gate_proj.weight",
            torch.zeros(4, 6, dtype=torch.int8),
            r"gate_proj of expert 0 .*\[4, 6\], expected \[2, 6\]",
        ),
        ("0.gate_proj.weight", torch.zeros(2, 6), "is torch.float32"),
        ("1.down_proj.scale_bias", torch.zeros(6, 1), r"expected \[6, 16\]"),
        ("0.side_proj.weight", torch.zeros(2, 6), "no such tensor"),
        ("2.up_proj.weight", torch.zeros(2, 6), "no such tensor"),
        ("1.up_proj.weight_zero", torch.zeros(4, 1), "no such tensor"),
    ],
)
def test_experts_that_do_not_fit(name: str, tensor: torch.Tensor, words: str) -> None:
    experts = {f"{LAYER}.mlp.experts": ExpertTensors(2, 6, 4, W4A8_DYNAMIC)}
    with pytest.raises(CheckpointError, match=words):
        list(SeenTensors([(f"{LAYER}.mlp.experts.{name}", tensor)], experts))
