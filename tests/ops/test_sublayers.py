"""A decoder layer's sublayers in one call: the bits of the single ops, whatever the instruction set."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from glm5_kernels.native import library
from tests.ops.support.sublayers import (
    EXPERTS,
    HIDDEN,
    Step,
    attention_by_ops,
    draw_layer,
    draw_step,
    in_one_call,
    mlp_by_ops,
)

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
MODES = [ops.PER_TOKEN, ops.PER_TENSOR, ops.NO_QUANT]


def copied(step: Step) -> Step:
    return Step(*(x.clone() if isinstance(x, torch.Tensor) else x for x in step))


@pytest.mark.usefixtures("instruction_set", "threads")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [2, 3, 16])
def test_attention_has_the_bits_of_the_ops(mode: str, tokens: int) -> None:
    """With an indexer that selects, one that only stores keys, and none."""
    for indexer, selects, first in ((True, True, False), (True, False, True), (False, False, False)):
        by_columns = ops.reads_columns(torch.bfloat16)
        weights, step = draw_layer(mode, by_columns, indexer).attention, draw_step(tokens, selects, first)
        other = copied(step)
        expected, got = attention_by_ops(weights, other), in_one_call(ops.MlaSublayer(weights), step)
        for one, two in zip(got, expected, strict=True):
            # A bf16 product by torch, where it is the faster one, adds in another order.
            torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2 if mode == ops.NO_QUANT or not by_columns else 0)
        if mode != ops.NO_QUANT and by_columns:
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
            assert torch.equal(step.latents, other.latents) and torch.equal(step.keys, other.keys)
            assert torch.equal(step.topk_indices, other.topk_indices)


@pytest.mark.usefixtures("instruction_set", "threads")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("routed", [True, False])
def test_mlp_has_the_numbers_of_the_ops(mode: str, routed: bool) -> None:
    """Two sums of a router's weights may differ in their last bit, and then an output in its own."""
    weights = draw_layer(mode, True, routed=routed).mlp
    for tokens in (1, 5, 16):
        x, residual = torch.randn(2, tokens, HIDDEN).bfloat16()
        got, expected = ops.MlpSublayer(weights)(x, residual), mlp_by_ops(weights, x, residual)
        assert torch.equal(got[1], expected[1])
        torch.testing.assert_close(got[0], expected[0], rtol=2e-2, atol=2e-2)


def test_experts_are_those_with_the_largest_sums() -> None:
    """A bias that outweighs every score chooses two experts; the others' weights may be anything."""
    mlp = draw_layer(ops.PER_TOKEN, True).mlp
    assert mlp.experts is not None
    bias = torch.full((EXPERTS,), -9.0)
    bias[[1, 4]] = 0
    scales = mlp.experts.w2_scale.clone()
    x, residual = torch.randn(2, 3, HIDDEN).bfloat16()
    outs = []
    for others in (1.0, float("nan")):
        scales[[0, 2, 3]] = others
        experts = mlp.experts._replace(correction_bias=bias, w2_scale=scales.clone())
        outs.append(ops.MlpSublayer(mlp._replace(experts=experts))(x, residual)[0])
    assert torch.equal(*outs) and not outs[1].isnan().any()


def test_an_undefined_softmax_is_left_to_the_ops() -> None:
    step = draw_step(3, selects=False)
    step.latents[:, :, 0] = float("nan")
    sublayer = ops.MlaSublayer(draw_layer(ops.PER_TOKEN, True).attention)
    assert in_one_call(sublayer, step) is None
    assert in_one_call(sublayer, draw_step(3, selects=False)) is not None


def test_strides() -> None:
    """Rows at any distance, as of a slice; a cache whose rows are part of wider ones."""
    weights, step = draw_layer(ops.PER_TOKEN, True).attention, draw_step(4, selects=True)
    expected = in_one_call(ops.MlaSublayer(weights), copied(step))
    wide = torch.zeros(4, 2 * HIDDEN, dtype=torch.bfloat16)
    wide[:, HIDDEN:] = step.x
    got = in_one_call(ops.MlaSublayer(weights), step._replace(x=wide[:, HIDDEN:]))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_operands_that_do_not_fit_are_refused() -> None:
    layer, step = draw_layer(ops.PER_TOKEN, True), draw_step(3, selects=True)
    attention, mlp = ops.MlaSublayer(layer.attention), ops.MlpSublayer(layer.mlp)
    table = step.batch.block_table
    wrong = {
        "sizes of x": step._replace(x=step.x[:, :64]),
        "no columns": step._replace(x=step.x[:, :0], residual=None),
        "dtype": step._replace(x=step.x.float()),
        "columns of x": step._replace(x=torch.empty(HIDDEN, 3, dtype=torch.bfloat16).T),
        "residual": step._replace(residual=step.x[:2]),
        "tokens": step._replace(slots=step.slots[:2], angles=(step.angles[0][:2], step.angles[1][:2])),
        "angles": step._replace(angles=(step.angles[0][:2], step.angles[1][:2])),
        "rotated dims": step._replace(angles=(step.angles[0][:, :8], step.angles[1][:, :8])),
        "slot": step._replace(slots=torch.tensor([0, 96, 1])),
        "block": step._replace(batch=step.batch._replace(block_table=table + 2)),
        "keys": step._replace(keys=step.keys[:4]),
        "size of keys": step._replace(keys=step.keys[..., :32]),
        "indices": step._replace(topk_indices=step.topk_indices.T.contiguous().T),
        "expanded cache": step._replace(latents=step.latents[:1].expand(6, -1, -1)),
    }
    for name, operands in wrong.items():
        with pytest.raises(ops.KernelInputError):
            in_one_call(attention, operands)
            pytest.fail(name)
    with pytest.raises(ops.KernelInputError, match="index_keys is missing"):
        tables = ops.DecodeStep(step.batch, step.slots, step.angles, step.angles)
        attention(step.x, None, tables, *step.caches(), None, step.topk_indices, True)
    for x in (torch.zeros(17, HIDDEN), torch.zeros(0, HIDDEN), torch.zeros(3, 32), torch.zeros(3, 0)):
        with pytest.raises(ops.KernelInputError):
            mlp(x.bfloat16(), x.bfloat16())


def test_weights_that_do_not_fit_are_refused() -> None:
    layer = draw_layer(ops.PER_TOKEN, True)
    w, experts = layer.attention, layer.mlp.experts
    assert experts is not None
    for fields in ({"w_uv": w.w_uv[:2]}, {"q_b": w.qkv_a}, {"kv_gamma": w.q_gamma[:32]}):
        with pytest.raises(ops.KernelInputError):
            ops.MlaSublayer(w._replace(**fields))
    for fields in (
        {"per_token": 6},
        {"correction_bias": experts.correction_bias[:4]},
        {"w2_scale": experts.w2_scale[:, :48]},
    ):
        with pytest.raises(ops.KernelInputError):
            ops.MlpSublayer(layer.mlp._replace(experts=experts._replace(**fields)))
    for fields in ({"w_uk_t": w.w_uk_t.float()}, {"norm_weight": w.norm_weight.half()}):
        with pytest.raises(ops.UnsupportedVariantError):
            ops.MlaSublayer(w._replace(**fields))
