"""A tensor that the checkpoint lacks is an error, not uninitialised memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from glm5_ascend.errors import CheckpointError
from glm5_ascend.serve.plugin.loading import SeenTensors, require_complete, source_tensors

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
        (f"{LAYER}.mlp.experts.routed_experts.w2_scale_bias",
         [f"{LAYER}.mlp.experts.{e}.down_proj.scale_bias" for e in (0, 1)]),
        (f"{LAYER}.mlp.experts.routed_experts.w13_weight",
         [f"{LAYER}.mlp.experts.{e}.{p}_proj.weight" for e in (0, 1) for p in ("gate", "up")]),
    ],
)  # fmt: skip
def test_source_tensors(parameter: str, tensors: list[str]) -> None:
    assert source_tensors(parameter, experts=2) == tensors


def test_one_missing_shard_of_a_fused_module_is_named() -> None:
    model = FakeModel(f"{LAYER}.self_attn.fused_qkv_a_proj.weight")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* first is .*kv_a_proj_with_mqa.weight"):
        require_complete(model, {f"{LAYER}.self_attn.q_a_proj.weight"})


def test_tensors_that_the_format_may_leave_out() -> None:
    o_proj = f"{LAYER}.self_attn.o_proj"
    static = FakeModel(f"{o_proj}.deq_scale", f"{o_proj}.weight_scale", f"{o_proj}.weight_offset")
    require_complete(static, {f"{o_proj}.deq_scale"})
    draft = FakeModel("model.embed_tokens.weight", "model.layers.5.shared_head.head.weight")
    require_complete(draft, set(), is_draft=True)
    with pytest.raises(CheckpointError):
        require_complete(draft, set())
    with pytest.raises(CheckpointError, match="weight_scale"):
        require_complete(FakeModel(f"{o_proj}.weight_scale"), set())


def test_extracted_tensors_do_not_reach_the_loader() -> None:
    pairs = [("rot.weight", torch.eye(2)), ("model.norm.weight", torch.ones(2))]
    seen = SeenTensors(pairs, extract=("rot.weight",))
    assert [name for name, _ in seen] == ["model.norm.weight"]
    assert seen.names == {"rot.weight", "model.norm.weight"} and torch.equal(seen.extracted["rot.weight"], torch.eye(2))
