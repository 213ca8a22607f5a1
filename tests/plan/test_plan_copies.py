"""Weights of a die against what vllm-ascend's own code holds: what `glm5-ascend rehearse` weighed at GLM-5's size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm5_ascend.engine_lines import VLLM_ASCEND_023, VLLM_ASCEND_030, EngineLine
from glm5_ascend.errors import PlanError
from glm5_ascend.plan import memory, weights
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import named
from glm5_ascend.plan.weights import copies

W4A8 = Engine(16, 1, sequences=16)
W8A8 = Engine(16, 1, sequences=16, flashcomm=True)
#: Model, weights, engine, decode only, prefill and decode apart; bytes of parameters and of what was made of them.
WEIGHED = [
    ("glm-5", "w4a8", W4A8, False, False, 28_163_986_944),
    ("glm-5", "w4a8", replace(W4A8, line=VLLM_ASCEND_030), False, False, 29_541_577_728),
    ("glm-5", "w8a8", W8A8, False, False, 54_825_694_944),
    ("glm-5", "w8a8", Engine(4, 8, batched_tokens=128), True, True, 31_236_289_248),
    ("glm-5", "w8a8", Engine(8, 4, flashcomm=True, mlapo=False), False, True, 31_222_092_200),
    ("glm-5", "w8a8", Engine(8, 4, flashcomm=True, mlapo=False, line=VLLM_ASCEND_030), False, True,
     28_917_917_864),
    ("glm-5.2", "w4a8", Engine(16, 1, dcp=16, dsa_cp=True, flashcomm=True), False, False, 35_309_995_836),
]  # fmt: skip


@pytest.mark.parametrize(("name", "quantization", "engine", "decode_only", "split", "weighed"), WEIGHED)
def test_weights_are_those_of_the_official_code(
    name: str, quantization: str, engine: Engine, decode_only: bool, split: bool, weighed: int
) -> None:
    model = named(name, quantization)
    (stage,) = engine.stages(model.config)
    shares = weights.per_die(model, engine, stage)
    planned = sum(shares.values()) + sum(copies(model, engine, decode_only, split, stage).values())
    assert planned == pytest.approx(weighed, rel=0.0001)  # a tenth of what `rehearse` says nothing about


@pytest.mark.parametrize(
    ("line", "weighed"),
    [(VLLM_ASCEND_023, (26_327_705_836, 27_193_577_660)), (VLLM_ASCEND_030, (24_983_462_252, 25_932_796_732))],
)
def test_a_die_of_each_pipeline_stage(line: EngineLine, weighed: tuple[int, int]) -> None:
    """Two stages of 41 and 37 layers that prefill; the second has the draft and a copy of the embedding."""
    model = named("glm-5", "w8a8")
    engine = Engine(16, 1, pp=2, partition=(41, 37), flashcomm=True, mlapo=False, line=line)
    for stage, nbytes in zip(engine.stages(model.config), weighed, strict=True):
        shares = weights.per_die(model, engine, stage)
        extra = copies(model, engine, False, True, stage)
        assert sum(shares.values()) + sum(extra.values()) == pytest.approx(nbytes, rel=0.0001)


def test_layers_of_the_stages_are_divided_as_vllm_does() -> None:
    config = named("glm-5", "w8a8").config
    assert [len(stage) for stage in Engine(8, pp=4).stages(config)] == [19, 20, 20, 19]
    with pytest.raises(PlanError, match="41,36: not 2 stages of 78 layers"):
        Engine(8, pp=2, partition=(41, 36)).stages(config)


def test_copies_exclude_each_other() -> None:
    model, engine = named("glm-5", "w8a8"), replace(W8A8, flashcomm=False)
    (stage,) = engine.stages(model.config)
    assert any(copies(model, engine, False, False, stage).values())
    for other in (replace(engine, mlapo=False), replace(engine, dcp=16)):
        assert not any(copies(model, other, False, False, stage).values())
    assert not any(copies(named("glm-5", "w8a8", "li+sfa"), engine, False, False, stage).values())
    assert not any(copies(model, replace(engine, batched_tokens=1024), True, True, stage).values())
    divided = copies(model, replace(engine, dsa_cp=True), False, False, stage)
    assert "MLAPO copies" not in divided and divided["DSA-CP copies"] > 0 and divided["whole shared experts"] > 0


def test_only_marked_layers_keep_int8_indexer_keys() -> None:
    model = replace(named("glm-5.2", "w4a8", "li"), marked=frozenset({6, 10}))
    everywhere = memory.bytes_per_token(named("glm-5.2", "w4a8", "li"), True)
    assert memory.bytes_per_token(model, True) == everywhere + 20 * (256 - 130)  # 22 layers have an indexer
