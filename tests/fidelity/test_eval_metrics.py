"""Streamed metrics against plain torch on whole logits, and the intervals against another way to compute them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.fidelity.evaluation import head, stored_layer
from glm5_ascend.fidelity.evaluation import stored_model as stored
from glm5_ascend.fidelity.evaluation.compare import FidelityComparison, compare
from glm5_ascend.fidelity.evaluation.metrics import mean_interval, metrics, p99
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel, Walk
from tests.conftest import Quantized
from tests.support.decoder_layer import Weights, main_logits
from tests.support.tiny_model import SHARED_INDEXER, write_tiny_model

WINDOWS = list(torch.randint(7, 263, (5, 48), generator=torch.Generator().manual_seed(1)))  # index_topk is 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a weight, of the head and of the tokens fall into several blocks, the last one not full."""
    monkeypatch.setattr(stored, "VOCABULARY_BLOCK", 96)
    monkeypatch.setattr(stored, "MLP_TOKENS", 9)
    monkeypatch.setattr(stored_layer, "BLOCK_WEIGHTS", 2**9)
    monkeypatch.setattr(head, "ROWS", 50)


def log_probabilities(directory: Path) -> torch.Tensor:
    """By whole logits, fp64 [windows, S - 1, vocab]."""
    return torch.stack(StoredModel(directory).logits(WINDOWS))[:, :-1].double().log_softmax(-1)


def walked(directory: Path, layers_: int) -> Walk:
    """The walk after this many layers."""
    walk = Walk.from_tokens(StoredModel(directory), WINDOWS)
    for layer in range(layers_):
        walk.step(layer)
    return walk


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8"])
def test_every_figure(recipe: str, tiny_source: Path, tiny_quantized: Quantized) -> None:
    out = tiny_quantized(recipe)
    comparison = compare(out, tiny_source, WINDOWS)
    a, b = log_probabilities(tiny_source), log_probabilities(out)
    true = torch.stack(WINDOWS)[:, 1:]
    kl = (a.exp() * (a - b)).sum(-1)
    right_a, right_b = a.argmax(-1) == true, b.argmax(-1) == true
    expected = {
        "kl_mean": kl.mean(),
        "kl_p99": kl.flatten().sort().values[-(-99 * kl.numel() // 100) - 1],
        "kl_max": kl.max(),
        "top1_agreement": (a.argmax(-1) == b.argmax(-1)).double().mean(),
        "flip_rate": (right_a != right_b).double().mean(),
        "nll_source": -a.gather(-1, true[..., None]).mean(),
        "nll_quantized": -b.gather(-1, true[..., None]).mean(),
    }
    got = {row.name: row.value for row in metrics(comparison)}
    assert expected["kl_mean"] > 1e-5
    for name, value in expected.items():
        assert got[name] == pytest.approx(float(value), rel=1e-4, abs=1e-7), name
    assert got["nll_delta"] == pytest.approx(got["nll_quantized"] - got["nll_source"])
    assert got["nll_change"] == pytest.approx(got["nll_delta"] / got["nll_source"])


def test_agreement_of_selections(tiny_source: Path, tiny_w4a8: Path) -> None:
    comparison = compare(tiny_w4a8, tiny_source, WINDOWS)
    assert [layer.experts is None for layer in comparison.layers] == [True, False, False]
    assert all(layer.indexer is not None for layer in comparison.layers)
    source, quantized = walked(tiny_source, 3), walked(tiny_w4a8, 3)
    assert source.experts is not None and quantized.experts is not None
    pairs = zip(source.experts.tolist(), quantized.experts.tolist(), strict=True)
    shares = torch.tensor([len(set(x) & set(y)) / len(x) for x, y in pairs]).view(len(WINDOWS), -1)
    layer = comparison.layers[2]
    assert layer.experts is not None and layer.indexer is not None
    torch.testing.assert_close(layer.experts, shares.mean(1))
    keys = [
        float((a & b)[16:].sum()) / (32 * 16)  # type: ignore[operator]
        for a, b in zip(source.selections, quantized.selections, strict=True)
    ]
    assert layer.indexer.tolist() == pytest.approx(keys)
    assert 0.5 < float(layer.indexer.mean()) < 1


def test_short_windows_have_no_indexer_to_compare(tiny_source: Path, tiny_w4a8: Path) -> None:
    comparison = compare(tiny_w4a8, tiny_source, [window[:16] for window in WINDOWS])
    assert all(layer.indexer is None for layer in comparison.layers)
    assert "indexer_overlap" not in {row.name for row in metrics(comparison)}


@pytest.mark.parametrize("options", [{"dtype": "fp8"}, {"dtype": "float16"}, SHARED_INDEXER])
def test_the_walk_is_the_plain_forward(options: dict[str, object], tmp_path: Path) -> None:
    """FP8 blocks, fp16, and layers that share an indexer: logits of a forward that reads the source by itself."""
    source = write_tiny_model(tmp_path / "source", **options)  # type: ignore[arg-type]
    files = open_source(source)

    def weights(layer: int) -> Weights:
        return Weights(lambda name: files.read(f"model.layers.{layer}.{name}"))

    got = StoredModel(source).logits(WINDOWS)
    for window, logits in zip(WINDOWS, got, strict=True):
        _, expected = main_logits(files.config, files.read, weights, window)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_intervals_are_paired() -> None:
    """A loss that both models share does not widen the interval of their difference."""
    nll = 10 * torch.rand(400, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    none = torch.zeros(400, 1, dtype=torch.bool)
    rows = {row.name: row for row in metrics(FidelityComparison(nll, nll, nll + 0.1, none, none, none))}
    delta, level = rows["nll_delta"].interval, rows["nll_source"].interval
    assert delta is not None and level is not None
    assert delta[1] - delta[0] < 1e-6 < 0.1 < level[1] - level[0]
    assert mean_interval(nll[:1, 0]) is None


def test_interval_of_a_ratio_draws_both_together() -> None:
    """Against all 4^4 draws of four windows, which can be listed; twice the same, whatever torch's seed is."""
    values, weights = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([1.0, 1.0, 3.0, 5.0])
    picks = torch.cartesian_prod(*[torch.arange(4)] * 4)
    ends = torch.tensor([0.025, 0.975])
    for weight, every in (
        (None, values[picks].mean(1)),
        (weights, values[picks].sum(1) / weights[picks].sum(1)),
    ):
        interval = mean_interval(values, weight)
        assert interval == pytest.approx(every.quantile(ends).tolist(), rel=0.05)
        torch.manual_seed(5)
        assert mean_interval(values, weight) == interval
    assert mean_interval(torch.full((3,), 0.5)) == (0.5, 0.5)


@pytest.mark.parametrize("count", [1, 100, 101])
def test_p99_is_the_nearest_rank(count: int) -> None:
    values = torch.randperm(count).double()
    assert int((values <= p99(values)).sum()) >= 0.99 * count
    assert int((values < p99(values)).sum()) < 0.99 * count
