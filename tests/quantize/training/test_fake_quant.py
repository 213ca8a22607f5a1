"""Fake quantization gives the bits of the stored checkpoint and of the server's arithmetic; its gradients are STE's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.errors import RecipeError
from glm5_ascend.fidelity.evaluation.stored_model import StoredLayer, StoredModel
from glm5_ascend.model import layers
from glm5_ascend.quantize.methods.method import Method
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.rounding import quantize_linear
from glm5_ascend.quantize.methods.ssz import SSZ
from glm5_ascend.quantize.training.fake_quant import (
    fake_quant_activation,
    fake_quant_linear,
    fake_quant_weight,
    first_scale,
)
from glm5_ascend.quantize.training.qat import TrainableModel
from glm5_kernels import ops
from tests.support.decoder_layer import decoder_layer
from tests.support.tiny_model import quantize_tiny, write_tiny_model

N, K = 32, 48
SCHEMES = [schemes.W8A8_DYNAMIC, schemes.W4A8_DYNAMIC]
METHODS = [MINMAX, SSZ]


def adversaries() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(N, K, generator=generator)
    ties = torch.randint(-15, 16, (N, K), generator=generator) / 2.0
    ties[:, 0] = 7.0  # scale 1: every half is a tie
    ties_int8 = torch.randint(-255, 255, (N, K), generator=generator) / 2.0
    ties_int8[:, 0] = 127.0
    zero_rows = normal * (torch.arange(N) % 2)[:, None]
    mixed = normal * 10.0 ** torch.randint(-44, 37, (N, 1), generator=generator)
    return {
        "normal": normal, "ties": ties, "ties_int8": ties_int8, "zero_rows": zero_rows, "zeros": torch.zeros(N, K),
        "negative_zeros": -torch.zeros(N, K), "denormals": normal * 1e-40, "smallest": torch.full((N, K), 1.4e-45),
        "huge": normal * 1e36, "largest": torch.full((N, K), torch.finfo(torch.bfloat16).max), "mixed": mixed,
        "one_outlier": normal.index_fill(1, torch.tensor([5]), 500.0), "negative_peak": -normal.abs(),
        "transposed": torch.randn(K, N, generator=generator).T, "every_other": torch.randn(N, 2 * K)[:, ::2],
        "odd_width": normal[:, :33],
    }  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(weight: torch.Tensor, scheme: str, method: Method) -> None:
    stored = quantize_linear("model.layers.1.mlp.experts.0.up_proj", weight.float(), scheme, method).stored
    fake = fake_quant_weight(weight, scheme, method)
    assert fake.dequantized.isfinite().all()
    assert same_bits(fake.dequantized, schemes.dequantize(scheme, stored))
    assert same_bits(fake.integers, schemes.integer_weight(scheme, stored))
    assert same_bits(fake.scale, stored["weight_scale"])
    if scheme == schemes.W8A8_DYNAMIC:
        assert same_bits(fake.scale, fake.scale.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", adversaries())
def test_adversarial_weights_have_the_bits_of_the_checkpoint(
    name: str, scheme: str, method: Method, dtype: torch.dtype
) -> None:
    check(adversaries()[name].to(dtype), scheme, method)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=34, max_size=34),
    st.sampled_from(SCHEMES),
    st.sampled_from(METHODS),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_weight_has_the_bits_of_the_checkpoint(
    values: list[float], scheme: str, method: Method, dtype: torch.dtype
) -> None:
    limit = 1e37  # beyond it sums over a row overflow
    check(torch.tensor(values).clamp(-limit, limit).reshape(2, 17).to(dtype), scheme, method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", adversaries())
def test_activations_have_the_bits_of_the_server(name: str, dtype: torch.dtype) -> None:
    """An identity in int8 shows how the server rounds x: y = (x_q * 1) * s_x * 1."""
    x = adversaries()[name].to(dtype)
    identity = ops.LinearWeights(torch.eye(x.shape[1], dtype=torch.int8), ops.PER_TOKEN, torch.ones(x.shape[1]))
    served = ops.int8_linear(x.float(), identity)
    assert torch.equal(fake_quant_activation(x), served)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_server_s(scheme: str, dtype: torch.dtype) -> None:
    weight, x = torch.randn(N, K), torch.randn(2, 9, K).to(dtype)
    stored = quantize_linear("x.up_proj", weight, scheme).stored
    integers, scale = schemes.integer_weight(scheme, stored), stored["weight_scale"].flatten()
    fake = fake_quant_weight(weight, scheme)
    assert same_bits(fake_quant_linear(x, fake), ops.int8_linear(x, ops.LinearWeights(integers, ops.PER_TOKEN, scale)))
    product = fake_quant_activation(x) @ fake.dequantized.T
    torch.testing.assert_close(fake_quant_linear(x, fake).float(), product, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_go_straight_through(scheme: str) -> None:
    weight, x = torch.randn(N, K, requires_grad=True), torch.randn(5, K, requires_grad=True)
    fake = fake_quant_weight(weight, scheme)
    seen = torch.randn(5, N)
    (fake_quant_linear(x, fake) * seen).sum().backward()
    torch.testing.assert_close(weight.grad, seen.T @ fake_quant_activation(x.detach()))
    torch.testing.assert_close(x.grad, seen @ fake.dequantized.detach())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_learned_scale_is_stored_and_learns_as_lsq(scheme: str) -> None:
    weight = torch.randn(N, K, requires_grad=True)
    scale = (0.6 * first_scale(weight, scheme)).requires_grad_()  # so that some weights are clipped
    fake = fake_quant_weight(weight, scheme, scale=scale)
    stored = quantize_linear("x.up_proj", weight.detach(), scheme, scale=scale.detach()).stored
    assert same_bits(fake.dequantized, schemes.dequantize(scheme, stored))
    grad = torch.randn(N, K)
    fake.dequantized.backward(grad)
    low, high = (-8, 7) if scheme == schemes.W4A8_DYNAMIC else (-128, 127)
    ratio = weight.detach() / fake.scale
    clipped = (ratio.round() < low) | (ratio.round() > high)
    assert 0 < clipped.sum() < clipped.numel()
    assert torch.equal(weight.grad, torch.where(clipped, 0.0, grad))
    slope = torch.where(clipped, ratio.clamp(low, high), ratio.round() - ratio)  # equations 3 and 5 of the paper
    torch.testing.assert_close(scale.grad, (grad * slope).sum(1, keepdim=True) / (K * high) ** 0.5)


def test_bad_arguments_are_refused() -> None:
    weight = torch.randn(N, K)
    with pytest.raises(ValueError, match="not W8A8"):
        fake_quant_weight(weight, schemes.W8A8)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive and finite"):
            fake_quant_weight(weight, schemes.W4A8_DYNAMIC, scale=torch.full((N, 1), bad))


def test_a_trained_model_is_what_its_checkpoint_computes(tmp_path: Path) -> None:
    """Train, save, quantize: the logits of the training forward are those of the stored integers, bit for bit."""
    source = write_tiny_model(tmp_path / "source", num_hidden_layers=2)
    model, teacher = TrainableModel(source, "qat-w4a8"), StoredModel(source)
    tokens = [torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(n)) for n in range(2)]
    targets = [logits.log_softmax(-1) for logits in teacher.logits(tokens)]
    weights = dict(model.quantized())
    optimizer = torch.optim.Adam(weights.values(), lr=5e-5)
    losses = []
    for _ in range(15):
        outputs = [logits.log_softmax(-1) for logits in model.logits(tokens)]
        pairs = zip(targets, outputs, strict=True)
        loss = torch.cat([(target.exp() * (target - output)).sum(-1) for target, output in pairs]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]

    files = SourceCheckpoint(source).files
    for shard in {files.file_of[name] for name in weights}:
        tensors = load_file(source / shard)
        tensors |= {name: weights[name].detach().to(t.dtype) for name, t in tensors.items() if name in weights}
        save_file(tensors, source / shard, metadata={"format": "pt"})
    stored = StoredModel(quantize_tiny(source, tmp_path / "out", "qat-w4a8"))
    with torch.no_grad():
        for sequence in tokens:
            assert same_bits(model.logits([sequence])[0], plain_logits(stored, sequence))


def plain_logits(stored: StoredModel, sequence: torch.Tensor) -> torch.Tensor:
    """The stored checkpoint layer by layer, sums in the order of `layers.decoder_layer`, as in training."""
    top = StoredLayer(stored.files, stored.description, "")
    hidden, selected = top.vector("model.embed_tokens.weight")[sequence], None
    for layer in range(stored.config.num_hidden_layers):
        weights = StoredLayer(stored.files, stored.description, stored.config.spec.layer_prefix(layer))
        hidden, selected = decoder_layer(stored.config, layer, weights, hidden, selected)
    gain = top.vector("model.norm.weight")
    return top.linear("lm_head", layers.rms_norm(hidden, gain, stored.config.rms_norm_eps))


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8"])
def test_recipes_that_do_more_than_round_are_refused(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="must only round"):
        TrainableModel(write_tiny_model(tmp_path / "source"), recipe)
