"""The sweep for gradients against plain autograd of the whole model, and the tokens that it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.errors import CheckpointError
from glm5_ascend.model import layers, structure
from glm5_ascend.quantize.calibration import product as products
from glm5_ascend.quantize.calibration import sampled_loss
from glm5_ascend.quantize.calibration.sampled_loss import DRAWS, GRADIENT_SCALE, output_gradient
from glm5_ascend.quantize.methods.output_feedback import GradientMoments
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.pipeline import calibration_of, prepare, quantize
from glm5_ascend.quantize.run import gradient_sweep
from glm5_ascend.quantize.run.gradient_files import GradientFiles
from glm5_ascend.quantize.run.source_weights import FloatWeights
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model

KINDS = {
    "plain": {"num_hidden_layers": 4},
    "shared indexer": SHARED_INDEXER,
    "groups of experts": {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
}


class Whole:
    """All weights of the main model, unrotated, with autograd for every stream."""

    def __init__(self, weights: FloatWeights) -> None:
        self.weights, self.config = weights, weights.source.config
        self.tensors = {
            prefix + structure.tensor_name(part): weights.load(prefix, part, {})
            for prefix, part in structure.all_parts(self.config)
        }
        self.prefix = ""

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{self.prefix}{name}.weight"].T

    def vector(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name]

    def streams(self, sequence: torch.Tensor) -> list[torch.Tensor]:
        """In front of every layer, and behind the last."""
        hidden = self.tensors["model.embed_tokens.weight"][sequence].requires_grad_()
        found, shared = [hidden], None
        for layer in range(self.config.num_hidden_layers):
            self.prefix = structure.layer_prefix(layer)
            hidden, shared = layers.attention_block(self.config, layer, self, hidden, shared)
            hidden = layers.mlp_block(self.config, layer, self, hidden)
            found.append(hidden)
        return found


def without_rotation(folder: Path) -> Path:
    """The recipe, less what changes the basis of the stream."""
    from glm5_ascend.quantize.recipe import find_recipe

    text = find_recipe("w4a8-yaqa").read_text()
    path = folder / "plain-yaqa.yaml"
    path.write_text(text.replace("    - type: quarot\n", ""))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_second_moments_are_those_of_autograd(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "native_bf16", lambda device: False)
    given: list[torch.Tensor] = []
    found: dict[int, GradientMoments] = {}

    def recorded(*arguments: Any) -> torch.Tensor:
        given.append(output_gradient(*arguments))
        return given[-1]

    def kept(files: GradientFiles, layer: int, moments: GradientMoments) -> None:
        found[layer] = moments
        written(files, layer, moments)

    written = GradientFiles.write_outputs
    monkeypatch.setattr(gradient_sweep, "output_gradient", recorded)
    monkeypatch.setattr(GradientFiles, "write_outputs", kept)
    monkeypatch.setattr(gradient_sweep, "HEAD_TOKENS", 1)  # a sequence at a time
    monkeypatch.setattr(gradient_sweep, "GRADIENT_ROWS", 40)  # fewer than gradients or columns
    source = write_tiny_model(tmp_path / "source", **KINDS[kind])
    options = QuantizeOptions(
        source, tmp_path / "out", str(without_rotation(tmp_path)), write_calibration(tmp_path / "text.jsonl"), 3, 48,
        threads=1,
    )  # fmt: skip
    prepared = prepare(options)
    quantize(prepared)

    calibration = calibration_of(prepared)
    assert calibration is not None and len(given) == len(calibration.sequences)
    whole = Whole(FloatWeights(prepared.source, None, torch.device("cpu")))
    config = prepared.source.config
    wanted = {layer: torch.zeros(config.hidden_size, config.hidden_size) for layer in found}
    energies: dict[int, list[torch.Tensor]] = {layer: [] for layer in found}
    for sequence, behind in zip(calibration.sequences, given, strict=True):
        streams = whole.streams(sequence)
        for draw in range(DRAWS):
            gradients = torch.autograd.grad(streams[-1], streams, behind[draw], retain_graph=True)
            for layer in found:
                wanted[layer] += gradients[layer + 1].T @ gradients[layer + 1]
                energies[layer].append(gradients[layer + 1].double().square().sum(1))
    assert sorted(found) == [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    for layer, moments in found.items():
        assert float((moments.total - wanted[layer]).norm() / wanted[layer].norm()) < 1e-4
        energy = torch.cat(energies[layer])
        assert moments.rows == len(energy)
        assert moments.energy == pytest.approx(float(energy.sum()), rel=1e-4)
        assert moments.energy_squares == pytest.approx(float(energy.square().sum()), rel=1e-4)


def test_tokens_are_drawn_as_the_model_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of the vocabulary as in one: frequencies within five standard deviations, in one pass."""
    monkeypatch.setattr(products, "native_bf16", lambda device: False)
    positions, vocabulary, hidden = 4000, 11, 16
    head, x = 0.5 * torch.randn(vocabulary, hidden), torch.randn(1, hidden).expand(positions, -1)
    likely = (x[0] @ head.T).softmax(0)
    for rows in (1, 4, vocabulary):
        made = sampled_loss._of_likelihood(x, head.split(rows), torch.Generator().manual_seed(3))
        drawn = made + likely @ head
        distance = torch.cdist(drawn.flatten(0, 1), head)
        assert float(distance.amin(1).max()) < 1e-2  # every one is a row of the head
        counts = distance.argmin(1).bincount(minlength=vocabulary)
        expected = DRAWS * positions * likely
        assert bool(((counts - expected).abs() < 5 * (expected * (1 - likely)).sqrt()).all())
        assert not torch.equal(drawn[0], drawn[1])


def test_gradients_of_the_output_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "native_bf16", lambda device: False)
    head, stream, norm = torch.randn(30, 8), torch.randn(5, 8), 1 + 0.1 * torch.randn(8)
    found = output_gradient(stream, norm, 1e-5, head.split(7), torch.Generator().manual_seed(0))
    leaf = stream.clone().requires_grad_()
    likelihood = (layers.rms_norm(leaf, norm, 1e-5) @ head.T).log_softmax(1)
    for draw in found:
        for position in range(len(stream)):
            each = torch.stack([
                torch.autograd.grad(likelihood[position, token], leaf, retain_graph=True)[0][position]
                for token in range(len(head))
            ])  # fmt: skip
            nearest = (each * GRADIENT_SCALE - draw[position]).norm(dim=1).min()
            assert float(nearest) < 1e-5 * float(draw[position].norm())


def test_a_model_without_gradients_is_refused(tmp_path: Path) -> None:
    """A head of zeros: nothing in the model changes what it says."""
    from safetensors.torch import load_file, save_file

    source = write_tiny_model(tmp_path / "source")
    shard = source / "model-00001-of-00001.safetensors"
    tensors = load_file(shard)
    tensors["lm_head.weight"].zero_()
    save_file(tensors, shard, {"format": "pt"})
    calib = write_calibration(tmp_path / "text.jsonl")
    with pytest.raises(CheckpointError, match=r"layer 2: the gradients of the model's output are zero"):
        quantize(prepare(QuantizeOptions(source, tmp_path / "out", "w4a8-yaqa", calib, 2, 32)))
    assert not (tmp_path / "out").exists()
