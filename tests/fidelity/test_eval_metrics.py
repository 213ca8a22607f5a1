"""Streamed metrics against plain torch on whole logits, and the intervals against another way to compute them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.fidelity.evaluation import head, walk
from glm5_ascend.fidelity.evaluation import stored_model as stored
from glm5_ascend.fidelity.evaluation.compare import FidelityComparison, compare
from glm5_ascend.fidelity.evaluation.intervals import mean_interval
from glm5_ascend.fidelity.evaluation.metrics import metrics, p99
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.model import layers
from tests.support.decoder_layer import decoder_layer
from tests.support.tiny_model import SHARED_INDEXER, write_tiny_model

WINDOWS = list(torch.randint(7, 263, (5, 48), generator=torch.Generator().manual_seed(1)))  # index_topk is 16
Quantized = Callable[..., Path]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a model of 320 tokens falls into several of, the last one not full."""
    monkeypatch.setattr(stored, "VOCABULARY_BLOCK", 96)
    monkeypatch.setattr(head, "ROWS", 50)


def plain_logits(directory: Path) -> torch.Tensor:
    """[windows, S, vocab] through `decoder_layer`, all weights of a layer at once."""
    model, found = StoredModel(directory), []
    for window in WINDOWS:
        hidden, selected = model.files.read("model.embed_tokens.weight").float()[window], None
        for layer in range(model.config.num_hidden_layers):
            hidden, selected = decoder_layer(model.config, layer, model.weights(layer), hidden, selected)
        normed = layers.rms_norm(hidden, model.files.read("model.norm.weight").float(), model.config.rms_norm_eps)
        found.append(normed @ model.files.read("lm_head.weight").float().T)
    return torch.stack(found)


def choices(directory: Path, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [windows, S, k] and selections [windows, S, S] of one layer, sequence by sequence."""
    model, experts, keys = StoredModel(directory), [], []
    for window in WINDOWS:
        hidden, selected = model.files.read("model.embed_tokens.weight").float()[window], None
        for number in range(layer):
            hidden, selected = decoder_layer(model.config, number, model.weights(number), hidden, selected)
        weights, eps = model.weights(layer), model.config.rms_norm_eps
        x = layers.rms_norm(hidden, weights.vector("input_layernorm.weight"), eps)
        mixed, selected = layers.attention(model.config, weights, x, selected, model.config.has_indexer(layer))
        x = layers.rms_norm(hidden + mixed, weights.vector("post_attention_layernorm.weight"), eps)
        experts.append(layers.route(model.config, weights, x)[1])
        keys.append(selected)
    return torch.stack(experts), torch.stack(keys)


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8"])
def test_every_figure(recipe: str, tiny_source: Path, tiny_quantized: Quantized) -> None:
    out = tiny_quantized(recipe)
    found = compare(out, tiny_source, WINDOWS)
    a, b = (plain_logits(path)[:, :-1].double().log_softmax(-1) for path in (tiny_source, out))
    true = torch.stack(WINDOWS)[:, 1:]
    kl = (a.exp() * (a - b)).sum(-1)
    right_a, right_b = a.argmax(-1) == true, b.argmax(-1) == true
    want = {
        "kl_mean": kl.mean(),
        "kl_p99": kl.flatten().sort().values[-(-99 * kl.numel() // 100) - 1],
        "kl_max": kl.max(),
        "top1_agreement": (a.argmax(-1) == b.argmax(-1)).double().mean(),
        "flip_rate": (right_a != right_b).double().mean(),
        "nll_source": -a.gather(-1, true[..., None]).mean(),
        "nll_quantized": -b.gather(-1, true[..., None]).mean(),
    }
    got = {row.name: row.value for row in metrics(found)}
    assert want["kl_mean"] > 1e-5
    for name, value in want.items():
        assert got[name] == pytest.approx(float(value), rel=1e-4, abs=1e-7), name
    assert got["nll_delta"] == pytest.approx(got["nll_quantized"] - got["nll_source"])
    assert got["nll_change"] == pytest.approx(got["nll_delta"] / got["nll_source"])


def test_agreement_of_choices(tiny_source: Path, tiny_w4a8: Path) -> None:
    found = compare(tiny_w4a8, tiny_source, WINDOWS)
    assert [layer.experts is None for layer in found.layers] == [True, False, False]
    assert all(layer.indexer is not None for layer in found.layers)
    (ids_a, keys_a), (ids_b, keys_b) = choices(tiny_source, 2), choices(tiny_w4a8, 2)
    shares = [
        [len(set(x.tolist()) & set(y.tolist())) / len(x) for x, y in zip(u, v, strict=True)]
        for u, v in zip(ids_a, ids_b, strict=True)
    ]
    layer = found.layers[2]
    assert layer.experts is not None and layer.indexer is not None
    assert layer.experts.tolist() == pytest.approx([sum(share) / len(share) for share in shares])
    both = (keys_a & keys_b)[:, 16:].sum((1, 2)) / (32 * 16)
    assert layer.indexer.tolist() == pytest.approx(both.tolist())
    assert 0.5 < float(layer.indexer.mean()) < 1


@pytest.mark.parametrize("recipe", ["", "w4a8"])
def test_a_checkpoint_against_itself_is_exact(recipe: str, tiny_source: Path, tiny_quantized: Quantized) -> None:
    same = tiny_quantized(recipe) if recipe else tiny_source
    for row in metrics(compare(same, same, WINDOWS)):
        ones = {"top1_agreement", "expert_agreement", "indexer_overlap"}
        if not row.name.startswith("nll_") or row.name in ("nll_delta", "nll_change"):
            assert row.value == (1.0 if row.name in ones else 0.0), row
            assert row.interval in (None, (row.value, row.value)), row


def test_short_windows_have_no_indexer_to_compare(tiny_source: Path, tiny_w4a8: Path) -> None:
    found = compare(tiny_w4a8, tiny_source, [window[:16] for window in WINDOWS])
    assert all(layer.indexer is None for layer in found.layers)
    assert "indexer_overlap" not in {row.name for row in metrics(found)}


@pytest.mark.parametrize("made", [{"dtype": "fp8"}, {"dtype": "float16"}, SHARED_INDEXER])
def test_the_walk_is_the_plain_forward(made: dict[str, object], tmp_path: Path) -> None:
    """FP8 blocks, fp16, and layers that share an indexer: logits of a forward that reads the source by itself."""
    source = write_tiny_model(tmp_path / "source", **made)  # type: ignore[arg-type]
    files = SourceCheckpoint(source)

    class Weights:
        def __init__(self, layer: int) -> None:
            self.prefix = f"model.layers.{layer}."

        def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
            return x @ files.read(f"{self.prefix}{name}.weight").T

        def vector(self, name: str) -> torch.Tensor:
            return files.read(self.prefix + name)

    got = StoredModel(source).logits(WINDOWS)
    for window, logits in zip(WINDOWS, got, strict=True):
        hidden, selected = files.read("model.embed_tokens.weight")[window], None
        for layer in range(files.config.num_hidden_layers):
            hidden, selected = decoder_layer(files.config, layer, Weights(layer), hidden, selected)
        normed = layers.rms_norm(hidden, files.read("model.norm.weight"), files.config.rms_norm_eps)
        torch.testing.assert_close(logits, normed @ files.read("lm_head.weight").T, rtol=1e-4, atol=1e-4)


def test_only_one_expert_is_alive_at_a_time(tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    references: list[weakref.ref[object]] = []

    class Layer(stored.StoredLayer):
        def __init__(self, *arguments: object) -> None:
            nonlocal most
            super().__init__(*arguments)  # type: ignore[arg-type]
            references.append(weakref.ref(self))
            most = max(most, sum(reference() is not None for reference in references))

    monkeypatch.setattr(stored, "StoredLayer", Layer)
    model = StoredModel(tiny_source)
    through = walk.Walk.from_tokens(model, WINDOWS)
    for layer in range(model.config.num_hidden_layers):
        through.step(layer)
    assert len(references) == 2 + 2 * (2 + 4) and most == 2  # the one before goes when the next is there


def test_paired_bootstrap() -> None:
    """Against the normal approximation, where it holds; and pairing: what both models share does not widen it."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, generator=generator, dtype=torch.float64) + 3
    low, high = mean_interval(values) or (0.0, 0.0)
    wide = 1.96 * float(values.std()) / 400**0.5
    assert (low, high) == pytest.approx((float(values.mean()) - wide, float(values.mean()) + wide), abs=0.15 * wide)
    hard = 10 * torch.rand(400, 1, generator=generator, dtype=torch.float64)  # windows differ far more than models
    none = torch.zeros(400, 1, dtype=torch.bool)
    found = FidelityComparison(hard, hard, hard + 0.1, none, none, none)
    rows = {row.name: row for row in metrics(found)}
    delta, nll = rows["nll_delta"].interval, rows["nll_source"].interval
    assert delta is not None and nll is not None
    assert delta[1] - delta[0] < 1e-6 < 0.1 < nll[1] - nll[0]
    assert mean_interval(values[:1]) is None


def test_interval_of_a_ratio_draws_both_together() -> None:
    """Against all 4^4 draws of four windows, which can be listed; twice the same, whatever torch's seed is."""
    values, weights = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([1.0, 1.0, 3.0, 5.0])
    picks = torch.cartesian_prod(*[torch.arange(4)] * 4)
    ends = torch.tensor([0.025, 0.975])
    for weight, every in (
        (None, values[picks].mean(1)),
        (weights, values[picks].sum(1) / weights[picks].sum(1)),
    ):
        found = mean_interval(values, weight)
        assert found == pytest.approx(every.quantile(ends).tolist(), rel=0.05)
        torch.manual_seed(5)
        assert mean_interval(values, weight) == found
    assert mean_interval(torch.full((3,), 0.5)) == (0.5, 0.5)


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 1000])
def test_p99_is_the_nearest_rank(count: int) -> None:
    values = torch.randperm(count).double()
    assert int((values <= p99(values)).sum()) >= 0.99 * count
    assert int((values < p99(values)).sum()) < 0.99 * count
