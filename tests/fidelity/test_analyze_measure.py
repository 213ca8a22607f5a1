"""What `analyze` measures, against the same figures computed another way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.fidelity.analysis.probe import round_linear
from glm5_ascend.fidelity.analysis.run import Analysis, analyze, prepare
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.fidelity.options import AnalyzeOptions
from glm5_ascend.model import layers, streams
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_kernels import ops
from tests.conftest import Quantized
from tests.support.decoder_layer import decoder_layer, mlp_block, whole_mlp
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model


@pytest.fixture(scope="module")
def analysis(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    calib = write_calibration(tmp_path_factory.mktemp("analyze") / "calib.jsonl")
    return analyze(prepare(AnalyzeOptions(tiny_source, recipe="w4a8", calib=calib, samples=4, seq_len=64)))


def test_a_rounded_linear_is_the_engines() -> None:
    """Against the engine's operator on the integers."""
    weight, x = torch.randn(48, 64), torch.randn(200, 64) * torch.rand(64) * 3
    linear = round_linear("self_attn.o_proj", weight, schemes.W8A8_DYNAMIC, MINMAX, InputStatistics.of(x, 512), None)
    scale = (weight.abs().amax(1) / 127).bfloat16().float()
    integers = (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
    engine = ops.int8_linear(x, ops.LinearWeights(integers, ops.PER_TOKEN, scale))
    torch.testing.assert_close(linear(x), engine, rtol=1e-4, atol=1e-4)


def test_what_a_layer_report_holds(analysis: Analysis) -> None:
    dense, moe = analysis.layers[0], analysis.layers[2]
    names = {name for unit in dense.units for name in unit.modules}
    assert names >= {"self_attn.q_a_proj", "self_attn.o_proj", "mlp.down_proj"}
    assert "self_attn.kv_b_proj" not in names  # always FLOAT
    assert [len(layer.expert_tokens) for layer in analysis.layers] == [0, 4, 4]
    assert sum(moe.expert_tokens) == 2 * analysis.calibration.tokens  # two experts a token
    for layer in analysis.layers:
        for unit in layer.units:
            assert 0 <= unit.noise[unit.scheme] < 1 and unit.noise[schemes.FLOAT] == 0
    experts = next(unit for unit in moe.units if unit.experts)
    assert experts.noise[schemes.W4A8_DYNAMIC] > 20 * experts.noise[schemes.W8A8_DYNAMIC] > 0


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
        expected = whole_mlp(config, layer, weights, layers.rms_norm(after, gain, config.rms_norm_eps))
        rotated = layers.rms_norm(after @ rotation, torch.ones(config.hidden_size), config.rms_norm_eps)
        output = whole_mlp(config, layer, quantized, rotated) @ rotation.T
        ratios.append((output - expected).square().sum(-1) / (after + expected).square().sum(-1))
    mlp = [unit for unit in analysis.layers[layer].units if unit.modules[0].startswith("mlp.")]
    predicted = sum(unit.noise[unit.scheme] for unit in mlp)
    assert predicted == pytest.approx(float(torch.cat(ratios).mean()), rel=0.25)  # units are taken as independent


def test_noise_of_flash_is_what_its_streams_show(tiny_quantized: Quantized, tiny_flash: Path, tmp_path: Path) -> None:
    """The quantized MLPs of layers with linear and with sparse attention, on the same four residual streams."""
    calib = write_calibration(tmp_path / "calib.jsonl")
    options = AnalyzeOptions(tiny_flash, recipe="flash-w4a8-best", calib=calib, samples=4, seq_len=64)
    measured = analyze(prepare(options))
    source, stored = StoredModel(tiny_flash), StoredModel(tiny_quantized("flash-w4a8-best", tiny_flash))
    config, ratios = source.config, {layer: [] for layer in range(4)}  # type: dict[int, list[torch.Tensor]]
    for sequence in measured.calibration.sequences[:4]:
        hidden = streams.spread(config, source.embed(sequence))
        for layer in ratios:
            after, _ = layers.attention_block(config, layer, source.weights(layer), hidden)
            hidden, output = (mlp_block(config, layer, m.weights(layer), after) for m in (source, stored))
            ratios[layer].append((output - hidden).square().sum(-1) / hidden.square().sum(-1))
    for layer, ratio in ratios.items():
        assert {unit.modules[0].split(".")[0] for unit in measured.layers[layer].units} == {"mlp"}
        assert measured.layers[layer].noise == pytest.approx(float(torch.cat(ratio).mean()), rel=0.25)


def test_shared_indexers_and_a_recipe_without_rotation(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", **SHARED_INDEXER)
    calib = write_calibration(tmp_path / "calib.jsonl")
    analysis = analyze(prepare(AnalyzeOptions(source, recipe="rtn-w4a8", calib=calib, samples=3, seq_len=48)))
    assert len(analysis.layers) == 4
    assert "self_attn.indexer.wq_b" not in {name for unit in analysis.layers[3].units for name in unit.modules}
    static = analyze(prepare(AnalyzeOptions(source, recipe="w8a8", calib=calib, samples=3, seq_len=48)))
    types = {scheme for unit in static.layers[0].units for scheme in unit.scheme.split("+")}
    assert types == {schemes.W8A8, schemes.W8A8_DYNAMIC}
