"""Odd but sound: sources whose outputs look degenerate and are right. No error, with the source and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5_ascend.verify import verify
from tests.conftest import Quantized
from tests.support.tiny_model import edited_tensors, write_tiny_model

LAYER = "model.layers.1."
Tensors = dict[str, torch.Tensor]


def dead(tensors: Tensors) -> None:
    """A dead expert and head, dead channels and norm gains, an expert that is never chosen."""
    for name, tensor in tensors.items():
        if f"{LAYER}mlp.experts.3." in name:
            tensor[:] = 0
        if name.endswith("up_proj.weight"):
            tensor[3] = 0
        if name.endswith("gate_proj.weight"):  # dead, but the scale that was moved still shows in up_proj
            tensor[5] = 0
        if name.endswith("norm.weight") and "k_norm" not in name:
            tensor[::7] = 0
    tensors[f"{LAYER}self_attn.kv_b_proj.weight"][16:32] = 0  # the V rows of head 0
    tensors[f"{LAYER}self_attn.o_proj.weight"][:, 3] = 0
    tensors[f"{LAYER}mlp.experts.2.down_proj.weight"][:, 4] = 0
    tensors[f"{LAYER}mlp.gate.e_score_correction_bias"][2] = -1e4


def extreme(tensors: Tensors) -> None:
    """Huge and tiny weights, gains of either sign, an MTP layer with an embedding and a head of its own."""
    tensors[f"{LAYER}mlp.experts.0.up_proj.weight"][3, 5] = 1e3
    tensors[f"{LAYER}self_attn.q_b_proj.weight"][2, 2] = 1e3
    chance = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        of_mtp = name.startswith("model.layers.3.") and name.endswith(
            ("embed_tokens.weight", "shared_head.head.weight")
        )
        if of_mtp or (name.endswith("norm.weight") and "k_norm" not in name):
            tensor[:] = torch.randn(tensor.shape, generator=chance).to(tensor.dtype)
        if f"{LAYER}mlp.experts.1." in name:
            tensor *= 1e-3


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sources_by_name = {}
    for edit in (dead, extreme):
        source = sources_by_name[edit.__name__] = write_tiny_model(tmp_path_factory.mktemp("odd") / edit.__name__)
        with edited_tensors(source) as tensors:
            edit(tensors)
    return sources_by_name


@pytest.mark.parametrize("kind", ["dead", "extreme"])
@pytest.mark.parametrize("recipe", ["w4a8", "w8a8-best"])
def test_odd_sources(kind: str, recipe: str, sources: dict[str, Path], tiny_quantized: Quantized) -> None:
    out = tiny_quantized(recipe, sources[kind])
    for against in (None, sources[kind]):
        report = verify(out, against=against)
        assert report.ok, "\n".join(report.lines())
        assert {finding.id for finding in report.findings} <= {"value.all_zero"}


def test_the_source_takes_a_doubt_back(tiny_quantized: Quantized, tmp_path: Path) -> None:
    """A weight 10^6 times its neighbours is most likely damage; the source says that it is not."""
    source = write_tiny_model(tmp_path / "source")
    with edited_tensors(source) as tensors:
        tensors[f"{LAYER}self_attn.q_b_proj.weight"][2, 2] = 1e6
    out = tiny_quantized("rtn-w4a8", source)
    assert [finding.id for finding in verify(out).findings] == ["value.scale_range"]
    assert not verify(out, against=source).findings


@pytest.mark.parametrize("chosen_experts", [2, 4])
def test_a_router_of_zeros_where_every_expert_is_chosen(
    chosen_experts: int, tiny_quantized: Quantized, tmp_path: Path
) -> None:
    source = write_tiny_model(tmp_path / "source", num_experts_per_tok=chosen_experts)
    with edited_tensors(source) as tensors:
        tensors[f"{LAYER}mlp.gate.weight"][:] = 0
    findings = verify(tiny_quantized("rtn-w4a8", source)).findings
    assert {finding.id for finding in findings} == (set() if chosen_experts == 4 else {"value.all_zero"})
