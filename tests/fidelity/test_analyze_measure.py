"""What `analyze` measures, against the same figures computed another way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.fidelity.analysis.measure import Outliers, linear_errors, round_linear
from glm5_ascend.fidelity.analysis.outliers import SourceBasis
from glm5_ascend.fidelity.analysis.run import Analysis, analyze, prepare
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.fidelity.options import AnalyzeOptions
from glm5_ascend.model import layers
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, Linear
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_kernels import ops
from tests.support.decoder_layer import decoder_layer
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model


@pytest.fixture(scope="module")
def analysis(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    calib = write_calibration(tmp_path_factory.mktemp("analyze") / "calib.jsonl")
    return analyze(prepare(AnalyzeOptions(tiny_source, recipe="w4a8", calib=calib, samples=4, seq_len=64)))


@pytest.mark.parametrize("scheme", [schemes.W8A8_DYNAMIC, schemes.W8A8, schemes.W4A8_DYNAMIC])
def test_errors_of_one_linear(scheme: str) -> None:
    weight, x = torch.randn(48, 64), torch.randn(200, 64) * torch.rand(64) * 3
    linear = round_linear("mlp.experts.0.gate_proj", weight, scheme, MINMAX, InputStatistics.of(x, 512), None)
    errors = linear_errors(linear, weight, x)
    hessian, change = x.T @ x, linear.weight - weight
    expected = (torch.trace(change @ hessian @ change.T) / torch.trace(weight @ hessian @ weight.T)).sqrt()
    assert errors.weight == pytest.approx(float(expected), rel=1e-3)
    exact = x @ weight.T
    assert errors.output == pytest.approx(float((linear(x) - exact).norm() / exact.norm()), rel=1e-4)
    assert 0 < errors.activation < errors.output * 1.5
    if scheme == schemes.W8A8_DYNAMIC:  # the engine's own operator, from the integers
        scale = weight.abs().amax(1) / 127
        scale = scale.bfloat16().float()
        integers = (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
        engine = ops.int8_linear(x, ops.LinearWeights(integers, ops.PER_TOKEN, scale))
        torch.testing.assert_close(linear(x), engine, rtol=1e-4, atol=1e-4)


def test_outliers() -> None:
    normal = Outliers.of(torch.randn(400, 400))
    assert normal.kurtosis == pytest.approx(3, abs=0.1) and 3.5 < normal.peak < 7
    x = torch.zeros(10, 10)
    x[3, 3] = 5
    assert Outliers.of(x) == Outliers(pytest.approx(10), pytest.approx(100))
    assert Outliers.of(torch.zeros(3, 3)) == Outliers(0, 0)


def test_inputs_in_the_source_basis(tiny_source: Path) -> None:
    """An input in the source's basis times the source's weight gives the output of the rotated weight."""
    config = StoredModel(tiny_source).config
    rotations, size = Rotations(config, 5), config.sizes
    to_source = SourceBasis(rotations)
    for part in config.backbone(1):
        if isinstance(part, Linear) and not part.is_table:
            gains = {norm: 0.5 + torch.rand(size["hidden" if "layernorm" in norm and "_a_" not in norm else "q_lora"
                     if "q_a" in norm else "kv_lora"]) for norm in part.norm}  # fmt: skip
            weight = torch.randn(part.shape(size))
            x = torch.randn(7, weight.shape[1])
            folded = weight * torch.cat([gains[n] for n in part.norm]) if part.norm else weight.clone()
            rotated = rotations.rotate_weight(folded.clone(), part.basis_in, FIXED)
            source = to_source(x, part, gains)
            if part.norm:  # `source` is the normalised input times the gain, as the source's linear reads it
                torch.testing.assert_close(source @ weight.T, x @ rotated.T, rtol=1e-3, atol=1e-3)
            else:
                torch.testing.assert_close(source @ folded.T, x @ rotated.T, rtol=1e-3, atol=1e-3)


def test_what_a_layer_report_holds(analysis: Analysis) -> None:
    dense, moe = analysis.layers[0], analysis.layers[2]
    assert {linear.name for linear in dense.linears} >= {"self_attn.q_a_proj", "self_attn.o_proj", "mlp.down_proj"}
    assert "self_attn.kv_b_proj" not in {linear.name for linear in dense.linears}  # always FLOAT
    assert [len(layer.experts) for layer in analysis.layers] == [0, 4, 4]
    assert sum(expert.tokens for expert in moe.experts) == 2 * analysis.calibration.tokens  # two experts a token
    for layer in analysis.layers:
        for linear in layer.linears:
            assert 0 < linear.errors.weight < linear.errors.output < 0.1
            assert linear.tokens == analysis.calibration.tokens or "wq_b" in linear.name
        for unit in layer.units:
            assert 0 <= unit.noise[unit.scheme] < 1 and unit.noise[schemes.FLOAT] == 0
    experts = next(unit for unit in moe.units if unit.experts)
    assert experts.noise[schemes.W4A8_DYNAMIC] > 20 * experts.noise[schemes.W8A8_DYNAMIC] > 0
    assert set(moe.experts[0].linears) == {"gate_proj", "up_proj", "down_proj"}
    assert all(0.02 < errors.weight < 0.3 for errors in moe.experts[0].linears.values())


def test_noise_is_what_the_layer_shows(tiny_source: Path, analysis: Analysis) -> None:
    """Noise of a MoE MLP against a checkpoint of the same recipe on the same stream, by the engine's ops."""
    from tests.support.tiny_model import quantize_tiny

    out = quantize_tiny(tiny_source, analysis.options.calib.parent / "out", "w4a8")  # type: ignore[union-attr]
    source, stored = StoredModel(tiny_source), StoredModel(out)
    config, layer = source.config, 1
    sequences = list(prepare(analysis.options).calibration.sequences)[:4]
    rotation = Rotations(config, 1234).global_rotation()
    ratios = []
    for sequence in sequences:
        hidden, selected = source.embed(sequence), None
        for number in range(layer):
            hidden, selected = decoder_layer(config, number, source.weights(number), hidden, selected)
        weights, quantized = source.weights(layer), stored.weights(layer)
        x = layers.rms_norm(hidden, weights.vector("input_layernorm.weight"), config.rms_norm_eps)
        after = hidden + layers.attention(config, weights, x, selected, True)[0]
        gain = weights.vector("post_attention_layernorm.weight")
        expected = layers.whole_mlp(config, layer, weights, layers.rms_norm(after, gain, config.rms_norm_eps))
        rotated = layers.rms_norm(after @ rotation, torch.ones(config.hidden_size), config.rms_norm_eps)
        output = layers.whole_mlp(config, layer, quantized, rotated) @ rotation.T
        ratios.append((output - expected).square().sum(-1) / (after + expected).square().sum(-1))
    mlp = [unit for unit in analysis.layers[layer].units if unit.modules[0].startswith("mlp.")]
    predicted = sum(unit.noise[unit.scheme] for unit in mlp)
    assert predicted == pytest.approx(float(torch.cat(ratios).mean()), rel=0.25)  # units are taken as independent


def test_shared_indexers_and_a_recipe_without_rotation(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", **SHARED_INDEXER)
    calib = write_calibration(tmp_path / "calib.jsonl")
    analysis = analyze(prepare(AnalyzeOptions(source, recipe="rtn-w4a8", calib=calib, samples=3, seq_len=48)))
    assert len(analysis.layers) == 4
    assert "self_attn.indexer.wq_b" not in {linear.name for linear in analysis.layers[3].linears}
    for layer in analysis.layers:
        for linear in layer.linears:
            assert linear.activations["source"] == linear.activations["rotated"] == linear.activations["smoothed"]
    static = analyze(prepare(AnalyzeOptions(source, recipe="w8a8", calib=calib, samples=3, seq_len=48)))
    assert {linear.scheme for linear in static.layers[0].linears} == {schemes.W8A8, schemes.W8A8_DYNAMIC}
